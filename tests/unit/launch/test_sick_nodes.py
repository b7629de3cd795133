"""A node whose health check fails: what the others learn, whose place is free, and what the agent and its report make of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

from tests.unit.launch.agent_jobs import RunningJob, running_job
from tests.unit.launch.test_multi_endpoint import Bench, agent, free_place, quick, serve
from tests.unit.launch.test_reporter import written
from tests.unit.launch.test_spare_nodes import member, spare
from tests.waiting import until
from ttp.launch import __main__ as program
from ttp.launch import main as launcher
from ttp.launch.endings import REQUEUE_EXIT_CODE, Drained
from ttp.launch.health.node_health import NodeHealth, SickNode
from ttp.launch.health.seat import Seat
from ttp.launch.rendezvous import choose, departures, store_failover, waiting_spare
from ttp.launch.rendezvous.departures import Excluded, excluded_after, publish_excluded
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.rendezvous.multi_endpoint import Endpoint, epoch_key
from ttp.launch.rendezvous.spare_nodes import (
    JOINING,
    LEFT,
    RUNNING,
    SICK,
    SPARE,
    Agent,
    Entry,
    PlaceTaken,
    Silence,
    place_to_take,
    read_agents,
)
from ttp.launch.rendezvous.store_failover import TooFewNodes
from ttp.launch.rendezvous.waiting_spare import UnfitSpare, wait_for_place
from ttp.launch.report.reporter import Reporter
from ttp.launch.report.summary import summary_lines
from ttp.launch.watch.death_watch import Death

__all__ = ["quick"]
"""A fixture that pytest uses by itself: short times."""


def new(number: int, state: str = JOINING, place: int = 0) -> Agent:
    """Return an agent before the job's first attempt."""
    return Agent(node=f"node-{number}", number=number, state=state, place=place)


def again(number: int, state: str) -> Agent:
    """Return another agent of node-2."""
    return Agent(node="node-2", number=number, state=state)


@pytest.mark.parametrize(
    ("agents", "lost", "own", "taken"),
    [
        # sick after a fault: its place is free at once
        ([member(1, JOINING), member(2, SICK), member(3, RUNNING), spare(5)], {2}, 5, "node-2"),
        ([member(1, RUNNING), member(2, SICK), member(3, RUNNING), spare(5)], {2}, 5, ""),
        # sick before the first attempt; a node that is merely late keeps its place
        ([new(1), new(2, SICK), spare(5)], {2}, 5, "node-2"),
        ([new(1), spare(5)], set(), 5, ""),
        ([new(2, SICK), spare(5)], {2}, 5, ""),
        # each place once, in the order of the spares
        ([new(1), new(2, SICK), spare(5), spare(6)], {2}, 6, ""),
        ([new(1), new(2, SICK), new(3, SICK), spare(5), spare(6)], {2, 3}, 6, "node-3"),
        ([new(1), new(2, SICK), new(5, JOINING, place=2), spare(6)], {2}, 6, ""),
        ([new(1), new(2, SICK), new(5, SICK, place=2), spare(6)], {2, 5}, 6, "node-2"),
        ([new(1), new(2, SICK), new(5, SICK, place=2), spare(6), spare(7)], {2, 5}, 7, ""),
        ([new(1), new(2, SICK), spare(5), spare(6)], {2, 5}, 6, "node-2"),
        # a sick node that was started again has one place: sick again, and well, also under another number than the one that was taken
        ([new(1), new(2, SICK), again(3, SICK), spare(5), spare(6)], {2, 3}, 5, "node-2"),
        ([new(1), new(2, SICK), again(3, SICK), spare(5), spare(6)], {2, 3}, 6, ""),
        ([new(1), new(2, SICK), again(3, SICK), new(5, JOINING, place=2), spare(6)], {2, 3}, 6, ""),
        ([new(1), new(2, SICK), again(3, JOINING), spare(5)], {2}, 5, ""),
        ([new(1), new(2, SICK), again(3, JOINING), spare(5)], {2, 3}, 5, "node-2"),
        # never more than the job's three nodes
        ([new(1), new(2, SICK), new(3, SICK), new(4), spare(5), spare(6)], {2, 3}, 5, "node-2"),
        ([new(1), new(2, SICK), new(3, SICK), new(4), spare(5), spare(6)], {2, 3}, 6, ""),
        ([new(1), new(2, SICK), new(4), new(7), new(8), spare(5)], {2}, 5, ""),
        # a spare that was sick before had no place
        ([new(1), member(2, SICK, start=3), spare(5)], {2}, 5, ""),
    ],
)
def test_a_sick_nodes_place_is_free(agents: list[Agent], lost: set[int], own: int, taken: str) -> None:
    found = place_to_take(agents, lost, own, 3)
    assert (found.node if found is not None else "") == taken


