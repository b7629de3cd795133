"""The controllers of a simulated job: the shipped handler of a controller's items, and faults of their processes and their network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from tests.simulation.network import DOWN, UP, RankStream, Route, Stream
from tests.simulation.truth import Snapshot
from ttp.controller.core.facts import events as ev
from ttp.controller.core.facts.events import EarlierLives
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.ranks.takeover import SUPERSEDE_PART
from ttp.controller.handler import Addressed, Handler, StopAsked, StreamEnded
from ttp.controller.handler import RankLink as ServersEnd
from ttp.hang_limits import HangLimits
from ttp.proto.messages import Exit, Heartbeat, Registration, Replace, StandbyList, StateReport, TakePlaces, Upward

if TYPE_CHECKING:
    from tests.simulation.agents import Agent
    from tests.simulation.job import Job


_VERDICTS = ("decided", "refused", "published", "exit_sent", "incident")
_STANDBY = Stage.STANDBY  # found faster than an attribute of an enumeration

TOGETHER_S = 0.02
"""Heartbeats of all relays that come within so short a time are one event."""

LOST_ORDERS = 0.1
"""The part of the orders to end that do not arrive in time; not the next one as well."""

ROUNDING_S = 1e-6
"""A clock that is ahead is read a little late, so that a deadline has passed then for certain."""


class Link(ServersEnd):
    """The controller's end of a rank's stream, as the shipped handler uses it."""

    def __init__(self, job: Job, stream: Stream) -> None:
        self._job, self.stream = job, stream

    def send(self, messages: Sequence[Addressed]) -> None:
        stream, job = self.stream, self._job
        take_in = job.process_behind(stream).take_in
        for _, message in messages:
            job.sent_down(message)
            stream.carry(DOWN, take_in, message)

    def reject(self, text: str) -> None:
        self._job.reject_stream(self.stream.rank, self.stream)

    def finish(self) -> None:
        """Its rank has another stream."""


class AgentLink(ServersEnd):
    """The controller's end of a launcher's stream."""

    def __init__(self, launcher: Agent, controller: Controller) -> None:
        self._launcher, self._controller = launcher, controller

    def send(self, messages: Sequence[Addressed]) -> None:
        for _, message in messages:
            if isinstance(
                message, StandbyList | Replace | TakePlaces | Exit
            ):  # its other messages matter to its log only
                self._launcher.take_in(self._controller, message)

    def reject(self, text: str) -> None:
        raise AssertionError(f"the stream of a launcher was rejected: {text}")

    def finish(self) -> None:
        """It has another stream."""


class Journal:
    """A controller's journal, in memory."""

    wants_state = False

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def starting_state(self, state: Any) -> None:
        """It is never replayed."""

    def input(self, now: float, event: ev.Event) -> None:
        """The seed replays it."""

    def write_event(self, unix_s: float, monotonic_s: float, event: str, fields: Mapping[str, Any]) -> None:
        if event in ("protocol_error", "machine_failed", "not_sent"):  # no simulated fault is a reason for it
            self._controller.job.refused(str(fields), sys.exception() or AssertionError(str(fields)))
            return
        self._controller.said(ev.Journal(event, fields))


