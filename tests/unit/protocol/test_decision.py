"""The newest step at which every shard has a live holder that has it or can reach it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.unit.protocol.bench import MIB, record, report
from ttp.controller.core.facts.coverage import Group
from ttp.controller.core.facts.decision import Decision, Refusal, decide
from ttp.controller.core.facts.planning import SMALLEST_PART_BYTES, hand_over, share_out
from ttp.proto.messages import Part, Phase, StateReport

COMPUTE, READY, UPDATING, DONE = Phase.COMPUTE, Phase.READY, Phase.UPDATING, Phase.DONE
HALVES = (Group("g0", "shard 0", MIB, (0, 2)), Group("g1", "shard 1", MIB, (1, 3)))


def verdict(*reports: StateReport, records: Iterable[int] = (), **options: object) -> Decision | Refusal:
    known = {r.step: r for rep in reports for r in rep.records} | {step: record(step) for step in records}
    return decide(HALVES, {rep.rank: rep for rep in reports}, known, **options)  # type: ignore[arg-type]


def test_without_a_record_all_write_the_step_before() -> None:
    found = verdict(report(1, 1, READY, 7), report(2, 1, COMPUTE, 7), report(3, 1, READY, 7))
    assert found == Decision(6, None, (), (1, 2, 3))


def test_one_survivors_record_takes_every_ready_rank_along() -> None:
    found = verdict(report(1, 1, READY, 7), report(2, 1, DONE, 7, records=[7]), report(3, 1, READY, 7))
    assert found == Decision(7, record(7), (1, 3), (1, 2, 3))


def test_a_dead_ranks_step_never_counts() -> None:
    """Ranks 0 and 2 held shard 0 at step 7; only their reports remain, and no record among the living."""
    found = verdict(report(1, 1, READY, 7), report(3, 1, READY, 7), absent={0: "dead (signal SIGKILL)", 2: "dead"})
    assert isinstance(found, Refusal)
    assert found.missing == ("shard 0",)
    assert "rank 0, dead (signal SIGKILL)" in found.reason


def test_a_record_reported_by_a_rank_that_died_since_is_still_a_proof() -> None:
    found = verdict(report(0, 1, READY, 7), report(1, 1, READY, 7), records=[7])
    assert found == Decision(7, record(7), (0, 1), (0, 1))


def test_a_stuck_ranks_record_counts_and_its_shards_do_not() -> None:
    stuck = report(0, 1, UPDATING, 7, records=[7], closed=False)
    found = verdict(stuck, report(1, 1, READY, 7), report(2, 1, READY, 7), report(3, 1, READY, 7))
    assert found == Decision(7, record(7), (1, 2, 3), (1, 2, 3))


def test_a_stuck_rank_that_is_the_last_holder_means_refusal_with_its_name() -> None:
    stuck = report(0, 1, UPDATING, 7, records=[7], closed=False)
    found = verdict(stuck, report(1, 1, READY, 7), absent={0: "stuck in UPDATING of step 7", 2: "dead (killed)"})
    assert isinstance(found, Refusal)
    assert "shard 0" in found.reason and "rank 0, stuck in UPDATING of step 7" in found.reason


def test_a_torn_rank_never_counts() -> None:
    torn = report(0, 1, UPDATING, 7, records=[7], torn=True)
    found = verdict(torn, report(1, 1, READY, 7), report(2, 1, READY, 7))
    assert found == Decision(7, record(7), (1, 2), (1, 2))


def test_a_torn_ranks_local_copy_does_not_count_either() -> None:
    """The update that raised half way may have been making it."""
    torn = report(0, 1, UPDATING, 7, torn=True, backup_step=6)
    found = verdict(torn, report(1, 1, READY, 7, backup_step=5))
    assert isinstance(found, Refusal) and found.missing == ("shard 0",)


def test_a_rank_in_compute_does_not_roll_forward() -> None:
    """Its gradients are not final; with local copies the job falls back to the step that all have."""
    done = report(1, 1, DONE, 7, records=[7], backup_step=6)
    found = verdict(done, report(0, 1, COMPUTE, 7), report(2, 1, READY, 7, backup_step=5))
    assert found == Decision(7, record(7), (2,), (1, 2), copies=True)
    found = verdict(done, report(0, 1, COMPUTE, 7))
    assert found == Decision(6, None, (), (0, 1), copies=True)


def test_a_failed_roll_forward_is_not_tried_again() -> None:
    reports = (report(0, 1, READY, 7, backup_step=5), report(1, 1, DONE, 7, records=[7], backup_step=6))
    assert verdict(*reports) == Decision(7, record(7), (0,), (0, 1), copies=True)
    assert verdict(*reports, unreachable=frozenset({(0, 7)})) == Decision(6, None, (), (0, 1), copies=True)


def test_skipped_steps_count_as_steps() -> None:
    found = verdict(report(0, 1, DONE, 7, records=[7]), report(1, 1, DONE, 7, records=[7]))
    assert isinstance(found, Decision) and found.step == 7


def test_nothing_to_save_before_the_first_step() -> None:
    found = verdict(report(0, 1, COMPUTE, 1), report(1, 1, READY, 1))
    assert isinstance(found, Refusal) and "nothing to save" in found.reason and found.missing == ()


def test_a_refusal_without_survivors_names_all_shards() -> None:
    found = verdict()
    assert isinstance(found, Refusal) and found.missing == ("shard 0", "shard 1")


def test_each_part_goes_to_the_holder_with_the_least_to_write() -> None:
    """As it is said, whatever shorter way there is: also where holders differ in what they have, are not able, or hold more than one group."""
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(300):
        world = rng.randint(1, 8)
        able = rng.sample(range(world), rng.randint(1, world))
        groups = [
            Group(
                f"g{number}",
                "",
                rng.choice((0, 100, 4096, 10_000, MIB, 5 * MIB)),
                tuple(sorted({rng.choice(able), *others})),
            )
            for number in range(rng.randint(1, 8))
            for others in (rng.sample(range(world), rng.randint(0, world)),)
        ]
        holders = {group.group_id: [rank for rank in group.holders if rank in able] for group in groups}
        loads, expected = dict.fromkeys(able, 0.0), dict[int, list[Part]]()
        for group in sorted(groups, key=lambda group: (len(holders[group.group_id]), -group.nbytes, group.group_id)):
            count = max(1, min(len(holders[group.group_id]), -(-group.nbytes // SMALLEST_PART_BYTES)))
            for index in range(count):
                rank = min(holders[group.group_id], key=lambda rank: (loads[rank], rank))
                loads[rank] += group.nbytes / count
                expected.setdefault(rank, []).append(Part(group.group_id, index, count))
        plan = {
            rank: tuple(sorted(parts, key=lambda part: (part.group_id, part.index))) for rank, parts in expected.items()
        }
        assert share_out(groups, able) == (plan, max(loads.values())), f"seed {seed}: {groups}, {able}"


def test_every_part_is_given_once_and_replicas_share_the_work() -> None:
    plan, largest = share_out(HALVES, (0, 1, 2, 3))
    assert largest == HALVES[0].nbytes / 2
    assert plan == {0: (Part("g0", 0, 2),), 1: (Part("g1", 0, 2),), 2: (Part("g0", 1, 2),), 3: (Part("g1", 1, 2),)}


def test_the_slowest_writer_of_a_ring_with_a_dead_rank_has_little_more_than_its_share() -> None:
    ring = tuple(Group(f"g{i}", f"shard {i}", MIB, tuple(sorted((i, (i + 1) % 5)))) for i in range(5))
    plan, largest = share_out(ring, (1, 2, 3, 4))
    loads = {rank: sum(MIB / part.count for part in parts) for rank, parts in plan.items()}
    assert max(loads.values()) == largest <= 1.5 * MIB, loads
    assert sorted((p.group_id, p.index) for parts in plan.values() for p in parts) == sorted(
        (g.group_id, index) for g in ring for index in range(1 if 0 in g.holders else 2)
    )


def test_a_tiny_group_is_not_cut() -> None:
    assert share_out((Group("g", "scalars", 8, (0, 1, 2)),), (0, 1, 2)) == ({0: (Part("g", 0, 1),)}, 8.0)


def test_parts_of_a_lost_writer_go_to_the_holder_with_the_least_to_do() -> None:
    parts = (Part("a", 0, 2), Part("b", 1, 2))
    assert hand_over(parts, {"a": (1, 2), "b": (2,)}, {1: 3}) == {2: parts}
    assert hand_over(parts, {"a": (1, 2), "b": ()}, {}) is None


def test_each_part_that_is_handed_over_counts_for_the_next() -> None:
    three = tuple(Part("a", index, 3) for index in range(3))
    two = {"a": (1, 2)}
    assert hand_over(three[:2], two, {}) == {1: three[:1], 2: three[1:2]}
    assert hand_over(three, two, {2: 1}) == {1: three[:2], 2: three[2:]}
    assert hand_over(three[:1], two, {1: 1}) == {2: three[:1]}, "a rank that has nothing yet"


def test_nothing_to_write_has_no_largest_share() -> None:
    assert share_out((), ()) == ({}, 0.0)


def test_ready_at_another_step_than_the_next_reaches_nothing() -> None:
    """A rank at step 6 whose gradients are of step 8 can do the update of neither 7 nor 8."""
    odd = report(0, 1, READY, 8, state_step=6)
    for step in (7, 8):
        found = verdict(odd, report(1, 1, DONE, step, records=[step]), report(3, 1, DONE, step))
        assert isinstance(found, Refusal) and found.missing == ("shard 0",)
        assert "held by rank 0, which is at step 6, rank 2, which did not answer" in found.reason


def test_the_refusal_names_the_step_that_the_fewest_shards_lack() -> None:
    """At step 7 one of three shards is lost, at step 6 and at step 5 two are: the first says most."""
    groups = (*HALVES, Group("g2", "shard 2", MIB, (4,)))
    reports = {0: report(0, 1, DONE, 7), 1: report(1, 1, DONE, 7), 2: report(2, 1, DONE, 6), 4: report(4, 1, DONE, 5)}
    found = decide(groups, reports, {})
    assert isinstance(found, Refusal)
    assert found.missing == ("shard 2",) and "at step 7" in found.reason
    reports = {1: report(1, 1, DONE, 7), 2: report(2, 1, DONE, 6), 3: report(3, 1, DONE, 6), 4: report(4, 1, DONE, 5)}
    found = decide(groups, reports, {})
    assert isinstance(found, Refusal)
    assert found.missing == ("shard 2",) and "at step 6" in found.reason
    found = decide(groups, {}, {})
    assert isinstance(found, Refusal) and "at step" not in found.reason


def test_a_refusal_names_as_much_as_can_be_read() -> None:
    """Up to four holders and four shards; of the others the number."""
    for size, more in ((4, ""), (5, "1 more")):
        many = decide((Group("g", "shard", MIB, tuple(range(size))),), {}, {})
        assert isinstance(many, Refusal) and ("and" in many.reason) is bool(more) and more in many.reason
        wide = decide(tuple(Group(f"g{i}", f"shard {i}", MIB, (i,)) for i in range(size)), {}, {})
        assert isinstance(wide, Refusal) and ("and" in wide.reason) is bool(more) and more in wide.reason


def test_who_rolls_forward_is_found_among_all() -> None:
    rolling = (0, 3, 4, 9)
    decision = Decision(1, None, rolling, tuple(range(11)))
    assert [rank for rank in range(-1, 11) if decision.rolls(rank)] == list(rolling)


def test_a_copy_of_the_state_before_the_first_step_is_a_copy() -> None:
    """Step 0 is not written, but where it is the newest that all shards have, the refusal says that nothing was finished."""
    holders = (report(0, 1, COMPUTE, 2, backup_step=0), report(1, 1, COMPUTE, 1, backup_step=0))
    found = verdict(*holders)
    assert isinstance(found, Refusal) and "no optimizer step was finished yet" in found.reason
    found = verdict(report(0, 1, COMPUTE, 2, backup_step=0), report(1, 1, COMPUTE, 2))
    assert isinstance(found, Decision) and found.step == 1 and found.copies
