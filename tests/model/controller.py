"""One controller of the model: the shipped machine, the streams it knows, and what it has logged, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from tests.model.clock import later_controller
from tests.model.rank import host_of
from tests.model.shape import Shape
from ttp.controller.core import machine
from ttp.controller.core.facts import events as ev
from ttp.controller.core.facts.state import AttachedAgent, ControllerState, Stage
from ttp.hang_limits import HangLimits
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    Cause,
    CauseKind,
    Downward,
    Exit,
    Freeze,
    PublishOrder,
    Registration,
    Replace,
    Upward,
)

Out = tuple[str, object]
"""("send", (ranks, message)), ("replace", the order to an agent), ("look for", addresses), ("supersede", address), ("over", reason)."""

_A_CAUSE = Cause(CauseKind.EXITED, (), "")
_ENDED_BY_OTHERS = ("killed", "superseded", "left alone")
_LOGGED = ("published", "refused", "finished", "frozen")


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the journal that the checks look at."""

    event: str
    step: int = 0
    """Of `frozen`: of the newest commit record that a rank reported."""
    path: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Controller:
    """`streams`: ranks whose newest stream is registered here."""

    place: int
    state: ControllerState
    streams: frozenset[int] = frozenset()
    facts: tuple[Fact, ...] = field(default=())
    ended: str = ""
    """`killed`, or why it ended its work; empty: somebody listens at its address."""
    stopped: bool = False
    ever_stopped: bool = False

    @property
    def gone(self) -> bool:
        return bool(self.ended)

    @property
    def running(self) -> bool:
        return not self.ended and not self.stopped

    @property
    def sent_all_away(self) -> bool:
        """It has ordered ranks and agents to end."""
        return self.state.stage is Stage.EXITING or (self.gone and self.ended not in _ENDED_BY_OTHERS)

    @property
    def idle(self) -> bool:
        return self.state.stage is Stage.STANDBY


def first(shape: Shape, place: int) -> Controller:
    """Return the active controller (place 0) or a standby."""
    settings = ev.ControllerSettings(
        job_id="model",
        term=1 + place,
        world_size=shape.world_size,
        heartbeat_s=shape.heartbeat_s,
        lease_s=shape.lease_s,
        freeze_timeout_s=shape.freeze_timeout_s,
        progress_timeout_s=shape.progress_timeout_s,
        total_timeout_s=shape.total_timeout_s,
        register_timeout_s=8.0,
        orphan_timeout_s=3.0,
        hang=HangLimits(floor_s=1e6),
        standby=place,
        address=f"c{place}",
        in_place_s=shape.in_place_s,
        publish_first=shape.publish_first,
    )
    state = machine.initial(settings, 0.0)
    if shape.in_place_s > 0:  # no agent attaches later or is lost
        state = replace(state, agents=tuple(AttachedAgent(host_of(rank), (rank,)) for rank in range(shape.world_size)))
    return Controller(place, state)


