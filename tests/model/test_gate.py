"""The model's gate and work thread against the shipped ones: the same calls in any order, and every answer compared.

The search copies and compares its ranks, which threads and locks do not allow; so gate and work thread are values there. Both are
given the same orders of a machine here, and the same steps of a training thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.model import in_place
from tests.model import rank as twin
from tests.model.shape import Shape
from tests.simulation.waits import TRAINING, Blocked, Waits
from ttp.errors import ProtocolError
from ttp.processor.core import events as ev
from ttp.processor.gate import Gate
from ttp.processor.handler import Handler
from ttp.processor.worker import Held, Task, Tasks
from ttp.proto.frozen import replace
from ttp.proto.messages import CauseKind, Part, Regroup, ShareResult, WriteOrder

SHAPE = Shape()
FIRST = twin.first(SHAPE, 0).proc
ANSWERS = ev.GateClosed | ev.RollForwardDone | ev.WorkFailed | ev.WriteDone


@dataclass(frozen=True)
class Ordered:
    """Stands for any event on which the machine orders this."""

    effects: tuple[ev.Effect, ...]


class NotedMachine:
    """Gives the orders of its list, and keeps the answers of gate and work thread."""

    def __init__(self) -> None:
        self.answers: list[ev.Event] = []

    def initial(self, settings: ev.ProcessorSettings, now: float) -> None:
        """It has no state."""

    def next_deadline(self, state: Any) -> float | None:
        return None

    def transition(self, state: Any, event: Any, now: float) -> tuple[Any, tuple[ev.Effect, ...]]:
        if isinstance(event, Ordered):
            return state, event.effects
        if isinstance(event, ANSWERS):
            self.answers.append(comparable(event))
        return state, ()


def comparable(answer: ev.Event) -> ev.Event:
    """Return an answer without what people read."""
    match answer:
        case ev.WorkFailed(freeze_id, stage, tmp_name):
            return ev.WorkFailed(freeze_id, stage, tmp_name, "")
        case ev.WriteDone(order):
            return ev.WriteDone(order, ShareResult(()))
    return answer


class Shipped:
    """Gate, handler and `Tasks` as they are shipped, in one thread: who would wait is asked again when it need not."""

    def __init__(self) -> None:
        self.machine = NotedMachine()
        self.waits = Waits(lambda: 0.0)
        self.gate = Gate(0, waits=self.waits)
        self.items: deque[Any] = deque()
        self.tasks: deque[Task] = deque()
        self.begun: Held | None = None
        """The task that is the holder's now."""
        ports: Any = SimpleNamespace(
            put=self.items.append, submit=self.tasks.append, lost_parent=lambda: "", paused=lambda: False, work_done=lambda: 0,
            checkpoint=lambda: "", log=lambda level, text: None,
        )  # fmt: skip
        self.handler = Handler(FIRST.settings, "c0", self.gate, ports, machine=self.machine, clock=lambda: 0.0)
        self.work = Tasks(self.gate, 0.5, lambda level, text: None)
        self.handler.begin()

    def order(self, *effects: ev.Effect) -> None:
        self.items.append(Ordered(effects))
        self.go_on()

    def go_on(self, in_vain: bool = False) -> None:
        """Do all that need not wait. `in_vain`: who waits for the end of an update has waited long enough."""
        lock = self.waits.gates_lock
        while True:
            while self.items:
                self.handler.take(self.items.popleft())
            if self.begun is not None or not self.tasks:
                return
            lock.in_vain = in_vain
            try:
                answer = self.work.begin(self.tasks[0])
            except Blocked:
                return
            finally:
                lock.in_vain = False
            task = self.tasks.popleft()
            if answer is not None:
                self.items.append(answer)
            elif isinstance(task, Held):
                self.begun = task

    def end_task(self, result: object) -> None:
        task, self.begun = self.begun, None
        assert task is not None
        self.items.append(self.work.done(task, result))
        self.go_on()
        self.handler.tick()
        self.go_on()

    def train(self, call: Callable[[], None]) -> bool:
        """The training thread makes a call of the gate; False: it waits, or is refused because the state is torn."""
        lock = self.waits.gates_lock
        lock.asking = TRAINING
        try:
            call()
        except (Blocked, ProtocolError):
            return False
        finally:
            lock.asking = ""
        self.go_on()
        self.handler.tick()  # a closing whose time was over is looked at again
        self.go_on()
        return True


