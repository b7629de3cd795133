"""Where standbys are started, under which terms and keys, and that one of them is a controller that waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ttp.config import Settings
from ttp.controller.agent_link import request_status
from ttp.controller.process import ControllerProcess
from ttp.errors import ControllerError
from ttp.exchange.discovery import controller_key
from ttp.runtime.standby import (
    MOST_STANDBYS,
    TERMS_OF_AN_ATTEMPT,
    Standbys,
    enter,
    listed,
    standby_place,
    standbys_key,
    standbys_of,
    start_job_controller,
    term_of,
)


def places(nodes: list[int], **variables: str) -> dict[int, tuple[int, int]]:
    """Return (node, place) of every rank that starts a standby, as the launcher's variables have it; `nodes`: ranks on each."""
    found, rank = {}, 0
    for node, size in enumerate(nodes):
        for local_rank in range(size):
            environ = {
                "GROUP_RANK": str(node),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(size),
                "WORLD_SIZE": str(sum(nodes)),
                **variables,
            }
            if place := standby_place(Settings.from_env(environ), rank, sum(nodes)):
                found[rank] = (node, place)
            rank += 1
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
def test_on_a_single_node_one_other_rank_starts_the_only_standby(size: int) -> None:
    """The controller is rank 0's; there is no other node, so that at least the death of a process is survived."""
    assert places([size]) == {1: (0, 1)}
    assert places([size], TTP_STANDBYS="5") == {1: (0, 1)}


@pytest.mark.parametrize("nodes", [[1, 1], [4, 4], [2, 8], [8, 1, 4], [4] * 16, [1] * 100])
@pytest.mark.parametrize("expected", [1, 2, 3, MOST_STANDBYS])
def test_on_several_nodes_each_standby_has_a_node_of_its_own_and_none_is_the_controllers(
    nodes: list[int], expected: int
) -> None:
    """The loss of a node takes one controller at most, while there are nodes enough."""
    found = places(nodes, TTP_STANDBYS=str(expected))
    count = min(expected, len(nodes) - 1)
    assert sorted(place for _, place in found.values()) == list(range(1, count + 1))
    hosts = [node for node, _ in found.values()]
    assert len(set(hosts)) == count and 0 not in hosts
    assert all(rank == sum(nodes[:node]) for rank, (node, _) in found.items()), "the first rank of its node"


def test_no_rank_starts_a_standby_when_configured_not_to_or_when_alone() -> None:
    """A lone rank's controller outlives every rank that could use it."""
    assert places([1]) == places([4], TTP_STANDBYS="0") == places([2, 2], TTP_STANDBYS="0") == {}


def test_terms_rise_from_place_to_place_and_from_attempt_to_attempt() -> None:
    """So that every later controller fences all before it; keys tell them apart in the store."""
    terms = [
        term_of(start, place) for start in range(4) for place in (*range(MOST_STANDBYS + 9), TERMS_OF_AN_ATTEMPT - 2)
    ]
    assert terms == sorted(set(terms)) and terms[0] > 0
    keys = {standbys_key(start) for start in range(3)}
    assert len(keys | {controller_key(start) for start in range(3)}) == 6


@pytest.fixture
def settings() -> Settings:
    return Settings(job_id="job", host="127.0.0.1", round_number=2)


@pytest.fixture
def log_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"


@pytest.mark.parametrize("one_node", [True, False])
def test_a_standby_waits_under_its_own_term_and_address(settings: Settings, log_dir: Path, one_node: bool) -> None:
    """It listens for every node's ranks where there are several, and leaves when it is ordered."""
    standby = start_job_controller(replace(settings, one_node=one_node), 1, 4, log_dir)
    try:
        status = request_status(standby.address, job_id="job")
        assert (status.stage, status.term, status.world_size) == ("standby", term_of(2, 1), 4)
        assert status.pid == standby.pid and (log_dir / "standby_2_1.jsonl").exists()
    finally:
        standby.dismiss()
        assert standby.wait(30.0) == 0


def test_a_standby_that_cannot_be_started_costs_the_job_nothing(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log's folder cannot be made: a warning names the place and the reason."""
    (tmp_path / "file").touch()
    standbys = Standbys(settings, 4, tmp_path / "file" / "log", HashStore)
    assert standbys.first(1, HashStore()) == ""
    assert "standby controller 1 could not be started" in caplog.text


def test_the_list_in_the_store_is_in_the_order_of_places_whoever_enters_first() -> None:
    """Two ranks start standbys at once; the slower one may have the lower place. Each attempt has a list of its own."""
    store = HashStore()
    assert listed(store, 7) == ()
    for place, address in ((11, "b:2"), (2, "a:1"), (10, "c:3")):
        enter(store, 7, place, address)
    enter(store, 8, 1, "d:4")
    assert listed(store, 7) == ("a:1", "c:3", "b:2") and listed(store, 8) == ("d:4",)


def test_a_standby_in_the_place_of_a_lost_one_is_found_and_its_end_is_seen(settings: Settings, log_dir: Path) -> None:
    """Its place is above all that the attempt began with; its starter sees SIGKILL."""
    store, ended = HashStore(), Queue[str]()
    standbys = Standbys(settings, 4, log_dir, lambda: store)
    standbys.on_end(ended.put)
    try:
        first = standbys.start(())
        second = standbys.start((first,))
        assert standbys.look() == (first, second)
        terms = [request_status(address, job_id="job").term for address in (first, second)]
        assert terms == [term_of(2, MOST_STANDBYS + 1), term_of(2, MOST_STANDBYS + 2)]
        os.kill(request_status(first, job_id="job").pid, signal.SIGKILL)
        assert ended.get(timeout=30.0) == first
    finally:
        standbys.dismiss()


def test_a_standby_that_comes_up_after_all_were_dismissed_is_ended(
    settings: Settings, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends while its rank starts one in another's place: no other rank would end it before the process does."""
    store, made = HashStore(), list[ControllerProcess]()
    standbys = Standbys(settings, 4, log_dir, lambda: store)

    def start(*arguments: Any) -> ControllerProcess:
        made.append(start_job_controller(*arguments))
        standbys.dismiss()
        return made[0]

    monkeypatch.setattr("ttp.runtime.standby.start_job_controller", start)
    with pytest.raises(ControllerError, match="none was needed any more"):
        standbys.start(())
    assert made[0].process.poll() == 0 and not standbys.running and not standbys.look()


def test_a_controller_in_the_place_of_all_others_is_left_undone_where_another_is_found(
    settings: Settings, log_dir: Path
) -> None:
    """Two controllers of one job need not be: the other one was entered while this one started."""
    store = HashStore()
    enter(store, 2, 10, "other:1")
    with pytest.raises(ControllerError, match="other:1"):
        Standbys(settings, 4, log_dir, lambda: store).start(("first:1",))
    assert listed(store, 2) == ("other:1",)


@pytest.mark.parametrize(
    ("nodes", "expected", "count"), [(1, 2, 1), (1, 0, 0), (2, 2, 1), (3, 2, 2), (8, 2, 2), (8, 5, 5), (2, 0, 0)]
)
def test_as_many_standbys_are_kept_as_a_job_begins_with(
    settings: Settings, nodes: int, expected: int, count: int
) -> None:
    """One on a single node; one on each further node up to TTP_STANDBYS."""
    own = replace(settings, nodes=nodes, one_node=nodes == 1, node_rank=0, standbys=expected)
    assert standbys_of(own, 4 * nodes) == count
    assert len(places([4] * nodes, TTP_STANDBYS=str(expected))) == count
