"""The gate at its narrow moments: a freeze or a thaw that comes between two of another thread's instructions, placed there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.gates import freeze, thaw
from tests.unit.runtime.test_gate import LONG_S, Trainer, one_update, record, waits_in
from ttp.errors import ProtocolError
from ttp.processor.gate import Gate
from ttp.proto.messages import Phase, StateReport


def elsewhere(act: Callable[[], object]) -> None:
    """Do it to the end on another thread: the lock is re-entrant, and this thread may hold it."""

    def body() -> None:
        act()

    Trainer(body).finish()


def before_the_next(gate: Gate, call: str, act: Callable[[], object]) -> threading.Event:
    """Another thread acts right before this gate's lock is taken or given back next; the event says that it has."""
    real = getattr(gate, call)
    acted = threading.Event()

    def once(*arguments: object, **options: object) -> object:
        setattr(gate, call, real)
        elsewhere(act)
        acted.set()
        return real(*arguments, **options)

    setattr(gate, call, once)
    return acted


def after_the_next(gate: Gate, call: str, act: Callable[[], object]) -> None:
    """Another thread acts right after this gate's lock was taken or given back next."""
    real = getattr(gate, call)

    def once(*arguments: object, **options: object) -> object:
        setattr(gate, call, real)
        result = real(*arguments, **options)
        elsewhere(act)
        return result

    setattr(gate, call, once)


def test_a_new_gate_is_open_and_knows_of_nothing() -> None:
    """Before the first freeze, the first notice and the first collective."""
    gate = Gate(0)
    assert (gate.freeze_id, gate.drain_error, gate.records, gate.backup_step) == (-1, "", (), -1)
    assert not (gate.closed or gate.final or gate.torn or gate.waiting or gate.notice or gate.lets_go)


# --- who passes ---


@pytest.mark.parametrize("call", ["computing", "ready", "begin_update", "resumed"])
def test_a_freeze_that_comes_before_the_lock_is_taken_holds_the_training_thread(call: str) -> None:
    """I7: the bar is looked at behind the lock; looked at before, it was still up when the freeze was acknowledged."""
    gate = Gate(0)
    reports: list[StateReport] = []
    frozen = before_the_next(gate, "_acquire", lambda: reports.append(freeze(gate, 1, LONG_S)))
    arguments = (1, record(1)) if call == "begin_update" else (1,)
    trainer = Trainer(lambda: getattr(gate, call)(*arguments))
    assert frozen.wait(LONG_S) and waits_in(trainer, call)
    assert reports[0].closed and freeze(gate, 1, LONG_S) == reports[0]
    assert thaw(gate, 1)
    assert trainer.passed.wait(LONG_S)


@pytest.mark.parametrize("fails", ["fail_update", "abandon"])
def test_after_a_failed_update_the_next_one_is_refused_at_once(fails: str) -> None:
    """No freeze came between: the failure itself bars the way."""
    gate = Gate(1)
    gate.begin_update(1, record(1))
    gate.fail_update(1) if fails == "fail_update" else gate.abandon()
    with pytest.raises(ProtocolError, match=r"rank 1.*failed half way"):
        gate.begin_update(2, record(2))


def test_a_thaw_that_is_at_work_keeps_a_failing_update_waiting() -> None:
    """The thaw lowers the bar by what it knows of the state: a failure that came in between would be overlooked."""
    gate = Gate(0)
    came = threading.Event()
    real = gate._freezes._lock

    class Control:
        """The lock of freezes and thaws, which says when somebody wants it."""

        def __enter__(self) -> None:
            came.set()
            real.acquire()

        def __exit__(self, *why: object) -> None:
            real.release()

    gate._freezes._lock = Control()  # type: ignore[assignment]

    def train() -> None:
        gate.begin_update(1, record(1))
        gate.fail_update(1)

    with real:
        trainer = Trainer(train)
        while trainer.is_alive() and not came.is_set():
            pass
        assert came.is_set() and not gate.torn
    trainer.finish()
    assert gate.torn


