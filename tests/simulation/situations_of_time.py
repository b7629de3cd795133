"""Situations about time: how long work is waited for, roll forwards that fail, and who is silent for how long.

Each puts into a job what must come together; who, when, for how long and what else is drawn. `situations` says how often each comes.
"""

from __future__ import annotations

import random
from functools import partial

from tests.simulation.faults import KINDS
from tests.simulation.job import Job
from tests.simulation.network import DOWN, UP
from tests.simulation.outliving import delay_results

BEGINNINGS = ("kill", "kill", "exception", "exception", "host loss", "preemption")
PHASES = ("READY", "UPDATING", "UPDATING", "DONE")


def inject(job: Job, rng: random.Random, kind: str, rank: int) -> None:
    KINDS[kind].inject(job, rng, rank)


def last_step(job: Job, rng: random.Random) -> int:
    """One that is late enough for something to be saved."""
    return rng.randint(2, max(2, job.training.steps))


def fail(job: Job, rng: random.Random, kinds: tuple[str, ...] = BEGINNINGS, moment: str = "") -> str:
    """Somebody fails in training."""
    kind, count = rng.choice(kinds), rng.randint(1, len(job.ranks))
    moment = moment or f"{rng.choice(PHASES)} {last_step(job, rng)}"
    job.hook(moment, count, lambda rank: inject(job, rng, kind, rank))
    return f"{kind} of the {count}. at '{moment}'"


def some(job: Job, rng: random.Random, most: int = 0) -> list[int]:
    """Some ranks, or all; `most`: so many."""
    return rng.sample(job.everybody, rng.randint(1, most or len(job.ranks)))


# --- how long work is waited for ---


def work_goes_on(job: Job, rng: random.Random) -> list[str]:
    """Work of some ranks progresses for a good part of what a fault may take, or for longer; the others are soon done."""
    step, ranks = rng.choice(("write", "write", "manifest", "rename", "roll")), some(job, rng, len(job.ranks) - 1)
    if step in ("manifest", "rename") and rng.random() < 0.7:
        ranks = list({0, *ranks})
    for rank in ranks:
        job.ranks[rank].slow_work[step] = rng.uniform(0.2, 2.5) * job.times.total_timeout_s
        job.ranks[rank].was_stopped = True  # no rank has to wait for it
    notes = f"'{step}' of ranks {ranks} is slow"
    if step != "roll":
        return [notes, fail(job, rng)]
    last = last_step(job, rng)
    delay_results(job, rng, ranks, last)
    return [notes, fail(job, rng, ("kill", "exception"), f"{rng.choice(('UPDATING', 'DONE'))} {last}")]


def total_time(job: Job, rng: random.Random) -> list[str]:
    """All that could be done progresses for longer than a fault may take; the controller may be lost, or away for a while, meanwhile."""
    total_s = job.times.total_timeout_s
    step = rng.choice(("write", "manifest", "roll", "update"))
    last = last_step(job, rng)
    for process in job.ranks:
        process.was_stopped = True
        if step == "update":
            process.slow_update[last] = rng.uniform(1.2, 1.5) * total_s
        else:
            process.slow_work[step] = rng.uniform(1.2, 1.5) * total_s
    notes = [f"'{step}' of all ranks progresses for longer than a fault may take"]
    if step == "roll":
        delay_results(job, rng, some(job, rng, len(job.ranks) - 1), last)
    notes.append(
        fail(job, rng, ("kill", "exception"), f"{'UPDATING' if step in ('roll', 'update') else 'DONE'} {last}")
    )
    if rng.random() < 0.4:
        kind = rng.choice(("controller kill", "controller pause", "controller cut", "stream break", "kill"))
        at_s = rng.uniform(0.1, 0.6) * total_s
        job.scheduler.at(at_s, lambda: inject(job, rng, kind, rng.choice(job.everybody)))
        notes.append(f"{kind} at {at_s:.1f} s")
    return notes


