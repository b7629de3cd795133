"""Every kind of fault that a simulated job may meet, by name, and what it does.

A kind either acts at once, or lies in wait and acts when the job comes to it (a full disk harms no rank before one
writes). The job's `strikes` say which kind acted where: an immediate one is noted here, one that waits where it bites.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tests.simulation.controllers import Controller
from tests.simulation.job import LONGEST_PAUSE_S, Job
from tests.simulation.network import DOWN, UP
from tests.simulation.stale import stale_message
from ttp.controller.core.facts.pace import ENOUGH
from ttp.proto.messages import CauseKind

Act = Callable[[Job, random.Random, int], bool]
"""Do it to this rank or where it concerns it; False: there was nothing to do it to."""

LEARNING_STEPS = 4 * ENOUGH
"""Steps after which a simulated job has learned its own pace."""


@dataclass(frozen=True)
class Kind:
    """`harmless`: may cost no more than a pause. `waits`: noted when it bites, not when it is put in."""

    name: str
    act: Act
    harmless: bool = False
    waits: bool = False

    def inject(self, job: Job, rng: random.Random, rank: int) -> None:
        where = job.where(rank)
        if self.act(job, rng, rank) and not self.waits:
            job.struck(self.name, rank, where)


# --- ranks that end ---


def kill(job: Job, rng: random.Random, rank: int) -> bool:
    alive = job.ranks[rank].alive
    job.kill(rank)
    return alive


def _kill_several(job: Job, rng: random.Random, rank: int) -> bool:
    living = [other.rank for other in job.ranks if other.alive]
    if len(living) < 2:
        return False
    for other in rng.sample(living, rng.randint(2, len(living))):
        job.kill(other)
    return True


def _kill_replicas(job: Job, rng: random.Random, rank: int) -> bool:
    """Every holder of one of the rank's shard groups."""
    group = rng.choice(job.training.groups_of(rank))
    holders = job.training.layout.holders[int(group[1:])]
    alive = any(job.ranks[other].alive for other in holders)
    for other in holders:
        job.kill(other)
    return alive


def _kill_host(job: Job, rng: random.Random, rank: int) -> bool:
    hosts = job.nodes
    on_it = [other for other in range(len(hosts)) if hosts[other] == hosts[rank]]
    alive = any(job.ranks[other].alive for other in on_it)
    for other in on_it:
        job.kill(other, quiet=True)
    if (agent := job.launchers.get(hosts[rank])) is not None:
        agent.lost = True  # it says nothing more, and its stream stays open
    return alive


def _kill_writer(job: Job, rng: random.Random, rank: int) -> bool:
    """A rank that is in the middle of a file."""
    writers = [other.rank for other in job.ranks if other.alive and other.work.writing]
    if writers:
        job.kill(rank if rank in writers else rng.choice(writers))
    return bool(writers)


def _kill_publisher(before: str, moment: str) -> Act:
    """Whoever publishes next dies right at this moment, between two of its steps; this rank now, if it stands there."""

    def act(job: Job, rng: random.Random, rank: int) -> bool:
        def strike(publisher: int) -> None:
            job.struck(f"publisher killed before the {before}", publisher)
            job.kill(publisher)

        work = job.ranks[rank].work
        if job.ranks[rank].alive and work.publishing and work.before == before:
            strike(rank)
        else:
            job.hook(moment, 1, strike)
        return True

    return act


def _raise(job: Job, rng: random.Random, rank: int) -> bool:
    return _fault(job, rank, CauseKind.EXCEPTION, "ValueError: bad batch")


def _peer_error(job: Job, rng: random.Random, rank: int) -> bool:
    return _fault(job, rank, CauseKind.PEER_ERROR, "connection closed by peer")


def _fault(job: Job, rank: int, kind: CauseKind, text: str) -> bool:
    process = job.ranks[rank]
    able = process.alive and not process.main_raised
    process.run(lambda: process.fault(kind, text))
    return able


def _preempt(job: Job, rng: random.Random, rank: int) -> bool:
    process = job.ranks[rank]
    process.run_beside(process.notice)
    return process.alive


