"""What follows under `ttp.protect` when ranks that hold the same hold other bits: read again, reported to the gate, and then known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ttp.adopt.comparing import AdoptedCheck
from ttp.errors import ReplicasDiffer, WrongPeer, WrongReplica
from ttp.interfaces.update_tracker import NullTracker
from ttp.optim.on_divergence import OnDivergence
from ttp.optim.step_state import StepState
from ttp.proto.messages import Digest, ShardGroup

LABEL = "replica 0: 2 tensors"


class State:
    """Of this rank: what it reads of its one group, look by look."""

    def __init__(self, bits: Sequence[int]) -> None:
        self._bits = list(bits)

    def shard_groups(self) -> tuple[ShardGroup, ...]:
        return (ShardGroup("g", LABEL, 8),)

    def bits(self) -> dict[str, int]:
        return {"g": self._bits.pop(0)}


class Reported(NullTracker):
    """Keeps what a rank reports of replicas that differ."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Digest, ...]]] = []

    def dispute(self, step: int, digests: tuple[Digest, ...]) -> None:
        self.calls.append((step, digests))


def checked(
    choice: str, mine: Sequence[int], others: Sequence[Sequence[int]]
) -> tuple[AdoptedCheck, Reported, OnDivergence]:
    """Return rank 0's check after step 20. mine, others: what it and the others read, look by look."""
    tracker, steps = Reported(), StepState(torch.device("cpu"))
    steps.tracker, steps.step = tracker, 20
    looks = list(others)

    def exchange(value: Any) -> list[Any]:
        first = isinstance(value, list)
        assert first or tracker.calls, "the gate has the digests before any rank can know who is wrong"
        return [value, *([{"g": bits}, {"g": LABEL}] if first else {"g": bits} for bits in looks.pop(0))]

    on_divergence = OnDivergence(choice)
    on_divergence.equal_after = 10
    on_divergence.checkpoint_before = lambda step: f"/there/iter_{step:07d}"
    state: Any = State(mine)
    return AdoptedCheck(state, steps, exchange, on_divergence), tracker, on_divergence


@pytest.mark.parametrize("choice", ["report", "stop", "repair"])
def test_equal_bits_are_nothing_to_act_on(choice: str) -> None:
    check, tracker, on_divergence = checked(choice, [5], [[5, 5]])
    assert check.check() == [] and not tracker.calls and on_divergence.equal_after == 20


def test_a_comparison_that_may_be_of_some_ranks_alone_proves_nothing_for_all() -> None:
    """`equal_after` decides whether saves compare, and which checkpoint is named: only `check`, which all ranks call, sets it."""
    check, _, on_divergence = checked("stop", [5], [[5, 5]])
    assert check.differing() == [] and on_divergence.equal_after == 10


def test_a_report_is_a_line_for_each_group() -> None:
    check, tracker, on_divergence = checked("report", [5], [[6, 5]])
    assert check.check() == [f"{LABEL} has other bits on ranks [0, 2] than on ranks [1]"]
    assert not tracker.calls and on_divergence.equal_after == 10


@pytest.mark.parametrize(
    ("choice", "mine", "others", "error"),
    [
        ("repair", 6, [5, 5], WrongReplica),
        ("repair", 5, [6, 5], WrongPeer),
        ("repair", 5, [6], ReplicasDiffer),
        ("repair", 5, [6, 7], ReplicasDiffer),
        ("stop", 5, [6, 5], ReplicasDiffer),
    ],
)
def test_what_two_looks_see_ends_the_step(choice: str, mine: int, others: list[int], error: type[Exception]) -> None:
    check, tracker, _ = checked(choice, [mine, mine], [others, others])
    with pytest.raises(error, match=rf"after step 20, {LABEL} has other bits.*equal after step 10"):
        check.check()
    assert tracker.calls == [(20, (Digest("g", mine, 1 + len(others)),))]


@pytest.mark.parametrize(("filled", "error"), [((1,), ReplicasDiffer), ((2,), WrongPeer), ((), WrongPeer)])
def test_a_copy_proves_nothing(filled: tuple[int, ...], error: type[Exception]) -> None:
    """Of three holders: rank 1 has rank 0's bits, by itself or because it was filled with them."""
    check, _, on_divergence = checked("repair", [5, 5], [[5, 6], [5, 6]])
    on_divergence.filled = filled
    with pytest.raises(error):
        check.check()


def test_the_checkpoint_that_is_named_is_from_before_the_difference() -> None:
    check, _, _ = checked("stop", [5, 5], [[6], [6]])
    with pytest.raises(ReplicasDiffer, match="Resume from /there/iter_0000010,"):
        check.check()


@pytest.mark.parametrize(("mine", "others"), [([6, 5], [[5, 5], [5, 5]]), ([5, 5], [[5, 6], [5, 5]])])
def test_what_one_look_alone_sees_is_withdrawn(mine: list[int], others: list[list[int]]) -> None:
    check, tracker, on_divergence = checked("stop", mine, others)
    assert check.check() == [] and on_divergence.equal_after == 20
    assert [bool(digests) for _, digests in tracker.calls] == [True, False]
