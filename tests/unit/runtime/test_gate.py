"""The gate, with real threads: closed means that nothing changes, whatever the timing."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.gates import freeze, thaw
from ttp.errors import ProtocolError
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord, Phase

LONG_S = 20.0
"""Nothing here should take it: a wait that does is a failure."""


def record(step: int) -> CommitRecord:
    return CommitRecord(step, 1.0, 1.0, False, 1.0, (1e-3,), ())


def one_update(gate: Gate, step: int) -> None:
    gate.computing(step)
    gate.ready(step)
    gate.begin_update(step, record(step))
    gate.end_update(step)


class Trainer(threading.Thread):
    """A training thread that runs a body and can be asked what became of it."""

    def __init__(self, body: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self.error: BaseException | None = None
        self.passed = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self._body()
            self.passed.set()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join(LONG_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def waits_in(trainer: Trainer, function: str) -> bool:
    """Wait until the thread stands in `Gate._pass`, below `function`'s caller; False when it ends instead."""
    while trainer.is_alive():
        frame = sys._current_frames().get(trainer.ident or 0)
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if function in names and "_pass" in names and names[0] == "wait":
            return True
    return False


@pytest.fixture(autouse=True)
def frequent_thread_switches() -> Iterator[None]:
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(old)


def test_a_step_goes_through_its_four_phases() -> None:
    gate = Gate(3, state_step=4)
    assert (gate.phase, gate.step, gate.state_step) == (Phase.COMPUTE, 5, 4)
    gate.computing(5)
    gate.ready(5)
    assert (gate.phase, gate.step, gate.state_step) == (Phase.READY, 5, 4)
    gate.begin_update(5, record(5), backup_step=4)
    assert (gate.phase, gate.step, gate.state_step, gate.backup_step) == (Phase.UPDATING, 5, 4, 4)
    gate.end_update(5)
    assert (gate.phase, gate.step, gate.state_step) == (Phase.DONE, 5, 5)


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.READY, Phase.DONE])
def test_a_freeze_reports_where_the_rank_stands(phase: Phase) -> None:
    gate = Gate(2)
    one_update(gate, 1)
    if phase is not Phase.DONE:
        gate.computing(2)
    if phase is Phase.READY:
        gate.ready(2)
    report = freeze(gate, 7, LONG_S)
    assert (report.rank, report.freeze_id, report.closed, report.phase) == (2, 7, True, phase)
    assert (report.step, report.state_step, report.torn) == (1 if phase is Phase.DONE else 2, 1, False)
    assert report.records == (record(1),)


def test_the_last_two_commit_records_are_kept() -> None:
    gate = Gate(0)
    for step in (1, 2, 3):
        one_update(gate, step)
    assert freeze(gate, 1, 0).records == (record(2), record(3))


@pytest.mark.parametrize("call", ["computing", "ready", "begin_update"])
def test_no_call_passes_a_closed_gate_and_thaw_lets_it_pass(call: str) -> None:
    """I7: nothing changes after the acknowledgement; a false alarm frees the rank."""
    gate = Gate(0)
    gate.ready(1)
    before = freeze(gate, 1, LONG_S)
    arguments = (1, record(1)) if call == "begin_update" else (1,)
    trainer = Trainer(lambda: getattr(gate, call)(*arguments))
    assert waits_in(trainer, call)
    assert freeze(gate, 1, LONG_S) == before
    assert thaw(gate, 1)
    assert trainer.passed.wait(LONG_S)


def test_a_freeze_waits_for_the_update_in_progress() -> None:
    gate = Gate(0)
    gate.begin_update(1, record(1))
    reports = []
    freezer = Trainer(lambda: reports.append(freeze(gate, 1, LONG_S)))
    while gate._freezes.barred is False:
        pass
    assert not reports
    gate.end_update(1)
    freezer.finish()
    assert (reports[0].closed, reports[0].phase, reports[0].state_step) == (True, Phase.DONE, 1)


