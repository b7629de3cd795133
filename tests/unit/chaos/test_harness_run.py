"""One run under a schedule, of a job that is played: what is struck, when, and what is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ttp.chaos.faults.control_socket import Control, Message, Peer
from ttp.chaos.faults.external import Injector
from ttp.chaos.faults.rank_hook import FaultOrder
from ttp.chaos.faults.scenario import parse_scenario
from ttp.chaos.observed.recorder import Record
from ttp.chaos.observed.target import Target
from ttp.chaos.run import campaign
from ttp.chaos.run.campaign import Soak, run_campaign
from ttp.chaos.run.harness import Harness

NO_PID = 1 << 30
"""No process has it."""


class Rank:
    """A peer that keeps what it is given."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.pid, self.lost = rank, NO_PID + rank, False
        self.facts = {"rank": rank, "world_size": world_size, "pid": self.pid, "start": 0, "save_dirs": []}
        self.given: list[FaultOrder] = []
        """Those that may happen yet, and, in `orders`, all that there were."""
        self.orders: list[FaultOrder] = []
        self.cancelled: list[list[int]] = []

    def give(self, orders: Sequence[FaultOrder], *, cancel: Sequence[int] = ()) -> None:
        self.given = [*(order for order in self.given if order.id not in cancel), *orders]
        self.orders += orders
        self.cancelled += [list(cancel)] if cancel else []


class Job:
    """Target and control of a job of two ranks that makes a step whenever it is looked at. `on_step` is called before each."""

    def __init__(self, steps: int | None = None, on_step: Callable[[Job], None] = lambda job: None) -> None:
        self.disk = Path()
        self.mounted, self.launches, self.mark = False, 0, "played"
        self.nodes: tuple[Any, ...] = ()
        self.start_on: Callable[[int], None] = lambda index: None
        self.launchers: list[Any] = []
        self.ranks: list[Rank] = []
        self.step, self.steps, self.killed = 0, steps or 1_000_000, False
        self.harness: Harness
        self.faults = 0
        """After so many the job ends, if it has not ended before; 0: it does not."""
        self.messages: list[tuple[Rank, Message]] = []
        self._on_step = on_step

    def start(self) -> None:
        self.launches, self.killed = self.launches + 1, False
        self.launchers = [SimpleNamespace(poll=self.ended, pid=NO_PID)]
        self.ranks = [Rank(rank, 2) for rank in (0, 1)]
        for rank in self.ranks:
            self.tell(rank, "hello", **rank.facts)

    def tell(self, peer: Rank, kind: str, **fields: Any) -> None:
        self.messages.append((peer, {"type": kind, "unix_s": time.time(), **fields}))

    def ended(self) -> int | None:
        """A launcher that was killed has ended, its ranks have not."""
        return -9 if self.killed else 0 if self.step >= self.steps else None

    def controllers(self) -> dict[int, int]:
        return {}

    @property
    def peers(self) -> list[Rank]:
        return self.ranks if self.step < self.steps else []

    def poll(self, timeout_s: float) -> list[tuple[Rank, Message]]:
        if self.faults and sum(bool(one.outcome) for one in self.harness.incidents) == self.faults:
            self.steps = self.step
        if self.step < self.steps:
            self.step += 1
            self._on_step(self)
            for rank in self.ranks:
                self.tell(rank, "step", step=self.step, grad_norm="0x1p0", sums=[])
        messages, self.messages = self.messages, []
        return messages

    def leftovers(self) -> list[str]:
        return []

    litter = leftovers

    def fire(self) -> None:
        """Ranks do what they were ordered to."""
        for rank in self.ranks:
            for order in rank.given:
                self.tell(rank, "firing", id=order.id, point=order.fault.point, step=self.step)
            rank.given = []


def harness(job: Job, *faults: dict[str, Any], **fields: Any) -> Harness:
    """Let the faults happen in the job; return the harness that did it."""
    scenario = parse_scenario({"seed": 1, "faults": list(faults), "deadline_s": 20, **fields}, "here")
    job.faults = len(scenario.faults)
    job.harness = made = Harness(cast(Target, job), cast(Control, job), scenario, random.Random(1))
    made.run(scenario.faults)
    return made


def test_what_a_rank_reports_of_its_fault_is_put_down_with_the_rank() -> None:
    """Its step, and who it was."""
    job = Job(None, Job.fire)
    (incident,) = harness(job, {"fault": "slow", "rank": 1, "for_s": 0.001, "point": "ready"}).incidents
    (firing,) = incident.firings
    assert (firing.kind, firing.ranks, firing.point) == ("slow", (1,), "ready")
    assert firing.whom == f"rank 1 (pid {NO_PID + 1})" and incident.outcome == "unharmed"


