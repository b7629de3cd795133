"""From a seed to a job and what goes wrong in it. One seed is one job, always."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.job import Job, Times
from tests.simulation.training import LAYOUTS, Layout, Training
from ttp.proto.messages import CauseKind

_DUMP_MOMENTS = (
    "suspect", "death_seen", "freeze_sent", "got Freeze", "frozen", "decided", "rolling", "got RollForward", "rolled_forward",
    "write_sent", "got WriteOrder", "writing", "written", "publish_sent", "publishing", "manifest written", "renamed",
    "published", "thawed", "got Thaw", "exit_sent", "got Exit", "replanned", "takeover_began", "got Welcome", "took_over",
)  # fmt: skip


@dataclass
class Scenario:
    """A job with its faults hooked in. `harmless`: nothing in it may cost more than a pause."""

    seed: int
    job: Job
    harmless: bool = True
    faults: list[str] = field(default_factory=list)


def build(seed: int, layout: Layout | None = None, faults: bool = True, steps: int = 0) -> Scenario:
    """Return the scenario of a seed; `layout` and `steps` override the seed's choice. Without `faults`, a test adds its own."""
    rng = random.Random(seed)
    chosen = rng.choice(LAYOUTS)
    training = Training(layout or chosen, steps=steps or rng.randint(2, 7), local_copy=rng.random() < 0.2)
    job = Job(rng, training, Times(), agents=rng.random() < 0.8, standbys=rng.choice((0, 1, 1, 2, 2)))
    job.slowest_s = rng.choice((0.001, 0.005, 0.05))
    scenario = Scenario(seed, job)
    if not faults:
        return scenario
    shape = rng.random()
    if shape < 0.15:
        for _ in range(rng.randint(1, 4)):
            _add(scenario, rng, rng.choice(_HARMLESS))
    elif shape < 0.45:
        for _ in range(rng.randint(0, 4)):
            _add(scenario, rng, rng.choice(_ALL))
    else:
        _add_chain(scenario, rng)
    return scenario


def _add_chain(scenario: Scenario, rng: random.Random) -> None:
    """A fault late enough that there is something to save, on a job with hidden troubles, and more during the dump."""
    job = scenario.job
    world_size = job.training.layout.world_size
    scenario.harmless = False
    for kind in rng.sample(_HIDDEN, rng.choice((0, 0, 1, 2))):
        rank = rng.randrange(world_size)
        scenario.faults.append(f"{kind} of rank {rank} from the start")
        _ACTIONS[kind](job, rng, rank)
    moment = f"{rng.choice(('READY', 'UPDATING', 'DONE'))} {rng.randint(2, max(2, job.training.steps))}"
    _hook(scenario, rng, rng.choice(("kill", "kill", "kill", "exception", "host loss", "stop")), moment)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        _hook(scenario, rng, rng.choice(_ALL), rng.choice(_DUMP_MOMENTS))
    for _ in range(rng.choice((0, 0, 1, 2))):
        _hook(scenario, rng, rng.choice(_OF_CONTROLLERS), rng.choice(_DUMP_MOMENTS))


def _add(scenario: Scenario, rng: random.Random, kind: str) -> None:
    """Put in one fault, at a time of training or at a moment of the protocol."""
    job = scenario.job
    steps = job.training.steps
    if rng.random() < 0.45 or not scenario.faults:
        moment = rng.uniform(0.0, 0.1) if rng.random() < 0.1 else rng.uniform(0.1, 0.12 + 0.05 * steps)
        act = _aimed(scenario, rng, kind, f"at {moment:.4f} s")
        job.scheduler.at(moment, lambda: act(-1))
    elif rng.random() < 0.4:
        _hook(scenario, rng, kind, f"{rng.choice(('READY', 'UPDATING', 'DONE'))} {rng.randint(1, steps)}")
    else:
        _hook(scenario, rng, kind, rng.choice(_DUMP_MOMENTS))


def _hook(scenario: Scenario, rng: random.Random, kind: str, moment: str) -> None:
    """Put in one fault that comes when something has happened a number of times, or a little later."""
    job = scenario.job
    count = rng.randint(1, job.training.layout.world_size)
    delay = rng.choice((0.0, 0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.1)))
    act = _aimed(scenario, rng, kind, f"{delay:.4f} s after the {count}. '{moment}'")
    job.hook(moment, count, lambda rank: job.scheduler.after(delay, lambda: act(rank)))


def _aimed(scenario: Scenario, rng: random.Random, kind: str, when: str) -> Callable[[int], None]:
    """Return the fault, on the rank that the moment concerns or on one that is fixed now."""
    scenario.harmless &= kind in _HARMLESS
    job = scenario.job
    fixed, elsewhere = rng.randrange(job.training.layout.world_size), rng.random() < 0.4
    whom = f"rank {fixed}" if elsewhere else f"the rank concerned, or {fixed}"
    scenario.faults.append(f"{kind} of {whom}, {when}")
    return lambda rank: _ACTIONS[kind](job, rng, fixed if elsewhere or rank < 0 else rank)


def _kill(job: Job, rng: random.Random, rank: int) -> None:
    job.kill(rank)


