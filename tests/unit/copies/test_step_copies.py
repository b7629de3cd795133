"""A rank's copies around its steps: what is refused, when it waits, and that a lost keeper costs no step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import pytest
import torch

from ttp.checkpoint.format.types import HeldTensor
from ttp.config import Settings
from ttp.copies.region import Description
from ttp.errors import CheckpointError, ConfigError
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord
from ttp.runtime import step_copies
from ttp.runtime.state_provider import OptimizerStateProvider
from ttp.runtime.step_copies import BUDGET, NO_COPIES, CopyOptions, StepCopies, begin_copies


@dataclass
class Memory:
    """A rank's memory, and a keeper that answers what it is given to answer."""

    description: Description
    said: list[dict[str, Any]] = field(default_factory=list)
    taken: list[tuple[int, int, int]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    waits: int = 0
    error: Exception | None = None
    lost: bool = False
    closed: bool = False
    on_wait: Callable[[], None] = lambda: None

    def take(self, slot: int, step: int, sequence: int, state: bytes, tensors: list[torch.Tensor]) -> float:
        if self.error:
            raise self.error
        self.taken.append((slot, step, sequence))
        self.state, self.tensors = json.loads(state), [tensor.clone() for tensor in tensors]
        return 0.0

    def say(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    def next_message(self, timeout_s: float | None) -> dict[str, Any] | None:
        assert timeout_s is not None and timeout_s > 0
        self.waits += 1
        self.on_wait()
        if self.lost:
            raise OSError("the copy keeper was lost: for the test")
        return self.answers.pop(0) if self.answers else {"safe": self.said[-1]["step"], "why": ""}

    def close(self) -> None:
        self.closed = True


class Optimizer:
    """Two groups, and a step that the test counts."""

    device = torch.device("cpu")
    current_step = 0
    last_record = None
    spans_job = True
    workload = ""
    drained = 0

    def __init__(self) -> None:
        self.lane = self
        self.held = {"b": [held("y", 2.0)], "a": [held("x", 1.0)]}

    def drain(self) -> None:
        self.drained += 1

    def holdings(self, step: int | None = None) -> dict[str, list[HeldTensor]]:
        assert step in (None, self.current_step)
        return self.held

    def host_state(self, step: int) -> dict[str, Any]:
        return {"param_groups": [{"lr": 0.5}]}

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {"x": (1,), "y": (1,)}

    def param_names(self, group: int) -> list[str]:
        return ["x", "y"]


def held(key: str, value: float) -> HeldTensor:
    return HeldTensor(key, (1,), 0, torch.tensor([value]))


class Job:
    """One rank between its gate and its keeper; the other ranks answer what `others` makes of its word."""

    def __init__(self, options: CopyOptions | None = None, settings: Settings | None = None) -> None:
        self.optimizer, self.gate, self.now = Optimizer(), Gate(0), 0.0
        self.holder = cast(OptimizerStateProvider, self)
        self.others: Callable[[Any], list[Any]] = lambda mine: [mine]
        self.asked: list[Any] = []
        self.options = options or CopyOptions("memory", every=2)
        self.settings = settings or Settings(copies="@a socket", host="one", round_number=3)
        self.memories: list[Memory] = []
        self.layout = {"world_size": 1}
        self.passed_over = {"/somewhere/iter_0000042": 7}

    def host_state(self, step: int) -> dict[str, Any]:
        return {"optimizer": self.optimizer.host_state(step), "trainer": {"seen": step}}

    def exchange(self, mine: Any, device: torch.device) -> list[Any]:
        self.asked.append(mine)
        return json.loads(json.dumps(self.others(mine)))  # type: ignore[no-any-return]

    def open(self, address: str, description: Description) -> Memory:
        self.memories.append(Memory(description))
        return self.memories[-1]

    def begin(self) -> StepCopies:
        return StepCopies(self.holder, self.settings, self.options, ["/somewhere"], self.gate, lambda: self.now)

    def trains(self, step: int) -> None:
        self.gate.computing(step)
        self.gate.ready(step)
        self.gate.begin_update(step, cast(CommitRecord, None))
        self.optimizer.current_step = step
        self.now += 1.0
        self.gate.end_update(step)


@pytest.fixture
def job() -> Iterator[Job]:
    of = Job()
    with (
        mock.patch.object(step_copies, "CopyMemory", of.open),
        mock.patch.object(step_copies, "exchange_json", of.exchange),
        mock.patch.object(step_copies, "be_ended_first", lambda: None),
    ):
        yield of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": "disk"}, "invalid copies: got 'disk', expected 'memory', or None for none"),
        ({"budget": 0.0}, "invalid copy_budget: got 0.0, expected a part of the time above 0, up to 1: 0.01 is one percent"),
        ({"budget": 1.5}, "invalid copy_budget: got 1.5, expected"),
        ({"budget": "1%"}, "invalid copy_budget: got '1%', expected"),
        ({"budget": float("nan")}, "invalid copy_budget: got nan, expected"),
        ({"every": 0}, "invalid copy_every: got 0, expected a number of steps, or None"),
        ({"every": 1.5}, "invalid copy_every: got 1.5, expected"),
        ({"every": True}, "invalid copy_every: got True, expected"),
        ({"budget": True}, "invalid copy_budget: got True, expected"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CopyOptions(**({"copies": "memory"} | options))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_options_without_copies_want_none() -> None:
    assert not NO_COPIES.enabled
    assert (CopyOptions("memory").enabled, CopyOptions("memory").budget, CopyOptions("memory").every) == (
        True, BUDGET, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "own_form", "message"),
    [
        ({}, True, "a form of the trainer's own"),
        ({"spans_job": False}, False, "no collective that every rank of the job enters"),
        ({"shared_dirs": False}, False, "TTP_SHARED_DIRS=False"),
    ],
)
def test_a_job_that_cannot_have_copies_is_refused(
    job: Job, change: dict[str, Any], own_form: bool, message: str
) -> None:
    for name, value in change.items():
        if name == "shared_dirs":
            job.settings = Settings(copies="@a socket", shared_dirs=False)
        else:
            setattr(job.optimizer, name, value)
    with pytest.raises(ConfigError, match=message):
        begin_copies(job.options, job.holder, job.settings, [], job.gate, own_form=own_form)
    assert job.asked == []


def test_without_a_wish_or_without_protection_there_are_no_copies(job: Job) -> None:
    assert begin_copies(NO_COPIES, job.holder, job.settings, [], job.gate, own_form=True) is None
    assert begin_copies(job.options, job.holder, job.settings, [], None, own_form=True) is None
    assert begin_copies(job.options, job.holder, job.settings, [], job.gate, own_form=False) is not None


def test_without_ttprun_every_rank_is_refused(job: Job) -> None:
    job.settings = Settings(copies="")
    with pytest.raises(ConfigError, match="got no ttprun"):
        job.begin()
    job.settings = Settings(copies="@a socket")
    job.others = lambda mine: ["no room", mine] if isinstance(mine, str) else [mine]
    with pytest.raises(ConfigError, match="another rank has no memory for its copies: no room"):
        job.begin()
    assert (job.gate.before_ready, job.gate.after_update) == (None, None)


def test_a_copy_is_taken_behind_the_first_step_and_then_every_so_many_into_slots_by_turns(job: Job) -> None:
    job.begin()
    for step in range(1, 7):
        job.trains(step)
    [memory] = job.memories
    assert memory.taken == [(1, 1, 1), (0, 3, 2), (1, 5, 3)]
    assert [(m["do"], m["step"], m["slot"], m["sequence"], m["send"]) for m in memory.said] == [
        ("copied", 1, 1, 1, False), ("copied", 3, 0, 2, False), ("copied", 5, 1, 3, False),
    ]  # fmt: skip
    assert [m["within_s"] for m in memory.said] == [0.0, 1.0, 1.0], "half of the time until the next one"
    assert memory.state == {"state": job.host_state(5), "record": None}
    assert [float(tensor) for tensor in memory.tensors] == [1.0, 2.0], "in the order of the description's places"
    assert job.optimizer.drained == 3
    assert memory.description.attempt == 3
    assert memory.description.facts["directories"] == ["/somewhere"]
    assert memory.description.facts["passed_over"] == job.holder.passed_over


def test_a_rank_waits_before_ready_only_when_its_next_copy_is_due(job: Job) -> None:
    job.begin()
    [memory] = job.memories
    waited: list[tuple[int, int]] = []
    for step in range(1, 6):
        job.gate.computing(step)
        phases: list[Any] = []
        memory.on_wait = lambda seen=phases: seen.append((job.gate.phase, job.gate.waiting))  # type: ignore[misc]
        job.gate.ready(step)
        assert all(phase.name == "COMPUTE" and waiting for phase, waiting in phases)
        assert not job.gate.waiting
        waited.append((step, memory.waits))
        job.gate.begin_update(step, cast(CommitRecord, None))
        job.optimizer.current_step = step
        job.gate.end_update(step)
    assert waited == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]


def test_what_is_checked_before_ready_is_checked_with_copies_too(job: Job) -> None:
    """A step that no rank could save is refused first."""
    checked: list[int] = []
    job.gate.before_ready = checked.append
    job.begin()
    for step in (1, 2):
        job.trains(step)
    assert checked == [1, 2]


def test_an_answer_about_an_earlier_copy_is_not_one_about_this(job: Job) -> None:
    job.begin()
    job.trains(1)
    [memory] = job.memories
    memory.answers = [{"safe": 0, "why": ""}, {"safe": 1, "why": ""}]
    job.trains(2)
    job.trains(3)
    assert memory.waits == 2


def test_a_keeper_that_is_lost_costs_no_step_and_is_reported_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.begin()
    [memory] = job.memories
    memory.lost = True
    with caplog.at_level(logging.WARNING):
        for step in range(1, 8):
            job.trains(step)
        assert memory.waits == 3, "once for each copy"
    assert job.gate.phase.name == "DONE"
    assert [step for _, step, _ in memory.taken] == [1, 3, 5, 7]
    assert [record.getMessage() for record in caplog.records] == ["rank 0: the copy keeper was lost: for the test"]


@pytest.mark.parametrize(
    "error", [OSError("no keeper"), CheckpointError("too large"), ConfigError("no room"), EOFError("closed")]
)
def test_a_copy_that_cannot_be_taken_costs_no_step_and_is_not_waited_for(
    job: Job, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    job.begin()
    [memory] = job.memories
    memory.error = error
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            job.trains(step)
    assert memory.waits == 0
    assert [record.getMessage() for record in caplog.records] == [f"rank 0: no copy of step 1: {error}"]


def test_a_copy_that_is_not_safe_is_reported_and_training_continues(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.begin()
    [memory] = job.memories
    memory.answers = [{"safe": 1, "why": "the next node has not got it"}]
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            job.trains(step)
    assert [r.getMessage() for r in caplog.records] == [
        "rank 0: the copy of step 1 is not safe: the next node has not got it"
    ]


@pytest.mark.parametrize(
    ("everyone", "send"),
    [
        ([("one", "ab"), ("one", "a")], False),
        ([("one", "ab"), ("two", "ab")], False),
        ([("one", "ab"), ("two", "a")], True),
        ([("one", "ab"), ("one", "ab"), ("two", "c")], True),
    ],
)
def test_a_copy_is_sent_where_some_group_is_on_no_other_node(
    job: Job, everyone: list[tuple[str, str]], send: bool
) -> None:
    def others(mine: Any) -> list[Any]:
        if isinstance(mine, dict):
            return [{"host": host, "groups": list(groups)} for host, groups in everyone]
        return [mine]

    job.others = others
    job.begin()
    job.trains(1)
    [memory] = job.memories
    assert memory.said[0]["send"] is send
    assert memory.description.world_size == len(everyone)
    assert memory.description.groups == tuple(sorted({group for _, groups in everyone for group in groups}))


def test_ranks_agree_on_the_longest_interval_after_some_copies(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.options = CopyOptions("memory", budget=0.1)
    job.others = lambda mine: [mine, 4] if isinstance(mine, int) else [mine]
    job.begin()
    [memory] = job.memories
    with caplog.at_level(logging.INFO):
        for step in range(1, 12):
            job.trains(step)
    # the first agreement comes after two copies; the copy that is due by then keeps its place
    assert [step for _, step, _ in memory.taken] == [1, 2, 3, 7, 11]
    assert [mine for mine in job.asked if isinstance(mine, int)] == [1]
    assert "copies in memory every 4 steps from step 3 on" in caplog.text
    assert "at most 7 steps lost" in caplog.text
    assert not job.gate.waiting


def test_an_interval_follows_from_what_copies_and_steps_take(job: Job) -> None:
    job.options = CopyOptions("memory", budget=0.1)
    job.begin()
    [memory] = job.memories
    take = memory.take

    def slow(*args: Any) -> float:
        job.now += 0.5
        return take(*args)

    memory.take = slow  # type: ignore[method-assign, assignment]
    for step in (1, 2):
        job.trains(step)
    assert job.asked[-1] == 5


def test_a_wait_before_ready_counts_as_time_that_training_stops(job: Job) -> None:
    job.options = CopyOptions("memory", budget=0.1)
    job.begin()
    [memory] = job.memories

    def waits() -> None:
        job.now += 4.0

    memory.on_wait = waits
    for step in (1, 2):
        job.trains(step)
    # the first copy stopped training for 4 s behind it, the second 0 s yet: 2 s; steps took 1 s and those 4
    assert job.asked[-1] == 4


def test_ranks_agree_anew_after_some_copies_and_then_after_each_so_many(job: Job) -> None:
    job.options = CopyOptions("memory", budget=1.0)
    job.begin()
    for step in range(1, 97):
        job.trains(step)
    assert len([mine for mine in job.asked if isinstance(mine, int)]) == 5, "after 2, 8, 32, 64 and 96"


def test_a_rank_with_copies_is_ended_first_when_memory_runs_out(job: Job) -> None:
    with mock.patch.object(step_copies, "be_ended_first") as called:
        job.begin()
    called.assert_called_once_with()


def test_a_fixed_interval_is_not_agreed_on(job: Job) -> None:
    job.options = CopyOptions("memory", every=1)
    job.begin()
    for step in range(1, 10):
        job.trains(step)
    assert [mine for mine in job.asked if isinstance(mine, int)] == []


def test_the_first_rank_reports_what_is_kept_and_what_a_fault_costs(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        job.begin()
    assert [r.getMessage() for r in caplog.records] == [
        "copies in memory: those of rank 0 take 16 B of its node's memory; after every 2 steps. Losing any of 1 rank costs at most 3 steps"
    ]


def test_under_a_budget_no_number_of_steps_is_promised_at_the_start(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.options = CopyOptions("memory")
    with caplog.at_level(logging.INFO):
        job.begin()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith("; at first after each step, then as often as 1.0% of the time allows")


def test_a_keeper_that_does_not_answer_costs_a_copy_and_not_the_training(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stopped, say: its end would show at once."""
    job.options = CopyOptions("memory", every=1)
    job.begin()
    job.trains(1)
    with mock.patch.object(Memory, "next_message", lambda self, timeout_s: None):
        job.trains(2)
    assert "the copy of step 1 is not safe: no answer of the copy keeper within 180 s" in caplog.text
    job.trains(3)


def test_copies_that_are_closed_leave_the_gate_alone(job: Job) -> None:
    copies = job.begin()
    job.trains(1)
    copies.close()
    job.trains(2)
    job.trains(3)
    [memory] = job.memories
    assert memory.closed
    assert len(memory.taken) == 1