def test_a_soak_asks_for_no_fault_of_a_job_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run begins; the fault that was due as the job ended did not happen."""
    jobs: list[Job] = []

    @contextmanager
    def staged(*args: object) -> Iterator[tuple[Job, Job]]:
        jobs.append(Job(30))
        yield jobs[-1], jobs[-1]

    monkeypatch.setattr(campaign, "staged", staged)
    scenario = parse_scenario({"seed": 1, "faults": [{"fault": "slow", "for_s": 1}]}, "here")
    for made in run_campaign(scenario, ["train.py"], tmp_path, soak=Soak(300.0, 60.0), compare=False):
        if len(made.runs) == 2:
            break
    assert [len(one.run.incidents) for one in made.runs] == [1, 1] and [job.launches for job in jobs] == [1, 1]


def test_a_fault_that_finds_nothing_to_hit_did_not_happen_and_is_not_waited_for() -> None:
    """A rank that has left, a launcher that has ended, no controller: the next fault comes at once."""

    def leave(job: Job) -> None:
        job.ranks[1].lost = True
        job.fire()

    job = Job(None, leave)
    kinds: list[dict[str, Any]] = [
        {"fault": "kill", "rank": 1},
        {"fault": "kill_controller"},
        {"fault": "slow", "rank": 0, "for_s": 0.001},
    ]
    made = harness(job, *kinds)
    assert [one.outcome for one in made.incidents] == ["not reached", "not reached", "unharmed"]
    assert [one.complete for one in made.incidents] == [False, False, True] and job.launches == 1


@pytest.mark.parametrize("kind", ["slow", "cpu"])
@pytest.mark.parametrize("moment", [{"after_steps": 50}, {"step": 30}, {"after_s": 3600}, {"step": 9}], ids=str)
def test_no_fault_comes_after_the_job_is_over(
    kind: str, moment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for, a step's beginning, a moment within it, or a while: of one at a point no order is given."""
    monkeypatch.setattr(Harness, "_step_s", lambda self: 1e6)
    job = Job(8 if kind == "cpu" or moment != {"step": 9} else 6)
    (incident,) = harness(job, {"fault": kind, "rank": 0, "for_s": 0.001, **moment}).incidents
    assert incident.firings == [] and incident.outcome == "not reached" and not job.ranks[0].orders


def test_no_fault_comes_within_a_step_in_which_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "_step_s", lambda self: 1e6)
    job = Job(8)
    (incident,) = harness(job, {"fault": "cpu", "rank": 0, "for_s": 0.001, "step": 8}).incidents
    assert incident.firings == [] and not job.ranks[0].orders


def happen(job: Job, event: str) -> None:
    """A controller's journal has a line more."""
    job.harness.record.journal.append({"event": event, "unix_s": time.time() + 1, "controller": 0})


@pytest.mark.parametrize("then", [{"after_s": 3600}, {"event": "frozen"}, {"event": "death_seen"}], ids=str)
def test_no_further_fault_comes_after_the_job_is_over(then: dict[str, Any]) -> None:
    """Nor where its event has been there, and the job is over by then."""

    def on_step(job: Job) -> None:
        if any(rank.given for rank in job.ranks):
            job.fire()
            happen(job, "death_seen")
            job.step = job.steps

    job = Job(200, on_step)
    slow = {"fault": "slow", "for_s": 0.001, "point": "ready"}
    (incident,) = harness(job, {**slow, "rank": 0, "then": [{**slow, "rank": 1, **then}]}).incidents
    assert [firing.ranks for firing in incident.firings] == [(0,)] and incident.planned == 2
    assert not incident.complete and not job.ranks[1].orders


def test_what_follows_the_launchers_death_waits_for_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has ended by then, and the job is not over: its ranks are still there. Then the command is started anew."""
    given_at: list[int] = []
    killed_at: list[int] = []

    def on_step(job: Job) -> None:
        if killed_at and job.step == killed_at[0] + 10:
            happen(job, "frozen")
        given_at.extend(job.step for rank in job.ranks for _ in rank.given)
        job.fire()

    job = Job(None, on_step)

    def kill(pid: int, signum: int) -> None:
        assert pid == NO_PID
        job.killed = True
        killed_at.append(job.step)

    monkeypatch.setattr("ttp.chaos.faults.external.os.kill", kill)
    monkeypatch.setattr(Injector, "gone", lambda self: bool(given_at))
    slow = {"fault": "slow", "rank": 1, "for_s": 0.001, "point": "ready", "event": "frozen"}
    (incident,) = harness(job, {"fault": "kill_agent", "after_steps": 3, "then": [slow]}).incidents
    assert [firing.kind for firing in incident.firings] == ["kill_agent", "slow"] and incident.complete
    assert given_at and min(given_at) > killed_at[0] + 10 and job.launches == 2 and incident.outcome == "relaunched"


def test_a_launcher_that_has_ended_is_not_hit() -> None:
    """Its number may be another process's."""
    job = Job()
    job.launchers = [SimpleNamespace(poll=lambda: 0, pid=NO_PID)]
    (spec,) = parse_scenario({"faults": [{"fault": "kill_agent"}]}, "here").faults
    assert Injector(cast(Target, job), random.Random(0)).elsewhere(spec, Record()) == []


