"""A controller or a processor on a bench: say an event, look at what comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from ttp.controller.core import machine as controller_machine
from ttp.controller.core.facts import events as controller_events
from ttp.controller.core.facts.events import ControllerSettings, Journal, StreamClosed
from ttp.controller.core.facts.state import Stage
from ttp.processor.core import events as processor_events
from ttp.processor.core import machine as processor_machine
from ttp.processor.core.events import ProcessorSettings
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    FileEntry,
    Freeze,
    Heartbeat,
    Phase,
    PublishOrder,
    Registration,
    RollForward,
    ShardGroup,
    ShareResult,
    StateReport,
    Upward,
    WriteOrder,
    Written,
)

T = TypeVar("T")
MIB = 1 << 20
HALVES = ((0, 2), (1, 3))
"""Four ranks in two halves: partners 0 and 2, 1 and 3."""


def record(step: int) -> CommitRecord:
    return CommitRecord(step, 1.5, 1.0, False, 1.0, (0.1,), (2.0,))


def registration(
    rank: int, holders: tuple[tuple[int, ...], ...] = HALVES, host: str = "", pid: int = 0, roots: tuple[str, ...] = ("/a", "/b")
) -> Registration:  # fmt: skip
    world_size = 1 + max(max(ranks) for ranks in holders)
    groups = tuple(ShardGroup(f"g{i}", f"shard {i}", MIB) for i, ranks in enumerate(holders) if rank in ranks)
    return Registration(rank, world_size, host or f"host{rank}", pid or 100 + rank, groups, 0, roots, "{}")


def report(
    rank: int, freeze_id: int, phase: Phase, step: int, *, records: Iterable[int] = (), **changed: Any
) -> StateReport:
    """Return a rank's report; its state is `step`'s when DONE and the one before otherwise."""
    state_step = step if phase is Phase.DONE else step - 1
    fields: dict[str, Any] = {"closed": True, "torn": False, "backup_step": -1, "state_step": state_step, **changed}
    return StateReport(rank, freeze_id, phase=phase, step=step, records=tuple(record(s) for s in records), **fields)


def share(rank: int) -> ShareResult:
    return ShareResult((FileEntry(f"r{rank}", 10, "00", rank),))


def only(items: Iterable[Any], kind: type[T]) -> list[T]:
    return [item for item in items if isinstance(item, kind)]


class ControllerBench:
    """A controller machine with a clock that the test moves."""

    def __init__(self, holders: tuple[tuple[int, ...], ...] = HALVES, assembled: bool = True, **settings: Any) -> None:
        self.world_size = 1 + max(max(ranks) for ranks in holders)
        self.now = 0.0
        self.holders = holders
        fixed = {"job_id": "job", "term": 3, "world_size": self.world_size}
        self.state = controller_machine.initial(ControllerSettings.from_flat(fixed | settings), 0.0)
        self.effects: tuple[controller_events.Effect, ...] = ()
        self.journal: list[Journal] = []
        if assembled:
            for rank in range(self.world_size):
                self.say(registration(rank, holders))
            assert self.at(Stage.RUNNING)

    def at(self, stage: Stage) -> bool:
        return self.state.stage is stage

    def take(self, event: controller_events.Event, after: float = 0.0) -> tuple[controller_events.Effect, ...]:
        self.now += after
        self.state, self.effects = controller_machine.transition(self.state, event, self.now)
        self.journal += only(self.effects, Journal)
        hash(self.state)  # states stay hashable, whatever happens
        deadline = controller_machine.next_deadline(self.state)
        assert deadline is None or deadline > self.now, f"{event!r} leaves a deadline in the past: its driver spins"
        return self.effects

    def say(self, *messages: Upward, after: float = 0.0) -> None:
        for message in messages:
            self.take(controller_events.Received(message), after)

    def close(self, *ranks: int, after: float = 0.0) -> None:
        self.take(StreamClosed(ranks), after)

    def wait(self, seconds: float, senders: Iterable[int] | None = None) -> None:
        """Let time pass, ticking at every deadline; `senders` (default: all ranks) send heartbeats each half second."""
        end = self.now + seconds
        beat = self.now
        while True:
            deadline = controller_machine.next_deadline(self.state)
            beat_at = beat + 0.5
            moment = min(end, beat_at, end if deadline is None else max(deadline, self.now))
            self.now = moment
            if moment == beat_at:
                beat = moment
                for rank in range(self.world_size) if senders is None else senders:
                    self.say(Heartbeat(rank, Phase.COMPUTE, 1))
            else:
                self.take(controller_events.Tick())
            if moment >= end:
                return

    def sent(self, kind: type[T]) -> dict[int, T]:
        """Return the messages of one kind in the last effects, by rank."""
        return {
            rank: effect.message
            for effect in only(self.effects, controller_events.Send)
            if isinstance(effect.message, kind)
            for rank in effect.ranks
        }

    def said_to_agents(self, kind: type[T]) -> dict[str, list[T]]:
        """Return the messages of one kind in the last effects, by the agent's host."""
        messages: dict[str, list[T]] = {}
        for effect in only(self.effects, controller_events.Tell):
            for host in effect.hosts if isinstance(effect.message, kind) else ():
                messages.setdefault(host, []).append(effect.message)  # type: ignore[arg-type]
        return messages

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the fields of every journal line of one kind so far."""
        return [dict(line.fields) for line in self.journal if line.event == event]

    # --- the usual way of a fault, one stage at a time ---

    def all_report(self, step: int, phase: Phase = Phase.COMPUTE, ranks: Iterable[int] = range(4)) -> None:
        for rank in ranks:
            self.say(report(rank, self.state.freeze_id, phase, step))

    def orders(self) -> dict[int, WriteOrder]:
        return self.sent(WriteOrder)

    def all_write(self, orders: dict[int, WriteOrder]) -> None:
        for rank in sorted(orders):
            self.say(self.written(rank, orders[rank]))

    def written(self, rank: int, order: WriteOrder) -> Written:
        return Written(rank, order.freeze_id, order.tmp_name, order.parts, share(rank))

    def publish_order(self) -> tuple[int, PublishOrder]:
        ((rank, order),) = self.sent(PublishOrder).items()
        return rank, order


class ProcessorBench:
    """A processor machine with a clock that the test moves."""

    def __init__(self, rank: int = 1, connected: bool = True, **settings: Any) -> None:
        self.now = 0.0
        self.rank = rank
        self.state = processor_machine.initial(ProcessorSettings(rank, **settings), 0.0)
        self.effects: tuple[processor_events.Effect, ...] = ()
        if connected:
            self.tick()
            self.take(processor_events.Connected(registration(rank)))

    def take(self, event: processor_events.Event, after: float = 0.0) -> tuple[processor_events.Effect, ...]:
        self.now += after
        self.state, self.effects = processor_machine.transition(self.state, event, self.now)
        hash(self.state)
        return self.effects

    def receive(self, message: Any, after: float = 0.0) -> tuple[processor_events.Effect, ...]:
        return self.take(processor_events.Received(message), after)

    def tick(self, after: float = 0.0) -> tuple[processor_events.Effect, ...]:
        return self.take(processor_events.Tick(Phase.COMPUTE, 1), after)

    def wait(self, seconds: float) -> tuple[processor_events.Effect, ...]:
        """Let time pass, ticking at every deadline and at least each tenth of a second; return all effects."""
        end = self.now + seconds
        effects: list[processor_events.Effect] = []
        while self.now < end:
            deadline = self.deadline()
            moment = min(end, self.now + 0.1, end if deadline is None else max(deadline, self.now + 1e-3))
            effects += self.tick(after=moment - self.now)
        self.effects = tuple(effects)
        return self.effects

    def deadline(self) -> float | None:
        return processor_machine.next_deadline(self.state)

    def said(self, kind: type[T]) -> list[T]:
        return [e.message for e in only(self.effects, processor_events.Send) if isinstance(e.message, kind)]

    def freeze(self, freeze_id: int = 1, phase: Phase = Phase.READY, step: int = 5, **changed: Any) -> None:
        """Freeze and close the gate."""
        self.receive(Freeze(freeze_id, Cause(CauseKind.EXITED, (0,), "signal SIGKILL")))
        self.take(processor_events.GateClosed(report(self.rank, freeze_id, phase, step, **changed)))

    def roll(self, freeze_id: int = 1, step: int = 5) -> RollForward:
        order = RollForward(freeze_id, record(step))
        self.receive(order)
        return order
