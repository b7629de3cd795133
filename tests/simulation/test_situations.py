"""Random jobs alone find mistakes that show only where several things come together: each situation comes as often as its weight says."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.mutants.by_seeds import look
from tests.simulation.mutations import MUTATIONS
from tests.simulation.situations import SITUATIONS, drawn

JOBS = 20_000
FOUND_WITHIN = {
    "a_leap_of_the_clock_counts_as_silence": 600,
    "vouches_are_not_believed": 200,
    "late_publisher_of_a_lower_term_supersedes": 400,
    "torn_file_costs_its_directory": 100,
}
"""Wrong variants that 3,000 jobs had not shown, or that took long, before there were weights."""


@pytest.mark.parametrize("wrong", FOUND_WITHIN)
def test_random_jobs_alone_show_what_is_wrong(wrong: str) -> None:
    """Within so many seeds from 0 on."""
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.patch.__name__ == wrong]

    def change() -> bool:
        mutation.patch(pytest.MonkeyPatch())  # in a process of its own
        return True

    found = look(change, 0, FOUND_WITHIN[wrong])
    assert found.by, f"{mutation.wrong}: no job of the seeds 0 to {found.jobs - 1} shows it"


def test_each_situation_comes_as_often_as_its_weight_says() -> None:
    """To a fifth, or five times the root of what is expected."""
    came = Counter(found[0].put_in for seed in range(JOBS) if (found := drawn(seed)) is not None)
    for situation in SITUATIONS:
        expected = situation.share * JOBS
        assert abs(came[situation.put_in] - expected) < 5 * expected**0.5, situation.put_in.__name__
    assert 0.2 < sum(situation.share for situation in SITUATIONS) < 0.5, "the others mix single faults"