def _lose_agent(job: Job, rng: random.Random, rank: int) -> bool:
    """The agent of a host is gone: no process sees its ranks end any more, and they report that."""
    node = job.ranks[rank].node
    if not job.lose_agent(node):
        return False
    for process in (*job.ranks, *job.in_place.former):
        if process.node == node:
            process.lose_launcher()
    return True


# --- ranks that stand still ---


def _stop(*seconds: float | None) -> Act:
    """SIGSTOP, and SIGCONT after one of these (None: never)."""

    def act(job: Job, rng: random.Random, rank: int) -> bool:
        able = job.ranks[rank].alive and not job.ranks[rank].stopped
        job.stop(rank, rng.choice(seconds))
        return able

    return act


def _stop_briefly(job: Job, rng: random.Random, rank: int) -> bool:
    able = job.ranks[rank].alive and not job.ranks[rank].stopped
    job.stop(rank, rng.uniform(0.01, 0.25))
    return able


def _hog(job: Job, rng: random.Random, rank: int) -> bool:
    return job.hog(rank, rng.choice((0.1, 0.5, 1.0, 2.0, None)))


def _hog_briefly(job: Job, rng: random.Random, rank: int) -> bool:
    return job.hog(rank, rng.uniform(0.01, 0.25))


def _hang_compute(job: Job, rng: random.Random, rank: int) -> bool:
    process = job.ranks[rank]
    job.note(f"rank {rank} will hang in its next computation")
    process.slow_compute[process.gate.step + 1] = inf
    _fail_another(job, rng, rank)
    return True


def _hang_update(job: Job, rng: random.Random, rank: int) -> bool:
    process = job.ranks[rank]
    job.note(f"rank {rank} will hang in an update")
    process.hang_update_at = 1
    _fail_another(job, rng, rank)
    return True


def _fail_another(job: Job, rng: random.Random, rank: int) -> None:
    """Where a hang is not seen, because none is looked for or the job's pace is not known yet, another rank dies a little later."""
    watched = job.times.hang_floor_s < 10 and job.ranks[rank].gate.step > LEARNING_STEPS
    if watched and rng.random() < 0.8:
        return
    victim = rng.choice([other for other in range(job.training.layout.world_size) if other != rank])
    job.scheduler.after(rng.uniform(0.1, 0.2), lambda: job.kill(victim))


def _slow_down(job: Job, rng: random.Random, rank: int) -> bool:
    """A few steps take many times as long as the others; that does not count as a fault."""
    process = job.ranks[rank]
    for step in range(process.gate.step + 1, process.gate.step + rng.randint(2, 4)):
        process.slow_compute[step] = rng.uniform(0.05, 0.4)
    return True


def _break_roll(job: Job, rng: random.Random, rank: int) -> bool:
    job.note(f"rank {rank} will fail to roll forward")
    job.ranks[rank].break_roll = True
    return True


def _hang_work(job: Job, rng: random.Random, rank: int) -> bool:
    job.note(f"rank {rank}'s next order will never be done")
    job.ranks[rank].hang_work = True
    return True


# --- clocks ---


def _jump(low_s: float, high_s: float) -> Act:
    def act(job: Job, rng: random.Random, rank: int) -> bool:
        process, seconds = job.ranks[rank], rng.uniform(low_s, high_s)
        job.note(f"the clock of rank {rank} leaps by {seconds:.3f} s")
        process.was_stopped = True
        process.jump(seconds)
        return process.alive

    return act


def _jump_controller(low_s: float, high_s: float) -> Act:
    def act(job: Job, rng: random.Random, rank: int) -> bool:
        controller = _controller(job)
        controller.jump(rng.uniform(low_s, high_s))
        return not controller.gone

    return act


# --- the network ---


def _break_stream(job: Job, rng: random.Random, rank: int) -> bool:
    job.note(f"rank {rank}'s stream breaks")
    return job.drop_stream(rank)


def _break_all_streams(job: Job, rng: random.Random, rank: int) -> bool:
    job.note("all streams break")
    return any([job.drop_stream(other) for other in range(job.training.layout.world_size)])


def _lose_messages(job: Job, rng: random.Random, rank: int) -> bool:
    job.note(f"what is said on rank {rank}'s stream is lost until it breaks")
    return job.lose_tail(rank, rng.uniform(0.005, 0.3))


