"""The result of the spanning collective counts only if every rank contributed to this very step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ttp
from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.errors import AbortedCollective, ProtocolError
from ttp.interfaces.update_tracker import NullTracker
from ttp.optim.step_agreement import communicators, spanning
from ttp.optim.step_agreement.participation import NUMBERS, Contribution, Ending, attempt_number, ending_of
from ttp.optim.step_agreement.spanning import Spanning
from ttp.processor.core.causes import cause_of
from ttp.proto.messages import CauseKind, CommitRecord

CPU = torch.device("cpu")
SQUARES = torch.tensor(2.0, dtype=torch.float64)


def total(contributions: list[Contribution]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*(one.numbers for one in contributions), strict=True)))


@given(attempt=st.integers(0, (1 << 20) - 1), step=st.integers(1, 10**12), size=st.integers(1, 100_000))
def test_the_sum_over_every_rank_is_accepted(attempt: int, step: int, size: int) -> None:
    """At any step, in any world: the sums are exact in FP64."""
    one = Contribution(attempt, step)
    one.check([size * number for number in one.numbers], size)


@given(step=st.integers(1, 10**9), size=st.integers(2, 100_000), missing=st.integers(1, 100_000))
def test_a_result_without_some_rank_is_refused(step: int, size: int, missing: int) -> None:
    """Whoever has it holds no proof that the missing ones were READY."""
    one, there = Contribution(7, step), max(1, size - missing)
    with pytest.raises(AbortedCollective, match=rf"contributions of {there:g} ranks, expected {size}: "):
        one.check([there * number for number in one.numbers], size)


@given(step=st.integers(2, 10**9), ago=st.integers(1, 4000), size=st.integers(1, 1000))
def test_the_complete_result_of_an_earlier_step_is_refused(step: int, ago: int, size: int) -> None:
    """An aborted collective may return memory that an earlier one has filled."""
    stale = Contribution(7, step - ago) if step > ago else Contribution(7, step + ago)
    with pytest.raises(AbortedCollective, match="is not of this step and attempt"):
        Contribution(7, step).check(total([stale] * size), size)


def test_the_result_of_another_attempt_is_refused() -> None:
    """Memory that an earlier attempt's process has left, say."""
    assert attempt_number("job/0") != attempt_number("job/1")
    other, own = Contribution(attempt_number("job/0"), 3), Contribution(attempt_number("job/1"), 3)
    with pytest.raises(AbortedCollective, match="is not of this step and attempt"):
        own.check(total([other] * 4), 4)


def test_ranks_at_different_steps_are_the_trainers_mistake() -> None:
    """All contributed, so no collective was aborted."""
    with pytest.raises(
        ProtocolError, match=r"step 5: other ranks are at another step .*give all ranks as many batches"
    ):
        Contribution(0, 5).check(total([Contribution(0, 5), Contribution(0, 6)]), 2)


@pytest.mark.parametrize(
    "garbage", [(0.0,) * NUMBERS, (float("nan"),) * NUMBERS, (float("inf"),) * NUMBERS, (1e300,) * NUMBERS]
)
def test_garbage_is_refused(garbage: tuple[float, ...]) -> None:
    with pytest.raises(AbortedCollective):
        Contribution(3, 9).check(garbage, 2)


def test_an_aborted_collective_is_known_as_a_peers_failure() -> None:
    """Its rank is a witness: the controller looks for the rank that failed first."""
    assert cause_of(0, AbortedCollective.__name__, "step 3: ...").kind is CauseKind.PEER_ERROR


# --- the collective itself ---


def make(
    monkeypatch: pytest.MonkeyPatch, sums: Callable[[torch.Tensor, str], object], barrier: str | None = None
) -> Spanning:
    """A spanning collective over a group of 2 and a barrier of 4 whose all-reduces do what `sums` does."""

    def all_reduce(vector: torch.Tensor, group: Any) -> None:
        sums(vector, group)

    sizes = {"span": 2, "barrier": 4}
    monkeypatch.setattr(spanning, "dist", SimpleNamespace(all_reduce=all_reduce, get_world_size=sizes.__getitem__))
    return Spanning("span", barrier, CPU)


