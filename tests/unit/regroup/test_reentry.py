"""A rank's part in a recovery without a checkpoint: which exceptions of training are waited behind, and that no order comes too late or twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError, NotAsBefore, Regroup
from ttp.groups.process_groups import GROUPS
from ttp.optim.on_divergence import OnDivergence
from ttp.processor.core.events import RegroupDone, WorkFailed
from ttp.proto import messages
from ttp.regroup import reentry as module
from ttp.regroup.reentry import Reentry
from ttp.runtime.saves import SaveMarks

ORDER = messages.Regroup(3, 8, (0,), None)
GIVEN = {
    "saves": (0, 0, ()),
    "trainer": {"samples": 32},
    "optimizer": {"step": 8},
    "equal_after": 6,
    "passed_over": {"/c/iter_0000040": 5},
}
LONG_S = 30.0


@contextlib.contextmanager
def pause(at_most_s: float) -> Iterator[None]:
    yield


class Device:
    type = "cpu"


class Optimizer:
    device = Device()
    spans_job = True

    differing: tuple[str, ...] = ()

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.on_divergence = OnDivergence("report")
        self.on_divergence.equal_after = 6

    def rewire(self, successor: Any) -> None:
        self.calls.append("rewire")

    def load_begin(self) -> None:
        self.calls.append("load_begin")

    def fill(self, replaced: Any) -> None:
        self.calls.append(f"fill {replaced}")

    def host_state(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def load_end(self, step: int, host_state: dict[str, Any], record: Any) -> None:
        self.calls.append(f"load_end {step} {host_state}")

    def keep(self, step: int, record: Any) -> None:
        self.calls.append(f"keep {step}")
        self.on_divergence.equal_after = step

    def check_replicas(self) -> tuple[str, ...]:
        assert self.on_divergence.filled == ORDER.replaced, "what was copied proves nothing"
        self.calls.append(f"compare, equal after {self.on_divergence.equal_after}")
        return self.differing


class Holder:
    """What the trainer has said of its steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.step_states, self.states = optimizer, self, {8: {"samples": 32}}
        self.copies: list[str] = []
        self.passed_over: dict[str, int] = {"/c/iter_0000042": 7}

    def pass_over(self, checkpoints: dict[str, int]) -> None:
        self.optimizer.calls.append(f"pass over {checkpoints}")

    def prepare_copy(self) -> None:
        self.copies.append("prepared")

    def copy_to_host(self, step: int) -> None:
        self.copies.append(f"step {step}, {'groups left' if 'leave' in self.optimizer.calls else 'nothing left'}")

    def drop_copy(self) -> None:
        self.copies.append("dropped")

    def get(self, step: int) -> dict[str, Any]:
        return self.states[step]

    def put(self, step: int, state: dict[str, Any]) -> None:
        self.optimizer.calls.append(f"state {step} {state}")


class Saves:
    marks = SaveMarks(8, 2)

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def take(self, marks: SaveMarks) -> None:
        self.calls.append("saves")

    def published(self, step: int) -> None:
        self.calls.append(f"step {step} is on disk")


