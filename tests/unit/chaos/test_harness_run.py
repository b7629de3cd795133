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

from ttp.chaos.faults.control_socket import Control, Message
from ttp.chaos.faults.rank_hook import FaultOrder
from ttp.chaos.faults.scenario import parse_scenario
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

    def give(self, orders: Sequence[FaultOrder], *, cancel: bool = False) -> None:
        self.given = [*(() if cancel else self.given), *orders]


class Job:
    """Target and control of a job of two ranks that makes a step whenever it is looked at, until its last one. `on_step` is called before each."""

    def __init__(self, steps: int = 1_000_000, on_step: Callable[[Job], None] = lambda job: None) -> None:
        self.nodes, self.mounted, self.launches, self.mark = (), False, 0, "played"
        self.launchers: list[Any] = []
        self.ranks: list[Rank] = []
        self.step, self.steps = 0, steps
        self.messages: list[tuple[Rank, Message]] = []
        self._on_step = on_step

    def start(self) -> None:
        self.launches += 1
        self.launchers = [SimpleNamespace(poll=self.ended, pid=NO_PID)]
        self.ranks = [Rank(rank, 2) for rank in (0, 1)]
        for rank in self.ranks:
            self.tell(rank, "hello", **rank.facts)

    def tell(self, peer: Rank, kind: str, **fields: Any) -> None:
        self.messages.append((peer, {"type": kind, "unix_s": time.time(), **fields}))

    def ended(self) -> int | None:
        return 0 if self.step >= self.steps else None

    @property
    def peers(self) -> list[Rank]:
        return [] if self.ended() is not None else self.ranks

    def poll(self, timeout_s: float) -> list[tuple[Rank, Message]]:
        if self.ended() is None:
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
    scenario = parse_scenario({"seed": 1, "faults": list(faults), "deadline_s": 60, **fields}, "here")
    made = Harness(cast(Target, job), cast(Control, job), scenario, random.Random(1))
    made.run(scenario.faults)
    return made


def test_what_a_rank_reports_of_its_fault_is_put_down_with_the_rank() -> None:
    """Its step, and who it was."""
    job = Job(60, Job.fire)
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
