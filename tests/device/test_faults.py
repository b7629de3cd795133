"""Faults on the device by seed, and planted mistakes. `make soak` has ten thousand of the former."""

from __future__ import annotations

import random

import pytest

from tests.device.campaign import campaign, caught
from tests.device.mutants import MUTANTS


def test_faults_by_seed() -> None:
    """No wrong commit, no torn state saved as whole, nothing that hangs."""
    first = random.SystemRandom().randrange(1 << 30)
    outcome = campaign(range(first, first + 10), world=2)
    assert not outcome.violations, f"first seed {first}: {outcome.violations[0]}"
    assert outcome.episodes == 10, f"first seed {first}"


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
def test_more_faults_by_seed(world: int) -> None:
    """On as many ranks as either layout takes."""
    first = random.SystemRandom().randrange(1 << 30)
    outcome = campaign(range(first, first + 60), world=world)
    assert not outcome.violations, f"first seed {first}: {outcome.violations[0]}"
    assert outcome.episodes == 60 and outcome.results["saved"] > 30, f"first seed {first}: {outcome.results}"


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_mistake_is_seen(mutant: str) -> None:
    """Each by the episodes that it names."""
    assert caught(mutant), f"nothing shows: {mutant}"
