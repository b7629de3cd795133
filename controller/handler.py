"""Handles what comes to a controller, one item at a time: the machine goes on, and what it orders is sent.

Owns the routes (which stream a rank is on now) and the machine's state. Never decides: all decisions are the machine's. Never waits and has no
thread: `driver.py` gives it one, `server.py` the streams; the simulator runs it without. Knows nothing of gRPC: a stream is a `RankLink`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol, assert_never

from ttp.controller.core import machine
from ttp.errors import ProtocolError
from ttp.proto.codec import CodecError
from ttp.proto.frozen import dataclass
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    AgentHello,
    Downward,
    Exit,
    Finished,
    Freeze,
    Heartbeat,
    KeepAlive,
    Published,
    Registration,
    ReplaceFailed,
    Thaw,
    Upward,
    Vouch,
    Welcome,
    WorkerExit,
    WriteOrder,
)
from ttp.proto.status import JobStatus, PublishedCheckpoint

from .core.facts.events import (
    ControllerSettings,
    EarlierLives,
    Effect,
    Event,
    Finish,
    HeartbeatBatch,
    LookFor,
    Received,
    Send,
    StreamClosed,
    Supersede,
    Tell,
    Tick,
    TurnAway,
)
from .core.facts.events import Journal as JournalEffect
from .core.facts.state import Stage
from .core.facts.status import Reported, job_status
from .permissions import Refusals
from .stragglers import StragglerWatch, is_measured

TICK_S = 0.25
"""Longest time between two ticks."""

KEEP_ALIVE = KeepAlive()
Addressed = tuple[tuple[int, ...], Downward]
"""A message and the ranks of one stream that it is for."""


class RankLink(Protocol):
    """One stream, as the driver sees it; methods are called on the driver's thread and must not block."""

    def send(self, messages: Sequence[Addressed]) -> None:
        """Queue messages, in order, as one envelope. Raises CodecError, with none queued, for what the wire cannot carry."""

    def send_alike(self, links: Sequence[RankLink], message: Downward) -> None:
        """Queue one message on each of these streams, all of this link's controller."""
        for link in links:
            link.send((((), message),))

    def reject(self, text: str) -> None:
        """End the stream with this explanation."""

    def finish(self) -> None:
        """End the stream once everything queued has been sent."""


@dataclass(frozen=True, slots=True)
class StreamMessages:
    """What came together, by stream: an envelope of one, or what relays have brought of several within a few milliseconds."""

    parts: tuple[tuple[RankLink, tuple[Upward, ...]], ...]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    link: RankLink


@dataclass(frozen=True, slots=True)
class StatusAsked:
    reply: Callable[[JobStatus], None]


@dataclass(frozen=True, slots=True)
class StopAsked:
    """`generation`: of the newest rank with which another controller takes over; None: none does. `until_s`: it is not obeyed later, by this one's clock."""

    reason: str
    generation: int | None = None
    until_s: float = inf


