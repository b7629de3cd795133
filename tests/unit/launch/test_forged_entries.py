"""What another program writes into the workers' store, against agents and ranks that have credentials."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.controller_clients import Switchboard
from tests.unit.launch.test_fresh_store import FixedNodes
from tests.waiting import until
from ttp.config import Settings
from ttp.errors import ControllerError
from ttp.exchange import discovery
from ttp.exchange.discovery import controller_key, failure_key, log_dir_key, process_key
from ttp.exchange.first_step import FirstStep, progress_key
from ttp.exchange.sealed_store import attempts_seal, sealed
from ttp.identity import own
from ttp.identity.credentials import Credentials
from ttp.launch.links.controller_client import ControllerClient, ControllerEntry
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous.departures import FAILED
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous, JobStore
from ttp.runtime.job_controller import JobController
from ttp.runtime.standby import MOST_STANDBYS, TERMS_OF_AN_ATTEMPT, Standbys, _next_place, enter, listed, standbys_key

JOB = "job/7"


@pytest.fixture(autouse=True)
def credentials() -> Iterator[None]:
    """This process has the credentials of attempt 7."""
    own.use(lambda: Credentials(key=b"", certificate=b"", authority=b"", renew_unix_s=0.0, store_key=b"k" * 32))
    yield
    own.use(None)


@pytest.fixture
def ours(store: TCPStore) -> Store:
    """Return what the job's own processes write into."""
    return sealed(store, attempts_seal(JOB, logging.getLogger("ttp")))


def test_a_rank_writes_sealed_entries_and_refuses_others(store: TCPStore, ours: Store) -> None:
    """Through the one client of the store that a rank makes."""
    settings = Settings(
        job_id="job", round_number=7, launched=True, master_addr="127.0.0.1", master_port=store.port, one_node=True
    )
    controller = JobController(settings, Path("/logs"), 1, 2)
    store.set(failure_key(7), "ConfigError forged")
    store.set(controller_key(7), "forger:1 1")
    with pytest.raises(ControllerError, match="did not publish a controller within"):
        discovery.find(controller.store(), 7, 1, 0.0)
    discovery.publish(ours, 7, "host:8000", 12)
    assert discovery.find(controller.store(), 7, 1, 0.0) == "host:8000"
    FirstStep(controller.store(), 7).tell(5)
    assert ours.get(progress_key(7)) == b"5" and store.get(progress_key(7)) != b"5"


def test_an_agent_takes_no_controller_and_no_list_that_the_job_has_not_written(
    store: TCPStore, ours: Store, switchboard: Switchboard
) -> None:
    """Deaths would be reported to a stranger, and journals read elsewhere."""
    known: list[dict[int, str]] = []
    client = ControllerClient(
        JobStore("127.0.0.1", store.port, 7, JOB), {0: 70}, switchboard, search_s=0.01, recheck_s=0.01,
        processes_known=lambda found: known.append(dict(found)),
    )  # fmt: skip
    store.set(controller_key(7), "forger:1 1")
    store.set(log_dir_key(7), "/forged")
    store.set(process_key(7, 0), "1 1")
    store.set(progress_key(7), "9")
    store.append(standbys_key(7), "1 forger:2\n")  # type: ignore[attr-defined]
    client.start()
    client.look_now(30.0)
    assert (client.entry, client.log_dir, client.first_step, known, switchboard.links) == (None, None, None, [], {})
    discovery.publish(ours, 7, "host:8000", 12)
    enter(ours, 7, 1, "standby:1")
    ours.set(process_key(7, 0), "70 1")
    until(lambda: client.entry == ControllerEntry("host:8000", 12) and known == [{0: "70 1"}])
    until(lambda: client.connected and switchboard.links["host:8000"].standbys == ["standby:1"])
    client.close()


def test_an_agent_believes_no_failure_that_no_agent_has_published(
    store: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One would end the job on every node."""
    place = JobStore("127.0.0.1", store.port, 7, JOB)
    store.set(FAILED, "forged")
    store.set("ttp/nodes/restarts", "forged")
    store.set("ttp/nodes/succeeded/1", "1")
    store.set("ttp/nodes/fault", "1 100")
    first, second = [PeerAgents(place, node, 2, look_s=0.02) for node in range(2)]
    first.start()
    second.start()
    first.publish_succeeded()
    until(lambda: int(store.add("ttp/nodes/alive/0", 0)) > 3 and int(store.add("ttp/nodes/alive/1", 0)) > 3)
    assert (second.failed, second.failure, second.restarts, second.fault_begun_monotonic_s) == ("", "", "", None)
    assert not first.all_have_succeeded
    first.publish_failed("node-a has failed")
    until(lambda: second.failed == "node-a has failed")
    first.close()
    second.close()
    assert "'ttp/nodes/failed' is refused" in caplog.text and "ttp/nodes/alive" not in caplog.text


def test_heartbeats_of_agents_are_counted_though_they_have_no_seal(store: TCPStore) -> None:
    """A node that has none is lost, and one that has is not."""
    place = JobStore("127.0.0.1", store.port, 7, JOB)
    first, second = [PeerAgents(place, node, 3, look_s=0.02, lost_s=1.0) for node in range(2)]
    first.start()
    second.start()
    until(lambda: second.lost.startswith("no heartbeat from node 2 of 3"))
    first.close()
    second.close()


def test_a_count_that_was_set_back_gives_no_place_twice(
    ours: Store, store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two controllers of one term must not be; a count that was set forward costs the job its further standbys."""

    class Process:
        def __init__(self, place: int) -> None:
            self.address = f"place-{place}"

    started: list[int] = []

    def start(settings: Settings, place: int, *rest: object) -> Process:
        started.append(place)
        return Process(place)

    monkeypatch.setattr("ttp.runtime.standby.start_job_controller", start)
    monkeypatch.setattr(Standbys, "_watch", lambda self, process: None)
    standbys = Standbys(Settings(job_id="job", round_number=7), 4, tmp_path, lambda: ours)
    count = f"{standbys_key(7)}/count"
    for forged in (None, "-5", "0"):
        if forged is not None:
            store.set(count, forged)
        standbys.start(())
    assert started == [MOST_STANDBYS + 1, MOST_STANDBYS + 2, MOST_STANDBYS + 3]
    assert listed(ours, 7) == tuple(f"place-{place}" for place in started)
    store.set(count, "0")
    claimed = [_next_place(ours, 7) for _ in range(3)]
    assert len(set(claimed)) == 3 and min(claimed) > started[-1], "ranks that start one at the same time"
    store.set(count, str(TERMS_OF_AN_ATTEMPT))
    with pytest.raises(ControllerError, match="restart the job"):
        standbys.start(())


def test_the_first_step_is_looked_for_under_its_seal() -> None:
    """In the agent that has the store, and in one that has not."""
    handler = FreshStoreRendezvous(FixedNodes(HashStore(), 0, 1), "127.0.0.1", same_keys_every_round=False)
    handler.next_rendezvous()
    place = handler.job_store
    assert place.job_id == "run/0"
    server = handler._server
    assert server is not None
    server.set(progress_key(0), "9")
    assert handler.job_store_has(progress_key(0)) is False
    FirstStep(place.sealed(server), 0).tell(1)
    assert handler.job_store_has(progress_key(0)) is True
    handler._server = None
    assert handler.job_store_has(progress_key(0)) is True
    handler._job_store = replace(place, job_id="run/1")
    assert handler.job_store_has(progress_key(0)) is False, "an entry of another attempt"
    del server
    assert handler.job_store_has(progress_key(0)) is None, "the store is gone"