def test_a_sick_node_is_gone_at_once() -> None:
    assert Silence(1e9).of([member(1, SICK), member(2, RUNNING)], 100.0) == {1}


def test_excluded_nodes_are_read_in_order_from_a_number_on() -> None:
    """Each job has its own; what another program has written there hides none of those after it."""
    store, a, b = HashStore(), Excluded("a", "disk"), Excluded("b", 'memory "x"\n')
    publish_excluded(store, "j", a)
    store.set(f"ttp/sick/j/{store.add('ttp/sick/j', 1)}", "[[")
    publish_excluded(store, "j", b)
    found = excluded_after(store, "j", 0)
    assert (found[0], found[2], excluded_after(store, "j", 2)) == (a, b, (b,))
    assert "cannot be read" in found[1].reason and excluded_after(store, "other", 0) == ()


class Check:
    """A health check with the verdict that the test gives it; it remembers what it was asked for."""

    def __init__(self, verdict: str | None = None) -> None:
        self.answer = verdict
        self.answers: list[str] = []
        """The first ones of `judge`."""
        self.begun: list[float] = []

    def begin(self, since_monotonic_s: float) -> None:
        self.begun.append(since_monotonic_s)

    def verdict(self) -> str | None:
        return self.answer

    def wait(self, timeout_s: float | None = None) -> str | None:
        return self.answer

    def judge(self, since_monotonic_s: float) -> str:
        self.begin(since_monotonic_s)
        return self.answers.pop(0) if self.answers else self.answer or ""


@pytest.mark.parametrize("sick", ["", "its disk"])
def test_a_spare_is_checked_before_it_takes_a_place(monkeypatch: pytest.MonkeyPatch, sick: str) -> None:
    """Not before it is needed. Until the verdict it keeps its turn, and the others are not disturbed."""
    monkeypatch.setattr(waiting_spare, "ROUND_S", 0.02)
    monkeypatch.setattr(waiting_spare, "LOST_S", 0.3)
    monkeypatch.setattr(
        waiting_spare, "Silence", lambda lost_s: Silence(1e9)
    )  # none is lost for its silence: a sick one is gone at once
    place = free_place()
    server = serve(place)
    server.set(epoch_key(""), "1")
    first, second = Entry("job", "node-a"), Entry("job", "node-b")
    for entry in (first, second):
        entry.met(0, 2, 1)
        entry.renew(server, place, RUNNING)
    check, came = Check(), []

    def run() -> None:
        try:
            came.append(str(wait_for_place(agent(place), "job", Entry("job", "node-c"), 60.0, check)))
        except UnfitSpare as error:
            came.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: any(each.state == SPARE for each in read_agents(server, "job")))
    assert check.begun == []
    second.renew(server, place, SICK)
    needed = time.monotonic()

    def joins() -> None:
        first.renew(server, place, JOINING)

    until(lambda: joins() or len(check.begun) > 5)  # type: ignore[func-returns-value]
    assert came == [] and check.begun[0] >= needed and len(set(check.begun)) == 1
    assert server.get(epoch_key("")) == b"1"
    check.answer = sick
    until(lambda: joins() or bool(came))  # type: ignore[func-returns-value]
    thread.join(30)
    assert came == [sick or "node-c, a spare, takes the place of node-b"]
    assert server.get(epoch_key("")) == (b"1" if sick else b"2")


