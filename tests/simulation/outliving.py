"""Faults that need two coincidences at once, arranged: in work that outlives the stage that ordered it, or in training that
goes on because the freeze has not reached its rank.

Owns which steps of the work a kind of fault can act in, and what must happen meanwhile so that the job comes to the chosen
place: nothing but patience where that place comes later, another controller where the job must begin again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.faults import KINDS
from tests.simulation.held import Hold, nothing, stand_still
from tests.simulation.job import Job
from tests.simulation.network import UP

_WRITING = ("write",)
_PUBLISHING = ("manifest", "rename", "tracker")
STEPS: dict[str, tuple[str, ...]] = {
    "writer kill": _WRITING,
    "torn write": _WRITING,
    "failed fsync": (*_WRITING, "manifest", "rename"),
    "full disk": (*_WRITING, *_PUBLISHING),
    "rank's disk": (*_WRITING, *_PUBLISHING),
    "publisher killed before the manifest": ("manifest",),
    "publisher killed before the rename": ("rename",),
    "publisher killed before the tracker": ("tracker",),
    "publisher killed before the answer": ("answer",),
    "failing roll-forward": ("roll",),
    "hanging work": ("ApplyUpdate", "WriteShare", "PublishCheckpoint"),
}
"""By kind of fault, the steps of the work in which it acts."""
STAGE_OF = {
    "ApplyUpdate": "rolling", "roll": "rolling", "WriteShare": "writing", "write": "writing", "PublishCheckpoint": "publishing",
    "manifest": "publishing", "rename": "publishing", "tracker": "publishing",
    "answer": "publishing",
}  # fmt: skip
"""By step, the stage in which it is ordered."""
_ORDER = ("leaderless", "gathering", "freezing", "rolling", "writing", "publishing", "exiting")
IN_TRAINING = ("hang in compute", "slow rank", "hang in update")
"""Kinds that act when a rank's training thread comes to something."""


def _injects(job: Job, rng: random.Random, kind: str) -> Callable[[int], None]:
    return lambda rank: KINDS[kind].inject(job, rng, rank)


def _when_rank(job: Job, moment: str, rank: int, act: Callable[[], None]) -> None:
    """Act when this has happened to this very rank, right after."""

    def look(happened_to: int) -> None:
        if happened_to == rank:
            job.scheduler.after(0.0, act)

    for count in range(1, job.training.layout.world_size + 1):
        job.hook(moment, count, look)


def _moment(place: str) -> str:
    return "controller killed" if place == "leaderless" else f"stage {place}"


def _replace_controller(job: Job, rng: random.Random, longest_s: float) -> Callable[[int], None]:
    """The active controller dies a little later."""

    def kill(rank: int) -> None:
        controller = job.controller
        if not controller.gone:
            job.struck("controller kill", rank)
            controller.kill()

    return lambda rank: job.scheduler.after(rng.uniform(0.0, longest_s), partial(kill, rank))


def _begin(job: Job, rng: random.Random, rank: int, step: int, kind: str = "exception") -> None:
    """A rank that has finished a step fails; mostly it stays as a holder."""
    inject = _injects(job, rng, kind)
    _when_rank(job, f"DONE {step}", rank, lambda: inject(rank))


def delay_results(job: Job, rng: random.Random, ranks: list[int], step: int) -> None:
    """These ranks get a step's record so late that a freeze finds them READY."""
    for rank in ranks:
        job.ranks[rank].late_results[step] = rng.uniform(0.3, 3.0)


# --- work ---