def test_a_collective_that_returns_its_own_contribution_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an in-place all-reduce leaves that was aborted before it began."""
    with pytest.raises(AbortedCollective, match="contributions of 1 ranks, expected 2"):
        make(monkeypatch, lambda vector, group: None).agree(1, SQUARES, False, False, None)


def test_a_collective_that_returns_the_last_steps_result_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def double_once(vector: torch.Tensor, group: str) -> None:
        if kept:
            vector.copy_(kept[0])
        else:
            vector.mul_(2)
            kept.append(vector.clone())

    both = make(monkeypatch, double_once)
    assert both.agree(1, SQUARES, False, False, [1.0]).squares == 4.0
    with pytest.raises(AbortedCollective, match="is not of this step"):
        both.agree(2, SQUARES, False, False, [1.0])


def test_the_result_of_another_attempts_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attempt` is part of what is contributed."""

    def with_a_stranger(vector: torch.Tensor, group: str) -> None:
        own = vector[:NUMBERS].clone()
        vector.mul_(2)
        vector[:NUMBERS] = own + torch.tensor(Contribution(4, 1).numbers, dtype=torch.float64)

    both = make(monkeypatch, with_a_stranger)
    both.attempt = 5
    with pytest.raises(AbortedCollective, match="attempt 9, expected 10"):
        both.agree(1, SQUARES, False, False, None)
    both.attempt = 4
    assert both.agree(1, SQUARES, False, False, None).squares == 4.0