def test_a_stuck_update_is_reported_and_the_gate_stays_closed_behind_it() -> None:
    gate = Gate(0)
    may_end, ended = threading.Event(), threading.Event()

    def train() -> None:
        gate.begin_update(1, record(1))
        may_end.wait()
        gate.end_update(1)
        ended.set()
        gate.computing(2)

    trainer = Trainer(train)
    while gate.phase is not Phase.UPDATING:
        pass
    report = freeze(gate, 1, 0.01)
    assert (report.closed, report.phase, report.step, report.records) == (False, Phase.UPDATING, 1, (record(1),))
    may_end.set()
    assert ended.wait(LONG_S) and waits_in(trainer, "computing")
    again = freeze(gate, 2, LONG_S)
    assert (again.closed, again.phase, again.state_step) == (True, Phase.DONE, 1)
    assert not thaw(gate, 1), "the freeze in force is 2"
    assert thaw(gate, 2)
    trainer.finish()


def test_a_thaw_during_a_freeze_that_still_waits_leaves_the_gate_open_and_unacknowledged() -> None:
    gate = Gate(0)
    gate.begin_update(1, record(1))
    reports = []
    freezer = Trainer(lambda: reports.append(freeze(gate, 1, LONG_S)))
    while gate._freezes.barred is False:
        pass
    assert thaw(gate, 1)
    gate.end_update(1)
    freezer.finish()
    assert reports[0].closed is False
    one_update(gate, 2)


def test_of_two_freezes_the_later_is_in_force() -> None:
    gate = Gate(0)
    assert freeze(gate, 1, LONG_S).closed and freeze(gate, 2, LONG_S).closed
    trainer = Trainer(lambda: gate.computing(1))
    assert waits_in(trainer, "computing")
    assert not thaw(gate, 1)
    assert waits_in(trainer, "computing")
    assert thaw(gate, 2)
    trainer.finish()


def test_an_update_that_raised_leaves_a_torn_state_and_no_further_update() -> None:
    gate = Gate(1)
    gate.begin_update(1, record(1))
    gate.fail_update(1)
    report = freeze(gate, 1, LONG_S)
    assert (report.closed, report.torn) == (True, True)
    assert thaw(gate, 1)
    with pytest.raises(ProtocolError, match=r"rank 1.*failed half way"):
        gate.begin_update(2, record(2))


def test_an_exception_that_left_an_update_open_tears_the_state_and_frees_the_gate() -> None:
    """A rank whose training code was interrupted in the update must not keep the freeze waiting."""
    gate = Gate(0)

    def train() -> None:
        gate.begin_update(1, record(1))
        gate.abandon()

    Trainer(train).finish()
    report = freeze(gate, 1, LONG_S)
    assert (report.closed, report.torn) == (True, True)


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.READY, Phase.DONE])
def test_an_exception_outside_the_update_leaves_the_state_whole(phase: Phase) -> None:
    gate = Gate(0)
    one_update(gate, 1)
    if phase is not Phase.DONE:
        gate.computing(2)
    if phase is Phase.READY:
        gate.ready(2)
    gate.abandon()
    report = freeze(gate, 1, LONG_S)
    assert (report.closed, report.torn, report.phase, report.state_step) == (True, False, phase, 1)


def test_after_a_roll_forward_the_training_thread_never_passes_again() -> None:
    """The update was done for it: running it again would apply the gradients twice."""
    gate = Gate(0)
    gate.ready(1)
    trainer = Trainer(lambda: gate.begin_update(1, record(1)) if freeze(gate, 1, LONG_S).closed else None)
    assert waits_in(trainer, "begin_update")
    gate.start_roll_forward(record(1))
    gate.rolled_forward(1)
    assert gate.final and not thaw(gate, 1)
    report = freeze(gate, 2, LONG_S)
    assert (report.closed, report.phase, report.state_step) == (True, Phase.DONE, 1)
    assert report.records == (record(1),)
    assert not thaw(gate, 2)
    assert waits_in(trainer, "begin_update")


