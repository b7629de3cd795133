"""One simulated job: the real controller machine, the ranks, the network, the disk, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.collectives import Collectives
from tests.simulation.disk import Disk
from tests.simulation.network import Stream
from tests.simulation.rank import Rank
from tests.simulation.scheduler import Scheduler
from tests.simulation.training import Training
from ttp.controller import events as ev
from ttp.controller import machine
from ttp.proto.messages import CommitRecord, Upward, WorkerExit


class Violation(Exception):
    """An invariant of the protocol does not hold."""


@dataclass(frozen=True)
class Times:
    """The simulated job's settings, seconds."""

    heartbeat_s: float = 0.2
    lease_s: float = 0.6
    freeze_timeout_s: float = 0.8
    progress_timeout_s: float = 1.0
    total_timeout_s: float = 20.0
    register_timeout_s: float = 4.0
    orphan_timeout_s: float = 3.0
    controller_lost_s: float = 3.0
    hang_floor_s: float = 60.0
    hang_factor: float = 10.0
    boundary_s: float = 0.3


class Controller:
    """Driver of the controller's machine: one event at a time, a Tick at its deadline; it may be paused."""

    def __init__(self, job: Job) -> None:
        self.job = job
        times = job.times
        settings = ev.ControllerSettings(
            "sim", 1, job.training.layout.world_size, times.heartbeat_s, times.lease_s, times.freeze_timeout_s,
            times.progress_timeout_s, times.total_timeout_s, times.register_timeout_s, times.orphan_timeout_s,
            times.hang_floor_s, times.hang_factor,
        )  # fmt: skip
        self.state = machine.initial(settings, job.now)
        self.streams: dict[int, Stream] = {}
        self.story: list[tuple[float, ev.Journal]] = []
        self.over = ""
        self.paused_until = 0.0
        self._queue: list[ev.Event] = []
        self._tick_at = float("inf")
        self._schedule_tick()

    def take(self, event: ev.Event) -> None:
        if self.over:
            return
        if self.job.now < self.paused_until:
            if not self._queue:
                self.job.scheduler.at(self.paused_until, self._resume)
            self._queue.append(event)
            return
        self.state, effects = machine.transition(self.state, event, self.job.now)
        for effect in effects:
            self._carry_out(effect)
        self._schedule_tick()

    def _resume(self) -> None:
        events, self._queue = self._queue, []
        for event in events:
            self.take(event)

    def _schedule_tick(self) -> None:
        deadline = machine.next_deadline(self.state)
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = deadline
            self.job.scheduler.at(deadline, self._tick)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self.take(ev.Tick())
        if not self.over and self.job.now >= self.paused_until:
            self._schedule_tick()

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(ranks, message):
                self.job.sent_down(message)
                for rank in ranks:
                    if rank in self.streams:
                        process = self.job.ranks[rank]
                        deliver = lambda m, p=process: p.run(lambda: p.receive(m))  # noqa: E731
                        self.streams[rank].carry("down", deliver, message)
            case ev.Journal(event, _):
                self.story.append((self.job.now, effect))
                self.job.happened(event, -1)
            case ev.Finish(reason):
                self.over = reason
                self.job.scheduler.after(0.05, self._close_all)

    def _close_all(self) -> None:
        for rank in sorted(self.streams):
            self.job.drop_stream(rank)


