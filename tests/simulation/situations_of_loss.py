"""Situations about what is lost, late or said again, about disks, collectives, and controllers that change.

Each puts into a job what must come together; who, when, for how long and what else is drawn. `situations` says how often each comes.
"""

from __future__ import annotations

import random
from functools import partial
from math import inf

from tests.simulation.handed_on import hand_on
from tests.simulation.job import Job
from tests.simulation.lost import LOSABLE, lose
from tests.simulation.outliving import delay_results
from tests.simulation.situations_of_time import BEGINNINGS, PHASES, fail, inject, last_step, some
from tests.simulation.stale import remember
from ttp.proto.messages import Exit, FaultReport, Freeze, PublishOrder, RollForward, Thaw, WriteOrder

SLOW_S = 0.1
"""Slowest messages, a sixth of a lease: a rank whose stream breaks sent a heartbeat and a message ago, and is back after three."""

ANSWER_S = 0.2
"""A rank that has come to a controller has answered it by then."""

# --- what is lost, late or said again ---


def lost_in_a_false_alarm(job: Job, rng: random.Random) -> list[str]:
    """A message is lost while all are frozen in a false alarm, or in a job without a fault."""
    notes = _lose(job, rng, (*LOSABLE, Thaw, Thaw, Thaw))
    if rng.random() < 0.8:
        whom, step = rng.choice(job.everybody), rng.randint(1, job.training.steps)
        job.hook(f"DONE {step}", 1, lambda _: inject(job, rng, "stream break", whom))
        notes.append(f"the stream of rank {whom} breaks at 'DONE {step}'")
    return notes


def lost_in_a_dump(job: Job, rng: random.Random) -> list[str]:
    """A message of a dump is lost, mostly one of a rank that is indispensable."""
    notes = _lose(job, rng, (*LOSABLE, Freeze, RollForward, WriteOrder, PublishOrder, Exit, FaultReport))
    step = last_step(job, rng)
    if rng.random() < 0.5:
        return [*notes, fail(job, rng, ("exception", "preemption", "kill"), f"{rng.choice(PHASES)} {step}")]
    needed = next((rank for rank in job.everybody if job.ranks[rank].route.loses is not None), 0)
    delay_results(job, rng, [needed], step)
    group = next(holders for holders in job.training.layout.holders if needed in holders)
    for other in group:
        if other != needed:
            job.hook(f"UPDATING {step}", 1, lambda _, other=other: inject(job, rng, "kill", other))  # type: ignore[misc]
    return [*notes, f"all other holders of a shard of rank {needed} are killed in update {step}"]


def _lose(job: Job, rng: random.Random, kinds: tuple[type, ...]) -> list[str]:
    notes = []
    for rank in some(job, rng, min(2, len(job.ranks))):
        kind = rng.choice(kinds)
        lose(job, rank, kind)
        notes.append(f"the next {kind.__name__} of rank {rank} is lost")
    return notes


def late_reports(job: Job, rng: random.Random) -> list[str]:
    """False alarms on a network that is slow, and a rank that dies while what was said in them is still under way."""
    notes, step = [], rng.randint(2, 4)
    slowest_s = rng.uniform(0.05, SLOW_S)
    job.hook(
        f"DONE {step}", 1, lambda _: setattr(job, "slowest_s", slowest_s)
    )  # for streams that are opened from now on
    for rank in some(job, rng):
        job.hook(f"DONE {step}", 1, lambda _, rank=rank: inject(job, rng, "stream break", rank))  # type: ignore[misc]
    for _ in range(rng.randint(1, 2)):
        whom, moment = rng.choice(job.everybody), rng.choice((f"DONE {step + rng.randint(1, 3)}", "thawed"))
        job.hook(moment, 1, lambda _, whom=whom: inject(job, rng, "stream break", whom))  # type: ignore[misc]
        notes.append(f"the stream of rank {whom} breaks at '{moment}'")
    kind, whom, count = rng.choice(("kill", "kill", "controller kill")), rng.choice(job.everybody), rng.randint(1, 2)
    delay_s = rng.uniform(0.0, 0.2)
    job.hook("thawed", count, lambda _: job.scheduler.after(delay_s, partial(inject, job, rng, kind, whom)))
    return [*notes, f"{kind} of rank {whom}, {delay_s:.3f} s after thaw {count}"]