def test_a_roll_forward_moves_the_local_copy_too() -> None:
    """The update of step 2 overwrote the copy of step 0 with step 1's: the report must not offer what is gone."""
    gate = Gate(0)
    gate.ready(1)
    gate.begin_update(1, record(1), backup_step=0)
    gate.end_update(1)
    gate.ready(2)
    assert freeze(gate, 1, LONG_S).backup_step == 0
    gate.start_roll_forward(record(2))
    assert gate.phase is Phase.UPDATING, "heartbeats tell so meanwhile"
    gate.rolled_forward(2, backup_step=1)
    report = freeze(gate, 2, LONG_S)
    assert (report.state_step, report.backup_step) == (2, 1)
    assert report.records == (record(1), record(2)), "of the copy's step, and of the state's"


def test_a_training_thread_that_arrives_during_the_roll_forward_waits_too() -> None:
    """It meets the gate while the work thread holds the lock; that is not a misuse."""
    gate = Gate(0)
    gate.ready(1)
    freeze(gate, 1, LONG_S)
    gate.start_roll_forward(record(1))
    trainer = Trainer(lambda: gate.begin_update(1, record(1)))
    gate.rolled_forward(1)
    assert waits_in(trainer, "begin_update")
    assert gate.state_step == 1


def test_a_failed_roll_forward_tears_the_state() -> None:
    gate = Gate(0)
    gate.ready(1)
    freeze(gate, 1, LONG_S)
    gate.start_roll_forward(record(1))
    gate.roll_forward_failed()
    report = freeze(gate, 2, LONG_S)
    assert (report.torn, report.state_step) == (True, 0)


@pytest.mark.parametrize(
    ("prepare", "step", "why"),
    [
        (lambda gate: gate.ready(1), 1, "the gate is open"),
        (lambda gate: freeze(gate, 1, 0), 1, r"expected READY\(1\)"),
        (lambda gate: (gate.ready(1), freeze(gate, 1, 0)), 2, r"expected READY\(2\)"),
        (
            lambda gate: [call(gate) for call in (lambda g: one_update(g, 1), lambda g: freeze(g, 1, 0))],
            1,
            r"expected READY\(1\)",
        ),
    ],
)
def test_a_roll_forward_is_refused_unless_the_rank_is_frozen_in_ready(
    prepare: Callable[[Gate], object], step: int, why: str
) -> None:
    gate = Gate(0)
    prepare(gate)
    before = (gate.phase, gate.step, gate.state_step, gate.records)
    with pytest.raises(ProtocolError, match=why):
        gate.start_roll_forward(record(step))
    assert (gate.phase, gate.step, gate.state_step, gate.records) == before
    assert not gate.final
    assert freeze(gate, 9, 0).closed, "the lock was given back"


@pytest.mark.parametrize("call", ["end_update", "fail_update"])
def test_ending_an_update_that_was_not_begun_is_an_error_and_changes_nothing(call: str) -> None:
    gate = Gate(0)
    with pytest.raises(ProtocolError, match=f"{call}\\(1\\): no update"):
        getattr(gate, call)(1)
    assert gate.state_step == 0


def test_beginning_an_update_twice_is_an_error_and_no_deadlock() -> None:
    gate = Gate(0)
    gate.begin_update(1, record(1))
    with pytest.raises(ProtocolError, match="in progress already"):
        gate.begin_update(1, record(1))
    gate.end_update(1)


