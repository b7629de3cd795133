"""One simulated job: the real controller machine, the ranks, the network, the disk, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tests.simulation.agents import Agent
from tests.simulation.boundaries import Contribution
from tests.simulation.collectives import Collectives
from tests.simulation.comparing import Comparing
from tests.simulation.controllers import Controller
from tests.simulation.disk import Directory, Disk, Manifest, WrittenPart
from tests.simulation.held import Hold
from tests.simulation.in_place import InPlace
from tests.simulation.network import DOWN, UP, RankStream, Stream
from tests.simulation.on_disk import nothing_on_disk
from tests.simulation.pieces import Key, OwnDisks
from tests.simulation.rank import Rank
from tests.simulation.relays import Relay
from tests.simulation.scheduler import Scheduler
from tests.simulation.settings import OwnDirectories, Times
from tests.simulation.standbys import Standbys
from tests.simulation.training import Training
from tests.simulation.truth import Snapshot
from ttp.controller.core.facts import events as ev
from ttp.controller.core.facts.state import Regrouping, Stage
from ttp.proto.messages import CommitRecord, Thaw, Upward, WorkerExit

if TYPE_CHECKING:
    from tests.simulation.stale import Past

LONGEST_PAUSE_S = 0.25
"""A rank that is silent for so long is neither dead nor late with an answer."""

Content = tuple[Manifest | None, tuple[tuple[str, tuple[WrittenPart, ...]], ...]]
"""What a directory holds: its manifest, and the parts of every file that is durable."""


@dataclass(frozen=True)
class Strike:
    """A fault that acted."""

    kind: str
    where: str
    rank: int
    at_s: float


class Job:
    """A whole job under one seed. `happened` is where faults hook in; `broken` notes violated invariants."""

    def __init__(
        self,
        rng: random.Random,
        training: Training,
        times: Times,
        *,
        agents: bool,
        standbys: int = 0,
        own: OwnDirectories | None = None,
        spares: int = 0,
        relayed: bool = False,
    ) -> None:
        self.rng, self.training, self.times = rng, training, times
        self.agents, self.own = agents, own
        self.scheduler = Scheduler()
        self.slowest_s = 0.005
        self.roots: tuple[str, ...] = ("/a", "/b") if own is None else own.names
        """As the ranks know them."""
        self.nodes = list(training.layout.hosts)
        """By rank, where its process is."""
        self.spares = spares
        """Nodes without ranks, whose agents have room for those of one lost node each."""
        hosts = tuple(f"host{node}" for node in self.nodes)
        self.disk = Disk(self.roots) if own is None else OwnDisks(self.roots, hosts)
        self.relays = {node: Relay(self, node) for node in range(max(self.nodes) + 1 + spares)} if relayed else {}
        """By node: the relay that carries its ranks' streams, whose heartbeats come to a controller together."""
        self.slow = False
        """Some of its work is slow and progresses: no fault, and it holds a dump up."""
        self.calm_until = inf
        """Nothing had gone wrong before."""
        self.collectives = Collectives(self.scheduler, rng, hang_chance=0.5)
        self.in_place = InPlace(self, random.Random(rng.random()) if times.in_place_s else rng)
        self.comparing = Comparing(self)
        self.streams: list[Stream] = []
        """All that ranks have opened."""
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.strikes: list[Strike] = []
        self.everybody = tuple(range(training.layout.world_size))
        self._hooks: dict[str, list[tuple[int, Callable[[int], object]]]] = {}
        self.holds: dict[str, Hold] = {}
        """By step of the work, what holds up the rank that comes to it next."""
        self.holds_of_interpreters: list[tuple[int, float, float]] = []
        """(rank, began, ended) of those that ended."""
        self.killed: dict[int, float] = {}
        self.seen_to_end: set[int] = set()
        """Ranks whose end is not only seen by their silence."""
        self.thawed_up_to = -1
        self.contributed: dict[tuple[tuple[int, ...], int, int], dict[int, Contribution]] = {}
        """By members and step of the spanning collectives, what each rank added to tell how the step ends."""
        self.answers: dict[tuple[str, int], dict[int, Any]] = {}
        """By name and step, what ranks gave each other while they saved a step without a controller."""
        self.saved_alone: dict[int, int] = {}
        """By rank, the step that it saves, or has saved, without a controller."""
        self.must_save = ""
        """A step must be published: by the ranks `alone`, or by `any`."""
        self._last_kill_s = 0.0
        self.published_as: dict[tuple[str, str], Content] = {}
        self.committed_when_published: list[int] = []
        self._journal: list[tuple[float, ev.Journal]] = []
        self.snapshots: list[Snapshot] = []
        """What was true whenever a controller decided or refused."""
        self.excused = False
        """What came of its faults may cost it something: a slow step was as long as a hang when the gates closed."""
        self.refusals: list[str] | None = None
        """What machines have refused, in a job in which a message is sent that the protocol does not have; else it is a violation."""
        self.past: Past | None = None
        """What was said, where stale messages are to come."""
        self.said: list[tuple[Key, frozenset[str]]] = []
        """What controllers announced is published in pieces, and on which hosts it was."""
        self.first_standbys = standbys
        self.last_loss_s = 0.0
        """When a controller was killed last."""
        self.controllers = [Controller(self, place) for place in range(1 + standbys)]
        self.standbys = Standbys(self, standbys)
        self.ranks = [Rank(self, rank) for rank in range(training.layout.world_size)]
        for process in self.ranks:
            process.soon(rng.uniform(0.0, 0.1), process.tick)
        first_spare = max(self.nodes) + 1
        nodes = [*sorted(set(self.nodes)), *range(first_spare, first_spare + spares)]
        self.launchers = {node: Agent(self, node) for node in nodes} if agents else {}

    @property
    def hosts(self) -> list[str]:
        """By rank, the name of the node where its process is."""
        return [f"host{node}" for node in self.nodes]

    @property
    def controller(self) -> Controller:
        """The newest controller that ranks have come to."""
        return max((c for c in self.controllers if c.place == 0 or c.ranks_came), key=lambda c: c.place)

    @property
    def journal(self) -> list[tuple[float, ev.Journal]]:
        """The journals of all controllers, in order."""
        if len(self._journal) != sum(len(c.journal) for c in self.controllers):  # a journal only grows
            self._journal = sorted((line for c in self.controllers for line in c.journal), key=itemgetter(0))
        return self._journal

    def controller_at(self, address: str) -> Controller:
        return self.controllers[int(address.removeprefix("c"))]

    @property
    def now(self) -> float:
        return self.scheduler.now

    def root_of(self, rank: int, directory: str) -> str:
        """Return the directory that a rank sees under this name: where each node has its own, that of its node."""
        return directory if self.own is None else self.hosts[rank] + directory

    def disturb(self) -> None:
        """Something goes wrong, or does not go as usual, from now on."""
        self.calm_until = min(self.calm_until, self.now)

    def note(self, text: str) -> None:
        self.disturb()
        self.notes.append(f"{self.now:9.4f} {text}")

    def broken(self, text: str) -> None:
        self.note(text)
        self.violations.append(text)

    def refused(self, text: str, error: BaseException) -> None:
        """A machine refuses an event. Raises `error` in every job but those in which a message is sent that the protocol does not have."""
        if self.refusals is None:
            raise error
        self.refusals.append(text)

    def hook(self, name: str, count: int, action: Callable[[int], object]) -> None:
        """Call `action(rank)` the `count`-th time that `name` happens (from 1)."""
        self._hooks.setdefault(name, []).append((count, action))

    def happened(self, name: str, rank: int) -> None:
        waiting = self._hooks.get(name)
        if waiting is None:
            return
        self._hooks[name] = [(count - 1, action) for count, action in waiting]
        for count, action in waiting:
            if count == 1:
                action(rank)

    def where(self, rank: int) -> str:
        """Say where the job is: the controller's stage, and while training is on the phase of `rank`; of a silent one, also while the
        others regroup: it may run again until its agent ends it."""
        controller = self.controller
        if controller.dead:
            return "leaderless"
        if controller.over:
            return "over"
        stage = controller.state.stage
        trains = self.in_place.trains_on(rank) if stage is Stage.REGROUPING else self.ranks[rank]
        return trains.phase.name if trains is not None and stage in (Stage.RUNNING, Stage.REGROUPING) else stage.value

    def struck(self, kind: str, rank: int, where: str = "") -> None:
        """Note that a fault acts now, not when it was put in. `where`: if it changes that itself."""
        self.disturb()
        self.strikes.append(Strike(kind, where or self.where(rank), rank, self.now))

    # --- what the checks need to know while it happens ---

    def sent_down(self, message: Any) -> None:
        if type(message) is Thaw:
            self.thawed_up_to = max(self.thawed_up_to, message.freeze_id)

    def update_begins(self, rank: Rank, step: int) -> None:
        self.in_place.update_begins(rank, step)
        nothing_on_disk(rank, f"begins update {step}")
        if rank.acknowledged > self.thawed_up_to:
            self.broken(f"I7: rank {rank.rank} began update {step} after acknowledging freeze {rank.acknowledged}")
        if ("norm", step) not in self.collectives.finished:
            self.broken(
                f"I6: rank {rank.rank} began update {step} although the step's collective had not finished on any rank"
            )

    def committed(self) -> int:
        """Return the newest step whose record anybody has."""
        return max((record.step for record in self.known_records()), default=0)

    def renamed(self, root: str, step: int, process: Rank) -> None:
        """A process publishes a step. One on a node that was given up may publish an older one than those that the job has finished since."""
        self.disk.published.append((root, step))
        self.comparing.publishes(process, step)
        self.committed_when_published.append(step if process in self.in_place.former else self.committed())
        directory = self.disk.directories[root, f"iter_{step:07d}"]
        self.published_as[root, f"iter_{step:07d}"] = content_of(directory)

    def said_published(self, controller: Controller) -> None:
        """A controller announces that a step is published: where each node has its own directories, on the nodes that it takes for
        alive. Of a disk that is just gone it cannot know."""
        if not isinstance(self.disk, OwnDisks):
            return
        members, at = controller.state.members.table, controller.state.at
        ended = at.awaited if isinstance(at, Regrouping) else ()  # counted when it published, and are replaced only now
        believed = {
            host
            for process, host, member in zip(self.ranks, self.hosts, members, strict=True)
            if member.dead is None or (process.rank in ended and process.alive)
        }
        step = int(str(controller.journal[-1][1].fields["step"]))
        attempts = {key: names for key, names in self.disk.lacking(believed).items() if key.step == step}
        whole = [key for key, names in attempts.items() if not names]
        if not whole:
            self.broken(
                f"I1: c{controller.place} said that step {step} is published; missing {attempts or 'everything'}"
            )
        self.said += [(key, self.disk.hosts_of(key)) for key in whole[-1:]]

    def known_records(self) -> tuple[CommitRecord, ...]:
        steps = sorted(step for name, step in self.collectives.finished if name == "norm")
        return tuple(self.training.record(step) for step in steps)

    # --- streams ---

    def send_up(self, process: Rank, message: Upward) -> None:
        stream = process.stream
        if stream is not None:
            stream.carry(UP, stream.controller.receive, message)

    def drop_stream(self, rank: int) -> bool:
        """Break a rank's stream, if it has one; each side notices by itself."""
        stream = self.ranks[rank].stream
        if stream is None or stream.broken:
            return False
        self._break(rank, stream)
        return True

    def reject_stream(self, rank: int, stream: Stream) -> None:
        """The controller ends a stream on which no rank is registered."""
        if self.process_behind(stream).stream is stream:
            self._break(rank, stream)

    def process_behind(self, stream: Stream) -> Rank:
        """Return the process that has opened this stream."""
        return stream.process if isinstance(stream, RankStream) else self.ranks[stream.rank]

    def _break(self, rank: int, stream: Stream) -> None:
        process = self.process_behind(stream)
        if stream.broken:
            return
        self.disturb()
        stream.broken, stream.up = True, False
        seen = max(self.now, stream.held(DOWN)) - self.now
        process.later(seen + self.rng.uniform(0.001, 0.05), partial(process.disconnected, stream))
        self.close_seen_later(rank, stream)

    def abandon_stream(self, stream: Stream) -> None:
        """A rank gives up its stream; the controller notices when it can."""
        if stream.up and not stream.broken:
            stream.broken, stream.up = True, False
            self.close_seen_later(stream.rank, stream)

    def close_seen_later(self, rank: int, stream: Stream) -> None:
        moment = max(self.now, stream.held(UP)) + self.rng.uniform(0.001, 0.1)
        self.scheduler.at(moment, partial(stream.controller.close_seen, rank, stream))

    # --- faults ---

    def kill(self, rank: int, text: str = "signal SIGKILL", quiet: bool = False) -> None:
        """End a process at once. `quiet`: with its host, so that nothing is reported."""
        process = self.ranks[rank]
        if process.alive:
            self.killed[rank] = self.now
            self.note(f"rank {rank} is killed{' with its host' if quiet else ''}")
            self.process_gone(process, text, quiet)
            if self.own is not None:
                self._disk_goes(self.hosts[rank], self.own)

    def _disk_goes(self, host: str, own: OwnDirectories) -> None:
        """When the last rank of a host is killed, its disk may be gone too."""
        on_it = [rank for rank, its in enumerate(self.hosts) if its == host]
        if host in own.fragile and all(rank in self.killed for rank in on_it) and isinstance(self.disk, OwnDisks):
            self.note(f"the disk of {host} is lost")
            self.disk.lost.add(host)

    def process_gone(self, process: Rank, text: str, quiet: bool = False) -> None:
        process.alive, process.ended, process.ended_s = False, text, self.now
        process.handler.running = False
        self.disturb()
        self.scheduler.look = True
        if not any(rank.alive for rank in self.ranks):
            self.scheduler.after(1.0, self.in_place.end_former)
        left = text.startswith("exit code")
        self.collectives.rank_gone(process.rank, left, process.generation)
        stream = process.stream
        if stream is not None and not quiet:
            # What a dead process had sent still arrives, as far as its kernel had it: then the close.
            def close() -> None:
                stream.broken = True
                self.close_seen_later(process.rank, stream)

            self.scheduler.after(self.rng.uniform(0.004, 0.05), close)
        if not quiet:
            self.seen_to_end.add(process.rank)
        if self.agents and not quiet:
            agent = self.launchers[process.node]
            rank, pid = process.rank, process.pid
            delay = self.rng.uniform(0.001, 0.02)
            if self.rng.random() < 0.5:
                early = WorkerExit(rank, pid, "exiting", self.now)
                self.scheduler.after(delay, lambda: agent.tell(early))
                delay += self.rng.uniform(0.01, 0.3)
            exited = WorkerExit(rank, pid, text, self.now)
            self.scheduler.after(delay, lambda: agent.tell(exited))
            self.scheduler.after(delay, partial(agent.replacements.ended, process))

    def replace(self, rank: int, freeze_id: int, address: str) -> Rank:
        """Another process takes a rank's place, and comes to the controller at `address`."""
        old = self.ranks[rank]
        self.in_place.former.append(old)
        self.ranks[rank] = new = Rank(self, rank, freeze_id, old, address)
        new.rehearsal.begin_anew(old.rehearsal.steps)
        self.launchers[new.node].replaced(new)
        self.scheduler.look = True
        new.soon(self.rng.uniform(0.001, 0.02), new.tick)
        return new

    def stop(self, rank: int, seconds: float | None) -> None:
        """SIGSTOP; SIGCONT after `seconds` (None: never)."""
        process = self.ranks[rank]
        if not process.alive or process.stopped:
            return
        self.note(f"rank {rank} is stopped for {seconds} s")
        process.stopped = True
        process.was_stopped |= seconds is None or seconds > LONGEST_PAUSE_S
        process.stopped_for_good = seconds is None
        process.still_s = self.now
        self.scheduler.look = True
        if seconds is not None:
            self.scheduler.after(seconds, process.resume)

    def hog(self, rank: int, seconds: float | None) -> bool:
        """The training thread holds the interpreter for `seconds`; None: for good, and makes no progress itself."""
        process = self.ranks[rank]
        if seconds is None:
            able = process.alive and not process.stopped
            self.stop(rank, None)
            process.held_for_good |= able
            return able
        if not process.alive or process.hogged:
            return False
        self.note(f"rank {rank}'s training thread holds the interpreter for {seconds:.3f} s")
        process.hogged = True
        self.holds_of_interpreters.append((rank, self.now, self.now + seconds))
        process.was_stopped |= seconds > LONGEST_PAUSE_S
        self.scheduler.after(seconds, partial(process.run, process.let_go))
        return True

    def lose_agent(self, host: int) -> bool:
        """The launcher of a host ends; False when there is none any more."""
        agent = self.launchers.get(host)
        if agent is None or agent.lost:
            return False
        agent.leave(self.rng.uniform(0.001, 0.05))
        if (relay := self.relays.get(host)) is not None:
            relay.ends()
        return True

    def controller_gone(self, killed: bool) -> None:
        """A controller was killed, or its work is over."""
        self.scheduler.look = True
        if killed:
            self._last_kill_s = self.last_loss_s = self.now
        self.scheduler.after(3.001 * self.times.controller_lost_s, partial(setattr, self.scheduler, "look", True))

    def leave_behind(self, rank: int) -> bool:
        """A rank loses its stream and opens another; what is under way on the old one still arrives, late."""
        process = self.ranks[rank]
        stream = process.stream
        if stream is None or stream.broken:
            return False
        self.disturb()
        stream.losing, stream.up = True, False
        late_s = self.rng.uniform(0.02, 0.15)
        stream.hold(late_s)
        process.later(self.rng.uniform(0.001, 0.02), lambda: process.disconnected(stream))

        def end() -> None:
            stream.broken = True
            self.close_seen_later(rank, stream)

        self.scheduler.after(late_s + 0.001, end)
        return True

    def lose_tail(self, rank: int, seconds: float) -> bool:
        """Whatever is sent on a rank's stream from now on is lost, and after `seconds` the stream breaks."""
        stream = self.ranks[rank].stream
        if stream is None or stream.broken:
            return False
        self.disturb()
        stream.losing = True
        self.scheduler.after(seconds, partial(self._break, rank, stream))
        return True

    # --- the run ---

    def ended(self) -> bool:
        """Nothing runs any more but standbys without ranks: the agents end those."""
        if (
            self.now > self._last_kill_s + 3 * self.times.controller_lost_s
            and all(c.gone for c in self._within_reach())
            and not self.saving()
        ):
            return True  # the ranks that remain hang in a collective or a gate, and their agent ends them
        return all(c.gone or c.idle for c in self.controllers) and all(
            not p.alive or p.stopped_for_good for p in self.ranks
        )

    def saving(self) -> list[int]:
        """Return the ranks that run and save a step without a controller."""
        return [r.rank for r in self.ranks if r.boundary.saving and r.alive and not (r.stopped_for_good or r.hogged)]

    def _within_reach(self) -> set[Controller]:
        """Return the controllers that some living rank knows of, all where none lives: of a standby that began while a rank was
        stopped it may not know."""
        addresses = {address for rank in self.ranks if rank.alive for address in ("c0", *rank.state.successors)}
        return {self.controller_at(address) for address in sorted(addresses)} or set(self.controllers)

    def run(self, until_s: float) -> bool:
        return self.scheduler.run(until_s, self.ended)

    def dismantle(self) -> None:
        """Take the job apart when all is known about it: it is made of cycles, which the collector would have to find."""
        ranks = (*self.ranks, *self.in_place.former)
        of_ranks = [part for rank in ranks for part in (rank.replica, rank.handler, rank.work, rank)]
        for part in (
            *of_ranks,
            *self.streams,
            *(controller.handler for controller in self.controllers),
            *self.controllers,
            *self.launchers.values(),
            self.collectives,
            self.in_place,
            self.scheduler,
            self.standbys,
            self,
        ):
            part.__dict__.clear()


def content_of(directory: Directory) -> Content:
    """Return what of a simulated directory outlives a crash, to compare."""
    durable = ((name, file.parts) for name, file in directory.files.items() if file.durable)
    return directory.manifest, tuple(sorted(durable))