class Job:
    """A whole job under one seed. `happened` is where faults hook in; `broken` notes violated invariants."""

    def __init__(self, rng: random.Random, training: Training, times: Times, *, agents: bool) -> None:
        self.rng, self.training, self.times = rng, training, times
        self.agents = agents
        self.scheduler = Scheduler()
        self.slowest_s = 0.005
        self.roots: tuple[str, ...] = ("/a", "/b")
        self.disk = Disk()
        self.collectives = Collectives(self.scheduler, rng, hang_chance=0.5)
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.hooks: list[tuple[str, int, Callable[[int], None]]] = []
        self.killed: dict[int, float] = {}
        self.thawed_up_to = -1
        self.told_to_leave: set[tuple[tuple[int, ...], int]] = set()
        """(members, step) of the collectives in which somebody said that it was told to leave."""
        self.published_as: dict[tuple[str, str], str] = {}
        self.controller = Controller(self)
        self.ranks = [Rank(self, rank) for rank in range(training.layout.world_size)]
        for process in self.ranks:
            process.soon(rng.uniform(0.0, 0.1), process._tick)

    @property
    def now(self) -> float:
        return self.scheduler.now

    def note(self, text: str) -> None:
        self.notes.append(f"{self.now:9.4f} {text}")

    def broken(self, text: str) -> None:
        self.note(text)
        self.violations.append(text)

    def hook(self, name: str, count: int, action: Callable[[int], None]) -> None:
        """Call `action(rank)` the `count`-th time that `name` happens (from 1)."""
        self.hooks.append((name, count, action))

    def happened(self, name: str, rank: int) -> None:
        due = []
        for index, (wanted, count, action) in enumerate(self.hooks):
            if wanted == name:
                self.hooks[index] = (wanted, count - 1, action)
                if count == 1:
                    due.append(action)
        for action in due:
            action(rank)

    # --- what the checks need to know while it happens ---

    def sent_down(self, message: Any) -> None:
        name = type(message).__name__
        if name == "Thaw":
            self.thawed_up_to = max(self.thawed_up_to, message.freeze_id)

    def update_begins(self, rank: Rank, step: int) -> None:
        if rank.acknowledged > self.thawed_up_to:
            self.broken(f"I7: rank {rank.rank} began update {step} after acknowledging freeze {rank.acknowledged}")

    def renamed(self, root: str, step: int) -> None:
        self.disk.published.append((root, step))
        directory = self.disk.directories[root, f"iter_{step:07d}"]
        self.published_as[root, f"iter_{step:07d}"] = _content(directory)

    def known_records(self) -> tuple[CommitRecord, ...]:
        steps = sorted(step for name, step in self.collectives.finished if name == "norm")
        return tuple(self.training.record(step) for step in steps)

    # --- streams ---

    def send_up(self, process: Rank, message: Upward) -> None:
        if process.stream is not None:
            process.stream.carry("up", lambda m: self.controller.take(ev.Received(m)), message)

    def drop_stream(self, rank: int) -> None:
        """Break a rank's stream; each side notices by itself."""
        stream, process = self.ranks[rank].stream, self.ranks[rank]
        if stream is None or stream.broken:
            return
        stream.broken = True
        process.stream = None
        process.soon(self.rng.uniform(0.001, 0.05), lambda: process.step(_disconnected()))
        self.scheduler.after(self.rng.uniform(0.001, 0.1), lambda: self._close_seen(rank, stream))

    def _close_seen(self, rank: int, stream: Stream) -> None:
        if self.controller.streams.get(rank) is stream:  # a newer stream has not taken its place
            del self.controller.streams[rank]
            self.controller.take(ev.StreamClosed((rank,)))

    # --- faults ---

    def kill(self, rank: int, text: str = "signal SIGKILL", quiet: bool = False) -> None:
        """End a process at once. `quiet`: with its host, so that nobody says a word."""
        process = self.ranks[rank]
        if process.alive:
            self.killed[rank] = self.now
            self.note(f"rank {rank} is killed{' with its host' if quiet else ''}")
            self.process_gone(process, text, quiet)

    def process_gone(self, process: Rank, text: str, quiet: bool = False) -> None:
        process.alive, process.ended = False, text
        left = text.startswith("exit code")
        self.collectives.rank_gone(process.rank, surely=left)
        stream = process.stream
        if stream is not None and not quiet:
            # What a dead process had sent still arrives, as far as its kernel had it: then the close.
            def close() -> None:
                stream.broken = True
                self._close_seen(process.rank, stream)

            self.scheduler.after(self.rng.uniform(0.005, 0.1), close)
        if self.agents and not quiet:
            rank, pid = process.rank, 100 + process.rank
            delay = self.rng.uniform(0.001, 0.02)
            if self.rng.random() < 0.5:
                early = WorkerExit(rank, pid, "exiting", self.now)
                self.scheduler.after(delay, lambda: self.controller.take(ev.Received(early)))
                delay += self.rng.uniform(0.01, 0.3)
            exited = WorkerExit(rank, pid, text, self.now)
            self.scheduler.after(delay, lambda: self.controller.take(ev.Received(exited)))

    def stop(self, rank: int, seconds: float | None) -> None:
        """SIGSTOP; SIGCONT after `seconds` (None: never)."""
        process = self.ranks[rank]
        if not process.alive or process.stopped:
            return
        self.note(f"rank {rank} is stopped for {seconds} s")
        process.stopped = True
        process.was_stopped = True
        if seconds is not None:
            self.scheduler.after(seconds, process.resume)

    def pause_controller(self, seconds: float) -> None:
        self.note(f"the controller is stopped for {seconds} s")
        self.controller.paused_until = max(self.controller.paused_until, self.now + seconds)
        self.scheduler.at(self.controller.paused_until, lambda: self.controller.take(ev.Tick()))

    # --- the run ---

    def ended(self) -> bool:
        return bool(self.controller.over) and all(not p.alive or (p.stopped) for p in self.ranks)

    def run(self, until_s: float) -> bool:
        return self.scheduler.run(until_s, self.ended)


def _disconnected() -> Any:
    from ttp.processor.events import Disconnected

    return Disconnected("stream broke")


def _content(directory: Any) -> str:
    return repr(
        (directory.manifest, sorted((name, file.pieces) for name, file in directory.files.items() if file.durable))
    )
