"""Random jobs alone find mistakes that show only where several things come together: each situation comes as often as its weight says."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.mutants.by_seeds import look
from tests.simulation.mutations import MUTATIONS
from tests.simulation.situations import SITUATIONS, drawn

JOBS = 20_000
SHOWN_BY = 3_000
ONCE_NOT_SHOWN = (
    "a_leap_of_the_clock_counts_as_silence",
    "vouches_are_not_believed",
    "hang_without_proof",
    "no_older_step_is_tried",
    "thaws_what_another_ordered",
    "earlier_controller_keeps_its_ranks",
    "some_ranks_without_a_controller_are_enough",
)
"""Wrong variants that so many jobs did not show before there were weights: deafness, leases, hangs, disks, takeovers, notices."""


IN_MAKE_TEST = ("vouches_are_not_believed", "no_older_step_is_tried", "thaws_what_another_ordered")
"""The others take a thousand jobs or more; `make chaos` has them."""


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(wrong, marks=() if wrong in IN_MAKE_TEST else pytest.mark.long) for wrong in ONCE_NOT_SHOWN],
)
def test_random_jobs_alone_show_what_is_wrong(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From seed 0 on; the seed is printed. It takes some hundreds."""
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.patch.__name__ == wrong]

    def change() -> bool:
        mutation.patch(pytest.MonkeyPatch())  # in a process of its own
        return True

    found = look(change, 0, SHOWN_BY)
    assert found.by, f"{mutation.wrong}: no job of the seeds 0 to {found.jobs - 1} shows it"
    with capsys.disabled():
        print(f"\n  {mutation.name}: seed {found.jobs - 1}: {found.by[:100]}", end="")


def test_each_situation_comes_as_often_as_its_weight_says() -> None:
    """To a fifth, or five times the root of what is expected."""
    came = Counter(found[0].put_in for seed in range(JOBS) if (found := drawn(seed)) is not None)
    for situation in SITUATIONS:
        expected = situation.share * JOBS
        assert abs(came[situation.put_in] - expected) < 5 * expected**0.5, situation.put_in.__name__
    assert 0.2 < sum(situation.share for situation in SITUATIONS) < 0.5, "the others mix single faults"