def test_a_node_that_is_sick_before_it_joins_says_so_where_the_others_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """They log it once, disturb no attempt for it, and have it in their reports."""
    place = free_place()
    server = serve(place)
    sick, well = Bench(place), Bench(place)
    telling = threading.Thread(target=sick.store_failover.exclude, args=("its disk",), daemon=True)
    telling.start()
    came = well.join()  # opens the store
    telling.join(30)
    assert not telling.is_alive() and sick.made == []
    until(lambda: bool(well.store_failover._excluded))
    until(lambda: len(well.made) == 1)
    well.made[0].joined.set()
    until(lambda: bool(came))
    assert well.store_failover.take_excluded() == [Excluded("", "its disk")]
    assert well.store_failover.take_excluded() == []
    assert departures.departures_after(server, "job", 0) == ()
    assert [each.state for each in read_agents(server, "job") if each.number == 1 or each.state == SICK][-1] == SICK
    well.store_failover.shutdown()


@pytest.mark.parametrize(("is_spare", "state"), [(False, SICK), (True, LEFT)])
def test_only_a_node_of_the_job_leaves_its_place(is_spare: bool, state: str) -> None:
    """A sick spare leaves none: a node that is late has its own."""
    place = free_place()
    server = serve(place)
    server.set(epoch_key(""), "1")
    sick = Bench(place).store_failover
    sick._spare_node = is_spare
    sick.exclude("its disk")
    assert [each.state for each in read_agents(server, "job")] == [state]


def test_a_spare_and_a_sick_node_know_the_job_and_their_name_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's greatest number of nodes, for the places that are free; --local-addr, for both events of a sick node."""
    monkeypatch.setattr(store_failover, "EXCLUDE_S", 0.2)
    found: list[tuple[object, ...]] = []

    def wait(*arguments: object) -> PlaceTaken:
        found.append(arguments)
        return PlaceTaken("a", "b")

    monkeypatch.setattr(store_failover, "wait_for_place", wait)
    config = LaunchConfig(
        1, 7, 1, run_id="j", rdzv_backend="c10d", rdzv_endpoint=str(free_place()), rdzv_configs={"is_host": "0"},
        local_addr="127.0.0.9",
    )  # fmt: skip
    made = choose.make_failover(config, spare_node=True)
    made.wait_as_spare()
    assert [arguments[-2:] for arguments in found] == [(7, None)]
    assert FreshStoreRendezvous(made, "here", same_keys_every_round=False).exclude("its disk") == "127.0.0.9"
    made.shutdown()


def test_no_store_within_the_time_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_failover, "EXCLUDE_S", 0.2)
    Bench(free_place()).store_failover.exclude("its disk")
    assert "the other nodes do not learn that this one is excluded" in caplog.text