class Controller:
    """One controller's process: one item at a time, in order. `place` 0 begins as the active one, i is the i-th standby. It may be
    killed, stopped for a while, or cut off from everybody for a while."""

    def __init__(self, job: Job, place: int) -> None:
        self.job, self.place, self.term = job, place, 1 + place
        times = job.times
        settings = ev.ControllerSettings(
            "sim", self.term, job.training.layout.world_size, times.heartbeat_s, times.lease_s, times.vouched_lease_s,
            times.freeze_timeout_s, times.progress_timeout_s, times.total_timeout_s, times.register_timeout_s,
            times.orphan_timeout_s, HangLimits(times.hang_floor_s, times.hang_floor_s, times.hang_start_s, times.hang_factor),
            place, f"c{place}", job.first_standbys, times.standby_start_s, job.own is not None, times.in_place_s,
            publish_first=times.publish_first,
        )  # fmt: skip
        self.ahead_s = 0.0
        """Its clock against the job's."""
        self.route = Route()
        self.handler = Handler(
            settings,
            Journal(self),
            look_for=lambda address: self._look_for(job.controller_at(address)),
            supersede=lambda address, generation, look: self._supersede(job.controller_at(address), generation),
            clock=self.clock,
            unix_clock=self.clock,
        )
        self.handler.begin()
        self.journal: list[tuple[float, ev.Journal]] = []
        self.over, self.over_s = "", inf
        self.led_none = False
        """It has come to a verdict with nothing but processes in whose places others are."""
        self.dead = False
        self.killed_s = inf
        self.began_s = job.scheduler.now
        self.paused_until = 0.0
        self.cut_until = 0.0
        self.parted_until = 0.0
        """Until then it reaches no other controller."""
        self._has_lost_an_order = False
        self.answered: dict[int, float] = {}
        """When, by its own clock, it last answered each later controller that it is alive."""
        self.ranks_came = False
        """A rank has registered here, ever."""
        self.known_checkpoints: list[tuple[float, str]] = []
        """Which checkpoint ranks knew whose reports have come in time, and when they came."""
        self.absences: list[tuple[float, float]] = []
        """When it was away: began, ended."""
        self.leaps: list[tuple[float, float]] = []
        """When its clock leapt, and until when it was behind for that."""
        self.away_s = 0.0
        """Longest time for which it was stopped or cut off."""
        self._queue: list[Callable[[], None]] = []
        self._stage = self.state.stage
        self._tick_at = inf
        """When the next tick comes."""
        self._due = inf
        """When the handler asked to be called last."""
        self._beats: list[tuple[ServersEnd, Heartbeat]] = []
        """By host, those that have come and wait for the others."""
        self._schedule_tick()

    def clock(self) -> float:
        return self.job.scheduler.now + self.ahead_s

    @property
    def state(self) -> Any:
        """The machine's."""
        return self.handler.state

    @property
    def gone(self) -> bool:
        """Nothing listens at its address."""
        return self.dead or bool(self.over)

    @property
    def idle(self) -> bool:
        """A standby without ranks."""
        return self.state.stage is _STANDBY

    @property
    def sends(self) -> bool:
        """It says something to those that are attached."""
        if self.dead or self.over or self.idle:
            return False
        now = self.job.scheduler.now
        return now >= self.paused_until and now >= self.cut_until and now >= self.route.held_until[DOWN]

    # --- what comes in ---

    def link_of(self, stream: Stream) -> Link:
        return Link(self.job, stream)

    def when_running(self, call: Callable[[], None]) -> None:
        """Do it now, or in turn when the process goes on."""
        if self.gone:
            return
        if self.job.scheduler.now < self.paused_until:
            if not self._queue:
                self.job.scheduler.at(self.paused_until, self._resume)
            self._queue.append(call)
        else:
            call()

    def receive(self, stream: Stream, message: Upward) -> None:
        if self.dead or self.over or self.job.scheduler.now < self.paused_until:
            self.when_running(lambda: self._receive(stream, message))
        else:
            self._receive(stream, message)

    def _receive(self, stream: Stream, message: Upward) -> None:
        reports = type(message) is StateReport and self._looks_at(stream, message)
        if self.job.relays:
            self._receive_relayed(stream.link, message)
        else:
            self.handler.receive(stream.link, (message,))
        if (
            type(message) is StateReport
            and isinstance(stream, RankStream)
            and reports
            and self._looks_at(stream, message)
        ):
            # Else the fault's time was over as it came.
            self.known_checkpoints.append((self.job.now, stream.process.knew.get(message.freeze_id, "")))
        if type(message) is Registration and self.job.process_behind(stream) is self.job.ranks[stream.rank]:
            self.ranks_came = True
        self._go_on()

    def _looks_at(self, stream: Stream, report: StateReport) -> bool:
        """Say whether it comes on the rank's own stream, and is of the freeze that is in force."""
        state, known = self.state, self.handler.routes.get(stream.rank) is stream.link
        return (
            known
            and state.stage not in (Stage.EXITING, Stage.OVER)
            and state.fault is not None
            and bool(report.freeze_id >= state.freeze_id)
        )

    def _receive_relayed(self, link: ServersEnd, message: Upward) -> None:
        """Heartbeats that come about together, of whichever hosts, are one event; whatever else is said comes in order."""
        if not isinstance(message, Heartbeat):
            self._receive_heartbeats()
            self.handler.receive(link, (message,))
            return
        if not self._beats:
            self.job.scheduler.after(TOGETHER_S, partial(self.when_running, self._beats_are_due))
        self._beats.append((link, message))

    def _beats_are_due(self) -> None:
        self._receive_heartbeats()
        self._go_on()

    def _receive_heartbeats(self) -> None:
        beats, self._beats = self._beats, []
        known = []
        for link, beat in beats:
            if self.handler.routes.get(beat.rank) is link:
                known.append(beat)
            else:
                self.handler.receive(link, (beat,))
        self.handler.receive_heartbeats(known)

    def receive_again(self, rank: int, message: Upward) -> None:
        """A rank's message comes once more on its stream, or one of another attempt does that the adapters let through."""

        def receive() -> None:
            link = self.handler.routes.get(rank)
            if link is not None:
                self.handler.receive(link, (message,))
                self._go_on()

        self.when_running(receive)

    def close_seen(self, rank: int, stream: Stream) -> None:
        """A stream has ended; a newer one may have taken its place."""

        def close() -> None:
            self._receive_heartbeats()
            self.handler.take(StreamEnded(stream.link))
            self._go_on()

        self.when_running(close)

    def receive_from_agent(self, link: AgentLink, message: Upward) -> None:
        def receive() -> None:
            self._receive_heartbeats()
            self.handler.receive(link, (message,))
            self._go_on()

        self.when_running(receive)

    def agent_gone(self, link: AgentLink) -> None:
        def close() -> None:
            self._receive_heartbeats()
            self.handler.take(StreamEnded(link))
            self._go_on()

        self.when_running(close)

    def _go_on(self) -> None:
        """After an item: what the clock asks for, and what there is to send."""
        handler = self.handler
        handler.advance(self._due)
        if handler.finished and not self.over:
            self._finish(handler.finished)
        stage = handler.state.stage
        if stage is not self._stage:
            self._stage = stage
            self.job.happened(f"stage {stage.value}", -1)
        self._schedule_tick()

    def _resume(self) -> None:
        calls, self._queue = self._queue, []
        for call in calls:
            self.when_running(call)

    def _schedule_tick(self) -> None:
        due = self._due = self.handler.due()
        if due < self._tick_at:
            self._tick_by(due)

    def _tick_by(self, due: float) -> None:
        self._tick_at = due
        moment = due if self.ahead_s == 0.0 else due - self.ahead_s + ROUNDING_S
        self.job.scheduler.at(moment, partial(self._tick, due))

    def _tick(self, asked_for: float) -> None:
        if asked_for != self._tick_at:
            return  # an earlier one was asked for since
        self._tick_at = inf
        if self._due > asked_for:
            self._tick_by(self._due)  # something has happened since
        else:
            self.when_running(self._go_on)

    # --- what goes out ---

    def said(self, line: ev.Journal) -> None:
        """It writes a line of its journal. Where only processes are with it in whose places others are, its verdict is not the job's."""
        if line.event in _VERDICTS and self._leads_none():
            self.led_none = not any(said.event in _VERDICTS for _, said in self.journal)
            self.job.note(f"c{self.place}, which leads no process that counts: {line.event}")
            return
        self.journal.append((self.job.scheduler.now, line))
        self.job.happened(line.event, -1)
        if line.event in ("thawed", "regrouped"):
            self._thaws_one_generation()
        if line.event == "take_places_sent":
            self.job.in_place.given_up_s[str(line.fields["lost"])] = self.job.scheduler.now
        if line.event == "published":
            self.job.said_published(self)
        elif line.event in ("decided", "refused"):
            self.job.snapshots.append(Snapshot.of(self.job, line.event, self._is_apart()))

    def _is_apart(self) -> bool:
        """It was cut off when it began to take over from one that leads still."""
        began_s = next((at for at, line in self.journal if line.event == "takeover_began"), inf)
        leading = [c for c in self.job.controllers if c.place < self.place and c.ranks_came and not c.gone]
        return began_s <= self.parted_until and bool(leading)

    def _thaws_one_generation(self) -> None:
        """I22: those whose gates it opens have made their groups together."""
        routes, members = self.handler.routes.items(), self.state.members.table
        behind = [
            self.job.process_behind(link.stream)
            for rank, link in routes
            if isinstance(link, Link) and members[rank].attached
        ]
        generations = {
            process.rank: process.generation
            for process in behind
            if process.alive
            and process.stream is not None
            and process.stream.controller is self  # others do not receive it
        }
        if len(set(generations.values())) > 1:
            self.job.broken(
                f"I22: c{self.place} opens the gates of processes of several generations, by rank {generations}"
            )

    def _leads_none(self) -> bool:
        """Say whether ranks are attached, and each is a process on a node that was given up: it ran when another took its place."""
        streams = [link.stream for link in self.handler.routes.values() if isinstance(link, Link)]
        behind = [stream.process for stream in streams if isinstance(stream, RankStream)]  # a newcomer has no place
        those_that_count = any(process.alive for process in self.job.ranks)
        return bool(behind) and those_that_count and not any(map(self.job.in_place.counts, behind))

    def _finish(self, reason: str) -> None:
        self.over, self.over_s = reason, self.job.scheduler.now
        self.job.controller_gone(killed=False)
        led_by_others = any(
            process.alive and process.stream is not None and process.stream.controller is not self
            for process in self.job.ranks
        )
        if self.place and (not self.ranks_came or led_by_others):
            self.job.standbys.ended(self)
        self.job.scheduler.after(max(0.05, 1.01 * self.job.slowest_s), self.close_all)  # what was said arrives

    def _look_for(self, older: Controller) -> None:
        """It answers once it runs and the network carries the question, and its answer."""

        def answer() -> None:
            if not older.gone and not (self.gone and self.parted_until):  # else the question was never on its way
                older.answered[self.place] = older.clock()
                event = EarlierLives(f"c{older.place}", older.state.generation)
                self.job.scheduler.at(self._carried(older), lambda: self.when_running(lambda: self._answered(event)))

        self.job.scheduler.at(self._carried(older), lambda: older.when_running(answer))

    def _answered(self, event: EarlierLives) -> None:
        self.job.happened("an earlier controller has answered", -1)
        self.handler.take(event)
        self._go_on()

    def _carried(self, older: Controller) -> float:
        """Return when something arrives that is sent now by one of them to the other."""
        held = max(older.cut_until, self.cut_until, older.route.held_until[UP], older.parted_until, self.parted_until)
        return max(self.job.scheduler.now, held) + self.job.rng.uniform(0.001, self.job.slowest_s)

    def _supersede(self, older: Controller, generation: int) -> None:
        """The order reaches it at once, or is given up, and it is looked for again."""
        patience_s = SUPERSEDE_PART * self.job.times.lease_s
        given_up_s, until_s = self.job.scheduler.now + patience_s, older.answered[self.place] + patience_s

        def end() -> None:
            if older.gone:
                return
            if older.clock() > until_s:
                self._look_for(older)
                return
            older.handler.take(StopAsked(f"superseded by c{self.place}", generation, until_s))
            older._go_on()
            if not older.gone:
                self._look_for(older)
                return
            if older.state.generation > generation and self._leads_none():
                self.job.broken(
                    f"I22: c{older.place} is ended by c{self.place}, to which only processes on lost nodes have come"
                )
            older.close_all()

        moment = self._carried(older)
        lost = not self._has_lost_an_order and self.job.rng.random() < LOST_ORDERS
        self._has_lost_an_order |= lost
        if moment > given_up_s or lost:
            self.job.scheduler.at(given_up_s, lambda: self.when_running(lambda: self._look_for(older)))
        else:
            self.job.scheduler.at(moment, lambda: older.when_running(end))

    def close_all(self) -> None:
        """All its streams end, those without a registration included."""
        for process in (*self.job.ranks, *self.job.in_place.former):
            if process.alive and process.stream is not None and process.stream.controller is self:
                self.job.reject_stream(process.rank, process.stream)

    # --- its faults ---

    def kill(self) -> None:
        if not self.gone:
            self.job.note(f"controller c{self.place} is killed in {self.state.stage.value}")
            self.dead, self.killed_s = True, self.job.scheduler.now
            self.job.controller_gone(killed=True)
            self.job.standbys.ended(self)
            self.close_all()
            self.job.happened("controller killed", -1)

    def pause(self, seconds: float) -> None:
        self.job.note(f"controller c{self.place} is stopped for {seconds:.3f} s")
        self._away(seconds)
        self.paused_until = max(self.paused_until, self.job.scheduler.now + seconds)
        self.job.scheduler.at(self.paused_until, partial(self.when_running, self._go_on))

    def cut_one_way(self, way: str, seconds: float) -> None:
        """It receives nothing for a while and its messages arrive (`UP`), or the reverse (`DOWN`)."""
        name = f"controller c{self.place}"
        what = f"{name} receives nothing" if way == UP else f"messages of {name} do not arrive"
        self.job.note(f"{what} for {seconds:.3f} s")
        self._away(seconds)
        self.route.hold(way, self.job.scheduler.now + seconds)

    def jump(self, seconds: float) -> None:
        """Its clock leaps."""
        self.job.note(f"the clock of controller c{self.place} leaps by {seconds:.3f} s")
        now = self.job.scheduler.now
        level_s = max([now, *(ended_s for _, ended_s in self.leaps)]) - seconds
        self.leaps = [*((began_s, min(ended_s, now)) for began_s, ended_s in self.leaps), (now, max(now, level_s))]
        self.ahead_s += seconds
        self._tick_at = inf
        if not self.gone:
            self._schedule_tick()

    def cut(self, seconds: float) -> None:
        """Nothing reaches it or comes from it for a while, and then all of it."""
        self.job.note(f"controller c{self.place} is cut off for {seconds:.3f} s")
        self._away(seconds)
        self.cut_until = max(self.cut_until, self.job.scheduler.now + seconds)

    def _away(self, seconds: float) -> None:
        """Times of absence that touch each other count as one."""
        self.absences.append((self.job.scheduler.now, self.job.scheduler.now + seconds))
        already = max(self.paused_until, self.cut_until) - self.job.scheduler.now
        self.away_s = max(self.away_s, seconds, self.away_s + seconds if already > 0 else 0.0)
