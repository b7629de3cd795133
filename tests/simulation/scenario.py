"""From a seed to a job and what goes wrong in it. One seed is one job, always."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.simulation.comparing import alter
from tests.simulation.faults import ANY, EMERGENCY, HARMLESS, HIDDEN, KINDS, OF_CONTROLLERS, OF_STREAMS, OF_WORK
from tests.simulation.held import Hold
from tests.simulation.in_place import LIMIT_S, PUBLISHED_FIRST, TRIED
from tests.simulation.job import Job
from tests.simulation.lost import lose_something
from tests.simulation.matrix import DUMP, TRAINING, possible
from tests.simulation.newcomers import replace_process
from tests.simulation.outliving import IN_TRAINING, STAGE_OF, STEPS, delay_results, hold_rank, hold_work
from tests.simulation.parted import cut_off, lose_node
from tests.simulation.rehearsal import rehearse
from tests.simulation.relays import Relay
from tests.simulation.settings import OwnDirectories, Times
from tests.simulation.situations import WATCHED, WATCHED_STEPS, drawn
from tests.simulation.stale import remember
from tests.simulation.training import LAYOUTS, Layout, Training, ring

_DUMP_MOMENTS = (
    "suspect", "death_seen", "freeze_sent", "got Freeze", "frozen", "decided", "rolling", "got RollForward", "rolled_forward",
    "write_sent", "got WriteOrder", "writing", "written", "publish_sent", "publishing", "manifest written", "renamed",
    "published", "thawed", "got Thaw", "stage regrouping", "got Regroup", "replacement started", "replacement_came", "left", "filled",
    "regrouped", "regroup_failed", "exit_sent", "got Exit", "replanned", "takeover_began", "got Welcome", "took_over",
)  # fmt: skip
_ROLLING_MOMENTS = ("stage rolling", "stage rolling", "got RollForward", "rolling", "rolled_forward")
_PIECE_MOMENTS = (
    "writing", "written", "publish_sent", "publishing", "claimed", "manifest written", "superseded", "renamed",
    "place_published", "published",
)  # fmt: skip
_OF_PIECES = (
    "host loss", "host loss", "kill", "kill", "stop", "rank's disk", "full disk", "failed fsync", "controller kill",
    "controller pause", "controller cut", "rank's messages do not arrive", "stream break",
)  # fmt: skip
"""What goes wrong besides where each host publishes its own piece."""
_PHASES = ("COMPUTE", "READY", "UPDATING", "DONE")

OWN_DIRECTORIES = 0.2
"""Part of the jobs over several hosts in which each has directories of its own."""


@dataclass
class Scenario:
    """A job with its faults hooked in. `harmless`: nothing in it may cost more than a pause."""

    seed: int
    job: Job
    harmless: bool = True
    faults: list[str] = field(default_factory=list)


def build(
    seed: int, layout: Layout | None = None, faults: bool = True, steps: int = 0, own: OwnDirectories | None = None
) -> Scenario:
    """Return the scenario of a seed; `layout`, `steps` and `own` override the seed's choice. Without `faults`, a test adds its
    own, on directories that all share unless it says otherwise."""
    rng = random.Random(seed)
    chosen = rng.choice(LAYOUTS)
    training = Training(layout or chosen, steps=steps or rng.randint(2, 7), local_copy=rng.random() < 0.2)
    agents, standbys = rng.random() < 0.8, rng.choice((0, 1, 1, 2, 2))
    found = drawn(seed) if faults and not steps and layout is None else None
    if found is not None:
        situation, draw = found
        training, standbys = situation.fitted(training, standbys, draw)
        own = own or _own_directories(draw, training.layout, situation.own)
        job = Job(rng, training, situation.times, agents=agents or situation.agents, standbys=standbys, own=own)
        job.slowest_s = rng.choice((0.001, 0.005, 0.05))
        _draw_inputs(job, seed)
        return Scenario(seed, job, situation.harmless, situation.put_in(job, draw))
    plan = random.Random(~seed)  # what is wrong is drawn apart: a job without faults is the seed's job all the same
    shape = plan.random()
    watched = faults and not steps and shape < 0.03
    kind, place = plan.choice(_CELLS)
    aimed = faults and shape >= AIMED
    if aimed and (place in ("gathering", "leaderless") or (kind in STEPS and place not in TRAINING)):
        standbys = max(1, standbys)
    if aimed and layout is None and (kind, place) in _ODD_RANKS_BEHIND:
        training = Training(plan.choice(_EVEN_RANKS_COVER), training.steps, local_copy=True)
    if watched:
        training = Training(training.layout, WATCHED_STEPS, training.local_copy)
    apart = random.Random(f"own directories {seed}")
    if own is None and faults:
        own = _own_directories(apart, training.layout)
    times = WATCHED if watched else Times()
    regrouping = aimed and place == "regrouping"
    if faults and (regrouping or random.Random(f"in place {seed}").random() < TRIED):
        first = random.Random(f"published first {seed}").random() < PUBLISHED_FIRST
        times = replace(times, in_place_s=LIMIT_S, publish_first=first)
    if regrouping:
        agents, training = True, replace(training, local_copy=False)
    nodes = random.Random(f"nodes {seed}")
    has_spares = faults and times.in_place_s and agents and own is None and nodes.random() < WITH_SPARES
    spares = nodes.choice((1, 1, 2)) if has_spares and len(set(training.layout.hosts)) > 1 else 0
    relayed = faults and random.Random(f"inputs {seed}").random() < RELAYED
    job = Job(rng, training, times, agents=agents, standbys=standbys, own=own, spares=spares, relayed=relayed)
    job.slowest_s = rng.choice((0.001, 0.005, 0.05))
    scenario = Scenario(seed, job)
    if not faults:
        return scenario
    inputs = _draw_inputs(job, seed)
    if watched:
        _pause(job, inputs)
    else:
        rehearse(job, random.Random(f"rehearsed {seed}"))
        _slow_down(scenario, inputs)
    scenario.faults += lose_something(job, random.Random(f"lost {seed}"))
    if altered := alter(job, random.Random(f"altered {seed}")):
        scenario.faults += altered
        scenario.harmless = False
    if watched:
        _add_hang(scenario, rng)
    elif shape < 0.12:
        for _ in range(rng.randint(1, 4)):
            _add(scenario, rng, rng.choice(HARMLESS))
    elif shape < 0.30:
        for _ in range(rng.randint(0, 4)):
            _add(scenario, rng, rng.choice(ANY))
    elif shape < 0.46:
        _add_chain(scenario, rng)
    elif shape < AIMED:
        _add_pile(scenario, rng)
    else:
        _add_aimed(scenario, rng, kind, place)
    for _ in range(apart.choice((0, 1, 1, 2, 3)) if own is not None and not aimed else 0):
        _hook(scenario, apart, apart.choice(_OF_PIECES), apart.choice(_PIECE_MOMENTS))
    _replace_a_process(scenario, random.Random(f"newcomers {seed}"))
    if spares:
        _lose_a_node(scenario, nodes)
    if relayed:
        _disturb_relays(scenario, random.Random(f"relays {seed}"))
    return scenario


def _draw_inputs(job: Job, seed: int) -> random.Random:
    """Draw the events that are not faults; return the rest of it."""
    inputs = random.Random(f"inputs {seed}")
    inputs.random()  # whether there are relays
    aborted = random.Random(f"aborted {seed}")
    job.collectives.garbage = aborted if aborted.random() < GARBAGE else None
    for launcher in job.launchers.values():  # some come when training is on already
        launcher.came_s = inputs.choice((0.0, 0.0, inputs.uniform(0.0, 0.4)))
    return inputs


def _replace_a_process(scenario: Scenario, rng: random.Random) -> None:
    """In some jobs another process comes in the place of a rank that ended unseen, mostly while training is on."""
    if rng.random() >= REPLACED:
        return
    job = scenario.job
    rank = rng.randrange(job.training.layout.world_size)
    in_training = f"{rng.choice(_PHASES)} {rng.randint(1, job.training.steps)}"
    moment = in_training if rng.random() < 0.7 else rng.choice(_DUMP_MOMENTS)
    scenario.harmless = False
    scenario.faults.append(f"another process in the place of rank {rank}, after '{moment}'")

    def act() -> None:
        replace_process(job, rng, rank)

    job.hook(moment, 1, lambda _: job.scheduler.after(rng.uniform(0.0, 0.01), act))


def _lose_a_node(scenario: Scenario, rng: random.Random) -> None:
    """A node is lost, or cut off and back, in a job that may train on with a spare one; some of these jobs lose another one then."""
    job = scenario.job
    steps = job.training.steps
    for process in job.ranks if rng.random() < 0.5 else ():  # so that training is not over when a node comes back
        process.slow_compute[rng.randint(max(1, steps - 1), steps)] = rng.uniform(0.2, 2.0)
    for count in range(rng.choice((1, 1, 2))):
        node, cut_s = rng.choice(sorted(set(job.nodes))), rng.uniform(0.5, 1.0) + rng.choice((0.0, 0.0, 1.0, 3.0))
        in_training = f"{rng.choice(_PHASES)} {rng.randint(1, max(1, steps - 1))}"
        moment = in_training if count == 0 or rng.random() < 0.4 else rng.choice(_SEAT_MOMENTS)
        beside = tuple(place for place in range(1, 1 + job.first_standbys) if rng.random() < 0.3)
        lost = rng.random() < 0.4
        act = partial(lose_node, job, node) if lost else partial(cut_off, job, node, cut_s, beside)
        scenario.harmless = False
        scenario.faults.append(f"host{node} {'lost' if lost else f'cut off for {cut_s:.3f} s'}, after '{moment}'")
        _later(job, moment, rng.uniform(0.0, 0.02), act)


def _disturb_relays(scenario: Scenario, rng: random.Random) -> None:
    """In some jobs with relays one stands still, for a moment or for longer than its ranks wait, or loses its connection."""
    job = scenario.job
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        relay, still_s = job.relays[rng.choice(job.nodes)], rng.choice((rng.uniform(0.01, 0.3), rng.uniform(0.1, 2.0)))
        breaks = rng.random() < 0.3
        in_training = f"{rng.choice(_PHASES)} {rng.randint(1, job.training.steps)}"
        moment = (
            in_training
            if rng.random() < 0.5
            else rng.choice((*_DUMP_MOMENTS, "registers", "took_over", "controller killed"))
        )

        def act(relay: Relay = relay, still_s: float = still_s, breaks: bool = breaks) -> None:
            if breaks:
                relay.loses(job.controller.place)
            else:
                relay.stands_still(still_s)

        scenario.faults.append(
            f"relay of host{relay.node} {'disconnected' if breaks else f'still for {still_s:.3f} s'}, after '{moment}'"
        )
        _later(job, moment, rng.uniform(0.0, 0.02), act)


def _later(job: Job, moment: str, later_s: float, act: Callable[[], Any]) -> None:
    job.hook(moment, 1, lambda _: job.scheduler.after(later_s, act))


def _pause(job: Job, rng: random.Random) -> None:
    """In some jobs that know their pace ranks report that they do something else, for longer than a hang may last."""
    if rng.random() < 0.5:
        return
    step, together = rng.randint(2, job.training.steps), rng.random() < 0.5
    first = rng.choice(job.ranks)
    for process in job.ranks if together else [first]:
        process.pauses[step] = rng.uniform(1.5, 4.0) * job.times.hang_floor_s


def _slow_down(scenario: Scenario, rng: random.Random) -> None:
    """In some jobs disks and updates take longer than the controller waits for an answer, and progress: this is not a fault."""
    if rng.random() >= SLOW:
        return
    job, shared = scenario.job, rng.random() < 0.5
    longest_s = 2 * job.times.progress_timeout_s
    slow = [process for process in job.ranks if shared or rng.random() < 0.4]
    steps = rng.sample(_SLOW_STEPS, rng.randint(1, 2))
    job.slow = bool(slow)
    for process in slow:
        process.slow_work |= {step: rng.uniform(job.times.progress_timeout_s, longest_s) for step in steps}
        if rng.random() < 0.3:
            process.slow_update[rng.randint(1, job.training.steps)] = rng.uniform(0.5, longest_s)
    job.note(f"slow, and no fault: {', '.join(steps)} of ranks {[process.rank for process in slow]}")


def _own_directories(rng: random.Random, layout: Layout, certain: bool = False) -> OwnDirectories | None:
    """Draw whether each host has directories of its own, and whose disk goes with it."""
    hosts = sorted(set(layout.hosts))
    if len(hosts) < 2 or (rng.random() >= OWN_DIRECTORIES and not certain):
        return None
    fragile = frozenset(f"host{host}" for host in hosts if rng.random() < 0.5)
    return OwnDirectories(rng.choice((("/a",), ("/a", "/b"), ("/a", "/b"))), fragile)


WITH_SPARES = 0.5
"""Part of the jobs that try to recover in place, over several nodes with a launcher each, in which a node is lost and there are spare ones."""
_SEAT_MOMENTS = (
    "take_places_sent", "replacement started", "replacement_came", "left", "filled", "regrouped", "regroup_failed", "earlier_process", "took_over",
)  # fmt: skip
REPLACED = 0.02
"""Part of the jobs in which a rank's process is replaced."""
GARBAGE = 0.3
"""Part of the jobs in which collectives that are aborted may return garbage."""
RELAYED = 0.3
"""Part of the jobs in which each node has a relay."""
SLOW = 0.06
"""Part of the jobs in which work is slow and progresses."""
_SLOW_STEPS = ("write", "write", "roll", "manifest", "rename")
_CELLS = possible()
"""Those to aim at."""
AIMED = 0.52
"""Part of the seeds that mix faults; the others aim."""
_EVEN_RANKS_COVER = (ring(3), ring(5), ring(4, replicas=3))
"""Layouts in which the even ranks hold every shard, so that they roll forward to a step that no odd rank has come to."""
_ODD_RANKS_BEHIND = {("hang in compute", "rolling"), ("slow rank", "rolling")}
"""Cells that need such a layout, and records that do not span the ranks: a rank that still computes was never READY."""