@pytest.mark.parametrize("excluded", [True, False])
def test_too_few_nodes_ask_for_others_where_that_may_help(excluded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the nodes never met: something else is wrong then. The time is over once the store was read, however long that took."""
    place = free_place()
    server = serve(place)
    server.set(epoch_key("job"), "1")
    if excluded:
        publish_excluded(server, "job", Excluded("node-b", "its disk"))
    bench = Bench(place)
    tried = bench.store_failover._join

    def join(place: Endpoint, left_s: float) -> RendezvousInfo | None:
        until(lambda: bench.store_failover._read_departures(place) or place in bench.store_failover._excluded_read)  # type: ignore[func-returns-value]
        bench.store_failover._join_timeout_s = 0.0
        return tried(place, 0.0)

    monkeypatch.setattr(bench.store_failover, "_join", join)
    with pytest.raises(RendezvousTimeoutError, match="too few nodes joined within 0 s") as caught:
        bench.store_failover.next_rendezvous()
    assert isinstance(caught.value, TooFewNodes) is excluded
    assert ("excluded: node-b: its disk" in str(caught.value)) is excluded


def test_a_job_that_ran_asks_for_other_nodes() -> None:
    bench = Bench(free_place(), join_timeout_s=0.5)
    bench.store_failover.met(3, 2)
    with pytest.raises(TooFewNodes):
        bench.store_failover.next_rendezvous()


class Handler:
    """In the rendezvous' place."""

    def __init__(self, shares: bool = True) -> None:
        self.shares = shares
        self.excluded: list[str] = []

    def exclude(self, reason: str) -> str:
        self.excluded.append(reason)
        return "node-a" if self.shares else ""

    def take_excluded(self) -> list[Excluded]:
        return [Excluded("node-b", "its disk")]


@dataclass
class Seated:
    seat: Seat
    check: Check
    handler: Handler
    events: list[dict[str, Any]]
    reporter: Reporter


def seated(verdict: str | None = "", *, shares: bool = True, story: Path | None = None) -> Seated:
    check, handler, events = Check(verdict), Handler(shares), list[dict[str, Any]]()
    reporter = Reporter(story, on_event=lambda line: events.append(json.loads(line)))
    return Seated(Seat(check, handler, reporter), check, handler, events, reporter)  # type: ignore[arg-type]


def death(rank: int, status: int | None, seen_s: float) -> Death:
    return Death(
        rank=rank, pid=70 + rank, status=status, text="", seen_monotonic_s=seen_s, seen_unix_s=0.0, settled=True
    )  # fmt: skip


class Workers:
    """In an attempt's place."""

    def __init__(self, *deaths: Death) -> None:
        self._deaths = {each.rank: each for each in deaths}

    def deaths(self) -> dict[int, Death]:
        return self._deaths


def test_a_node_is_checked_since_its_last_fault() -> None:
    """One whose ranks leave for a restart, or succeed, has had none."""
    here = seated()
    here.seat.take()
    (start,) = here.check.begun
    here.seat.fault(Workers(death(0, 75, start + 5), death(1, 76, start + 6), death(2, 0, start + 7)))
    here.seat.take()
    assert here.check.begun == [start, start]
    here.seat.fault(Workers(death(0, 75, start + 5), death(1, -9, start + 8)))
    here.seat.take()
    assert here.check.begun[2:] == [start + 8, start + 8]


def test_a_sick_node_gives_up_its_seat_and_runs_the_command_on_events() -> None:
    here = seated("its disk")
    with pytest.raises(SickNode, match=r"this node is excluded: its disk\. Repair it, or start this command"):
        here.seat.take()
    assert here.handler.excluded == ["its disk"]
    (event,) = here.events
    assert (event["event"], event["node"], event["reason"]) == ("sick_node", "node-a", "its disk"), (
        "as the others have it"
    )


def test_a_check_that_failed_beside_a_fault_is_run_once_more() -> None:
    """Its disk was busy with the dump, or the survivors held the memory. The other check begins when the node is to be seated."""
    here = seated()
    called_s = time.monotonic()
    here.check.answers = ["its disk", ""]
    here.seat.take()
    assert here.check.begun[0] <= called_s <= here.check.begun[1] and here.handler.excluded == []
    here.check.answers = ["its disk", "its memory"]
    with pytest.raises(SickNode, match="its memory"):
        here.seat.take()
    assert len(here.check.begun) == 4


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("", ""),
        (None, "; this node takes part if its health check passes, else it is excluded (exit code 75)"),
        ("its disk", "; this node's health check failed (its disk): it is excluded (exit code 75) unless a second one passes"),
    ],
)  # fmt: skip
def test_a_restart_depends_on_this_nodes_check(verdict: str | None, said: str) -> None:
    """A fault is reported before it is known whether the node takes part in the next attempt; a node without a check does."""
    assert seated(verdict).seat.condition() == said and (REQUEUE_EXIT_CODE == 75 or not said)
    assert Seat(None, Handler(), None).condition() == ""  # type: ignore[arg-type]


def test_a_check_that_failed_since_is_not_run_again(tmp_path: Path) -> None:
    """One before the node joins is its last word."""
    runs = tmp_path / "runs"
    health = NodeHealth(["sh", "-c", f"echo x >> {runs}; exit 1"])
    with pytest.raises(SickNode):
        Seat(health, Handler(), None).take()  # type: ignore[arg-type]
    assert runs.read_text() == "x\n"
    health.begin(time.monotonic())
    health.wait(60.0)
    with pytest.raises(SickNode):
        Seat(health, Handler(), None).take()  # type: ignore[arg-type]
    assert runs.read_text() == "x\n" * 3