class BothGates(RuleBasedStateMachine):
    """The rank of the model and the shipped one."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.machine = NotedMachine()
        self.patch.setattr(twin, "machine", self.machine)
        self.shipped = Shipped()
        self.twin = twin.Rank(0, FIRST, main="compute")
        self.freeze_id, self.thawed, self.rolled = 0, True, False

    @initialize(vacant=st.booleans())
    def begins(self, vacant: bool) -> None:
        """`vacant`: in another process's place, with nothing yet."""
        if not vacant:
            return
        self.freeze_id, self.thawed = 1, False
        self.shipped.handler._ticket = self.shipped.gate.vacate(self.freeze_id)
        self.twin = replace(self.twin, main="vacant", gate=self.twin.gate.vacate(self.freeze_id))
        self.compared()

    def teardown(self) -> None:
        self.patch.undo()

    def compared(self) -> None:
        """Both have given the same answers and hold the same; whoever may pass the one may pass the other."""
        if isinstance(self.shipped.begun, ev.WriteShare) and not self.twin.stage:
            self.turn(twin.work_begun(SHAPE, self.twin, "writing"))
        assert self.shipped.machine.answers == self.machine.answers
        shipped, model = self.shipped.gate, self.twin.gate
        lock = self.shipped.waits.gates_lock
        assert (shipped.phase, shipped.step, shipped.state_step) == (model.phase, model.step, model.state[0])
        assert (shipped.torn, shipped.final, shipped.records) == (model.torn, model.final, model.records)
        assert (bool(lock.owner), shipped.freeze_id) == (bool(model.busy), model.freeze_id)
        if not lock.owner:
            assert shipped.closed == model.barred

    def turn(self, result: tuple[twin.Rank, tuple[twin.Out, ...]]) -> None:
        self.twin = result[0]

    def order(self, *effects: ev.Effect) -> None:
        self.shipped.order(*effects)
        turn = twin.Turn(SHAPE, self.twin)
        turn.take(Ordered(effects))  # type: ignore[arg-type]
        self.turn(turn.ended())
        self.compared()

    def may_pass(self, call: Callable[[], None]) -> bool:
        """Let the shipped training thread call its gate: it passes where the model's is open, and only there."""
        passed = self.shipped.train(call)
        assert passed == (self.twin.gate.open and not self.twin.gate.busy)
        return passed

    def has_roll_forward(self) -> bool:
        return any(isinstance(task, ev.ApplyUpdate) for task in self.twin.tasks)

    # --- the training thread ---

    @precondition(lambda self: self.twin.main == "compute")
    @rule()
    def reduces(self) -> None:
        if self.may_pass(lambda: self.shipped.gate.ready(self.twin.gate.step)):
            self.turn(twin.ready(SHAPE, self.twin))
        self.compared()

    @precondition(lambda self: self.twin.main == "norm")
    @rule()
    def begins_to_update(self) -> None:
        step = self.twin.gate.step
        if self.may_pass(lambda: self.shipped.gate.begin_update(step, SHAPE.record(step))):
            self.turn(twin.begin_update(SHAPE, self.twin, self.freeze_id))
        self.compared()

    @precondition(lambda self: self.twin.main == "update")
    @rule()
    def ends_its_update(self) -> None:
        assert self.shipped.train(lambda: self.shipped.gate.end_update(self.twin.gate.step))
        self.turn(twin.end_update(SHAPE, self.twin))
        self.compared()

    @precondition(lambda self: self.twin.main == "gather" and self.twin.gate.state[0] < SHAPE.steps)
    @rule()
    def gathers(self) -> None:
        step = self.twin.gate.state[0] + 1
        if self.may_pass(lambda: self.shipped.gate.computing(step)):
            self.turn(twin.gathered(SHAPE, self.twin))
        self.compared()

    @precondition(lambda self: not self.thawed and not self.twin.gate.busy and not self.has_roll_forward())
    @precondition(lambda self: not self.twin.gate.torn or self.twin.main == "vacant")
    @rule()
    def regroups(self) -> None:
        """Behind a closed gate the training thread leaves its step; what was final or torn is so no more."""
        step = self.twin.gate.state[0]
        assert self.shipped.train(lambda: self.shipped.gate.regrouped(step, None))
        order = Regroup(self.freeze_id, step, (), None)
        self.turn(in_place.regroup_done(SHAPE, replace(self.twin, regroup=order)))
        self.rolled = False
        self.compared()

    @precondition(lambda self: self.twin.main == "again" and self.twin.gate.state[0] < SHAPE.steps)
    @rule()
    def enters_again(self) -> None:
        if self.may_pass(self.shipped.gate.await_open):
            assert self.may_pass(lambda: self.shipped.gate.computing(self.twin.gate.state[0] + 1))
            self.turn(in_place.again(SHAPE, self.twin))
        self.compared()

    @precondition(lambda self: self.twin.main in ("compute", "norm", "update", "gather"))
    @rule()
    def raises(self) -> None:
        assert self.shipped.train(self.shipped.gate.abandon)
        self.turn(twin.raised(SHAPE, self.twin, CauseKind.EXCEPTION))
        self.compared()

    # --- the machine's orders ---

    @rule(again=st.booleans())
    def is_frozen(self, again: bool) -> None:
        """`again`: the freeze is repeated, which no controller does once it was thawed. After one whose gate was reported as not closed the
        two differ, in a report that the model gives twice: the end of the update is reported once for each closing."""
        if self.thawed or not again or self.twin.late == self.freeze_id:
            self.freeze_id += 1
        self.thawed = False
        self.order(ev.CloseGate(self.freeze_id))

    @precondition(lambda self: not self.thawed and not self.rolled and self.twin.main != "vacant")
    @rule()
    def is_thawed(self) -> None:
        """The machine thaws no rank that it has ordered to roll forward, and none that holds nothing yet."""
        self.thawed = True
        self.order(ev.OpenGate(self.freeze_id))

    @precondition(lambda self: not self.thawed and not self.twin.gate.busy and not self.has_roll_forward())
    @rule(ahead=st.sampled_from((1, 1, 1, 2)))
    def is_rolled_forward(self, ahead: int) -> None:
        """Where it is not READY at that step, the order is refused. The machine orders one at a time, to a gate that it knows to be closed."""
        self.rolled = True
        self.order(ev.ApplyUpdate(self.freeze_id, SHAPE.record(self.twin.gate.state[0] + ahead)))

    @precondition(lambda self: self.shipped.begun is not None and isinstance(self.shipped.begun, ev.ApplyUpdate))
    @rule()
    def has_rolled_forward(self) -> None:
        assert isinstance(self.shipped.begun, ev.ApplyUpdate)
        self.shipped.end_task(self.shipped.begun.record.step)
        self.turn(twin.end_roll(SHAPE, self.twin))
        self.compared()

    @precondition(
        lambda self: not self.thawed and self.twin.gate.content == self.twin.gate.state and not self.twin.gate.torn
    )
    @precondition(lambda self: not self.has_roll_forward())
    @rule(behind=st.integers(0, 1))
    def is_ordered_to_write(self, behind: int) -> None:
        """`behind`: an order of the freeze before, which a new freeze has overtaken."""
        freeze_id = self.freeze_id - behind
        name = f"iter_{self.twin.gate.state[0]:07d}_tmp_1_{freeze_id}_1"
        self.order(ev.WriteShare(WriteOrder(freeze_id, self.twin.gate.state[0], "/a", name, (Part("g0", 0, 1),))))

    @precondition(lambda self: isinstance(self.shipped.begun, ev.WriteShare))
    @rule()
    def has_written(self) -> None:
        assert self.twin.working_on_disk
        self.shipped.end_task(ShareResult(()))
        self.turn(twin.write_done(SHAPE, self.twin))
        self.compared()

    @precondition(lambda self: self.twin.close_by < inf and self.twin.gate.busy == "update")
    @rule()
    def waited_long_enough_for_an_update(self) -> None:
        self.shipped.go_on(in_vain=True)
        self.turn(twin.tick(SHAPE, replace(self.twin, close_by=0.0)))
        self.compared()


TestBothGates = BothGates.TestCase
TestBothGates.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True)