def test_a_group_whose_result_is_incomplete_takes_no_part_in_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other groups' records would prove too much: this one's verdict may be wrong."""
    given: dict[str, float] = {}

    def sums(vector: torch.Tensor, group: str) -> None:
        given[group] = float(vector[0])
        if group == "barrier":
            vector.mul_(4)

    with pytest.raises(AbortedCollective, match="contributions of 1 ranks, expected 2"):
        make(monkeypatch, sums, "barrier").agree(1, SQUARES, False, False, None)
    assert given == {"span": 1.0, "barrier": 0.0}


def test_a_barrier_that_lacks_a_rank_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AbortedCollective, match="contributions of 3 ranks, expected 4"):
        make(monkeypatch, lambda vector, group: vector.mul_(2 if group == "span" else 3), "barrier").agree(
            1, SQUARES, False, False, None
        )


def test_a_complete_barrier_carries_the_verdict_and_leaves_the_groups_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = make(monkeypatch, lambda vector, group: vector.mul_(2 if group == "span" else 4), "barrier")
    agreed = spans.agree(6, SQUARES, True, False, [3.0])
    assert (agreed.squares, agreed.overflow, agreed.ending, agreed.sums) == (4.0, False, Ending.WAIT, (6.0,))


@pytest.mark.parametrize(
    ("barrier", "ranks", "spans"), [(None, 2, True), (None, 4, False), ("barrier", 4, True), ("barrier", 8, False)]
)
def test_a_collective_spans_the_job_only_if_every_rank_enters_its_last_part(
    monkeypatch: pytest.MonkeyPatch, barrier: str | None, ranks: int, spans: bool
) -> None:
    """Else what it counts is not known of all ranks, and they cannot save together by it."""
    monkeypatch.setattr(spanning, "world", lambda: (0, ranks))
    assert make(monkeypatch, lambda vector, group: None, barrier).spans_job is spans


# --- how a step ends ---


@pytest.mark.parametrize(
    ("notices", "unled", "size", "ending"),
    [
        (0, 0, 4, Ending.GO_ON),
        (0, 4, 4, Ending.GO_ON),  # training continues without protection
        (1, 0, 4, Ending.WAIT),
        (1, 3, 4, Ending.WAIT),  # the controller of one rank leads
        (1, 4, 4, Ending.SAVE),
        (4, 4, 4, Ending.SAVE),
        (1, 2, 2, Ending.WAIT),  # the collective is over half of the job's ranks
    ],
)
def test_ranks_save_together_only_if_no_rank_of_the_job_has_a_controller(
    notices: float, unled: float, size: int, ending: Ending
) -> None:
    assert ending_of(notices, unled, size, 4) is ending


def contributed(
    monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[bool, bool]], barrier: str | None
) -> tuple[Ending, list[tuple[str, int]]]:
    """What rank 0 reads when ranks contribute (notice, unled): four ranks, in groups of two where there is a barrier. And the
    all-reduces of it: the group and its length."""
    calls: list[tuple[str, int]] = []
    notices, unleds = ([float(rank[which]) for rank in ranks] for which in (0, 1))
    in_span = slice(0, 2) if barrier else slice(0, 4)

    def all_reduce(vector: torch.Tensor, group: str) -> None:
        calls.append((group, len(vector)))
        members = 4 if group == "barrier" or barrier is None else 2
        vector[:NUMBERS] *= members
        counted = slice(0, 4) if group == "barrier" else in_span
        vector[NUMBERS + 1], vector[NUMBERS + 2] = sum(notices[counted]), sum(unleds[counted])

    sizes = {"span": 2 if barrier else 4, "barrier": 4}
    monkeypatch.setattr(spanning, "dist", SimpleNamespace(all_reduce=all_reduce, get_world_size=sizes.__getitem__))
    monkeypatch.setattr(spanning, "world", lambda: (0, 4))
    return Spanning("span", barrier, CPU).agree(1, SQUARES, *ranks[0], [3.0, 4.0]).ending, calls


@pytest.mark.parametrize("barrier", [None, "barrier"])
def test_the_collective_counts_ranks_without_a_controller(monkeypatch: pytest.MonkeyPatch, barrier: str | None) -> None:
    """With a barrier it is the one that counts: the other is over two ranks."""
    alone, noticed, led = (False, True), (True, True), (False, False)
    assert contributed(monkeypatch, [alone, alone, alone, noticed], barrier)[0] is Ending.SAVE
    assert contributed(monkeypatch, [alone, alone, led, noticed], barrier)[0] is Ending.WAIT
    assert contributed(monkeypatch, [alone] * 4, barrier)[0] is Ending.GO_ON
    assert contributed(monkeypatch, [led] * 4, barrier)[0] is Ending.GO_ON


@pytest.mark.parametrize("unled", [False, True])
def test_a_step_has_no_other_collective_for_it(monkeypatch: pytest.MonkeyPatch, unled: bool) -> None:
    """One all-reduce, of eight bytes more; two of them with a barrier, as ever."""
    two_sums = 2
    assert contributed(monkeypatch, [(False, unled)] * 4, None)[1] == [("span", NUMBERS + 4 + two_sums)]
    assert contributed(monkeypatch, [(False, unled)] * 4, "barrier")[1] == [
        ("span", NUMBERS + 4 + two_sums),
        ("barrier", NUMBERS + 3),
    ]


def test_a_rank_contributes_its_own_lack_of_a_controller_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the sum of its group: the barrier would count that once for each of its ranks."""
    given: list[float] = []

    def sums(vector: torch.Tensor, group: str) -> None:
        vector[:NUMBERS] *= 2 if group == "span" else 4
        given.append(float(vector[NUMBERS + 2]))
        vector[NUMBERS + 2] *= 2

    make(monkeypatch, sums, "barrier").agree(1, SQUARES, True, True, None)
    assert given == [1.0, 1.0]


# --- communicators of an accelerator ---


def fake_groups(monkeypatch: pytest.MonkeyPatch, *errors: str | None) -> list[str]:
    """Process groups whose communicators report these errors (None: they cannot say); returns which were asked."""
    asked: list[str] = []

    def group_of(name: str, error: str | None) -> Any:
        def get_error() -> Any:
            asked.append(name)
            if error is None:
                raise RuntimeError("Backend gloo does not support getError")
            return SimpleNamespace(name=error)

        return SimpleNamespace(group_name=name, _get_backend=lambda device: SimpleNamespace(get_error=get_error))

    groups = [group_of(f"group {number}", error) for number, error in enumerate(errors)]
    monkeypatch.setattr(communicators, "all_groups", lambda: groups)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return asked