@pytest.mark.parametrize("hosts_rank_zero", [True, False])
def test_excluded_nodes_are_reported_by_the_node_of_rank_0(tmp_path: Path, hosts_rank_zero: bool) -> None:
    """Where no other agent learns of it, a node reports itself."""
    for shares in (True, False):
        story = tmp_path / f"story_{shares}.jsonl"
        here = seated("too hot", shares=shares, story=story)
        here.reporter.begin(hosts_rank_zero, 4)
        here.seat.report_others()
        with pytest.raises(SickNode):
            here.seat.take()
        lines = [(line["node"], line["start"]) for line in written(story)] if story.exists() else []
        events = [event["reason"] for event in here.events]
        if hosts_rank_zero:
            assert ("node-b", 4) in lines and len(lines) == 1 + (not shares)
            assert events == ["its disk", "too hot"]
        else:
            assert lines == [] and events == ["too hot"]


def test_the_summary_names_the_sick_nodes(tmp_path: Path) -> None:
    story = tmp_path / "story.jsonl"
    here = seated(story=story)
    here.reporter.begin(True, 0)
    here.seat.report_others()
    here.reporter.finish("succeeded")
    end = written(story)[-1]
    assert end["excluded"] == ["node-b: its disk"]
    summary = here.reporter._sum_up("succeeded", time.time())
    assert summary is not None and "sick    node-b: its disk" in summary_lines(summary)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[RunningJob]:
    caplog.set_level(logging.INFO, "ttp.launch")
    with running_job(tmp_path, monkeypatch) as job:
        yield job


def test_no_process_is_put_on_a_sick_node(job: RunningJob) -> None:
    """The order is refused with the reason; the verdict is of a check after the death."""
    check = Check("too hot")
    job.attempt._replacements._health = check  # type: ignore[assignment]
    killed_s = time.monotonic()
    job.kill(1)
    job.order(1, freeze_id=3)
    until(lambda: job.line.refusals, "the answer")
    assert job.line.refusals == [(1, 3, "this node is sick: too hot")] and job.line.replacements == []
    assert check.begun and min(check.begun) >= killed_s


def test_a_place_is_taken_when_the_check_has_passed(job: RunningJob) -> None:
    check, before = Check(), job._processes(1)
    job.attempt._replacements._health = check  # type: ignore[assignment]
    job.kill(1)
    job.order(1, freeze_id=3)
    until(lambda: check.begun, "the check")
    assert job.line.replacements == []
    check.answer = ""
    pid = job.process(1, *before)
    until(lambda: not job.attempt.failed(), "the death to be forgotten")
    assert (job.line.refusals, job.line.replacements) == ([], [(1, pid)])
    job.succeed()


def test_an_attempt_that_ends_does_not_wait_for_the_check(job: RunningJob) -> None:
    check = Check()
    job.attempt._replacements._health = check  # type: ignore[assignment]
    job.kill(1)
    job.order(1, freeze_id=3)
    until(lambda: check.begun, "the check")
    began = time.monotonic()
    job.attempt._replacements.stop("the attempt ends")
    assert time.monotonic() - began < 20
    until(lambda: job.line.refusals, "the answer")
    assert job.line.refusals == [(1, 3, "the attempt ends")]


@pytest.mark.parametrize("error", [SickNode("this node is excluded: x"), TooFewNodes("too few"), Drained("asked")])
def test_the_exit_code_asks_for_other_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def end(**kwargs: object) -> None:
        raise error

    monkeypatch.setattr(launcher, "main", end)
    monkeypatch.setattr(program, "_begin_fork_servers", lambda: None)
    with pytest.raises(SystemExit) as caught:
        program._run()
    assert caught.value.code == REQUEUE_EXIT_CODE == 75
    said = capsys.readouterr().err
    assert said == ("" if isinstance(error, Drained) else f"ttprun: error: {error}\n")
