"""Agents of an elastic job meet again and again, with torch's own handlers on a real store: none is counted twice, and none takes a member's place."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.launcher.api import LaunchConfig

from tests.unit.launch.test_multi_endpoint import free_place, quick, serve
from tests.unit.launch.test_slow_store import StoreProcess, apart
from tests.waiting import until
from ttp.launch.rendezvous import choose, multi_endpoint
from ttp.launch.rendezvous.multi_endpoint import Endpoint, epoch_key
from ttp.launch.rendezvous.spare_nodes import JOINING

__all__ = ["apart", "quick"]
"""Fixtures: a store that can be paused; short times, which pytest uses by itself."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize object:pytest.PytestUnraisableExceptionWarning"),
]
"""See `test_the_heartbeats_of_a_lost_store_end`: torch may join a heartbeat's thread with itself."""


class Member:
    """An agent of a job on 2 to 3 nodes, whose thread joins when it is let."""

    def __init__(self, place: Endpoint, name: str) -> None:
        config = LaunchConfig(
            2, 3, 1, run_id="j", rdzv_backend="c10d", rdzv_endpoint=str(place),
            rdzv_configs={"is_host": "0"}, local_addr=name,
        )  # fmt: skip
        self.handler = choose.make_failover(config)
        self._configs = config.rdzv_configs
        self.made: list[tuple[int, int]] = []
        """The epoch and the number of nodes (0: as many as the job may have) of each handler of torch's."""
        self.may_make = threading.Event()
        self.may_make.set()
        make = self.handler._make

        def noted(place: Endpoint, epoch: int, nodes: int, moved: bool) -> RendezvousHandler:
            self.may_make.wait(60)
            self.made.append((epoch, nodes))
            return make(place, epoch, nodes, moved)

        self.handler._make = noted
        self._met: queue.SimpleQueue[RendezvousInfo] = queue.SimpleQueue()
        self.attempts = 0

    def join(self) -> None:
        """Begin to join, in a thread."""
        if self.attempts == 0:  # else two nodes wait half a minute for a third one
            self._configs["last_call_timeout"] = "2"
        else:
            self._configs.pop("last_call_timeout", None)
        threading.Thread(target=lambda: self._met.put(self.handler.next_rendezvous()), daemon=True).start()

    def met(self, attempt: int) -> tuple[int, int]:
        """Wait until it has met others for an attempt; return its rank, and of how many."""
        found = self._met.get(timeout=60)
        self.attempts += 1
        self.handler.met(attempt, found.world_size)
        return found.rank, found.world_size


class Job:
    """A job's agents, and the store where they meet."""

    def __init__(self, place: Endpoint, server: Store) -> None:
        self.place, self.server = place, server
        self.members: list[Member] = []

    def add(self, *names: str) -> list[Member]:
        added = [Member(self.place, name) for name in names]
        self.members += added
        return added

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.may_make.set()
            member.handler.shutdown()

    @property
    def epoch(self) -> int:
        return int(self.server.get(epoch_key("j")))


@pytest.fixture
def job() -> Iterator[Job]:
    place = free_place()
    with Job(place, serve(place)) as made:
        yield made


def waits(member: Member) -> bool:
    return member.handler._entry.agent.state == JOINING


def test_two_of_three_meet_round_after_round_though_one_comes_later(job: Job) -> None:
    """The second one comes while the first waits under the epoch for all, and begins one for both. It joins once: a handler of the epoch before would be
    another node there."""
    one, two = job.add("127.0.0.1", "127.0.0.2")
    for attempt in range(4):
        one.join()
        until(lambda: waits(one))
        two.join()
        assert sorted([one.met(attempt), two.met(attempt)]) == [(0, 2), (1, 2)]
        assert attempt < job.epoch <= 1 + 2 * attempt, "an epoch for those that are here, and one for all"
        until(lambda: not waits(one) and not waits(two))
    for member in (one, two):
        epochs = [epoch for epoch, _ in member.made]
        assert len(set(epochs)) == len(epochs), member.made


def test_one_that_comes_while_two_meet_takes_no_place_of_theirs(job: Job) -> None:
    """One of the two is slow to join. The third one waits, and they make room for it."""
    one, two = job.add("127.0.0.1", "127.0.0.2")
    for member in (one, two):
        member.join()
    assert sorted([one.met(0), two.met(0)]) == [(0, 2), (1, 2)]
    two.may_make.clear()
    for member in (one, two):
        member.join()
    until(lambda: one.made[-1] == (2, 2))
    (late,) = job.add("127.0.0.3")
    late.join()
    until(lambda: late.handler._entry.agent.beat > 10)
    assert late.made == []
    two.may_make.set()
    assert sorted([one.met(1), two.met(1)]) == [(0, 2), (1, 2)]
    until(lambda: one.handler.num_nodes_waiting() > 0 and two.handler.num_nodes_waiting() > 0)
    for member in (one, two):
        member.join()
    assert sorted(member.met(2 * (member is not late)) for member in job.members) == [(0, 3), (1, 3), (2, 3)]
    assert job.epoch <= 5


def test_an_agent_that_joins_is_counted_once_though_its_store_seemed_to_be_lost(
    apart: StoreProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store was paused. What had begun to join there goes on as soon as it answers: with a second handler, one node would meet itself."""
    store = TCPStore(apart.place.host, apart.place.port, is_master=False)
    with Job(apart.place, store) as job:
        one, two = job.add("127.0.0.1", "127.0.0.2")
        one.join()
        until(lambda: one.made and one.handler._entry.agent.beat > 30)
        with monkeypatch.context() as short:
            short.setattr(multi_endpoint, "ANSWER_S", 0.3)
            short.setattr(multi_endpoint, "LEAST_S", 0.3)
            apart.pause()
            until(lambda: "is lost" in caplog.text)
        apart.go_on()
        beat = one.handler._entry.agent.beat
        until(lambda: one.handler._entry.agent.beat > beat + 30)
        two.join()
        assert sorted([one.met(0), two.met(0)]) == [(0, 2), (1, 2)]
        assert (len(one.made), job.epoch) == (1, 1)