def _add_hang(scenario: Scenario, rng: random.Random) -> None:
    """Somebody hangs in a job that knows its own pace, and other things may go wrong before and meanwhile."""
    kind = rng.choice(("hang in compute", "hang in compute", "hang in update", "slow rank"))
    steps = scenario.job.training.steps
    _hook(scenario, rng, kind, f"{rng.choice(_PHASES)} {rng.randint(steps - 8, steps - 2)}")
    for _ in range(rng.choice((0, 0, 1, 2))):
        _add(scenario, rng, rng.choice(ANY))


def _add_chain(scenario: Scenario, rng: random.Random) -> None:
    """A fault late enough that there is something to save, on a job with hidden troubles, and more during the dump."""
    for kind in rng.sample(HIDDEN, rng.choice((0, 0, 1, 2))):
        _hide(scenario, rng, kind)
    moments: tuple[str, ...] = _DUMP_MOMENTS
    if rng.random() < 0.35:
        _begin_rolling(scenario, rng)
        moments = rng.choice((_DUMP_MOMENTS, _ROLLING_MOMENTS))
    else:
        _begin_dump(scenario, rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        _hook(scenario, rng, rng.choice(ANY), rng.choice(moments))
    for _ in range(rng.choice((0, 0, 1, 2))):
        _hook(scenario, rng, rng.choice(OF_CONTROLLERS), rng.choice(moments))


def _add_pile(scenario: Scenario, rng: random.Random) -> None:
    """Several faults in one stage of a dump, which takes its time."""
    place = rng.choice(DUMP)
    _begin(scenario, rng, place)
    _linger(scenario, rng, place)
    if place in ("freezing", "exiting"):  # a rank that does not answer is waited for
        _hook(scenario, rng, "stop", f"stage {place}", 1, 0.0)
    for _ in range(rng.choice((2, 3, 3, 4))):
        _hook(scenario, rng, rng.choice(tuple(KINDS)), f"stage {place}", 1, rng.uniform(0, 0.1))


def _linger(scenario: Scenario, rng: random.Random, place: str) -> None:
    """Have a step of the work that is ordered in this stage take its time."""
    steps = [step for step, stage in STAGE_OF.items() if stage == place]
    if steps:
        scenario.job.holds[rng.choice(steps)] = Hold(longest_s=rng.uniform(0.02, 0.6))


def _hide(scenario: Scenario, rng: random.Random, kind: str) -> None:
    rank = rng.randrange(scenario.job.training.layout.world_size)
    scenario.harmless = False
    scenario.faults.append(f"{kind} of rank {rank} from the start")
    KINDS[kind].inject(scenario.job, rng, rank)


def _begin(scenario: Scenario, rng: random.Random, place: str) -> None:
    """A fault of which the dump comes to this stage."""
    if place == "rolling":
        _begin_rolling(scenario, rng)
    elif place == "regrouping":
        steps = max(2, scenario.job.training.steps)
        _hook(
            scenario, rng, rng.choice(("kill", "kill", "exception")), f"{rng.choice(_PHASES)} {rng.randint(2, steps)}"
        )
    else:
        _begin_dump(scenario, rng)


def _begin_dump(scenario: Scenario, rng: random.Random) -> None:
    moment = (
        f"{rng.choice(('READY', 'UPDATING', 'UPDATING', 'DONE'))} {rng.randint(2, max(2, scenario.job.training.steps))}"
    )
    _hook(scenario, rng, rng.choice(EMERGENCY), moment)


def _begin_rolling(scenario: Scenario, rng: random.Random) -> None:
    """Somebody fails in an update, or right after, that others have not begun yet; rolling forward may take its time."""
    job = scenario.job
    ranks, step = job.training.layout.world_size, rng.randint(2, max(2, job.training.steps))
    killed = ranks > 2 and rng.random() < 0.4
    delay_results(job, rng, rng.sample(range(ranks), rng.randint(1, ranks - 1 - killed)), step)
    if killed:
        _hook(scenario, rng, "kill", f"UPDATING {step}", 2, 0.0)
    else:
        _hook(scenario, rng, "exception", f"{rng.choice(('UPDATING', 'DONE'))} {step}", 1, 0.0)
    if rng.random() < 0.5:
        _linger(scenario, rng, "rolling")


def _add_aimed(scenario: Scenario, rng: random.Random, kind: str, place: str) -> None:
    """A fault of this kind while the job is there, after whatever is needed for the job to come there."""
    if _arranged(scenario, rng, kind, place):
        return
    steps, ranks = scenario.job.training.steps, scenario.job.training.layout.world_size
    soon = rng.choice((0.0, rng.uniform(0, 0.003), rng.uniform(0, 0.03), rng.uniform(0, 0.3)))
    if place == "assembling":
        for _ in range(_tries(kind)):
            if kind in OF_STREAMS and rng.random() < 0.6:
                _hook(scenario, rng, kind, "registers", rng.randint(1, ranks), min(soon, rng.uniform(0, 0.02)))
            else:
                _at(scenario, rng, kind, rng.uniform(0.0, 0.11))
    elif place in TRAINING:
        soon = min(soon, rng.uniform(0, 0.01))
        _hook(scenario, rng, kind, f"{place} {rng.randint(1, steps)}", rng.randint(1, ranks), soon)
    elif place in DUMP:
        _aim_at_dump(scenario, rng, kind, place, soon)
    else:
        _aim_at_takeover(scenario, rng, kind, place, soon)
    if kind in OF_WORK and rng.random() < 0.6:  # work that is still under way when the job is elsewhere
        _hook(scenario, rng, "stop", rng.choice(("rolling", "writing", "writing", "publishing", "manifest written")))
    elif rng.random() < 0.4:
        _hook(scenario, rng, rng.choice(ANY), rng.choice(_DUMP_MOMENTS))


def _aim_at_dump(scenario: Scenario, rng: random.Random, kind: str, place: str, soon: float) -> None:
    _begin(scenario, rng, place)
    if rng.random() < 0.5:
        _linger(scenario, rng, place)
    soon = min(soon, rng.uniform(0, 0.006 if place in ("rolling", "publishing", "exiting") else 0.06))
    if kind in HIDDEN and rng.random() < 0.5:
        _hide(scenario, rng, kind)
    for _ in range(_tries(kind)):
        _hook(scenario, rng, kind, f"stage {place}", rng.choice((1, 1, 1, 1, 1, 2)), soon)


def _aim_at_takeover(scenario: Scenario, rng: random.Random, kind: str, place: str, soon: float) -> None:
    steps, ranks = scenario.job.training.steps, scenario.job.training.layout.world_size
    if kind in HIDDEN or rng.random() < 0.5:
        _begin_dump(scenario, rng)
        lost = rng.choice(
            ("stage freezing", "stage rolling", "writing", "stage writing", "publishing", "manifest written")
        )
    else:
        lost = f"{rng.choice(_PHASES)} {rng.randint(1, steps)}"
    _hook(scenario, rng, "controller kill", lost, 1, rng.choice((0.0, rng.uniform(0, 0.01))))
    if kind in HIDDEN:
        _hide(scenario, rng, kind)
    if kind in OF_STREAMS:  # in leaderless: between the first stream to a standby and the first registration there
        scenario.job.slowest_s = max(scenario.job.slowest_s, 0.005)
        count = ranks + (1 if place == "leaderless" else rng.randint(1, ranks))
        for _ in range(_tries(kind)):
            _hook(scenario, rng, kind, "registers", count, rng.choice((0.0, rng.uniform(0, 0.002), min(soon, 0.02))))
    elif place == "gathering":
        _hook(scenario, rng, kind, "stage gathering", 1, min(soon, rng.uniform(0, 0.03)))
    else:
        _hook(scenario, rng, kind, "controller killed", 1, min(soon, rng.uniform(0, 0.05)))


def _tries(kind: str) -> int:
    """A stale message is one only where something went before it, and somebody is attached to say it to."""
    return 3 if kind == "stale message" else 1


def _arranged(scenario: Scenario, rng: random.Random, kind: str, place: str) -> bool:
    """Put the fault in where work or training outlives what ordered it; False: nothing of the kind is to be arranged."""
    if place in (*TRAINING, "assembling") or rng.random() < 0.1:
        return False
    if place in {STAGE_OF[step] for step in STEPS.get(kind, ())} and rng.random() < 0.3:
        return False
    if kind in STEPS:
        notes = hold_work(scenario.job, rng, kind, place)
    elif kind in IN_TRAINING:
        notes = hold_rank(scenario.job, rng, kind, place)
    else:
        return False
    scenario.harmless = False
    scenario.faults.append(notes)
    return True


def _add(scenario: Scenario, rng: random.Random, kind: str) -> None:
    """Put in one fault, at a time of training or at a moment of the protocol."""
    steps = scenario.job.training.steps
    if rng.random() < 0.45 or not scenario.faults:
        _at(scenario, rng, kind, rng.uniform(0.0, 0.1) if rng.random() < 0.1 else rng.uniform(0.1, 0.12 + 0.05 * steps))
    elif rng.random() < 0.4:
        _hook(scenario, rng, kind, f"{rng.choice(_PHASES)} {rng.randint(1, steps)}")
    else:
        _hook(scenario, rng, kind, rng.choice(_DUMP_MOMENTS))


def _at(scenario: Scenario, rng: random.Random, kind: str, moment: float) -> None:
    act = _aimed(scenario, rng, kind, f"at {moment:.4f} s")
    scenario.job.scheduler.at(moment, lambda: act(-1))


def _hook(
    scenario: Scenario, rng: random.Random, kind: str, moment: str, count: int = 0, delay: float | None = None
) -> None:
    """Put in one fault that comes when something has happened a number of times (0: any), or a little later."""
    job = scenario.job
    count = count or rng.randint(1, job.training.layout.world_size)
    if delay is None:
        delay = rng.choice((0.0, 0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.1)))
    act, later = _aimed(scenario, rng, kind, f"{delay:.4f} s after the {count}. '{moment}'"), delay
    job.hook(moment, count, lambda rank: job.scheduler.after(later, lambda: act(rank)))


def _aimed(scenario: Scenario, rng: random.Random, kind: str, when: str) -> Callable[[int], None]:
    """Return the fault, on the rank that the moment concerns or on one that is fixed now."""
    scenario.harmless &= kind in HARMLESS
    job = scenario.job
    fixed, elsewhere = rng.randrange(job.training.layout.world_size), rng.random() < 0.4
    whom = f"rank {fixed}" if elsewhere else f"the rank concerned, or {fixed}"
    scenario.faults.append(f"{kind} of {whom}, {when}")
    if kind == "stale message":
        remember(job)

    def act(rank: int) -> None:
        chosen = fixed if elsewhere or rank < 0 else rank
        if not job.ranks[chosen].alive:  # whoever is next to it
            chosen = next((other.rank for other in job.ranks[chosen:] + job.ranks[:chosen] if other.alive), chosen)
        KINDS[kind].inject(job, rng, chosen)

    return act
