"""Jobs in which a rare turn of events is sure to come: what a mutation needs to show. One seed is one job."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from tests.simulation import test_hangs
from tests.simulation.handed_on import THREE_REPLICAS, hand_on
from tests.simulation.network import UP
from tests.simulation.outliving import delay_results
from tests.simulation.relays import Relay
from tests.simulation.scenario import Scenario, build
from tests.simulation.settings import OwnDirectories
from tests.simulation.staged import PartialCollectives
from tests.simulation.stale import remember, stale_message
from tests.simulation.test_failover import two_standbys
from tests.simulation.training import even, ring
from ttp.proto.messages import CauseKind, Published


def _calm(seed: int, harmless: bool = False) -> Scenario:
    """Return a job of two or four ranks without faults."""
    scenario = build(seed, even(2 + 2 * (seed % 2)), faults=False)
    scenario.harmless = harmless
    return scenario


def _with_standbys(seed: int, steps: int = 0, harmless: bool = False) -> Scenario:
    scenario = two_standbys(seed, steps)
    scenario.harmless = harmless
    return scenario


def raised_in_the_update(seed: int) -> Scenario:
    """Rank 0 raises in the middle of its update, and its partner dies."""
    scenario = _calm(seed)
    job, half = scenario.job, scenario.job.training.layout.world_size // 2
    process = job.ranks[0]
    job.hook("UPDATING 2", 1, lambda rank: process.fault(CauseKind.EXCEPTION, "out of memory"))
    job.hook("UPDATING 2", 1, lambda rank: job.kill(half))
    return scenario


def stuck_and_alone(seed: int) -> Scenario:
    """Rank 0 hangs in its update, and its partner dies."""
    scenario = _calm(seed)
    job, half = scenario.job, scenario.job.training.layout.world_size // 2
    job.ranks[0].hang_update_at = 2
    job.hook("UPDATING 2", 1 + seed % 2, lambda rank: job.kill(half))
    return scenario


def aborted_collectives(seed: int) -> Scenario:
    """A rank dies before the others' spanning collective of step 3 is complete, and theirs return without an error."""
    scenario = _calm(seed)
    job = scenario.job
    job.collectives.garbage = random.Random(seed)
    job.collectives.hang_chance = 0.0
    job.hook("READY 3", 1, lambda rank: job.kill((rank + 1) % len(job.ranks)))
    return scenario


def reported_and_died(seed: int) -> Scenario:
    """One rank has the record of the step in flight. It reports it, the others begin to roll forward, and one of them and it die."""
    scenario = build(seed, even(8), faults=False, steps=5)
    scenario.harmless = False
    job = scenario.job
    first: list[int] = []

    def strike(rank: int) -> None:
        first.append(rank)
        job.kill((rank + 1) % 8)

    job.hook("UPDATING 3", 1, strike)
    job.hook("rolling", 1, lambda rank: job.kill(first[0]))
    job.hook("rolling", 2, lambda rank: setattr(job.ranks[rank], "break_roll", True))
    return scenario


def preempted_on_a_slow_network(seed: int) -> Scenario:
    scenario = _calm(seed)
    job = scenario.job
    job.slowest_s = 0.05
    process = job.ranks[seed % len(job.ranks)]
    job.hook("UPDATING 2", 1, lambda rank: process.run(partial(process.fault, CauseKind.PREEMPTED, "SIGTERM")))
    return scenario


def late_reports(seed: int) -> Scenario:
    """A false alarm is over before all have reported; a rank dies while their reports are still under way."""
    scenario = build(seed, even(4), faults=False, steps=30)
    scenario.harmless = False
    job = scenario.job
    job.hook("DONE 2", 1, lambda rank: setattr(job, "slowest_s", 0.25))  # for streams that are opened from now on
    for other in range(4):
        job.hook("DONE 2", 1, lambda rank, other=other: job.drop_stream(other))  # type: ignore[misc]
    job.hook("DONE 4", 1, lambda rank: job.drop_stream(0))
    job.hook("thawed", 2, lambda rank: job.scheduler.after(0.003 * (seed % 50), lambda: job.kill(1)))
    return scenario


