"""The controllers of a simulated job: the real machine, its driver, and what may befall their processes and their network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from tests.simulation.network import BEAT, DOWN, UP, Route, Stream
from tests.simulation.truth import Snapshot
from ttp.controller import events as ev
from ttp.controller import machine
from ttp.controller.state import Stage
from ttp.proto.messages import Downward, Heartbeat, Registration, Upward

if TYPE_CHECKING:
    from tests.simulation.job import Job


_STANDBY = Stage.STANDBY  # found faster than an attribute of an enumeration

TOGETHER_S = 0.02
"""Heartbeats that come within so short a time are relayed in one envelope."""

ROUNDING_S = 1e-6
"""A clock that is ahead is read a little late, so that a deadline has passed then for certain."""


class Controller:
    """Driver of one controller's machine: one event at a time, a Tick at its deadline. `place` 0 begins as the active one,
    i is the i-th standby. It may be killed, stopped for a while, or cut off from everybody for a while."""

    def __init__(self, job: Job, place: int) -> None:
        self.job, self.place, self.term = job, place, 1 + place
        times = job.times
        settings = ev.ControllerSettings(
            "sim", self.term, job.training.layout.world_size, times.heartbeat_s, times.lease_s, times.vouched_lease_s,
            times.freeze_timeout_s, times.progress_timeout_s, times.total_timeout_s, times.register_timeout_s,
            times.orphan_timeout_s, times.hang_floor_s, times.hang_floor_s, times.hang_factor, place, f"c{place}",
            times.hang_start_s, job.first_standbys, times.standby_start_s, job.own is not None,
        )  # fmt: skip
        self.ahead_s = 0.0
        """Its clock against the job's."""
        self.route = Route()
        self.state = machine.initial(settings, job.now)
        self.streams: dict[int, Stream] = {}
        self.story: list[tuple[float, ev.Journal]] = []
        self.over = ""
        self.dead = False
        self.paused_until = 0.0
        self.cut_until = 0.0
        self.ranks_came = False
        """A rank has registered here, ever."""
        self.absences: list[tuple[float, float]] = []
        """When it was away: began, ended."""
        self.leaps: list[float] = []
        """When its clock leapt."""
        self.away_s = 0.0
        """Longest time for which it was stopped or cut off."""
        self._queue: list[Callable[[], None]] = []
        self._stage = self.state.stage
        self._tick_at = inf
        """When the next tick comes."""
        self._deadline: float | None = None
        """When the machine asked to be called last."""
        self._beating = False
        self._beats: dict[str, list[Heartbeat]] = {}
        """By host, those that have come and wait for the others."""
        self._schedule_tick()

    @property
    def gone(self) -> bool:
        """Nobody listens at its address."""
        return self.dead or bool(self.over)

    @property
    def idle(self) -> bool:
        """A standby that nobody has come to."""
        return self.state.stage is _STANDBY

    @property
    def heard(self) -> bool:
        """It says something to those that are attached."""
        if self.dead or self.over or self.idle:
            return False
        now = self.job.scheduler.now
        return now >= self.paused_until and now >= self.cut_until and now >= self.route.held_until[DOWN]

    @property
    def place_in_job(self) -> str:
        """What it is doing, in a word, killed or not."""
        return "dead" if self.dead else "over" if self.over else self.state.stage.value

    # --- what comes in ---

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

    def hear(self, stream: Stream, message: Upward) -> None:
        """A rank speaks on the stream on which it registered last, and on no other."""
        if self.dead or self.over or self.job.scheduler.now < self.paused_until:
            self.when_running(lambda: self._hear(stream, message))
        else:
            self._hear(stream, message)

    def _hear(self, stream: Stream, message: Upward) -> None:
        rank = stream.rank
        if isinstance(message, Registration):
            self.streams[rank], self.ranks_came = stream, True
        if rank not in self.streams:  # it speaks before it registered: its older stream came late, and has ended since
            self.job.reject_stream(rank, stream)
        elif self.streams[rank] is not stream:
            return
        elif self.job.beats_relayed:
            self._hear_in_envelope(self.job.hosts[rank], message)
        else:
            self._take(ev.Received(message))

    def _hear_in_envelope(self, host: str, message: Upward) -> None:
        """Heartbeats of a host that come about together are one event; whatever else is said comes in order."""
        beats = self._beats.setdefault(host, [])
        if not isinstance(message, Heartbeat):
            self._hear_beats(host)
            self._take(ev.Received(message))
            return
        if not beats:
            again = partial(self.when_running, partial(self._hear_beats, host))
            self.job.scheduler.after(TOGETHER_S, again)
        beats.append(message)

    def _hear_beats(self, host: str) -> None:
        beats, self._beats[host] = self._beats.get(host, []), []
        if beats:
            self._take(ev.Received(beats[0]) if len(beats) == 1 else ev.Beats(tuple(beats)))

    def close_seen(self, rank: int, stream: Stream) -> None:
        """A stream has ended; a newer one may have taken its place."""

        def close() -> None:
            self._hear_beats(self.job.hosts[rank])
            if self.streams.get(rank) is stream:
                del self.streams[rank]
                self._take(ev.StreamClosed((rank,)))

        self.when_running(close)

    def take(self, event: ev.Event) -> None:
        self.when_running(lambda: self._take(event))

    def _take(self, event: ev.Event) -> None:
        self.state, effects = machine.transition(self.state, event, self.job.scheduler.now + self.ahead_s)
        for effect in effects:
            self._carry_out(effect)
        self._schedule_tick()
        if self.state.stage is not self._stage:
            self._stage = self.state.stage
            self.job.happened(f"stage {self._stage.value}", -1)
        if not (self._beating or self.idle or self.gone):
            self._beating = True
            self._beat()

    def _resume(self) -> None:
        calls, self._queue = self._queue, []
        for call in calls:
            self.when_running(call)

    def _schedule_tick(self) -> None:
        deadline = self._deadline = machine.next_deadline(self.state)
        if deadline is not None and deadline < self._tick_at:
            self._tick_by(deadline)

    def _tick_by(self, deadline: float) -> None:
        self._tick_at = deadline
        due = deadline if self.ahead_s == 0.0 else deadline - self.ahead_s + ROUNDING_S
        self.job.scheduler.at(due, partial(self._tick, deadline))

    def _tick(self, asked_for: float) -> None:
        if asked_for != self._tick_at:
            return  # the machine has asked for an earlier one since
        self._tick_at = inf
        deadline = self._deadline
        if deadline is not None and deadline > asked_for:
            self._tick_by(deadline)  # something has happened since
        else:
            self.take(ev.Tick())

    # --- what goes out ---

    def _beat(self) -> None:
        if self.gone:
            return
        if self.job.scheduler.now >= self.paused_until:
            for rank in sorted(self.streams):
                self._send(rank, BEAT)
        self.job.scheduler.after(self.job.times.heartbeat_s, self._beat)

    def _send(self, rank: int, message: Downward) -> None:
        self.streams[rank].carry(DOWN, self.job.ranks[rank].take_in, message)

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(ranks, message):
                self.job.sent_down(message)
                for rank in ranks:
                    if rank in self.streams:
                        self._send(rank, message)
            case ev.Journal(event, _):
                self.story.append((self.job.scheduler.now, effect))
                self.job.happened(event, -1)
                if event == "published":
                    self.job.said_published(self)
                elif event in ("decided", "refused"):
                    self.job.snapshots.append(Snapshot.of(self.job, event))
            case ev.Tell(hosts, message):
                self.job.tell_launchers(self, hosts, message)
            case ev.Supersede(addresses):
                for address in addresses:
                    self._supersede(self.job.controller_at(address))
            case ev.Finish(reason):
                self.over = reason
                self.job.controller_gone(killed=False)
                self.job.scheduler.after(max(0.05, 1.01 * self.job.slowest_s), self.close_all)  # what was said arrives

    def _supersede(self, older: Controller) -> None:
        """The request reaches it once it runs and the network carries it."""

        def end() -> None:
            older.over = f"superseded by c{self.place}"
            self.job.controller_gone(killed=False)
            older.close_all()

        held = max(older.cut_until, self.cut_until, older.route.held_until[UP])
        moment = max(self.job.scheduler.now, held) + self.job.rng.uniform(0.001, self.job.slowest_s)
        self.job.scheduler.at(moment, lambda: older.when_running(end))

    def close_all(self) -> None:
        """All its streams end, those that nobody registered on yet included."""
        self.streams.clear()
        for process in self.job.ranks:
            if process.stream is not None and process.stream.controller is self:
                self.job.drop_stream(process.rank)

    # --- what befalls it ---

    def kill(self) -> None:
        if not self.gone:
            self.job.note(f"controller c{self.place} is killed in {self.state.stage.value}")
            self.dead = True
            self.job.controller_gone(killed=True)
            self.job.standbys.ended(self)
            self.close_all()
            self.job.happened("controller killed", -1)

    def pause(self, seconds: float) -> None:
        self.job.note(f"controller c{self.place} is stopped for {seconds:.3f} s")
        self._away(seconds)
        self.paused_until = max(self.paused_until, self.job.scheduler.now + seconds)
        self.job.scheduler.at(self.paused_until, lambda: self.take(ev.Tick()))

    def cut_one_way(self, way: str, seconds: float) -> None:
        """It hears nobody for a while and is heard (`UP`), or the reverse (`DOWN`)."""
        self.job.note(
            f"controller c{self.place} {'hears nobody' if way == UP else 'is heard by nobody'} for {seconds:.3f} s"
        )
        self._away(seconds)
        self.route.hold(way, self.job.scheduler.now + seconds)

    def jump(self, seconds: float) -> None:
        """Its clock leaps."""
        self.job.note(f"the clock of controller c{self.place} leaps by {seconds:.3f} s")
        self.leaps.append(self.job.scheduler.now)
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