def hold_work(job: Job, rng: random.Random, kind: str, place: str) -> str:
    """Have the fault act at this place, in a step of the work that may have been ordered in another; say how."""
    step = rng.choice(STEPS[kind])
    stage, world_size = STAGE_OF[step], job.training.layout.world_size
    last = rng.randint(2, max(2, job.training.steps))
    first = rng.randrange(world_size)
    others = [rank for rank in range(world_size) if rank != first]
    if stage == "rolling":
        delay_results(job, rng, rng.sample(others, rng.randint(1, len(others))), last)
    began: Callable[[int], None] = nothing
    until = _moment(place)
    if place == stage:
        until = ""
    elif _ORDER.index(place) < _ORDER.index(stage):
        began = _replace_controller(job, rng, 0.3)
        if place == "rolling":
            began = _return_of(job, rng, rng.choice(others), last, began)
        elif place == "freezing" and rng.random() < 0.3:
            began = _others_die(job, rng)
    longest_s = rng.uniform(0.001, 0.3) if not until else rng.uniform(2.0, 4.0)
    job.holds[step] = Hold(until, longest_s, began, _injects(job, rng, kind))
    _begin(job, rng, first, last, rng.choice(("exception", "exception", "exception", "preemption", "kill")))
    return f"{kind} in '{step}', which lasts {f'until {until}' if until else 'a while'}, after rank {first} was DONE {last}"


def _others_die(job: Job, rng: random.Random) -> Callable[[int], None]:
    """All holders of some shard but the one that is held up: the plan falls through, and all are asked again."""

    def kill(rank: int) -> None:
        group = rng.choice(job.training.layout.holders)
        for other in group:
            if other != rank:
                job.scheduler.after(rng.uniform(0.0, 0.1), partial(KINDS["kill"].inject, job, rng, other))

    return kill


def _return_of(
    job: Job, rng: random.Random, rank: int, step: int, then: Callable[[int], None]
) -> Callable[[int], None]:
    """A rank that is READY is silent, and found dead; it comes back for the next controller, which rolls it forward."""
    job.ranks[rank].late_results[step] = 3.0
    route = job.ranks[rank].route

    def go_silent() -> None:
        job.ranks[rank].was_stopped = True
        route.hold(UP, job.now + 5.0)

    _when_rank(job, f"READY {step}", rank, go_silent)

    def come_back(held: int) -> None:
        job.note(f"the next controller receives messages of rank {rank} again")
        route.held_until[UP] = job.now
        then(held)

    return come_back


# --- training ---


def hold_rank(job: Job, rng: random.Random, kind: str, place: str) -> str:
    """A rank stands still before it comes to a computation, or an update; it goes on when the others are at this place."""
    layout, steps = job.training.layout, job.training.steps
    step = rng.randint(2, max(2, steps))
    rank = rng.randrange(layout.world_size)
    if job.training.local_copy and place == "rolling" and kind != "hang in update":
        rank = rng.randrange(1, layout.world_size, 2)
    began: Callable[[int], None] = nothing
    if place in ("leaderless", "gathering"):
        began = _replace_controller(job, rng, 0.35)
    if place == "rolling":
        _roll_without(job, rng, rank, step)
    moment = f"READY {step}" if kind == "hang in update" else f"DONE {step - 1}"
    hold = Hold(_moment(place), rng.uniform(2.0, 4.0), began, _injects(job, rng, kind))
    _when_rank(job, moment, rank, lambda: stand_still(job.ranks[rank], hold))
    return f"{kind} when {_moment(place)}, of rank {rank}, which stood still from {moment} on"


def _roll_without(job: Job, rng: random.Random, absent: int, step: int) -> None:
    """Somebody fails at the end of an update that others have not begun; the absent rank's part in it is its own affair.

    With spanning records no rank gets one of a step that the absent rank has not come to. With a local copy the records
    of even and odd ranks are apart: then those fail and roll forward that the absent one is not among.
    """
    among = [rank for rank in range(job.training.layout.world_size) if rank != absent]
    if job.training.local_copy:
        among = [rank for rank in among if rank % 2 != absent % 2]
    if len(among) < 2:
        return
    first, *others = rng.sample(among, len(among))
    delay_results(job, rng, others[: rng.randint(1, len(others))], step)
    _begin(job, rng, first, step)
