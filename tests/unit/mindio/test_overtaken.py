"""A training thread whose update was done by the work thread is let out, where its trainer asked for it, and nowhere else."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gates import freeze
from ttp.errors import Overtaken
from ttp.optim.step_agreement.spanning import Spanning
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord

RECORD = CommitRecord(1, 1.0, 1.0, False, 1.0, (0.1,), ())


def begin(gate: Gate) -> tuple[threading.Thread, list[BaseException]]:
    """Let a thread begin the update of step 1; return it and what it has raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            gate.begin_update(1, RECORD)
        except Overtaken as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("before", [False, True])
def test_a_thread_at_the_gate_is_let_go_by_the_roll_forward_of_its_step(before: bool) -> None:
    """Whether it comes to the gate before the roll forward or after it; the gate stays final and closed."""
    gate = Gate(0)
    gate.lets_go = True
    gate.computing(1)
    gate.ready(1)
    freeze(gate, 1, 1.0)
    if before:
        thread, raised = begin(gate)
    assert not gate.overtook(1)
    gate.start_roll_forward(RECORD)
    gate.rolled_forward(1)
    if not before:
        thread, raised = begin(gate)
    thread.join(30)
    assert [type(error) for error in raised] == [Overtaken]
    assert gate.overtook(1) and not gate.overtook(2) and gate.final and gate.closed and gate.state_step == 1


def test_a_failed_roll_forward_lets_no_rank_go() -> None:
    """The state is torn: there is nothing to keep books of."""
    gate = Gate(0)
    gate.lets_go = True
    gate.computing(1)
    gate.ready(1)
    freeze(gate, 1, 1.0)
    gate.start_roll_forward(RECORD)
    gate.roll_forward_failed()
    assert not gate.overtook(1) and gate.torn


class Collective:
    """A collective that completes in the n-th wait for a while, or with an error there; 0: never."""

    def __init__(self, completes_in: int = 0, error: str = "") -> None:
        self.waits = 0
        self._completes_in, self._error = completes_in, error

    def is_completed(self) -> bool:
        return 0 < self._completes_in <= self.waits

    def wait(self, at_most: timedelta | None = None) -> None:
        assert at_most is not None or self.is_completed(), "waited for a collective that hangs"
        self.waits += at_most is not None
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)


def test_the_spanning_collective_is_left_when_it_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `abandons` raises comes out, and memory that the collective may still write is kept."""
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: Collective())
    spanning = Spanning("a group", None, torch.device("cpu"))
    asked: list[int] = []

    def abandon(step: int) -> None:
        asked.append(step)
        if len(asked) == 3:
            raise Overtaken("enough")

    spanning.abandons = abandon
    with pytest.raises(Overtaken, match="enough"):
        spanning.agree(7, torch.tensor(2.0, dtype=torch.float64), False, False, [1.0])
    assert asked == [7, 7, 7] and len(spanning._left) == 1


def test_a_collective_that_completes_within_a_slice_is_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs the CPU what it would without anybody who may abandon it."""
    work = Collective(completes_in=1)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: work)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    spanning = Spanning("a group", None, torch.device("cpu"))
    asked: list[int] = []
    spanning.abandons = asked.append
    agreed = spanning.agree(7, torch.tensor(2.0, dtype=torch.float64), False, False, [1.0])
    assert (agreed.squares, asked, work.waits, spanning._left) == (2.0, [7], 1, [])


def test_a_collective_that_fails_while_it_may_be_abandoned_fails_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer's death must not pass for the end of a slice."""
    work = Collective(completes_in=3, error="Connection closed by peer")
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: work)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    spanning = Spanning("a group", None, torch.device("cpu"))
    asked: list[int] = []
    spanning.abandons = asked.append
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        spanning.agree(7, torch.tensor(2.0, dtype=torch.float64), False, False, [1.0])
    assert asked == [7, 7, 7]