class Turn:
    """One transition of one controller under way."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.out: list[Out] = []

    def ended(self) -> tuple[Controller, tuple[Out, ...]]:
        for _ in range(16):
            if not self.controller.running or due_in(self.controller) > 0:
                break
            self.take(ev.Tick())
        return _at_rest(self.controller), tuple(self.out)

    def take(self, event: ev.Event) -> None:
        state, effects = machine.transition(self.controller.state, event, 0.0)
        self.controller = replace(self.controller, state=state)
        for effect in effects:
            match effect:
                case ev.Send(ranks, message):
                    self.out.append(("send", (ranks, _without_texts(message))))
                case ev.Journal(event_name, fields):
                    self._note(event_name, dict(fields))
                case ev.TurnAway(processes, reason):
                    self.out.append(("send", (tuple(rank for rank, _ in processes), Exit(EXIT_CODE_PERSISTED, reason))))
                case ev.LookFor(addresses):
                    self.out.append(("look for", addresses))
                case ev.Supersede(address):
                    self.out.append(("supersede", address))
                case ev.Finish(reason):
                    self.controller = replace(self.controller, ended=reason or "over")
                    self.out.append(("over", reason))
                case ev.Tell(_, Replace() as order):
                    self.out.append(("replace", order))
                case ev.Tell():
                    pass

    def _note(self, event: str, fields: dict[str, object]) -> None:
        if event not in _LOGGED:
            return
        records = fields.get("records", ())
        step = max(records, default=0) if isinstance(records, tuple) and records else fields.get("step", 0)
        assert isinstance(step, int)
        fact = Fact(event, step, str(fields.get("path", "")), str(fields.get("reason", "")))
        if fact not in self.controller.facts:
            self.controller = replace(self.controller, facts=(*self.controller.facts, fact))


def _at_rest(controller: Controller) -> Controller:
    """Return it in its form at rest. Where ranks may regroup, a process may come when the others have left: what an ended controller knew
    is dropped then, so that it comes to fewer situations."""
    if controller.gone and controller.state.settings.in_place_s > 0:
        state = machine.initial(controller.state.settings, 0.0)
        return replace(controller, state=state, streams=frozenset())
    return replace(controller, state=later_controller(controller.state, 0.0))


def _without_texts(message: Downward) -> Downward:
    """Leave out the cause, which ranks only show or write down."""
    return replace(message, cause=_A_CAUSE) if isinstance(message, Freeze | PublishOrder) else message


def due_in(controller: Controller) -> float:
    deadline = machine.next_deadline(controller.state)
    return inf if deadline is None else deadline


def later(shape: Shape, controller: Controller, seconds: float) -> tuple[Controller, tuple[Out, ...]]:
    return replace(controller, state=later_controller(controller.state, seconds)), ()


def tick(shape: Shape, controller: Controller) -> tuple[Controller, tuple[Out, ...]]:
    return Turn(controller).ended()


def receive(shape: Shape, controller: Controller, rank: int, message: Upward) -> tuple[Controller, tuple[Out, ...]]:
    """A message of a rank on its stream. What comes on an older stream than its newest is ignored."""
    turn = Turn(controller)
    if isinstance(message, Registration) and machine.leads_earlier(controller.state, message):
        return turn.ended()  # it is not taken in
    if isinstance(message, Registration) and machine.refusal(controller.state, message):
        return (
            turn.ended()
        )  # of a process that has ended, or is about to be ended, for another one: the driver orders it to exit
    if isinstance(message, Registration):
        turn.controller = replace(controller, streams=controller.streams | {rank})
    if rank in turn.controller.streams:
        turn.take(ev.Received(message))
    return turn.ended()


def receive_from_agent(shape: Shape, controller: Controller, message: Upward) -> tuple[Controller, tuple[Out, ...]]:
    turn = Turn(controller)
    turn.take(ev.Received(message))
    return turn.ended()


def earlier_lives(
    shape: Shape, controller: Controller, place: int, generation: int
) -> tuple[Controller, tuple[Out, ...]]:
    turn = Turn(controller)
    turn.take(ev.EarlierLives(f"c{place}", generation))
    return turn.ended()


def place_of(address: str) -> int:
    return int(address.removeprefix("c"))


def close_seen(shape: Shape, controller: Controller, rank: int) -> tuple[Controller, tuple[Out, ...]]:
    turn = Turn(controller)
    if rank in controller.streams:
        turn.controller = replace(controller, streams=controller.streams - {rank})
        turn.take(ev.StreamClosed((rank,)))
    return turn.ended()


def killed(shape: Shape, controller: Controller, how: str) -> tuple[Controller, tuple[Out, ...]]:
    return replace(controller, ended=how, streams=frozenset(), stopped=False), (("over", how),)


def stopped(shape: Shape, controller: Controller) -> tuple[Controller, tuple[Out, ...]]:
    return replace(controller, stopped=True, ever_stopped=True), ()


def resumed(shape: Shape, controller: Controller) -> tuple[Controller, tuple[Out, ...]]:
    return tick(shape, replace(controller, stopped=False))