def test_the_gate_is_closed_only_when_the_device_has_finished() -> None:
    answers = [False, True]
    waits = []

    def drain(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return answers.pop(0)

    gate = Gate(0, drain=drain)
    one_update(gate, 1)
    gate.computing(2)
    report = freeze(gate, 1, 0.5)
    assert (report.closed, report.phase, report.step) == (False, Phase.UPDATING, 1)
    assert freeze(gate, 1, 0.5).closed
    assert all(0 <= wait <= 0.5 for wait in waits)


def test_a_device_that_fails_leaves_a_torn_state() -> None:
    def drain(timeout_s: float) -> bool:
        raise RuntimeError("device lost")

    gate = Gate(0, drain=drain)
    one_update(gate, 1)
    assert freeze(gate, 1, LONG_S).torn
    assert gate.drain_error == "device lost"


def test_a_resumed_rank_stands_before_the_next_step() -> None:
    gate = Gate(0)
    gate.resumed(41, record(41))
    report = freeze(gate, 1, LONG_S)
    assert (report.phase, report.step, report.state_step, report.records) == (Phase.COMPUTE, 42, 41, (record(41),))


def test_under_random_freezes_and_thaws_the_state_stands_still_while_closed() -> None:
    """A trainer steps as fast as it can; whenever a freeze says closed, state and gradients stand still until the thaw."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    gate = Gate(0)
    state = [0]
    gradients = [0]
    stop = threading.Event()

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            gate.computing(step)
            gradients[0] += 1
            gate.ready(step)
            gate.begin_update(step, record(step))
            state[0] = -1
            state[0] = step
            gate.end_update(step)

    trainer = Trainer(train)
    for freeze_id in range(300):
        report = freeze(gate, freeze_id, rng.choice([0.0, 0.001, LONG_S]))
        if report.closed:
            held = state[0]
            assert held == report.state_step == gate.state_step
            seen = gradients[0] if report.phase is Phase.READY else None
            for _ in range(rng.randrange(200)):
                assert state[0] == held
                assert seen is None or gradients[0] == seen
            assert gate.phase is report.phase and gate.step == report.step
        assert thaw(gate, freeze_id)
    stop.set()
    trainer.finish()


def test_gradients_of_a_failed_step_are_kept_for_the_freeze() -> None:
    """The collective raised, and `finally: zero_grad()` follows: READY must still be there when the freeze comes."""
    gate = Gate(0)
    gate.ready(1)
    trainer = Trainer(lambda: gate.computing(1))  # before or after the freeze: it must not pass
    report = freeze(gate, 1, LONG_S)
    assert (report.closed, report.phase, report.step) == (True, Phase.READY, 1)
    gate.start_roll_forward(record(1))
    gate.rolled_forward(1)
    assert waits_in(trainer, "computing")


def test_a_failed_step_without_a_fault_is_given_up() -> None:
    """No rank froze: the trainer may try the step again."""
    gate = Gate(0, abandoned_s=0.05)
    gate.ready(1)
    gate.computing(1)
    assert gate.phase is Phase.COMPUTE


def test_the_boundary_holds_the_training_thread_through_a_thaw_until_it_is_released() -> None:
    """Every rank waits behind the same step; a false alarm meanwhile lets none of them go on."""
    gate = Gate(0)
    reached: list[int] = []
    gate.step_boundary.on_reached = reached.append

    def body() -> None:
        one_update(gate, 1)
        gate.boundary(1)

    trainer = Trainer(body)
    while not reached:
        assert trainer.is_alive()
    report = freeze(gate, 1, LONG_S)
    assert report.closed and report.phase is Phase.DONE and report.state_step == 1
    assert thaw(gate, 1)
    trainer.join(0.05)
    assert trainer.is_alive() and reached == [1]
    gate.step_boundary.release()
    trainer.finish()


def test_a_training_thread_that_leaves_the_boundary_waits_again_at_the_next() -> None:
    """Every controller was lost: it goes on, once. A gate that is released never holds it again."""
    gate = Gate(0)
    reached: list[int] = []
    gate.step_boundary.on_reached = reached.append

    def body() -> None:
        for step in (1, 2, 3):
            one_update(gate, step)
            gate.boundary(step)

    trainer = Trainer(body)
    for step in (1, 2):
        while reached != list(range(1, step + 1)):
            assert trainer.is_alive()
        trainer.join(0.05)
        assert trainer.is_alive() and reached[-1] == step
        if step == 1:
            gate.step_boundary.leave()
    gate.step_boundary.release()
    trainer.finish()
    assert reached == [1, 2, 3]


def test_at_a_boundary_that_no_controller_leads_the_ranks_save() -> None:
    """And wait for the end of the process, which the save asks for."""
    gate = Gate(0)
    saved: list[int] = []
    gate.step_boundary.on_unled = saved.append
    gate.step_boundary.on_reached = lambda step: pytest.fail("a controller is informed of it")
    gate.step_boundary.release()  # the end, for this test
    one_update(gate, 1)
    gate.boundary(1, unled=True)
    assert saved == [1]
