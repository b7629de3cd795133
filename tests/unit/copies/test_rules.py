"""Which step is saved of copies: one answer on all agents. And how often ranks copy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.copies.rules import MOST_STEPS, Offer, choose, interval, most_lost, slot_of, waits_before

GROUPS = frozenset("abc")
OFFERS = st.builds(
    Offer,
    st.integers(0, 3), st.integers(0, 5), st.integers(0, 2), st.integers(1, 3), st.integers(0, 1),
    st.frozensets(st.sampled_from("abc"), min_size=1), st.booleans(),
)  # fmt: skip


@given(st.lists(OFFERS, unique=True), st.randoms(use_true_random=False), st.integers(0, 2))
def test_agents_that_read_the_offers_in_any_order_choose_the_same_sources_in_the_same_order(
    offers: list[Offer], order: random.Random, newer_than: int
) -> None:
    # of one node, a rank has one copy in each memory at a step
    offers = list({(o.node, o.rank, o.attempt, o.step, o.received): o for o in offers}.values())
    choice = choose(offers, GROUPS, newer_than)
    shuffled = order.sample(offers, len(offers))
    again = choose(shuffled, GROUPS, newer_than)
    assert again == choice
    if choice is not None and again is not None:
        assert list(again.sources.items()) == list(choice.sources.items())


def offer(node: int, groups: str, step: int = 5, attempt: int = 1, received: bool = False) -> Offer:
    return Offer(node, node, attempt, step, 0, frozenset(groups), received)


def test_a_step_that_is_not_newer_than_the_newest_checkpoint_is_not_saved_again() -> None:
    offers = [offer(0, "abc")]
    assert choose(offers, GROUPS, 4) is not None
    assert choose(offers, GROUPS, 5) is None


def test_without_a_group_there_is_nothing_to_save() -> None:
    assert choose([offer(0, "a")], frozenset(), 0) is None


def test_each_group_comes_from_one_copy_and_the_work_is_shared() -> None:
    offers = [offer(0, "abc"), offer(1, "abc"), offer(2, "abc")]
    choice = choose(offers, GROUPS, 0)
    assert choice is not None
    assert sorted(map(sorted, choice.sources.values())) == [["a"], ["b"], ["c"]]


def test_copies_of_an_earlier_attempt_fill_no_gap() -> None:
    assert choose([offer(0, "a"), offer(1, "b", attempt=0)], frozenset("ab"), 0) is None


def test_a_nodes_own_copy_is_taken_before_one_that_came_from_another() -> None:
    choice = choose([offer(0, "a", received=True), offer(1, "a")], frozenset("a"), 0)
    assert choice is not None
    assert [source.node for source in choice.sources] == [1]


def test_a_slot_is_never_that_of_the_copy_before() -> None:
    assert [slot_of(count) for count in range(1, 5)] == [1, 0, 1, 0]


@pytest.mark.parametrize(("step", "waits"), [(4, False), (5, True), (6, True)])
def test_a_rank_waits_from_the_step_on_behind_which_it_copies_next(step: int, waits: bool) -> None:
    assert waits_before(step, 5) is waits


def test_what_a_fault_costs() -> None:
    assert [most_lost(every) for every in (1, 2, 3)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("copy_s", "step_s", "every"),
    [(0.1, 1.0, 10), (0.101, 1.0, 11), (0.0, 1.0, 1), (1.0, 0.0, 1), (1e-9, 1.0, 1), (1e9, 1.0, MOST_STEPS)],
)
def test_copies_take_at_most_their_part_of_the_time(copy_s: float, step_s: float, every: int) -> None:
    assert interval(copy_s, step_s, 0.01) == every