def _reorder(job: Job, rng: random.Random, rank: int) -> bool:
    job.note(f"rank {rank} opens another stream, and the old one's messages come late")
    return job.leave_behind(rank)


def _repeat(job: Job, rng: random.Random, rank: int) -> bool:
    """Everything on the rank's streams arrives twice, and the stream may break between."""
    process = job.ranks[rank]
    job.note(f"rank {rank}'s messages come twice")
    process.route.twice_until = job.now + rng.uniform(0.1, 2.0)
    if rng.random() < 0.5:
        job.drop_stream(rank)
    return process.alive


def _hold_stream(low_s: float, high_s: float) -> Act:
    def act(job: Job, rng: random.Random, rank: int) -> bool:
        stream = job.ranks[rank].stream
        if stream is None or stream.broken:
            return False
        job.note(f"rank {rank}'s stream stands still")
        job.ranks[rank].was_stopped |= high_s > LONGEST_PAUSE_S
        stream.hold(rng.uniform(low_s, high_s))
        return True

    return act


def _slow_network(job: Job, rng: random.Random, rank: int) -> bool:
    job.note(f"rank {rank}'s messages take long from now on")
    job.ranks[rank].route.slowest_s = rng.uniform(0.05, 0.1)
    return job.ranks[rank].alive


def _partition(way: str, low_s: float, high_s: float) -> Act:
    """One way only: what goes the other way still arrives."""

    def act(job: Job, rng: random.Random, rank: int) -> bool:
        process, seconds = job.ranks[rank], rng.uniform(low_s, high_s)
        what = f"messages of rank {rank} do not arrive" if way == UP else f"rank {rank} receives nothing"
        job.note(f"{what} for {seconds:.3f} s")
        process.was_stopped |= high_s > LONGEST_PAUSE_S
        process.route.hold(way, job.now + seconds)
        return process.alive

    return act


def _stale(job: Job, rng: random.Random, rank: int) -> bool:
    return stale_message(job, rng, rank)


# --- controllers ---


def _controller(job: Job) -> Controller:
    """Return the active controller; while there is none, the one that comes next."""
    behind = [c for c in job.controllers if c.place >= job.controller.place and not c.gone]
    return behind[0] if behind else job.controller


def _absence(rng: random.Random) -> float:
    return rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, 1.5), rng.uniform(1.0, 6.0)))


def _pause_controller(job: Job, rng: random.Random, rank: int) -> bool:
    controller = _controller(job)
    controller.pause(_absence(rng))
    return not controller.gone


def _cut_controller(job: Job, rng: random.Random, rank: int) -> bool:
    controller = _controller(job)
    controller.cut(_absence(rng))
    return not controller.gone


def _cut_controller_one_way(way: str) -> Act:
    def act(job: Job, rng: random.Random, rank: int) -> bool:
        controller = _controller(job)
        controller.cut_one_way(way, rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, 2.5))))
        return not controller.gone

    return act


def _kill_controller(job: Job, rng: random.Random, rank: int) -> bool:
    """The active one mostly, or any."""
    controller = _controller(job) if rng.random() < 0.75 else rng.choice(job.controllers)
    able = not controller.gone
    controller.kill()
    return able


def _kill_rank_and_controller(job: Job, rng: random.Random, rank: int) -> bool:
    controller = _controller(job)
    able = not controller.gone and job.ranks[rank].alive
    controller.kill()
    job.kill(rank)
    return able


# --- disks ---


def _fill_disk(job: Job, rng: random.Random, rank: int) -> bool:
    root = job.root_of(rank, rng.choice((*job.roots[:1] * 3, *job.roots)))
    job.note(f"{root} is full")
    job.disk.full.add(root)
    return True


def _spoil(what: str) -> Act:
    """From now on one directory, the first one mostly, fails this rank."""

    def act(job: Job, rng: random.Random, rank: int) -> bool:
        root = job.root_of(rank, rng.choice((*job.roots[:1] * 3, *job.roots)))
        job.note(f"{root}: {what} for rank {rank}")
        where = {"errors": job.disk.broken_for, "torn": job.disk.tearing, "unsynced": job.disk.unsynced}
        where[what].add((rank, root))
        return True

    return act


