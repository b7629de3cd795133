"""One simulated job: the real controller machine, the ranks, the network, the disk, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.agents import Agent
from tests.simulation.collectives import Collectives
from tests.simulation.controllers import Controller
from tests.simulation.disk import Disk
from tests.simulation.network import Stream
from tests.simulation.rank import Rank
from tests.simulation.scheduler import Scheduler
from tests.simulation.training import Training
from ttp.controller import events as ev
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
    hang_start_s: float = 1800.0
    boundary_s: float = 0.3


class Job:
    """A whole job under one seed. `happened` is where faults hook in; `broken` notes violated invariants."""

    def __init__(
        self, rng: random.Random, training: Training, times: Times, *, agents: bool, standbys: int = 0
    ) -> None:
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
        self._last_kill_s = 0.0
        self.published_as: dict[tuple[str, str], str] = {}
        self.committed_when_published: list[int] = []
        self.controllers = [Controller(self, place) for place in range(1 + standbys)]
        self.ranks = [Rank(self, rank) for rank in range(training.layout.world_size)]
        for process in self.ranks:
            process.soon(rng.uniform(0.0, 0.1), process.tick)
        hosts = sorted(set(training.layout.hosts)) if agents else []
        self._agents = {host: Agent(self, host) for host in hosts}

    @property
    def controller(self) -> Controller:
        """The newest controller that ranks have come to."""
        return max((c for c in self.controllers if c.place == 0 or not c.idle), key=lambda c: c.place)

    @property
    def story(self) -> list[tuple[float, ev.Journal]]:
        """What all controllers told, in order."""
        return sorted((line for c in self.controllers for line in c.story), key=lambda line: line[0])

    def controller_at(self, address: str) -> Controller:
        return self.controllers[int(address.removeprefix("c"))]

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
        self.committed_when_published.append(max((record.step for record in self.known_records()), default=0))
        directory = self.disk.directories[root, f"iter_{step:07d}"]
        self.published_as[root, f"iter_{step:07d}"] = _content(directory)

    def known_records(self) -> tuple[CommitRecord, ...]:
        steps = sorted(step for name, step in self.collectives.finished if name == "norm")
        return tuple(self.training.record(step) for step in steps)

    # --- streams ---

    def send_up(self, process: Rank, message: Upward) -> None:
        stream = process.stream
        if stream is not None:
            stream.carry("up", lambda m: stream.controller.hear(process.rank, stream, m), message)

    def drop_stream(self, rank: int) -> None:
        """Break a rank's stream; each side notices by itself."""
        stream, process = self.ranks[rank].stream, self.ranks[rank]
        if stream is None or stream.broken:
            return
        stream.broken = True
        process.stream = None
        process.soon(self.rng.uniform(0.001, 0.05), lambda: process.disconnected(stream))
        self._close_seen_later(rank, stream)

    def abandon_stream(self, process: Rank) -> None:
        """A rank gives up its stream; the controller notices when it can."""
        stream, process.stream = process.stream, None
        if stream is not None and not stream.broken:
            stream.broken = True
            self._close_seen_later(process.rank, stream)

    def _close_seen_later(self, rank: int, stream: Stream) -> None:
        moment = max(self.now, stream.controller.cut_until) + self.rng.uniform(0.001, 0.1)
        self.scheduler.at(moment, lambda: stream.controller.close_seen(rank, stream))

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
                self._close_seen_later(process.rank, stream)

            self.scheduler.after(self.rng.uniform(0.004, 0.05), close)
        if self.agents and not quiet:
            agent = self._agents[self.training.layout.hosts[process.rank]]
            rank, pid = process.rank, 100 + process.rank
            delay = self.rng.uniform(0.001, 0.02)
            if self.rng.random() < 0.5:
                early = WorkerExit(rank, pid, "exiting", self.now)
                self.scheduler.after(delay, lambda: agent.tell(early))
                delay += self.rng.uniform(0.01, 0.3)
            exited = WorkerExit(rank, pid, text, self.now)
            self.scheduler.after(delay, lambda: agent.tell(exited))

    def stop(self, rank: int, seconds: float | None) -> None:
        """SIGSTOP; SIGCONT after `seconds` (None: never)."""
        process = self.ranks[rank]
        if not process.alive or process.stopped:
            return
        self.note(f"rank {rank} is stopped for {seconds} s")
        process.stopped = True
        process.was_stopped = True
        process.stopped_for_good = seconds is None
        if seconds is not None:
            self.scheduler.after(seconds, process.resume)

    def controller_killed(self) -> None:
        self._last_kill_s = self.now

    # --- the run ---

    def ended(self) -> bool:
        """Nobody runs any more but standbys that nobody came to: the launchers end those."""
        if all(c.gone for c in self.controllers) and self.now > self._last_kill_s + 3 * self.times.controller_lost_s:
            return True  # who is left hangs in a collective or a gate, and its launcher ends it
        return all(c.gone or c.idle for c in self.controllers) and all(
            not p.alive or p.stopped_for_good for p in self.ranks
        )

    def run(self, until_s: float) -> bool:
        return self.scheduler.run(until_s, self.ended)


def _content(directory: Any) -> str:
    return repr(
        (directory.manifest, sorted((name, file.pieces) for name, file in directory.files.items() if file.durable))
    )