def slow_disks(seed: int) -> Scenario:
    """A rank dies, and every write takes longer than the controller waits for a word."""
    scenario = _calm(seed)
    job = scenario.job
    job.hook("UPDATING 2", 1, lambda rank: job.kill(1))
    for process in job.ranks:
        process.slow_work["write"] = 1.5 * job.times.progress_timeout_s
    return scenario


def publisher_dies(seed: int) -> Scenario:
    scenario = _calm(seed)
    job = scenario.job
    job.hook("UPDATING 2", 1, lambda rank: job.kill(1))
    job.hook("publishing", 1, job.kill)
    return scenario


def slow_step(seed: int) -> Scenario:
    """One step takes long, but not so long as a hang."""
    scenario = test_hangs.build(seed, even(4), harmless=True)
    test_hangs.compute_for(scenario.job, seed % 4, 0.4)
    return scenario


def slower_than_the_limit(seed: int) -> Scenario:
    """One step takes as long as the limit: a rank that is seen to have progressed before the dump does not count as hung."""
    scenario = test_hangs.build(seed, even(4), harmless=True)
    test_hangs.compute_for(scenario.job, seed % 4, 0.5 + 0.0005 * (seed % 40))
    return scenario


def pauses_for_longer_than_a_hang(seed: int) -> Scenario:
    """One rank reports that it does something else, and the others wait for it."""
    scenario = test_hangs.build(seed, even(4), harmless=True)
    scenario.job.ranks[seed % 4].pauses[test_hangs.AT] = 3 * scenario.job.times.hang_floor_s
    return scenario


def calm_with_relayed_beats(seed: int) -> Scenario:
    """Nothing goes wrong, and each host's heartbeats come together."""
    scenario = test_hangs.build(seed, even(4), harmless=True)
    scenario.job.relays = {node: Relay(scenario.job, node) for node in set(scenario.job.nodes)}
    return scenario


def order_said_again(seed: int) -> Scenario:
    """A rank's stream breaks while it writes much: when it is back, the controller repeats the order."""
    scenario = build(seed, ring(3), faults=False, steps=3)
    scenario.harmless = False
    job = scenario.job
    job.hook("UPDATING 2", 1, lambda rank: job.kill(1))
    job.hook("writing", 1, job.drop_stream)
    return scenario


def disk_full_at_publish(seed: int) -> Scenario:
    """All is written in one directory, and nothing can be added there."""
    scenario = _calm(seed)
    job = scenario.job
    job.hook("UPDATING 2", 1, lambda rank: job.kill(1))
    job.hook("publish_sent", 1, lambda rank: job.disk.full.add("/a"))
    return scenario


def another_publishes_later(seed: int) -> Scenario:
    """The tracker names a later step already: another process of the job published it in the same directory."""
    scenario = _calm(seed)
    job = scenario.job
    job.disk.before.add(("/a", 90))
    job.disk.tracker["/a"] = 90
    job.hook("UPDATING 2", 1, lambda rank: job.kill(1))
    return scenario


