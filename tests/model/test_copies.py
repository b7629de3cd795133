"""Copies in memory, in every order: no fault costs more than is promised, and each mutant of the rules is caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.model.copies import Protocol, Search, Shape
from ttp.copies import rules
from ttp.copies.rules import Choice, Offer

SHAPES = {
    "two ranks on one node": Shape((0, 0), ("a", "b"), 1),
    "two ranks on two nodes": Shape((0, 1), ("a", "b"), 1),
    "three ranks on two nodes, one group replicated": Shape((0, 0, 1), ("a", "b", "a"), 1),
}
SMALL = SHAPES["two ranks on two nodes"]
LEFT_OVER = tuple(Offer(2, 1, 0, step, step % 2, frozenset("b")) for step in range(1, 9))


@pytest.mark.parametrize("every", [1, *(pytest.param(every, marks=pytest.mark.long) for every in (2, 3))])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_fault_costs_more_than_is_promised_and_some_fault_costs_that(shape: str, every: int) -> None:
    search = Search(replace(SHAPES[shape], every=every, steps=3 * every + 1))
    assert search.run() == ""
    assert search.most_lost.get(True, rules.most_lost(every)) == rules.most_lost(every)
    assert search.most_lost[False] == every, "its own copy is whole before a rank goes on"


def test_copies_of_an_earlier_attempt_change_nothing() -> None:
    assert Search(replace(SMALL, steps=4, left_over=LEFT_OVER)).run() == ""


def mixed(offers: Sequence[Offer], groups: frozenset[str], newer_than: int) -> Choice | None:
    of = {replace(offer, attempt=9): offer for offer in offers}
    choice = rules.choose(list(of), groups, newer_than)
    return choice and replace(choice, sources={of[offer]: taken for offer, taken in choice.sources.items()})


def without_a_group(offers: Sequence[Offer], groups: frozenset[str], newer_than: int) -> Choice | None:
    return rules.choose(offers, frozenset(sorted(groups)[:1]), newer_than)


def older(offers: Sequence[Offer], groups: frozenset[str], newer_than: int) -> Choice | None:
    newest = rules.choose(offers, groups, newer_than)
    return newest and (
        rules.choose([offer for offer in offers if offer.step < newest.step], groups, newer_than) or newest
    )


MUTANTS = {
    "a slot is reused one copy early": (Protocol(slot_of=lambda count: 0), SMALL, "steps are lost"),
    "no wait before READY": (Protocol(waits_before=lambda step, at: False), SMALL, "steps are lost"),
    "a wait one step late": (Protocol(waits_before=lambda step, at: step > at), SMALL, "steps are lost"),
    "safe before it was sent": (Protocol(safe_when_sent=False), SMALL, "steps are lost"),
    "attempts are mixed": (Protocol(choose=mixed), replace(SMALL, left_over=LEFT_OVER), "step and attempt"),
    "a group is missing": (Protocol(choose=without_a_group), SMALL, "taken are"),
    "an older step": (Protocol(choose=older), SMALL, "chosen is"),
    "one step less than can be lost": (Protocol(most_lost=lambda every: 2 * every - 2), SMALL, "steps are lost"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_mutant_of_the_rules_is_caught(mutant: str, every: int) -> None:
    protocol, shape, what = MUTANTS[mutant]
    assert what in Search(replace(shape, every=every), protocol).run()