@dataclass(frozen=True, slots=True)
class StopIfNeverUsed:
    """No rank will attach to this controller any more; one with attached ranks stays until its work is done."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopWhenUnused:
    """A signal has come that may have been meant for all processes of the job: its ranks need this one to save what they have. It
    leaves once they have been gone for a lease; a broken stream comes back sooner."""

    reason: str
    guarded: bool = False
    """The processes that it was started for run: a standby stays, for its ranks may still have to come to it."""


@dataclass(frozen=True, slots=True)
class NotAllowed:
    """A process has said what its certificate does not allow: it was refused, and the machine does not learn of it."""

    text: str


Item = StreamMessages | StreamEnded | StatusAsked | StopAsked | StopIfNeverUsed | StopWhenUnused | NotAllowed | EarlierLives  # fmt: skip


class EventLog(Protocol):
    """The journal, as the handler writes it."""

    @property
    def wants_state(self) -> bool: ...

    def starting_state(self, state: Any) -> None: ...

    def input(self, now: float, event: Event) -> None: ...

    def write_event(self, unix_s: float, monotonic_s: float, event: str, fields: Mapping[str, Any]) -> None: ...


class Handler:
    """Takes one item at a time, and after it `advance`s: ticks, beats and what was gathered for the streams."""

    def __init__(
        self,
        settings: ControllerSettings,
        journal: EventLog,
        *,
        look_for: Callable[[str], None],
        supersede: Callable[[str, int, int], None],
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._look_for = look_for
        self._supersede = supersede
        self._clock = clock
        self._unix_clock = unix_clock
        self.state: Any = None
        """The machine's."""
        self.finished = ""
        """Why; empty: it goes on."""
        self._next_tick = self._next_beat = inf
        self._leaves_when_alone = ""
        """Why; empty: it was not ordered to."""
        self._alone_since = -inf  # no rank has attached yet: none comes back
        self.routes: dict[int, RankLink] = {}
        """The stream that each rank is on now."""
        self._carried: dict[RankLink, set[int]] = {}  # the routes' inverse
        self._agents: dict[str, RankLink] = {}
        self._overheard: Downward | None = None
        self._outgoing: dict[RankLink, list[Addressed]] = {}  # gathered since the last flush
        self._beats: dict[int, Heartbeat] = {}
        self._step_times: dict[int, float] = {}
        """By rank, what it measured last: for people."""
        self._shares: dict[int, tuple[float, float]] = {}
        """By rank, its own time of a step and its wait for others: for people."""
        self._loss: float | None = None
        self._stragglers = StragglerWatch(settings.heartbeat_s)
        self._published: PublishedCheckpoint | None = None
        self._refusals = Refusals()
        self._turned_away: set[tuple[int, int]] = set()
        """Processes, by rank and pid, that were ordered to exit because others are in their places: their ends are not these others'."""

    def begin(self) -> None:
        """Take the machine's first state."""
        now = self._clock()
        self.state = machine.initial(self._settings, now)
        self._journal.starting_state(self.state)
        self._next_tick = self._next_beat = now + TICK_S

    def due(self, soonest: float = -inf) -> float:
        """Return when `advance` must be called next, whatever comes until then. The machine's own deadline counts from `soonest` on: one
        that a tick did not move is tried again a little later, not at full speed."""
        deadline = machine.next_deadline(self.state)
        moment = self._next_tick if self._next_tick < self._next_beat else self._next_beat
        if deadline is None or deadline >= moment:
            return moment
        return deadline if deadline >= soonest else min(moment, soonest)

    def advance(self, due: float) -> None:
        """Do what the clock asks for, and send what was gathered. `due`: what `due` said before the item that was taken."""
        now = self._clock()
        if now > due + TICK_S:  # stopped itself, or starved: the ranks' lease begins anew
            self._alone_since = max(self._alone_since, now)
        if now >= due:  # also when messages keep coming
            self._next_tick = now + TICK_S
            self._step(Tick(), now)
        if now >= self._next_beat:
            self._next_beat = now + self._settings.heartbeat_s
            self._beat()
        if self._leaves_when_alone and self._is_alone(now):
            self._stop(self._leaves_when_alone)
        if self._outgoing:
            self._flush()
        if self._journal.wants_state:
            self._journal.starting_state(self.state)

    def take(self, item: Item) -> None:
        match item:
            case StreamMessages(parts):
                self.receive_together(parts)
            case StreamEnded(link):
                self._drop(link)
            case StatusAsked(reply):
                seen = Reported(self._beats, self._step_times, self._shares, self._stragglers.slowest(), self._loss)
                reply(job_status(self.state, seen, self._published, os.getpid(), self._clock()))
            case StopWhenUnused():
                self._leave_if_alone(item)
            case StopAsked():
                if why := self._why_it_stays(item):
                    self._log_event("stays", {"reason": f"{item.reason}, {why}"})
                else:
                    self._stop(item.reason)
            case EarlierLives():
                self._step(item, self._clock())
            case NotAllowed(text):
                if count := self._refusals.note(text):
                    self._log_event("not_allowed", {"text": text, "count": count})
            case StopIfNeverUsed(reason):
                stage = self.state.stage
                if stage is Stage.STANDBY or (stage is Stage.ASSEMBLING and not self.routes):
                    self._finish(reason)
            case _:
                assert_never(item)

    def _why_it_stays(self, order: StopAsked) -> str:
        if order.generation is not None and order.generation < self.state.generation:
            return f"with ranks of generation {order.generation}, and these are in {self.state.generation}"
        return "which came too late" if self._clock() > order.until_s else ""

    def _leave_if_alone(self, order: StopWhenUnused) -> None:
        """Leave now or once the ranks have gone; a guarded standby does neither, for SIGUSR1 and its guardians' end are its words."""
        if order.guarded and self.state.stage is Stage.STANDBY:
            self._log_event("stays", {"reason": f"{order.reason}, and what this standby was started for runs"})
        elif self._is_alone(self._clock()):
            self._stop(order.reason)
        else:
            self._leaves_when_alone = order.reason
            ranks = f"ranks are attached: {len(self.routes)}" if self.routes else "ranks were attached a moment ago"
            self._log_event("stays", {"reason": f"{order.reason}, and {ranks}"})

    def _is_alone(self, now: float) -> bool:
        """Say whether no rank needs this controller: one whose stream broke a moment ago may be all that has a shard."""
        back_by = self._alone_since + self._settings.lease_s
        return not self.routes and (self.state.stage is Stage.STANDBY or now >= back_by)

    def _stop(self, reason: str) -> None:
        self._log_event("stopped", {"reason": reason})
        self._finish(reason)

    def receive(self, link: RankLink, messages: Sequence[Upward]) -> None:
        self.receive_together(((link, messages),))

    def receive_together(self, parts: Sequence[tuple[RankLink, Sequence[Upward]]]) -> None:
        """What came together, in order; heartbeats that stand side by side are one event."""
        beats: list[Heartbeat] = []
        for link, message in ((link, message) for link, messages in parts for message in messages):
            if not isinstance(message, Heartbeat):
                self.receive_heartbeats(beats)
                self._receive_one(link, message)
            elif self._is_routed(link, message):
                self._note_heartbeat(message)
                beats.append(message)
        self.receive_heartbeats(beats)
        self._look_for_stragglers()

    def _note_heartbeat(self, beat: Heartbeat) -> None:
        self._beats[beat.rank] = beat
        self._note_step_time(beat.rank, beat.step_times_s)
        if beat.loss is not None:
            self._loss = beat.loss
        waited_s = beat.waited_s if beat.waited_s is not None else 0.0
        if beat.own_s is None or not (is_measured(beat.own_s) and is_measured(waited_s)):
            return
        if self._stragglers.compares(beat.rank):
            self._shares[beat.rank] = beat.own_s, waited_s
            self._stragglers.take(beat.rank, beat.step, beat.own_s, self._clock())

    def _note_step_time(self, rank: int, times_s: Sequence[float]) -> None:
        """The machine refuses a number that cannot be a time; people are not shown one either."""
        if times_s and is_measured(times_s[-1]):
            self._step_times[rank] = times_s[-1]

    def _look_for_stragglers(self) -> None:
        """Journal which ranks are slow from now on, and which are not any more; the machine does not know of it."""
        for change in self._stragglers.look(self._clock()):
            self._log_event("straggler_over" if change.over else "straggler", change.fields)

    def receive_heartbeats(self, beats: list[Heartbeat]) -> None:
        """As one event; where one of them is not allowed, the others count all the same."""
        if len(beats) == 1 or (beats and not self._step(HeartbeatBatch(tuple(beats)), self._clock())):
            for beat in beats:
                self._step(Received(beat), self._clock())
        beats.clear()

    def _is_routed(self, link: RankLink, message: Upward) -> bool:
        """Say whether this is the stream on which the message's rank registered last: it speaks on no other."""
        assert not isinstance(message, AgentHello | Vouch)
        if message.rank not in self.routes:
            link.reject(f"rank {message.rank} said {type(message).__name__} before it registered; register first")
        return self.routes.get(message.rank) is link  # else a leftover of a stream that the rank has given up

    def _receive_one(self, link: RankLink, message: Upward) -> None:
        """Route, then let the machine know."""
        match message:
            case Registration() if not self._route(link, message):
                return
            case AgentHello(host):
                self._agents[host] = link
            case WorkerExit(rank, pid) if 0 <= rank < self._settings.world_size and self._is_anothers(link, rank, pid):
                return
            case Registration() | WorkerExit() | Vouch() | ReplaceFailed():
                pass
            case _ if not self._is_routed(link, message):
                return
            case Finished(rank):
                self._stragglers.leave(rank)
        self._step(Received(message), self._clock())

    def _route(self, link: RankLink, registration: Registration) -> bool:
        rank, world_size = registration.rank, self._settings.world_size
        if registration.world_size != world_size or not 0 <= rank < world_size:
            link.reject(
                f"rank {rank} of {registration.world_size} registered, but this controller's job has {world_size} ranks;"
                " is it another attempt of the job?"
            )
            return False
        if machine.leads_earlier(self.state, registration):
            self._log_event("later_process", {"rank": rank, "host": registration.host, "pid": registration.pid})
            return False  # nothing is sent to it: after a lease it turns to another controller
        if why := machine.refusal(self.state, registration):
            self._log_event("earlier_process", {"rank": rank, "host": registration.host, "pid": registration.pid})
            self._turn_away(link, rank, registration.pid, why)
            return False
        self._step_times.pop(rank, None)  # it may be another process
        self._shares.pop(rank, None)
        self._stragglers.join(rank, registration.host, registration.pid, registration.workload)
        self._note_step_time(rank, registration.step_times_s)
        old = self.routes.get(rank)
        self.routes[rank] = link
        self._carried.setdefault(link, set()).add(rank)
        if old is not None and old is not link:
            self._carried[old].discard(rank)
            if not self._carried[old]:
                del self._carried[old]
                self._flush()
                old.finish()
        return True

    def _is_anothers(self, link: RankLink, rank: int, pid: int) -> bool:
        """Say whether it was turned away, or is of a node that has lost the place: the process in that may have the same pid elsewhere."""
        known = self.state.members.table[rank].registration
        if known is None or known.pid != pid:
            return (rank, pid) in self._turned_away
        return self._agents.get(known.host, link) is not link and link in self._agents.values()

    def _turn_away(self, link: RankLink | None, rank: int, pid: int, why: str) -> None:
        """Order a process to exit, on its stream alone: launchers must not take it for an order to all."""
        self._turned_away.add((rank, pid))
        if link is not None:
            self._outgoing.setdefault(link, []).append(((rank,), Exit(EXIT_CODE_PERSISTED, why)))

    def _drop(self, link: RankLink) -> None:
        self._outgoing.pop(link, None)
        ranks = tuple(sorted(self._carried.pop(link, ())))
        hosts = sorted(host for host, agent in self._agents.items() if agent is link)
        for rank in ranks:
            del self.routes[rank]
        for host in hosts:
            del self._agents[host]
        if ranks:
            if not self.routes:
                self._alone_since = self._clock()
            self._step(StreamClosed(ranks), self._clock())
        for host in hosts:
            self._step(StreamClosed((), host), self._clock())

    def _step(self, event: Event, now: float) -> bool:
        """Say whether it was allowed."""
        self._journal.input(now, event)
        try:
            self.state, effects = machine.transition(self.state, event, now)
        except ProtocolError as error:  # the state is unchanged
            if not isinstance(event, HeartbeatBatch):  # else each comes alone
                self._log_event("protocol_error", {"text": str(error)})
            return False
        except Exception:  # a bug must not leave the ranks without a controller
            traceback.print_exc(file=sys.stderr)
            self._log_event("machine_failed", {"input": type(event).__name__, "text": traceback.format_exc()})
            return True
        for effect in effects:
            self._carry_out(effect, event)
        return True

    def _carry_out(self, effect: Effect, event: Event) -> None:
        match effect:
            case Send(ranks, message):
                self._send(ranks, message)
            case Tell(hosts, message):
                for link in [self._agents[host] for host in hosts if host in self._agents]:
                    self._outgoing.setdefault(link, []).append(((), message))
            case TurnAway(processes, reason):
                for rank, pid in processes:
                    self._turn_away(self.routes.get(rank), rank, pid, reason)
            case LookFor(addresses):
                for address in addresses:
                    self._look_for(address)
            case Supersede(address, generation, look):
                self._supersede(address, generation, look)
            case JournalEffect(name, fields):
                self._log_event(name, dict(fields))
                if name == "published" and isinstance(event, Received) and isinstance(done := event.message, Published):
                    self._published = PublishedCheckpoint(done.step, done.path)
            case Finish(reason):
                self._finish(reason)
            case _:
                assert_never(effect)

    def _send(self, ranks: tuple[int, ...], message: Downward) -> None:
        """Gather it for the streams of these ranks: `_flush` makes one envelope a stream of all that one input caused."""
        if len(ranks) == 1 and isinstance(message, WriteOrder | Welcome):  # what each rank gets its own of
            if (link := self.routes.get(ranks[0])) is not None:
                self._outgoing.setdefault(link, []).append((ranks, message))
            return
        by_link: dict[RankLink, list[int]] = {}
        for rank in ranks:
            if rank in self.routes:
                by_link.setdefault(self.routes[rank], []).append(rank)
        if isinstance(message, Freeze | Thaw | Exit) and message != self._overheard:  # else it is repeated for one rank
            self._overheard = message  # by the launchers, addressed to no rank
            for link in self._agents.values():
                by_link.setdefault(link, [])
        for link, its_ranks in by_link.items():
            self._outgoing.setdefault(link, []).append((tuple(its_ranks), message))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for link, messages in outgoing.items():
            try:
                link.send(messages)
            except CodecError:
                for one in messages:  # the others must get through
                    self._send_alone(link, one)

    def _send_alone(self, link: RankLink, one: Addressed) -> None:
        try:
            link.send((one,))
        except CodecError as error:
            self._log_event("not_sent", {"ranks": one[0], "text": str(error)})

    def _beat(self) -> None:
        """Show every stream that the controller lives. A standby without ranks that count sends nothing: an agent that lost
        its way must not take it for the active controller."""
        links = list(dict.fromkeys((*self.routes.values(), *self._agents.values())))  # each once
        if links and self.state.stage is not Stage.STANDBY:
            self._flush()  # first: the first message of a rank is its welcome
            links[0].send_alike(links, KEEP_ALIVE)

    def _log_event(self, event: str, fields: dict[str, Any]) -> None:
        self._journal.write_event(self._unix_clock(), self._clock(), event, fields)

    def _finish(self, reason: str) -> None:
        self.finished = self.finished or reason or "finished"