def test_a_communicator_that_reports_an_error_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group is asked, the one that cannot say is passed over, and the error names its group."""
    asked = fake_groups(monkeypatch, None, "SUCCESS", "COMM_ERROR")
    with pytest.raises(AbortedCollective, match="step 8: the communicator of process group group 2 reports COMM_ERROR"):
        communicators.check_communicators(torch.device("cuda"), 8)
    assert asked == ["group 0", "group 1", "group 2"]


def test_the_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a failed collective raises by itself."""
    asked = fake_groups(monkeypatch, "COMM_ERROR")
    communicators.check_communicators(CPU, 8)
    assert asked == []


def test_torch_has_the_names_that_the_question_needs() -> None:
    """Two private names, and the error's; the list of groups can be read before there is one. A build without NCCL has `get_error` on
    its wrapper of process groups only."""
    from torch._C._distributed_c10d import ErrorType, ProcessGroup, _ProcessGroupWrapper

    assert vars(communicators)["all_groups"]() == []
    assert callable(ProcessGroup._get_backend) and callable(_ProcessGroupWrapper.get_error)
    assert ErrorType.SUCCESS.name == "SUCCESS"


def test_communicators_are_asked_once_the_devices_numbers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the collective may still be aborted."""
    order: list[str] = []
    read = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        order.append("read")
        return read(tensor)

    both = make(monkeypatch, lambda vector, group: vector.mul_(2))
    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    monkeypatch.setattr(both, "check_communicators", lambda step: order.append("asked"))
    both.agree(1, SQUARES, False, False, None)
    assert order[-2:] == ["read", "asked"]


class Calls(NullTracker):
    """Keeps which phases were reached."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def ready(self, step: int) -> None:
        self.reached.append("ready")

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        self.reached.append("begin_update")


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize(("fails_at", "reached"), [(1, []), (2, ["ready"])])
def test_a_communicators_error_is_looked_for_before_ready_and_before_the_update(
    monkeypatch: pytest.MonkeyPatch, adopted: bool, fails_at: int, reached: list[str]
) -> None:
    """Reduced gradients may be garbage at the first look, the record at the second."""
    model, looks, tracker = torch.nn.Linear(2, 2), 0, Calls()

    def look(device: torch.device, step: int) -> None:
        nonlocal looks
        looks += 1
        if looks == fails_at:
            raise AbortedCollective(f"step {step}: a communicator failed")

    monkeypatch.setattr(spanning, "check_communicators", look)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AdoptedOptimizer(model, plain) if adopted else ttp.TTPReplicaOptimizer(model.named_parameters(), lr=0.1)
    optimizer.attach(tracker)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AbortedCollective, match="step 1: a communicator failed"):
        plain.step() if adopted else optimizer.step()  # type: ignore[union-attr]
    assert tracker.reached == reached


class Boundaries(NullTracker):
    """Keeps how steps end behind which all ranks stop."""

    def __init__(self, notice: bool, unled: bool) -> None:
        self.notice, self.unled = notice, unled
        self.reached: list[tuple[int, bool]] = []

    def boundary(self, step: int, unled: bool = False) -> None:
        self.reached.append((step, unled))


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize(
    ("notice", "unled", "reached"), [(False, True, []), (True, False, [(1, False)]), (True, True, [(1, True)])]
)
def test_the_end_of_a_step_that_all_ranks_save_reaches_the_tracker(
    adopted: bool, notice: bool, unled: bool, reached: list[tuple[int, bool]]
) -> None:
    """From either optimizer: with a notice it stops, and saves where no rank has a controller."""
    model, tracker = torch.nn.Linear(2, 2), Boundaries(notice, unled)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AdoptedOptimizer(model, plain) if adopted else ttp.TTPReplicaOptimizer(model.named_parameters(), lr=0.1)
    optimizer.attach(tracker)
    model(torch.ones(1, 2)).sum().backward()
    plain.step() if adopted else optimizer.step()  # type: ignore[union-attr]
    assert tracker.reached == reached and optimizer.current_step == 1