def words_come_again(job: Job, rng: random.Random) -> list[str]:
    """A false alarm, and then a dump that is begun anew: what was said under the earlier freezes comes again."""
    remember(job)
    step = rng.randint(1, 2)
    job.hook(f"DONE {step}", 1, partial(inject, job, rng, "stream break"))
    job.disk.tearing.add((rng.choice(job.everybody), job.root_of(0, "/a")))
    for process in job.ranks:
        process.slow_work["write"] = rng.uniform(0.01, 0.1)

    def say_again(_: int) -> None:
        job.scheduler.after(
            rng.uniform(0.0, 0.02), lambda: inject(job, rng, "stale message", rng.choice(job.everybody))
        )

    for moment in ("frozen", "write_sent", "writing", "written", "publish_sent", "publishing", "renamed", "got Freeze"):
        for count in range(1, 9):
            job.hook(moment, count, say_again)
    return [fail(job, rng, ("exception", "kill", "preemption"), f"DONE {step + 2}"), "stale messages all along"]


# --- disks, collectives, controllers ---


def disks_fail(job: Job, rng: random.Random) -> list[str]:
    """Directories are full or fail some ranks, and ranks are at two steps."""
    notes = []
    for name in job.roots:
        what = rng.choice(("serves", "full", "errors", "torn", "torn", "unsynced"))
        for rank in list(job.everybody) if what == "full" else some(job, rng, max(1, len(job.ranks) // 2)):
            root = job.root_of(rank, name)
            if what == "full":
                job.disk.full.add(root)
            elif what != "serves":
                known = {"errors": job.disk.broken_for, "torn": job.disk.tearing, "unsynced": job.disk.unsynced}
                known[what].add((rank, root))
        notes.append(f"{name}: {what}")
    if job.own is None and rng.random() < 0.3:  # another process of the job has published a later step
        root = rng.choice(job.roots)
        job.disk.before.add((root, 90))
        job.disk.tracker[root] = 90
        notes.append(f"{root} has step 90")
    step = last_step(job, rng)
    if rng.random() < 0.5:
        behind = rng.choice(job.everybody)
        job.ranks[behind].slow_compute[step] = rng.uniform(0.3, 1.0)
        notes.append(f"rank {behind} is slow in step {step}")
    return [*notes, fail(job, rng, ("exception", "exception", "kill", "preemption"), f"DONE {step}")]


def no_disk_takes_the_step(job: Job, rng: random.Random) -> list[str]:
    """Some ranks can write nowhere, another one is a step behind, and all have copies of the step before."""
    step, ranks = last_step(job, rng), list(job.everybody)
    rng.shuffle(ranks)
    behind, failing = ranks[0], ranks[1 : 1 + rng.randint(1, max(1, len(ranks) // 2))]
    job.ranks[behind].slow_compute[step] = rng.uniform(0.3, 1.0)
    for rank in failing:
        job.disk.broken_for |= {(rank, job.root_of(rank, name)) for name in job.roots}
    notes = f"ranks {failing} can write nowhere, rank {behind} is slow in step {step}"
    return [notes, fail(job, rng, ("exception", "exception", "preemption", "kill"), f"DONE {step}")]


def places_fail(job: Job, rng: random.Random) -> list[str]:
    """A host is lost, or a publisher stands still while its controller dies, before all hosts have published what is theirs."""
    moment = rng.choice(
        ("written", "publish_sent", "place_published", "claimed", "claimed", "manifest written", "renamed")
    )
    how, stopped_s = rng.choice(("host loss", "host loss", "kill", "stop", "stop")), rng.uniform(0.5, 3.5)
    count = rng.randint(1, len(set(job.training.layout.hosts)))

    def strike(rank: int) -> None:
        if how != "stop":
            inject(job, rng, how, rank if rank >= 0 else rng.choice(job.everybody))
            return
        job.struck(how, rank)
        job.stop(max(0, rank), stopped_s)
        inject(job, rng, "controller kill", 0)

    job.hook(moment, count, strike)
    return [fail(job, rng), f"{how} at the {count}. '{moment}', for {stopped_s:.3f} s if it is a stop"]


def aborted_collectives(job: Job, rng: random.Random) -> list[str]:
    """Collectives that lose a member return garbage in place of raising."""
    job.collectives.garbage, job.collectives.hang_chance = rng, 0.0
    return [
        fail(
            job,
            rng,
            ("kill", "host loss", "exception"),
            f"{rng.choice(('READY', 'READY', 'UPDATING'))} {last_step(job, rng)}",
        )
    ]


_TAKEOVER_MOMENTS = (
    "death_seen", "freeze_sent", "got Freeze", "frozen", "decided", "got RollForward", "rolling", "rolled_forward", "write_sent",
    "writing", "written", "publish_sent", "publishing", "manifest written", "renamed", "fault_reported", "thawed",
)  # fmt: skip


def controllers_change(job: Job, rng: random.Random) -> list[str]:
    """The controller dies, or is away for about a lease, at some moment of a dump or of a false alarm; ranks are silent about then."""
    notes = [fail(job, rng, (*BEGINNINGS, "stream break", "stream break"))]
    moment, count = rng.choice(_TAKEOVER_MOMENTS), rng.randint(1, len(job.ranks))
    how, away_s = rng.choice(("controller kill",) * 3 + ("controller pause", "controller cut")), rng.uniform(0.4, 1.2)

    def strike(_: int) -> None:
        controller = job.controller
        if controller.gone:
            return
        job.struck(how, 0)
        if how == "controller kill":
            controller.kill()
        elif how == "controller pause":
            controller.pause(away_s)
        else:
            controller.cut(away_s)

    job.hook(moment, count, strike)
    notes.append(f"{how} at the {count}. '{moment}'")
    if rng.random() < 0.5:
        other, silent_s = rng.choice(job.everybody), rng.uniform(0.3, 1.0)
        around = rng.choice((moment, f"{rng.choice(PHASES)} {last_step(job, rng)}"))
        job.hook(around, 1, lambda _: job.stop(other, silent_s))
        notes.append(f"rank {other} is stopped for {silent_s:.3f} s at '{around}'")
    if rng.random() < 0.3:
        job.hook(
            "took_over",
            1,
            lambda _: job.scheduler.after(rng.uniform(0.0, 0.5), partial(inject, job, rng, "controller kill", 0)),
        )
        notes.append("the next one is killed too")
    return notes


_LATE_MOMENTS = (
    "took_over", "frozen", "decided", "rolling", "rolled_forward", "write_sent", "writing", "written", "publish_sent", "publishing",
    "manifest written", "renamed", "exit_sent",
)  # fmt: skip


_HANGING_MOMENTS = (
    "death_seen",
    "frozen",
    "fault_reported",
    "decided",
    "rolling",
    "write_sent",
    "written",
    "publish_sent",
)
_FOR_GOOD_S = 1e5
"""Longer than any job takes."""


def ranks_come_late(job: Job, rng: random.Random) -> list[str]:
    """Ranks are silent while a controller is lost, and come to the next one at some moment of the dump that it makes without them; others that hold the same die then."""
    notes = [fail(job, rng, (*BEGINNINGS, "stream break"))]
    moment, back = rng.choice(_TAKEOVER_MOMENTS), rng.choice(_LATE_MOMENTS)
    lost, count, late = rng.random() < 0.8, rng.randint(1, len(job.ranks)), some(job, rng, max(1, len(job.ranks) // 2))
    began = moment if lost else "death_seen"
    group = rng.choice([holders for holders in job.training.layout.holders if late[0] in holders])
    others = [rank for rank in group if rank not in late] or [rng.choice(job.everybody)]
    dying = others if rng.random() < 0.6 else [rng.choice(others)]
    longest_s, until_dead_s = rng.uniform(2.0, 6.0), rng.choice((0.0, rng.uniform(0.0, 0.4)))

    def strike(_: int) -> None:
        if lost:
            inject(job, rng, "controller kill", 0)
        for rank in late:
            job.struck("stop", rank)
            job.stop(rank, longest_s)

    def come(_: int) -> None:
        for rank in late:
            job.ranks[rank].resume()
        for nth in range(1, 2 * len(job.ranks)):
            job.hook("registers", nth, there)
        for rank in dying:
            job.scheduler.after(until_dead_s, partial(inject, job, rng, "kill", rank))

    def there(rank: int) -> None:
        process = job.ranks[rank]
        if rank in late and process.back_s == inf and not process.stopped:
            process.back_s = job.now + ANSWER_S

    job.hook(began, count if lost else 1, strike)
    job.hook("took_over" if lost else began, 1, lambda _: job.hook(back, 1, come))
    lost_too = f"the controller is lost at the {count}. '{moment}', and " if lost else ""
    notes.append(f"{lost_too}ranks {late} are stopped then until '{back}', and ranks {dying} killed")
    return notes


def next_controller_hangs(job: Job, rng: random.Random) -> list[str]:
    """The controller that leads is lost while the one behind it is stopped or cut off, mostly for good: ranks that turn to it hang, and go on to a third one."""
    notes = [fail(job, rng, BEGINNINGS)] if rng.random() < 0.7 else []
    moment = rng.choice(_HANGING_MOMENTS) if notes else f"{rng.choice(PHASES)} {rng.randint(2, 6)}"
    kind, until_lost_s = rng.choice(("controller pause", "controller cut")), rng.choice((0.0, rng.uniform(0.0, 0.3)))
    seconds = _FOR_GOOD_S if rng.random() < 0.75 else rng.uniform(0.3, 4.0) * job.times.lease_s

    def strike(_: int) -> None:
        behind = next(controller for controller in job.controllers if controller.place > job.controller.place)
        job.struck(kind, 0)
        (behind.pause if kind == "controller pause" else behind.cut)(seconds)
        job.scheduler.after(until_lost_s, partial(inject, job, rng, "controller kill", 0))

    job.hook(moment, 1, strike)
    return [*notes, f"{kind} of the next one for {seconds:.3f} s at '{moment}', and the one that leads is killed"]


def work_is_handed_on(job: Job, rng: random.Random) -> list[str]:
    """A writer fails, and then one that owes two orders."""
    step = last_step(job, rng)
    return [fail(job, rng, ("exception", "kill", "preemption"), f"DONE {step}"), hand_on(job, rng)]


def rolled_before_a_takeover(job: Job, rng: random.Random) -> list[str]:
    """A rank is silent while the others roll forward, and comes back for the controller that follows the one that dies then."""
    step, ranks = last_step(job, rng), list(job.everybody)
    rng.shuffle(ranks)
    silent, late, silent_s = ranks[0], ranks[1 : 1 + rng.randint(1, max(1, len(ranks) // 2))], rng.uniform(0.6, 1.2)
    for rank in late:
        job.ranks[rank].late_results[step] = rng.uniform(1.0, 3.0)
    job.hook(f"{rng.choice(('READY', 'UPDATING'))} {step}", 1, lambda _: job.stop(silent, silent_s))
    moment = rng.choice(("decided", "rolling", "rolled_forward", "rolled_forward", "write_sent", "writing"))
    count = 1 if moment in ("decided", "write_sent") else rng.randint(1, len(late))
    job.hook(moment, count, lambda _: inject(job, rng, "controller kill", 0))
    return [
        f"rank {silent} is stopped for {silent_s:.3f} s in step {step}, the controller is killed at the {count}. '{moment}'"
    ]


def away_for_about_a_lease(job: Job, rng: random.Random) -> list[str]:
    """The controller is stopped or cut off for about a lease: some ranks turn to the next one, the others are still with it."""
    job.slowest_s = rng.choice((0.005, 0.05, 0.05))  # for streams that are opened from now on
    seconds, kind = rng.uniform(0.65, 1.15) * job.times.lease_s, rng.choice(("controller pause", "controller cut"))
    moment = f"{rng.choice(PHASES)} {rng.randint(2, 6)}"

    def strike(_: int) -> None:
        job.struck(kind, 0)
        (job.controller.pause if kind == "controller pause" else job.controller.cut)(seconds)

    job.hook(moment, 1, strike)
    return [f"{kind} for {seconds:.3f} s at '{moment}'"]


def controllers_take_turns(job: Job, rng: random.Random) -> list[str]:
    """The first controller is away and comes back about when the second has died and the third is cut off; a rank dies later."""
    first, second, third = job.controllers[:3]
    began_s, away_s, cut_s = rng.uniform(0.1, 0.6), rng.uniform(0.6, 1.2), rng.uniform(0.5, 1.5)
    until_dead_s, until_cut_s = rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.3)
    job.scheduler.at(began_s, partial(first.pause, away_s))
    job.hook("took_over", 1, lambda _: job.scheduler.after(until_dead_s, second.kill))
    job.hook("took_over", 1, lambda _: job.scheduler.after(until_cut_s, partial(third.cut, cut_s)))
    notes = f"c0 is stopped for {away_s:.3f} s at {began_s:.3f} s, c1 killed, c2 cut off for {cut_s:.3f} s"
    return [notes, fail(job, rng, ("kill", "exception"), f"DONE {rng.randint(10, 30)}")]
