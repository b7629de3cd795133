"""When a rank's own backward pass is over, and its wait for the others begins, under a trainer that knows nothing of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.unit.adopt.test_steps import adopt
from ttp.adopt.own_backward import OwnBackward
from ttp.optim.step_state import StepState
from ttp.processor.gate import Gate


class Waits:
    """What a gate has received, beside what a wrapper does at the end of a pass, as DistributedDataParallel does: in a callback that is queued when the last
    gradient is there."""

    def __init__(self, device: str = "cpu") -> None:
        self.steps = StepState(torch.device(device))
        self.gate = self.steps.tracker = Gate(0)
        self.gate.on_wait = lambda waits: self.lines.append("waits" if waits else "goes on")
        self.backward = OwnBackward(self.steps)
        self.lines: list[str] = []
        self.fails = False
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.weight.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]

    def _reduce(self, param: Any) -> None:
        self.lines.append("gradient")
        torch.autograd.Variable._execution_engine.queue_callback(self._finalize)

    def _finalize(self) -> None:
        self.lines.append("all-reduce")
        if self.fails:
            raise ConnectionError("a peer is gone")


def test_the_wait_is_the_wrappers_at_the_end_of_the_pass() -> None:
    """Not the pass itself, and not what the trainer does behind it: clipping, a learning rate."""
    job = Waits()
    for _ in range(2):
        output = job.weight * 2
        job.backward.watch(output)
        torch.autograd.backward(output.sum())
        job.lines.append("clipping")
        job.backward.over()
    assert job.lines == ["gradient", "waits", "all-reduce", "goes on", "clipping"] * 2
    assert not job.gate.waiting


def test_a_model_with_several_outputs_waits_once() -> None:
    """Mappings and sequences, with other values than tensors in them, and what needs no gradient."""
    job = Waits()
    first, second = job.weight * 2, job.weight * 3
    job.backward.watch({"a": first, "b": second, "c": 3, "d": torch.ones(2)})
    torch.autograd.backward((first + second).sum())
    job.backward.watch([first, None])
    job.backward.watch(None)
    assert job.lines == ["gradient", "waits", "all-reduce", "goes on"]


def test_a_parameter_that_a_model_returns_gathers_no_hooks() -> None:
    job = Waits()
    for _ in range(20):
        job.backward.watch({"logits": job.weight * 2, "prototypes": job.weight})
    assert not job.weight._backward_hooks
    job.backward.watch(output := job.weight * 2)
    torch.autograd.backward(output.sum())
    assert job.lines == ["gradient", "waits", "all-reduce", "goes on"]


@pytest.mark.parametrize("left_by", ["step_back", "keep"])
def test_a_wait_that_raised_is_over_when_its_step_is_left(left_by: str) -> None:
    """A rank that stays is no rank that waits."""
    _, adopted, gate = adopt()
    adopted._backward._waits = gate.waiting = True
    adopted.step_back() if left_by == "step_back" else adopted.keep(0, None)
    assert not gate.waiting


def test_a_wait_that_raises_is_over_when_the_next_pass_begins() -> None:
    job = Waits()
    job.fails = True
    output = job.weight * 2
    job.backward.watch(output)
    with pytest.raises(ConnectionError):
        torch.autograd.backward(output.sum())
    assert job.gate.waiting, "it does, until the exception has left training"
    job.backward.over()
    assert not job.gate.waiting and job.lines[-1] == "goes on"
    lines = [*job.lines]
    job.backward.over()
    assert job.lines == lines, "there is none"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_that_is_computed_again_within_its_backward_pass_ends_with_that(reentrant: bool) -> None:
    """Activation checkpointing."""
    job = Waits()

    def part(value: torch.Tensor) -> torch.Tensor:
        output = value * job.weight
        job.backward.watch(output)
        return output

    output = checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    job.backward.watch(output)
    torch.autograd.backward(output.sum())
    assert job.lines.count("waits") == job.lines.count("goes on") == 1
    assert job.lines.index("gradient") < job.lines.index("waits") or reentrant


def test_an_adopted_step_reports_what_its_own_time_is() -> None:
    """The pass's end and the step's collectives are waits; the update is not."""
    model, adopted, gate = adopt()
    seen: list[bool] = []
    gate.on_wait = seen.append
    adopted.begin_pass()
    output = model(torch.ones(1, 2))
    adopted.begin_backward(output)
    torch.autograd.backward(output.sum())
    assert seen == [True, False] and not gate.waiting
    adopted._backward._waits = gate.waiting = True
    adopted.begin_pass()
    assert not gate.waiting, "the pass before has raised"
    del seen[2:]
    adopted.optimizer.step()
    assert seen == [True, False] * 3 and not gate.waiting


def test_waits_within_waits_are_one() -> None:
    """The inner one's end is not the outer one's."""
    job = Waits()
    with contextlib.ExitStack() as stack:
        stack.enter_context(job.steps.in_collective())
        with job.steps.in_collective():
            pass
        assert job.gate.waiting
    assert not job.gate.waiting