def rolls_fail(job: Job, rng: random.Random) -> list[str]:
    """Ranks that must roll forward fail to, take long, hang or die; who brought the record may die as well."""
    step, ranks = last_step(job, rng), list(job.everybody)
    rng.shuffle(ranks)
    late = ranks[: rng.randint(1, len(ranks) - 1)]
    first = ranks[len(late)]
    delay_results(job, rng, late, step)
    notes = []
    for rank in late:
        how = rng.choice(("fails", "fails", "is slow", "hangs", "dies", "rolls", "rolls", "rolls"))
        notes.append(f"rank {rank} {how}")
        process = job.ranks[rank]
        process.break_roll |= how == "fails"
        process.hang_work |= how == "hangs"
        if how == "is slow":
            process.slow_work["roll"] = rng.uniform(0.5, 3.0) * job.times.progress_timeout_s
        elif how == "dies":
            job.hook("rolling", rng.randint(1, len(late)), partial(inject, job, rng, "kill"))
    if rng.random() < 0.3:  # an update that the freeze waits for
        job.slow = True
        job.ranks[first].slow_update[step] = rng.uniform(0.5, 3.0) * job.times.progress_timeout_s
        job.hook(f"UPDATING {step}", 1, lambda rank: inject(job, rng, "kill", rng.choice(ranks)))
    else:
        kind = rng.choice(("exception", "exception", "kill"))
        job.hook(f"{rng.choice(('UPDATING', 'DONE'))} {step}", 1, partial(inject, job, rng, kind))
    if rng.random() < 0.4:
        moment = rng.choice(("rolling", "rolled_forward", "got RollForward"))
        job.hook(moment, rng.randint(1, len(late)), lambda _: inject(job, rng, "kill", first))
        notes.append(f"rank {first} is killed at '{moment}'")
    return notes


def rolls_follow_a_slow_update(job: Job, rng: random.Random) -> list[str]:
    """The last holder of a shard is in an update for longer than an answer may take; others roll forward after it."""
    step, holders = last_step(job, rng), rng.choice(job.training.layout.holders)
    first, others = rng.choice(holders), [rank for rank in job.everybody if rank not in holders]
    if not others:
        return rolls_fail(job, rng)
    late, seconds = (
        rng.sample(others, rng.randint(1, len(others))),
        rng.uniform(1.1, 3.0) * job.times.progress_timeout_s,
    )
    delay_results(job, rng, late, step)
    job.slow = True
    job.ranks[first].slow_update[step] = seconds

    def kill_the_others() -> None:
        for rank in holders:
            if rank != first:
                inject(job, rng, "kill", rank)

    job.hook(f"UPDATING {step}", 1, lambda _: job.scheduler.after(rng.uniform(0.0, 0.1), kill_the_others))
    return [
        f"update {step} of rank {first} takes {seconds:.3f} s, the other holders {holders} are killed, {late} are late"
    ]


# --- who is silent, and for how long ---


def deaf_controller(job: Job, rng: random.Random) -> list[str]:
    """In a dump the controller receives nothing for less than an orphan timeout, or its messages do not arrive; its clock may leap meanwhile."""
    notes = [fail(job, rng, ("exception", "exception", "kill", "preemption"))]
    moment = rng.choice(
        (
            "death_seen",
            "fault_reported",
            "stage freezing",
            "stage rolling",
            "stage writing",
            "stage writing",
            "stage publishing",
        )
    )
    way = rng.choice((UP, UP, UP, DOWN))
    seconds, leap_s = rng.uniform(0.2, 0.95) * job.times.orphan_timeout_s, rng.uniform(0.2, 5.0)
    leaps_s = rng.uniform(0.0, seconds) if rng.random() < 0.5 else -1.0

    def strike(_: int) -> None:
        controller = job.controller
        if controller.gone:
            return
        job.struck("controller receives nothing" if way == UP else "controller's messages do not arrive", 0)
        controller.cut_one_way(way, seconds)
        if leaps_s >= 0:
            job.scheduler.after(leaps_s, partial(controller.jump, leap_s))

    job.hook(
        moment, 1, lambda rank: job.scheduler.after(rng.choice((0.0, rng.uniform(0.0, 0.1))), partial(strike, rank))
    )
    return [
        *notes,
        f"no word comes {way} for {seconds:.3f} s after '{moment}', leap of {leap_s:.3f} s after {leaps_s:.3f} s",
    ]