# --- what is reported ---


def through(gate: Gate, *calls: str) -> None:
    """The training thread's calls of step 2, one after the other."""
    for call in calls:
        getattr(gate, call)(*((2, record(2), 1) if call == "begin_update" else (2,)))


MOMENTS = {
    "computing": ((), "computing", (Phase.COMPUTE, 2, 1, False)),
    "ready": (("computing",), "ready", (Phase.READY, 2, 1, False)),
    "end_update": (("computing", "ready", "begin_update"), "end_update", (Phase.DONE, 2, 2, False)),
    "end_update of a step that was never READY": (("begin_update",), "end_update", (Phase.DONE, 2, 2, False)),
    "fail_update": (("computing", "ready", "begin_update"), "fail_update", (Phase.UPDATING, 2, 1, True)),
    "resumed": ((), "resumed", (Phase.COMPUTE, 3, 2, False)),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_when_the_lock_is_given_back_all_is_noted(moment: str) -> None:
    """A freeze that comes at the very next instruction reports what will be true from now on."""
    before, last, expected = MOMENTS[moment]
    gate = Gate(0)
    one_update(gate, 1)
    through(gate, *before)
    reports: list[StateReport] = []
    after_the_next(gate, "_release", lambda: reports.append(freeze(gate, 1, LONG_S)))
    through(gate, last)
    (report,) = reports
    assert report.closed and (report.phase, report.step, report.state_step, report.torn) == expected
    assert freeze(gate, 1, LONG_S) == report


def test_a_freeze_gives_an_update_in_progress_the_time_that_it_was_given() -> None:
    """All of it, and none where there is none left: a lock that is asked for with a negative time may wait for good."""
    gate = Gate(0)
    gate.begin_update(1, record(1))
    asked: list[object] = []
    real = gate._acquire

    def acquire(*arguments: object, **options: object) -> bool:
        asked.append(options["timeout"])
        return real(timeout=0)

    gate._acquire = acquire
    elsewhere(lambda: (freeze(gate, 1, 7.0), freeze(gate, 2, -1.0)))
    assert asked == [7.0, 0.0]


def test_a_report_is_of_the_moment_at_which_the_gate_was_closed() -> None:
    """A thaw and an update come right after the lock was given back: what was reported is what stood behind the gate."""
    gate = Gate(0)

    def thaw_and_train() -> None:
        assert thaw(gate, 1)
        one_update(gate, 1)

    after_the_next(gate, "_release", thaw_and_train)
    report = freeze(gate, 1, LONG_S)
    assert (report.closed, report.phase, report.state_step, report.records) == (True, Phase.COMPUTE, 0, ())
    assert gate.state_step == 1


@pytest.mark.parametrize("end", ["rolled_forward", "roll_forward_failed"])
def test_a_report_says_that_the_gate_is_final(end: str) -> None:
    """A standby that took over would else open it again, and the training thread would wait for good."""
    gate = Gate(0)
    gate.begin_update(1, record(1), backup_step=0)
    gate.end_update(1)
    gate.ready(2)
    assert freeze(gate, 1, LONG_S).final is False
    gate.start_roll_forward(record(2))
    gate.rolled_forward(2, backup_step=1) if end == "rolled_forward" else gate.roll_forward_failed()
    report = freeze(gate, 2, LONG_S)
    failed = end == "roll_forward_failed"
    assert (report.final, report.torn, report.backup_step) == (True, failed, -1 if failed else 1)


def test_a_resumed_rank_offers_no_local_copy_and_no_older_record() -> None:
    """Both were of the state that the checkpoint has replaced."""
    gate = Gate(0)
    for step in (1, 2):
        gate.begin_update(step, record(step), backup_step=step - 1)
        gate.end_update(step)
    gate.resumed(7, record(7))
    report = freeze(gate, 1, LONG_S)
    assert (report.state_step, report.backup_step, report.records) == (7, -1, (record(7),))