def _kill_host(job: Job, rng: random.Random, rank: int) -> None:
    hosts = job.training.layout.hosts
    for other in range(len(hosts)):
        if hosts[other] == hosts[rank]:
            job.kill(other, quiet=True)


def _raise(job: Job, rng: random.Random, rank: int) -> None:
    process = job.ranks[rank]
    process.run(lambda: process.fault(CauseKind.EXCEPTION, "ValueError: bad batch"))


def _peer_error(job: Job, rng: random.Random, rank: int) -> None:
    process = job.ranks[rank]
    process.run(lambda: process.fault(CauseKind.PEER_ERROR, "connection closed by peer"))


def _preempt(job: Job, rng: random.Random, rank: int) -> None:
    process = job.ranks[rank]
    process.run(process.notice)


def _break_stream(job: Job, rng: random.Random, rank: int) -> None:
    job.note(f"rank {rank}'s stream breaks")
    job.drop_stream(rank)


def _break_all_streams(job: Job, rng: random.Random, rank: int) -> None:
    job.note("all streams break")
    for other in range(job.training.layout.world_size):
        job.drop_stream(other)


def _hold_stream(seconds: tuple[float, float]) -> Callable[[Job, random.Random, int], None]:
    def act(job: Job, rng: random.Random, rank: int) -> None:
        stream = job.ranks[rank].stream
        if stream is not None:
            job.note(f"rank {rank}'s stream stands still")
            stream.hold(rng.uniform(*seconds))

    return act


def _stop(job: Job, rng: random.Random, rank: int) -> None:
    job.stop(rank, rng.choice((0.1, 0.5, 1.0, 2.0, None)))


def _stop_briefly(job: Job, rng: random.Random, rank: int) -> None:
    job.stop(rank, rng.uniform(0.01, 0.25))


def _pause_controller(job: Job, rng: random.Random, rank: int) -> None:
    job.controller.pause(rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, 1.5), rng.uniform(1.0, 6.0))))


def _kill_controller(job: Job, rng: random.Random, rank: int) -> None:
    """The active one mostly, or any."""
    (job.controller if rng.random() < 0.75 else rng.choice(job.controllers)).kill()


def _cut_controller(job: Job, rng: random.Random, rank: int) -> None:
    job.controller.cut(rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, 1.5), rng.uniform(1.0, 6.0))))


def _kill_rank_and_controller(job: Job, rng: random.Random, rank: int) -> None:
    job.controller.kill()
    job.kill(rank)


def _hang_update(job: Job, rng: random.Random, rank: int) -> None:
    """An update never ends; as nobody watches for hangs here, another rank fails a little later."""
    job.note(f"rank {rank} will hang in an update")
    job.ranks[rank].hang_update_at = 1
    others = [other for other in range(job.training.layout.world_size) if other != rank]
    victim = rng.choice(others)
    job.scheduler.after(rng.uniform(0.1, 0.2), lambda: job.kill(victim))


def _break_roll(job: Job, rng: random.Random, rank: int) -> None:
    job.note(f"rank {rank} will fail to roll forward")
    job.ranks[rank].break_roll = True


def _hang_work(job: Job, rng: random.Random, rank: int) -> None:
    job.note(f"rank {rank}'s next order will never be done")
    job.ranks[rank].hang_work = True


def _fill_disk(job: Job, rng: random.Random, rank: int) -> None:
    root = rng.choice(job.roots)
    job.note(f"{root} is full")
    job.disk.full.add(root)


def _break_disk_of_rank(job: Job, rng: random.Random, rank: int) -> None:
    root = rng.choice(job.roots)
    job.note(f"{root} fails for rank {rank}")
    job.disk.broken_for.add((rank, root))


_ACTIONS: dict[str, Callable[[Job, random.Random, int], None]] = {
    "kill": _kill,
    "host loss": _kill_host,
    "exception": _raise,
    "peer error": _peer_error,
    "preemption": _preempt,
    "stream break": _break_stream,
    "break of all streams": _break_all_streams,
    "stream pause": _hold_stream((0.2, 1.5)),
    "stop": _stop,
    "hang in update": _hang_update,
    "failing roll-forward": _break_roll,
    "hanging work": _hang_work,
    "full disk": _fill_disk,
    "rank's disk": _break_disk_of_rank,
    "controller pause": _pause_controller,
    "controller kill": _kill_controller,
    "controller cut": _cut_controller,
    "rank and controller kill": _kill_rank_and_controller,
    "brief stop": _stop_briefly,
    "brief stream pause": _hold_stream((0.01, 0.2)),
}
_OF_CONTROLLERS = ("controller kill", "controller kill", "controller pause", "controller cut")
_HARMLESS = (
    "controller kill",
    "controller cut",
    "stream break",
    "break of all streams",
    "controller pause",
    "brief stop",
    "brief stream pause",
)
_ALL = (*("kill",) * 8, *("exception", "host loss", "stop", "hang in update") * 2, *_ACTIONS)
_HIDDEN = ("failing roll-forward", "hanging work", "full disk", "rank's disk", "rank's disk")