def about_a_lease(job: Job, rng: random.Random) -> list[str]:
    """Ranks are silent for about a lease, or for about the one of a rank that is seen to run; something else happens at that time."""
    at_s, ranks = rng.uniform(0.3, 2.5), rng.choice((some(job, rng, 1), some(job, rng), list(job.everybody)))
    lease_s = rng.choice((job.times.lease_s, job.times.vouched_lease_s))
    how, notes = rng.choice(("interpreter held", "interpreter held", "stop", "rank's messages do not arrive")), []

    def be_silent(rank: int, seconds: float) -> None:
        process = job.ranks[rank]
        if not process.alive or process.stopped or process.hogged:
            return
        job.struck(how, rank)
        if how == "stop":
            job.stop(rank, seconds)
        elif how == "interpreter held":
            job.hog(rank, seconds)
        else:
            process.was_stopped = True
            process.route.hold(UP, job.now + seconds)

    for rank in ranks:
        seconds = rng.uniform(0.5, 1.5) * lease_s
        job.scheduler.at(at_s + rng.choice((0.0, rng.uniform(0.0, 0.3))), partial(be_silent, rank, seconds))
        notes.append(f"{how} of rank {rank} for {seconds:.3f} s")
    if rng.random() < 0.7:
        kind = rng.choice(
            ("host loss", "host loss", "kill", "controller kill", "stream break", "launcher loss", "exception")
        )
        moment_s, whom = at_s + rng.uniform(-0.3, 0.8), rng.choice(job.everybody)
        job.scheduler.at(moment_s, partial(inject, job, rng, kind, whom))
        notes.append(f"{kind} of rank {whom} at {moment_s:.3f} s")
    return [f"at {at_s:.3f} s", *notes]


def compiles(job: Job, rng: random.Random) -> list[str]:
    """Ranks that are seen to run are silent for longer than a lease: this is not a fault, whatever streams and controllers do. Of the
    vouched lease a third of an ordinary one went by before, and half of one remains for a new stream."""
    ranks = rng.choice((some(job, rng, 1), list(job.everybody)))
    besides = rng.choice(("", "stream break", "controller kill"))

    def hold(_: int) -> None:
        for rank in ranks:
            job.hog(rank, rng.uniform(1.15, 1.65) * job.times.lease_s)
            job.struck("interpreter held", rank)
        if besides and len(ranks) == 1:
            job.scheduler.after(rng.uniform(0.0, 0.5), partial(inject, job, rng, besides, ranks[0]))

    moment = f"COMPUTE {rng.randint(1, 12)}"
    job.hook(moment, 1, hold)
    return [
        f"interpreters of ranks {ranks} held for longer than a lease, from '{moment}' on; {besides or 'nothing'} besides"
    ]


def silent_for_good(job: Job, rng: random.Random) -> list[str]:
    """A host is lost, a process stopped or an interpreter held, and never comes back; nothing else happens."""
    kind, rank = rng.choice(("host loss", "stop", "interpreter held")), rng.choice(job.everybody)

    def strike(_: int) -> None:
        if kind == "host loss":
            inject(job, rng, kind, rank)
            return
        job.struck(kind, rank)
        (job.stop if kind == "stop" else job.hog)(rank, None)

    moment = f"{rng.choice(('COMPUTE', 'READY', 'DONE'))} {rng.randint(2, 20)}"
    job.hook(moment, 1, strike)
    return [f"{kind} of rank {rank} for good at '{moment}'"]


def about_the_hang_limit(job: Job, rng: random.Random) -> list[str]:
    """A step takes about as long as a hang may. If its rank has progressed when its gate closes, nothing may be lost."""
    rank, step = rng.choice(job.everybody), rng.randint(28, 36)
    seconds = rng.uniform(0.98, 1.15) * job.times.hang_floor_s
    job.ranks[rank].slow_compute[step] = seconds
    job.slowest_s = rng.choice((0.005, 0.05))
    progressed: list[int] = []
    for count in range(1, 1 + len(job.ranks)):
        job.hook(f"READY {step}", count, lambda ready: progressed.append(ready) if ready == rank else None)

    def decide(_: int) -> None:
        job.excused |= not progressed

    job.hook("decided", 1, decide)
    return [f"step {step} of rank {rank} takes {seconds:.4f} s"]
