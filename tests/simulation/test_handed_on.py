"""The turns of events that second orders and stale words need really come, and the shipped machines keep every invariant in them."""

from __future__ import annotations

from collections import Counter

from tests.simulation.arranged import (
    parts_handed_on,
    published_comes_again,
    rolls_after_a_long_freeze,
    words_come_again,
)
from tests.simulation.checks import run_and_check
from tests.simulation.handed_on import THREE_REPLICAS, when_one_owes_two
from tests.simulation.scenario import build
from tests.simulation.stale import remember
from tests.simulation.training import LAYOUTS
from tests.simulation.truth import events

JOBS = 40


def test_many_writers_owe_two_orders() -> None:
    """In a third of the arranged jobs at least; all end within the invariants."""
    reached = 0
    for seed in range(JOBS):
        scenario = parts_handed_on(seed)
        job, two = scenario.job, list[int]()
        when_one_owes_two(job, two.append)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        reached += bool(two)
    assert reached >= JOBS / 3


def test_words_of_earlier_freezes_really_come_again() -> None:
    """Of every kind that is said in a dump which is begun anew: freezes, thaws and orders down, reports and answers up."""
    said: Counter[str] = Counter()
    for seed in range(JOBS):
        scenario = words_come_again(seed)
        job = scenario.job
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        past = remember(job)
        newest = job.controller.state.freeze_id
        for rank in range(len(job.ranks)):
            words = (*past.said_by(rank, newest), *past.said_to(rank, newest))
            said.update(type(word).__name__ for word in words)
    assert {"Freeze", "Thaw", "WriteOrder", "StateReport", "Written"} <= set(said), said


def test_a_piece_is_published_twice_where_its_first_directory_was_given_up() -> None:
    """A host is lost after another has published: all is written anew, and the old word comes again."""
    replanned = 0
    for seed in range(JOBS):
        scenario = published_comes_again(seed)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        replanned += bool(events(scenario.job, "place_published") and events(scenario.job, "replanned"))
    assert replanned >= JOBS / 3


def test_ranks_roll_forward_after_a_freeze_that_was_longer_than_an_answer_may_take() -> None:
    """And no rank is called stuck for it."""
    for seed in range(JOBS):
        scenario = rolls_after_a_long_freeze(seed)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert not [line for line in events(scenario.job, "stuck") if line["stage"] == "roll_forward"], f"seed {seed}"


def test_some_random_jobs_hand_parts_on_between_three_replicas() -> None:
    """Two of three such layouts come in no other way: those are about three of a hundred jobs."""
    layouts = Counter(build(seed).job.training.layout for seed in range(1000))
    assert 15 <= sum(layouts[layout] for layout in THREE_REPLICAS if layout not in LAYOUTS) <= 50