_LIST = (
    Kind("kill", kill),
    Kind("several kills", _kill_several),
    Kind("all replicas killed", _kill_replicas),
    Kind("host loss", _kill_host),
    Kind("writer kill", _kill_writer),
    Kind("publisher killed before the manifest", _kill_publisher("manifest", "publishing"), waits=True),
    Kind("publisher killed before the rename", _kill_publisher("rename", "manifest written"), waits=True),
    Kind("publisher killed before the tracker", _kill_publisher("tracker", "renamed"), waits=True),
    Kind("exception", _raise),
    Kind("peer error", _peer_error),
    Kind("preemption", _preempt),
    Kind("launcher loss", _lose_agent),
    Kind("stop", _stop(0.1, 0.5, 1.0, 2.0, None)),
    Kind("brief stop", _stop_briefly, harmless=True),
    Kind("interpreter held", _hog),
    Kind("interpreter held briefly", _hog_briefly, harmless=True),
    Kind("hang in compute", _hang_compute, waits=True),
    Kind("hang in update", _hang_update, waits=True),
    Kind("slow rank", _slow_down, harmless=True, waits=True),
    Kind("failing roll-forward", _break_roll, waits=True),
    Kind("hanging work", _hang_work, waits=True),
    Kind("clock leaps ahead", _jump(0.2, 5.0)),
    Kind("clock leaps back", _jump(-2.0, -0.2)),
    Kind("controller's clock leaps ahead", _jump_controller(0.2, 5.0)),
    Kind("controller's clock leaps back", _jump_controller(-2.0, -0.2)),
    Kind("stream break", _break_stream, harmless=True),
    Kind("break of all streams", _break_all_streams, harmless=True),
    Kind("message loss", _lose_messages),
    Kind("duplication", _repeat, harmless=True),
    Kind("reordering", _reorder, harmless=True),
    Kind("stream pause", _hold_stream(0.2, 1.5)),
    Kind("brief stream pause", _hold_stream(0.01, 0.2), harmless=True),
    Kind("slow network", _slow_network),
    Kind("rank receives nothing", _partition(DOWN, 0.1, 3.0)),
    Kind("rank's messages do not arrive", _partition(UP, 0.1, 3.0)),
    Kind("stale message", _stale, harmless=True),
    Kind("full disk", _fill_disk, waits=True),
    Kind("rank's disk", _spoil("errors"), waits=True),
    Kind("torn write", _spoil("torn"), waits=True),
    Kind("failed fsync", _spoil("unsynced"), waits=True),
    Kind("controller pause", _pause_controller, harmless=True),
    Kind("controller kill", _kill_controller, harmless=True),
    Kind("controller cut", _cut_controller, harmless=True),
    Kind("controller receives nothing", _cut_controller_one_way(UP)),
    Kind("controller's messages do not arrive", _cut_controller_one_way(DOWN)),
    Kind("rank and controller kill", _kill_rank_and_controller),
    Kind("publisher killed before the answer", _kill_publisher("answer", "tracker replaced"), waits=True),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _LIST}
HARMLESS = tuple(kind.name for kind in _LIST if kind.harmless and not kind.waits)
HIDDEN = (
    "failing roll-forward",
    "hanging work",
    "full disk",
    "rank's disk",
    "rank's disk",
    "torn write",
    "failed fsync",
)
"""Troubles that are there from the start and show in the dump."""
OF_WORK = (*HIDDEN, "writer kill", *(name for name in KINDS if name.startswith("publisher killed")))
"""Kinds that act on a rank that carries out an order."""
OF_STREAMS = (
    "stream break", "break of all streams", "message loss", "reordering", "stream pause", "brief stream pause", "stale message",
)  # fmt: skip
OF_CONTROLLERS = (
    "controller kill", "controller kill", "controller pause", "controller cut", "controller receives nothing",
    "controller's messages do not arrive", "controller's clock leaps ahead",
)  # fmt: skip
ANY = (*("kill",) * 8, *("exception", "host loss", "stop", "hang in update", "several kills") * 2, *KINDS)
"""To choose from: what is likely stands here several times."""
EMERGENCY = ("kill", "kill", "kill", "exception", "host loss", "stop", "preemption", "hang in update", "hang in update")
"""Faults that a dump begins with."""