def parts_handed_on(seed: int) -> Scenario:
    """A rank raises, so that all write; a writer fails, and then the one that owes its parts as well."""
    scenario = build(seed, THREE_REPLICAS[seed % 3], faults=False, steps=5)
    scenario.harmless = False
    job = scenario.job
    job.hook("DONE 3", 1, lambda rank: job.ranks[rank].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    hand_on(job, random.Random(seed))
    return scenario


def rolls_after_a_long_freeze(seed: int) -> Scenario:
    """The last holder of a shard is in an update for longer than an answer may take; the others roll forward after it."""
    scenario = build(seed, even(4), faults=False, steps=5)
    scenario.harmless = False
    job, rng = scenario.job, random.Random(seed)
    job.training = replace(job.training, local_copy=False)
    for process in job.ranks:
        process.replica.training = job.training
    job.slow = True
    job.ranks[1].slow_update[3] = rng.uniform(1.2, 3.0) * job.times.progress_timeout_s
    delay_results(job, rng, [0, 2], 3)
    job.hook("UPDATING 3", 1, lambda rank: job.scheduler.after(0.05, lambda: job.kill(3)))
    return scenario


# --- words of an earlier freeze ---


def words_come_again(seed: int) -> Scenario:
    """A false alarm, then a dump that is begun anew: what was said under the earlier freezes comes again in the later ones."""
    scenario = build(seed, (even(4), ring(4, replicas=3))[seed % 2], faults=False, steps=6)
    scenario.harmless = False
    job, rng = scenario.job, random.Random(seed)
    remember(job)
    job.hook("DONE 1", 1, lambda rank: job.drop_stream(rank))
    job.hook("DONE 3", 1, lambda rank: job.ranks[rank].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    job.disk.tearing.add((rng.randrange(4), "/a"))
    for process in job.ranks:
        process.slow_work["write"] = rng.uniform(0.01, 0.1)

    def stale() -> None:
        stale_message(job, rng, rng.randrange(4))

    def say_again(rank: int) -> None:
        job.scheduler.after(rng.uniform(0.0, 0.02), stale)

    for moment in ("frozen", "write_sent", "writing", "written", "publish_sent", "publishing", "renamed"):
        for count in range(1, 9):
            job.hook(moment, count, say_again)
    for count in range(1, 9):
        job.hook("got Freeze", 4 + count, say_again)
    return scenario


def published_comes_again(seed: int) -> Scenario:
    """Each host has directories of its own: what one said of its piece comes again when the other's loss has made it worthless."""
    scenario = build(seed, even(6), faults=False, own=OwnDirectories(fragile=frozenset({"host1", "host2"})))
    scenario.harmless = False
    job, rng = scenario.job, random.Random(seed)
    past = remember(job)

    def say_again(rank: int) -> None:
        controller = job.controller
        words = [word for other in range(6) for word in past.said_by(other, controller.state.freeze_id)]
        for word in words:
            if isinstance(word, Published) and not controller.gone:
                controller.receive_again(word.rank, word)

    job.hook("UPDATING 2", 1, lambda rank: job.ranks[0].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    for other in (2, 3):
        job.hook("place_published", 1, lambda rank, other=other: job.kill(other))  # type: ignore[misc]
    for count in (1, 2, 3):
        job.hook(
            "publish_sent", 3 + count, lambda rank: job.scheduler.after(rng.uniform(0.0, 0.01), lambda: say_again(rank))
        )
    return scenario


# --- each host with directories of its own ---


def each_publishes_its_piece(seed: int) -> Scenario:
    """Two hosts, and a rank of one of them dies."""
    scenario = build(seed, even(4), faults=False, own=OwnDirectories())
    scenario.harmless = False
    scenario.job.hook("UPDATING 2", 1, lambda rank: scenario.job.kill(rank))
    return scenario


def publisher_comes_back(seed: int) -> Scenario:
    """It was stopped over its order while the controller died, and its host's piece is published under the next term."""
    while True:
        scenario = build(seed, even(4), faults=False, own=OwnDirectories())
        if len(scenario.job.controllers) > 1 and scenario.job.training.steps >= 3:
            break
        seed += 1000
    scenario.harmless = False
    job = scenario.job

    def strike(rank: int) -> None:
        if rank < 2:
            job.stop(rank, 3.0)
            job.controllers[0].kill()

    job.hook("UPDATING 2", 1, lambda rank: job.kill(3))
    job.hook("claimed", 1, strike)
    job.hook("claimed", 2, strike)
    return scenario


def host_dies_with_its_files(seed: int) -> Scenario:
    """A host, its files and its disk are gone before the other one has published."""
    scenario = build(seed, even(4), faults=False, own=OwnDirectories(fragile=frozenset({"host1"})))
    scenario.harmless = False
    job = scenario.job
    job.hook("UPDATING 2", 1, lambda rank: job.kill(3))
    job.hook(("written", "publish_sent", "place_published")[seed % 3], 1, lambda rank: job.kill(2))
    return scenario


# --- with standbys ---


def step_changes_in_the_dump(seed: int) -> Scenario:
    """Only a rank that is silent has the newest record: the older step is written, and when the controller dies it comes back."""
    scenario = _with_standbys(seed)
    job = scenario.job
    witness, size = seed % 4, len(job.ranks)
    job.collectives = collectives = PartialCollectives(job, hang_chance=0.0)
    collectives.missed |= {(rank, 2) for rank in range(size) if rank != witness}
    job.hook("UPDATING 2", 1, lambda rank: job.stop(rank, 0.85))
    job.hook("written", 2, lambda rank: job.controllers[0].kill())
    return scenario


def died_in_a_dump(seed: int) -> Scenario:
    scenario = _with_standbys(seed)
    job = scenario.job
    job.hook("UPDATING 3", 2, lambda rank: job.kill(3))
    job.hook("got Freeze", 1, lambda rank: job.controllers[0].kill())
    return scenario


def died_between_two_tries(seed: int) -> Scenario:
    """Every step is computed twice; a rank dies when another one has given a step up, or has come to READY the second time."""
    scenario = _calm(seed)
    job = scenario.job
    for process in job.ranks:
        process.rehearsal.steps = set(range(1, job.training.steps + 1))
    moment, count = random.Random(seed).choice(
        (("given up 2", 1), ("given up 2", len(job.ranks)), ("READY 2", len(job.ranks) + 1))
    )
    job.hook(moment, count, lambda rank: job.kill((rank + 1) % len(job.ranks)))
    return scenario


def idle_controller_dies(seed: int) -> Scenario:
    """It dies between rename and tracker: its successor has the step published once more."""
    scenario = _with_standbys(seed)
    job = scenario.job
    job.hook("UPDATING 3", 2, lambda rank: job.kill(3))
    job.hook("renamed", 1, lambda rank: job.controllers[0].kill())
    return scenario


def false_alarm_under_a_dying_controller(seed: int) -> Scenario:
    scenario = _with_standbys(seed)
    job = scenario.job
    job.hook("DONE 2", 1, lambda rank: job.drop_stream(rank))
    job.hook("got Freeze", len(job.ranks) - 1, lambda rank: job.controllers[0].kill())
    return scenario


def silent_until_the_roll_forward(seed: int) -> Scenario:
    """A rank is silent until the others have been rolled forward, and comes back when the controller dies."""
    scenario = _with_standbys(seed)
    job = scenario.job
    job.hook("UPDATING 3", 1, lambda rank: job.stop((rank + 1) % len(job.ranks), 0.8))
    job.hook("rolled_forward", 1, lambda rank: job.controllers[0].kill())
    return scenario


def false_alarms_before_a_takeover(seed: int) -> Scenario:
    """The ranks have seen freeze 2; the standby's is called 1 again."""
    scenario = _with_standbys(seed, steps=40, harmless=True)
    job = scenario.job
    job.hook("DONE 1", 1, lambda rank: job.drop_stream(rank))
    job.hook("thawed", 1, lambda rank: job.drop_stream(0))
    job.hook("thawed", 2, lambda rank: job.controllers[0].kill())
    return scenario


def holders_die_with_the_controller(seed: int) -> Scenario:
    """Both holders of a shard are gone before the takeover: the rest does not make a checkpoint."""
    scenario = _with_standbys(seed)
    job = scenario.job

    def strike(rank: int) -> None:
        job.controllers[0].kill()
        for holder in job.training.layout.holders[0]:
            job.kill(holder)

    job.hook("DONE 2", 1, strike)
    return scenario


def stopped_about_a_lease(seed: int) -> Scenario:
    """The controller is stopped for about a lease: some ranks turn to the standby, the others are still with it."""
    scenario = _with_standbys(seed, steps=40, harmless=True)
    job = scenario.job
    job.slowest_s = 0.05
    job.hook("UPDATING 2", 1, lambda rank: job.controllers[0].pause(0.4 + 0.002 * (seed % 120)))
    return scenario


def back_and_forth(seed: int) -> Scenario:
    """The first controller comes back about when the second has died and the third is cut off."""
    scenario = _with_standbys(seed, steps=40)
    job, rng = scenario.job, random.Random(seed)
    away_s, until_dead_s, until_cut_s = rng.uniform(0.6, 1.2), rng.uniform(0, 0.3), rng.uniform(0, 0.3)
    cut_s = rng.uniform(0.5, 1.5)
    job.scheduler.at(rng.uniform(0.1, 0.6), lambda: job.controllers[0].pause(away_s))
    job.hook("took_over", 1, lambda rank: job.scheduler.after(until_dead_s, job.controllers[1].kill))
    job.hook("took_over", 1, lambda rank: job.scheduler.after(until_cut_s, lambda: job.controllers[2].cut(cut_s)))
    job.hook("DONE 30", 1, job.kill)
    return scenario


def work_goes_on(seed: int) -> Scenario:
    """A step of one rank's work progresses for longer than a fault may take; the others are done soon."""
    scenario = build(seed, even(4), faults=False, steps=5)
    scenario.harmless = False
    job = scenario.job
    job.ranks[0].slow_work[("write", "manifest")[seed % 2]] = 60.0
    job.hook("DONE 3", 1, lambda rank: job.ranks[1].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    return scenario


def torn_in_the_only_directory(seed: int) -> Scenario:
    """One rank's files end short in the directory that is not full, shared or each host's own."""
    own = OwnDirectories(("/a", "/b")) if seed % 2 else None
    scenario = build(seed, even(4), faults=False, steps=5, own=own)
    scenario.harmless = False
    job = scenario.job
    job.disk.tearing.add((0, job.root_of(0, "/a")))
    job.disk.full |= {job.root_of(rank, "/b") for rank in range(4)}
    job.hook("DONE 3", 2, job.kill)
    return scenario


def only_the_step_before_fits(seed: int) -> Scenario:
    """Rank 2 alone has its shard of the newest step, and no disk takes it; the others have copies of the step before."""
    scenario = build(seed, ring(3), faults=False, steps=5)
    scenario.harmless = False
    job = scenario.job
    job.training = replace(job.training, local_copy=True)
    for process in job.ranks:
        process.replica.training = job.training
    job.ranks[1].slow_compute[3] = 1.0
    job.disk.broken_for |= {(2, "/a"), (2, "/b")}
    job.hook("DONE 3", 2, lambda rank: job.ranks[0].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    return scenario


def deaf_while_its_clock_leaps(seed: int) -> Scenario:
    """The controller receives nothing for less than the orphan timeout, and its clock leaps meanwhile."""
    scenario = build(seed, even(4), faults=False, steps=5)
    scenario.harmless = False
    job, controller = scenario.job, scenario.job.controllers[0]
    job.hook("DONE 3", 1, lambda rank: job.ranks[1].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    job.hook("stage writing", 1, lambda rank: controller.cut_one_way(UP, 2.2))
    job.hook("stage writing", 1, lambda rank: job.scheduler.after(0.1, partial(controller.jump, 2.2)))
    return scenario


def attaches_again_late_in_a_round(seed: int) -> Scenario:
    """The stream of rank 0 breaks on a slow network: it is back when half of the round is over. Its partner dies meanwhile."""
    scenario = build(seed, even(4), faults=False, steps=5)
    scenario.harmless = False
    job = scenario.job

    def away(rank: int) -> None:
        job.slowest_s = 0.25  # for streams that are opened from now on
        job.drop_stream(0)
        job.scheduler.after(0.2, partial(job.kill, 2))

    job.hook("DONE 2", 1, away)
    return scenario


def attaches_again_late_with_the_newest_step(seed: int) -> Scenario:
    """With local copies: rank 2 is a step behind rank 0, its partner, whose stream breaks on a slow network as rank 1 fails."""
    scenario = build(seed, even(4), faults=False, steps=5)
    scenario.harmless = False
    job = scenario.job
    job.training = replace(job.training, local_copy=True)
    for process in job.ranks:
        process.replica.training = job.training
    job.ranks[2].slow_compute[3] = 2.0

    def away(rank: int) -> None:
        job.slowest_s = 0.25  # for streams that are opened from now on
        job.drop_stream(0)
        job.scheduler.after(0.1, partial(job.ranks[1].fault, CauseKind.EXCEPTION, "ValueError: bad batch"))

    job.hook("DONE 3", 1, away)
    return scenario