def test_a_process_that_has_ended_is_not_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose end the harness has not seen yet, or a controller."""
    job = Job()
    monkeypatch.setattr(job, "controllers", lambda: {0: NO_PID})
    kill, kill_controller = parse_scenario({"faults": [{"fault": "kill"}, {"fault": "kill_controller"}]}, "here").faults
    injector = Injector(cast(Target, job), random.Random(0))
    assert injector.signal_rank(kill, cast(Peer, Rank(0, 2)), 1) == []
    assert injector.elsewhere(kill_controller, Record()) == []


FILL = {"fault": "fill_disk", "for_s": 0.001, "after_steps": 3}


def test_where_no_disk_can_be_mounted_every_ranks_write_fails_and_the_first_that_does_is_the_fault() -> None:
    """Each rank is given its order; what is reported is the write that failed."""

    def write(job: Job) -> None:
        for order in job.ranks[1].given:
            job.tell(job.ranks[1], "firing", id=order.id, point="write", step=job.step)

    job = Job(None, write)
    (incident,) = harness(job, FILL, small_disk_mib=64).incidents
    assert [(one.kind, one.ranks, one.point) for one in incident.firings] == [("fill_disk", (1,), "write")]
    assert incident.complete and incident.outcome == "unharmed"
    for rank in job.ranks:
        (order,) = rank.orders
        assert (order.fault.action, order.fault.point, order.fault.rank) == ("enospc", "write", rank.rank)
        assert order.fault.times > 1 and rank.given == []


def test_a_full_disk_that_no_write_came_to_was_none_and_lasts_no_longer_than_it_should() -> None:
    """The job trains on, and a later write is not hit."""
    job = Job(10_000)
    (incident,) = harness(job, FILL, small_disk_mib=64).incidents
    assert incident.outcome == "not reached" and not incident.firings
    assert [len(rank.orders) for rank in job.ranks] == [1, 1] and not any(rank.given for rank in job.ranks)
    assert job.step < 10_000, "it was not waited for any longer"


def test_what_has_not_happened_by_the_end_of_an_incident_or_may_happen_again_hits_no_later_one() -> None:
    """Rank 0's order has happened once, rank 1's has not."""

    def once(job: Job) -> None:
        for order in job.ranks[0].given:
            job.tell(job.ranks[0], "firing", id=order.id, point="ready", step=job.step)

    job = Job(None, once)
    slow = {"fault": "slow", "rank": [0, 1], "for_s": 0.001, "point": "ready"}
    for incident in harness(job, slow, slow).incidents:
        assert [one.ranks for one in incident.firings] == [(0,)] and not incident.complete
    assert [len(rank.orders) for rank in job.ranks] == [2, 2] and not any(rank.given for rank in job.ranks)
    assert job.ranks[0].cancelled == [[1, 2], [3, 4]], "each incident's own"


def test_a_disk_that_is_mounted_is_filled_and_no_rank_is_given_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttp.chaos.faults.external._fill_file", lambda path: path.write_text("full"))
    job = Job()
    job.mounted, job.disk = True, tmp_path
    (incident,) = harness(job, FILL, small_disk_mib=64).incidents
    assert [one.whom for one in incident.firings] == [str(tmp_path)] and incident.complete
    assert job.ranks[0].orders == [] and list(tmp_path.iterdir()) == []


def test_a_launcher_that_ends_at_the_moment_of_its_fault_ends_the_job() -> None:
    """It is not started anew, as the harness has not killed it."""

    def on_step(job: Job) -> None:
        job.launchers = [SimpleNamespace(poll=lambda: 0, pid=NO_PID)]

    job = Job(None, on_step)
    (incident,) = harness(job, {"fault": "kill_agent"}, job_s=10).incidents
    assert incident.outcome == "not reached" and job.launches == 1
    assert job.harness._over(), "nothing is waited for"


def test_a_launcher_of_several_is_started_anew_and_the_job_may_end_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs on the other nodes."""
    monkeypatch.setattr("ttp.chaos.faults.external.os.kill", lambda pid, signum: None)
    monkeypatch.setattr(Harness, "_settled", lambda self, fault, incident: True)
    started: list[int] = []
    job = Job()
    job.nodes = (SimpleNamespace(name="node-a", holds=lambda pid: True, pids=lambda: []),)
    job.start_on = started.append
    (incident,) = harness(job, {"fault": "kill_agent"}, nodes=1).incidents
    assert incident.complete and started == [0] and job.launches == 1 and job.harness._over()
