"""What the summary says was lost, case by case: `nothing` only of a protected job whose last step is on disk."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ttp.last_step import LastStep
from ttp.launch.losses import Losses, lost_text

CALM = Losses(
    protected=True,
    faults=0,
    notices=0,
    steps_lost=0,
    steps_again=0,
    unknown_losses=0,
    untold_starts=(),
    ended_in_fault=False,
    last=LastStep(60, 60),
    without_training="31.2 s",
)
FAULT = replace(CALM, faults=1, ended_in_fault=True, last=None)
TABLE = [
    (CALM, "nothing"),
    (replace(CALM, protected=False), "not protected: no rank has called ttp.start"),
    (replace(FAULT, protected=False, unknown_losses=1), "not protected: no rank has called ttp.start"),
    (replace(CALM, last=None), "unknown: no rank has reported its last step"),
    (replace(CALM, last=LastStep(60, None)), "unknown: the trainer writes its own checkpoints, its last step is 60"),
    (replace(CALM, last=LastStep(60, 0)), "no checkpoint on disk of the last 60 steps, up to step 60 (TTP wrote none)"),
    (
        replace(CALM, last=LastStep(60, 59)),
        "no checkpoint on disk of the last 1 step, up to step 60 (the newest is of step 59)",
    ),
    (replace(CALM, untold_starts=(0, 1)), "unknown: how starts 0-1 ended is not known on this node"),
    (replace(CALM, untold_starts=(1,)), "unknown: how start 1 ended is not known on this node"),
    (FAULT, "0 steps; 31.2 s without training"),
    (replace(FAULT, steps_lost=3), "3 steps; 31.2 s without training"),
    (replace(FAULT, unknown_losses=1), "unknown after 1 fault; 31.2 s without training"),
    (replace(FAULT, unknown_losses=1, notices=1), "unknown after 1 notice; 31.2 s without training"),
    (
        replace(FAULT, steps_lost=3, unknown_losses=1, faults=2),
        "3 steps, and unknown after 1 fault; 31.2 s without training",
    ),
    (replace(FAULT, ended_in_fault=False, last=LastStep(60, 60)), "0 steps; 31.2 s without training"),
    (
        replace(FAULT, ended_in_fault=False, last=LastStep(60, 50)),
        "no checkpoint on disk of the last 10 steps, up to step 60 (the newest is of step 50); 31.2 s without training",
    ),
    (
        replace(FAULT, steps_lost=2, ended_in_fault=False),
        "2 steps, and unknown: no rank has reported its last step; 31.2 s without training",
    ),
    (
        replace(CALM, steps_lost=4, steps_again=4),
        "4 steps (4 to train again behind a checkpoint that was broken or not taken)",
    ),
]


@pytest.mark.parametrize(("known", "said"), TABLE)
def test_the_line_says_what_is_known_to_be_lost(known: Losses, said: str) -> None:
    assert lost_text(known) == said


def test_nothing_is_said_only_of_a_protected_job_whose_last_step_is_on_disk() -> None:
    """Over all combinations of facts."""
    lasts = (None, LastStep(5, None), LastStep(5, 0), LastStep(5, 4), LastStep(5, 5))
    facts = itertools.product((False, True), (0, 1), (0, 2), (0, 1), ((), (0,)), (False, True), lasts)
    for protected, faults, lost, unknown, untold, in_fault, last in facts:
        known = replace(
            CALM,
            protected=protected,
            faults=faults,
            steps_lost=lost,
            unknown_losses=unknown,
            untold_starts=untold,
            ended_in_fault=in_fault,
            last=last,
        )
        if in_fault > (faults > 0) or unknown > faults:
            continue  # no such job
        safe = protected and not (lost or unknown or untold) and (in_fault or last == LastStep(5, 5))
        assert lost_text(known).startswith(("nothing", "0 steps")) == safe, known