class Protection:
    """One that is asked what becomes of an exception; with the gate and the processor's queue."""

    def __init__(self, reentry: Reentry, then: str, order: messages.Regroup = ORDER) -> None:
        self.reentry, self.then, self.ordered = reentry, then, order
        self.held: list[BaseException] = []
        self.released = then == "released before"
        self.gate = self.processor = self
        self.calls: list[str] = []
        self.answers: list[Any] = []

    def abandon(self) -> None: ...

    def regrouped(self, step: int, record: Any) -> None:
        self.calls.append(f"gate regrouped {step}")

    def note_next_step(self) -> None:
        self.calls.append("note the next step")

    def put(self, answer: Any) -> None:
        self.calls.append(type(answer).__name__)
        self.answers.append(answer)

    def await_open(self) -> None:
        self.calls.append("open")
        if self.then == "another order":
            self.then = ""
            self.reentry.order(replace(ORDER, freeze_id=4))
            raise Regroup("another order")

    def hold(self) -> None:
        self.calls.append("hold")

    def hold_after(self, exc: BaseException, until: threading.Event) -> None:
        self.held.append(exc)
        if self.then == "ordered":
            self.reentry.order(self.ordered)
            assert until.wait(LONG_S)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to this process's groups."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *arguments, **named: None)
    monkeypatch.setattr(dist, "PrefixStore", lambda *arguments: None)
    monkeypatch.setattr(GROUPS, "leave", lambda: calls.append("leave"))
    monkeypatch.setattr(GROUPS, "close", lambda: calls.append("close"))
    monkeypatch.setattr(GROUPS, "let_go", lambda: calls.append("let_go"))
    monkeypatch.setattr(GROUPS, "make_again", lambda freeze_id: calls.append(f"make_again {freeze_id}"))
    monkeypatch.setattr(
        module, "exchange_json", lambda mine, device: [{"saves": (4, 1, ("dir", "tmp"))}, {**GIVEN, **mine}]
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for name in ("meeting", "pollable"):
        monkeypatch.setattr(GROUPS, name, getattr(GROUPS, name))
    return calls


@pytest.fixture
def reentry(left: list[str]) -> Reentry:
    return of_rank(1, left)


def of_rank(rank: int, left: list[str], **settings: Any) -> Reentry:
    optimizer: Any = Optimizer(left)
    holder: Any = Holder(optimizer)
    saves: Any = Saves(left)
    renew, step_back = lambda successor: left.append("renew"), lambda: left.append("step back")
    made = Reentry(optimizer, holder, saves, Settings(**settings), rank, renew, pause, step_back)
    made.begin()
    return made


def test_a_collective_that_fails_is_reported_and_an_order_has_training_entered_again(
    reentry: Reentry, left: list[str]
) -> None:
    """The groups are closed while the exception still holds what was under way, and nothing leaves them any more after that."""
    failed, protection = RuntimeError("Connection closed by peer"), Protection(reentry, "ordered")
    assert reentry.enters_again(failed, protection)  # type: ignore[arg-type]
    assert protection.held == [failed] and left[-1] == "close" and left.count("close") == 1
    assert reentry._leaving is not None and not reentry._leaving.is_alive()


def test_the_state_is_on_the_host_before_groups_are_left(left: list[str]) -> None:
    """Until training is entered again: leaving may block a device, and with it an emergency checkpoint's copies."""
    made = of_rank(1, left)
    holder, protection = made._holder, Protection(made, "ordered")
    assert made.enters_again(RuntimeError("Connection closed by peer"), protection)  # type: ignore[arg-type]
    assert vars(holder)["copies"] == ["prepared", "step 8, nothing left"]
    made.come_back(protection)  # type: ignore[arg-type]
    assert vars(holder)["copies"][2:] == ["dropped"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_step_that_was_published_first_counts_as_saved(left: list[str], saved: bool) -> None:
    """It is not saved a second time, and older checkpoints may go (keep_checkpoint_max)."""
    made = of_rank(1, left)
    protection = Protection(made, "ordered", replace(ORDER, saved=saved))
    assert made.enters_again(RuntimeError("Connection closed by peer"), protection)  # type: ignore[arg-type]
    made.come_back(protection)  # type: ignore[arg-type]
    assert ("step 8 is on disk" in left) is saved


@pytest.mark.parametrize(
    ("choice", "saved", "refused"),
    [("report", True, False), ("stop", True, True), ("repair", True, True), ("repair", False, False)],
)
def test_ranks_that_act_on_differences_leave_where_a_step_was_published_first(
    left: list[str], choice: str, saved: bool, refused: bool
) -> None:
    """What replicas would be compared for is on disk already."""
    made = of_rank(1, left)
    made._optimizer.on_divergence = OnDivergence(choice)
    assert made.order(replace(ORDER, saved=saved)).startswith("step 8 was published before replicas") is refused
    made._end_leaving()


def test_an_exception_that_the_order_itself_has_caused_is_not_reported(reentry: Reentry) -> None:
    """Else a recovered rank would have a fault of a step that all have given up."""
    protection = Protection(reentry, "released")
    assert reentry.order(ORDER) == "" and reentry.ordered
    for exc in (RuntimeError("Connection reset by peer"), Regroup("leaves step 9")):
        assert reentry.enters_again(exc, protection) and not protection.held  # type: ignore[arg-type]


@pytest.mark.parametrize("then", ["released", "released before"])
def test_without_an_order_the_exception_is_training_s_end(reentry: Reentry, left: list[str], then: str) -> None:
    protection = Protection(reentry, then)
    assert not reentry.enters_again(RuntimeError("no"), protection)  # type: ignore[arg-type]
    assert len(protection.held) == (then == "released") and not left


def test_what_comes_before_is_waited_for_and_what_is_closed_stays_so(left: list[str]) -> None:
    """A session that has saves in the agent's memory before training begins is not opened by its begin."""
    reentry = of_rank(1, left)
    reentry.begin("it has not finished a step of its own yet")
    assert reentry.order(ORDER) == "it has not finished a step of its own yet" and not reentry.ordered
    reentry.close("saves that are not waited for keep memory of this process")
    reentry.begin()
    assert "saves that are not waited for" in reentry.order(ORDER) and not reentry.ordered


ENDING = [
    SystemExit(0),
    KeyboardInterrupt(),
    ConfigError("lr: got -1, expected a number >= 0"),
    NotAsBefore("another batch"),
]


@pytest.mark.parametrize("exc", ENDING)
def test_what_ends_a_program_or_would_come_again_ends_it(reentry: Reentry, exc: BaseException) -> None:
    """An order that comes later is answered with that, so that the step is written."""
    protection = Protection(reentry, "ordered")
    assert not reentry.enters_again(exc, protection) and not protection.held  # type: ignore[arg-type]
    assert reentry.order(ORDER) == f"training has ended with {type(exc).__name__}" and not reentry.ordered


def test_an_order_before_training_has_begun_is_refused(left: list[str]) -> None:
    """Nothing would carry it out: the step is written at once."""
    optimizer: Any = Optimizer(left)
    holder: Any = Holder(optimizer)
    saves: Any = Saves(left)
    early = Reentry(optimizer, holder, saves, Settings(), 1, lambda successor: None, pause)
    assert early.order(ORDER) == "training has not begun" and not early.ordered


def test_training_that_has_returned_is_not_entered_again(reentry: Reentry) -> None:
    reentry.close("training has returned")
    reentry.close("a later reason")
    assert reentry.order(ORDER) == "training has returned"


def test_a_rank_that_stays_answers_once_all_is_equal_and_enters_training_behind_the_gate(
    reentry: Reentry, left: list[str]
) -> None:
    protection = Protection(reentry, "")
    reentry.order(ORDER)
    returned = reentry.come_back(protection)  # type: ignore[arg-type]
    done = [call for call in left if call not in ("leave", "close")]
    assert done[:4] == ["make_again 3", "rewire", "renew", "fill (0,)"], "nothing is loaded into what it holds"
    assert done[4:] == ["state 8 {'samples': 32}", "keep 8", "step back", "compare, equal after 6", "saves", "let_go"]
    assert protection.calls == ["gate regrouped 8", "note the next step", "RegroupDone", "open"]
    assert protection.answers == [RegroupDone(ORDER)] and not reentry.ordered
    assert (returned.step, returned.state, returned.saves) == (8, {"samples": 32}, SaveMarks(8, 2, ("dir", "tmp"))), (
        "the most of all"
    )


def test_a_process_in_a_lost_ones_place_takes_all_of_it(left: list[str]) -> None:
    reentry = of_rank(0, left)
    reentry.order(ORDER)
    assert reentry.come_back(Protection(reentry, "")).state == {"samples": 32}  # type: ignore[arg-type]
    assert "step back" not in left, "the program has just begun"
    assert left.index("load_begin") < left.index("fill (0,)") < left.index("load_end 8 {'step': 8}")
    assert "pass over {'/c/iter_0000040': 5}" in left, "it has not seen what was there when the attempt began"


def test_a_rank_that_stays_gives_on_what_it_has_passed_over(
    reentry: Reentry, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def exchange(mine: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        given.append(mine)
        return [{"saves": (4, 1, ("dir", "tmp"))}, {**GIVEN, **mine}]

    monkeypatch.setattr(module, "exchange_json", exchange)
    reentry.order(ORDER)
    assert reentry.come_back(Protection(reentry, "")).state == {"samples": 32}  # type: ignore[arg-type]
    assert [mine["passed_over"] for mine in given] == [{"/c/iter_0000042": 7}]
    assert not [call for call in left if call.startswith("pass over")]


def test_replicas_that_differ_are_answered_and_no_gate_is_touched(reentry: Reentry) -> None:
    """The step is written: this rank stays as a holder until its process ends."""
    protection = Protection(reentry, "")
    reentry._optimizer.differing = ("model.emb.weight",)  # type: ignore[attr-defined]
    reentry.order(ORDER)
    with pytest.raises(CheckpointError, match="replicas differ"):
        reentry.come_back(protection)  # type: ignore[arg-type]
    assert reentry._optimizer.on_divergence.filled == ()
    assert protection.calls == ["WorkFailed", "hold"]
    (answer,) = protection.answers
    assert isinstance(answer, WorkFailed) and (answer.freeze_id, answer.stage) == (3, "regroup")
    assert "replicas differ" in answer.error
    assert vars(protection)["regroups"] == 3, "their digests are reported behind the closed gate"


def test_an_order_that_comes_before_the_gate_opens_is_carried_out_too(reentry: Reentry, left: list[str]) -> None:
    protection = Protection(reentry, "another order")
    reentry.order(ORDER)
    reentry.come_back(protection)  # type: ignore[arg-type]
    assert [answer.order.freeze_id for answer in protection.answers] == [3, 4] and left.count("let_go") == 1


def test_groups_that_stay_in_use_are_answered(reentry: Reentry, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use() -> None:
        raise RuntimeError("process groups that were left are in use after 2 s")

    monkeypatch.setattr(GROUPS, "close", in_use)
    protection = Protection(reentry, "ordered")
    assert not reentry.enters_again(RuntimeError("Connection closed by peer"), protection)  # type: ignore[arg-type]
    assert protection.calls == ["WorkFailed", "hold"] and "in use" in protection.answers[0].error
