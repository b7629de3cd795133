"""What the summary says was lost, case by case: `nothing` only of a protected job whose last step is on disk."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ttp.exchange.last_step import LastStep
from ttp.launch.report.summary import Summary, lost_text, summary_lines

CALM = Summary(
    result="succeeded",
    starts=1,
    false_alarms=0,
    saved_steps=(),
    lasted_s=301.0,
    protected=True,
    faults=0,
    notices=0,
    steps_lost=0,
    steps_again=0,
    unknown_losses=0,
    untold_starts=(),
    ended_in_fault=False,
    last=LastStep(60, 60),
    lost_s=31.25,
)
SUMMARY = Summary(
    result="succeeded",
    starts=3,
    faults=2,
    notices=0,
    false_alarms=1,
    saved_steps=(42, 90),
    steps_lost=0,
    unknown_losses=0,
    lost_s=31.25,
    lasted_s=301.0,
    ended_in_fault=False,
    last=LastStep(120, 120),
)
FAULT = replace(CALM, faults=1, ended_in_fault=True, last=None)
TABLE = [
    (CALM, "nothing"),
    (replace(CALM, protected=False), "not protected: no rank called ttp.start()"),
    (replace(FAULT, protected=False, unknown_losses=1), "not protected: no rank called ttp.start()"),
    (replace(CALM, last=None), "unknown: no rank has reported its last step"),
    (
        replace(CALM, last=LastStep(60, None)),
        "no step at a fault; the trainer saves its own checkpoints, its last step is 60",
    ),
    (replace(CALM, last=LastStep(60, 0)), "no checkpoint on disk of the last 60 steps, up to step 60 (TTP wrote none)"),
    (
        replace(CALM, last=LastStep(60, 59)),
        "no checkpoint on disk of the last 1 step, up to step 60 (the newest is of step 59)",
    ),
    (replace(CALM, untold_starts=(0, 1)), "unknown: the end of attempts 0-1 is not known on this node"),
    (replace(CALM, untold_starts=(1,)), "unknown: the end of attempt 1 is not known on this node"),
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
        "4 steps (4 repeated: their checkpoint was broken or not used)",
    ),
]


@pytest.mark.parametrize(("known", "said"), TABLE)
def test_the_line_says_what_is_known_to_be_lost(known: Summary, said: str) -> None:
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


def test_the_summary_covers_the_entire_job() -> None:
    assert summary_lines(SUMMARY) == [
        "--- the job has ended ---",
        "result  succeeded",
        "ran     3 attempts in 301.0 s",
        "faults  2 faults, 1 false alarm",
        "saved   steps 42, 90",
        "lost    0 steps; 31.2 s without training",
    ]


def test_the_summary_does_not_hide_what_is_not_known() -> None:
    """A job whose ranks all died has no report of their last step."""
    lines = summary_lines(replace(SUMMARY, unknown_losses=1, steps_lost=3, saved_steps=(), lasted_s=7200.0))
    assert "lost    3 steps, and unknown after 1 fault; 31.2 s without training" in lines
    stopped = summary_lines(replace(SUMMARY, faults=1, notices=1, unknown_losses=1))
    assert "faults  0 faults, 1 preemption notice, 1 false alarm" in stopped
    assert "lost    unknown after 1 notice; 31.2 s without training" in stopped
    assert "ran     3 attempts in 120 min" in lines and not any(line.startswith("saved") for line in lines)
    calm = summary_lines(replace(SUMMARY, starts=1, faults=0, false_alarms=0, saved_steps=(), lost_s=0.0))
    assert calm[2:] == ["ran     1 attempt in 301.0 s", "faults  0 faults", "lost    nothing"]


def test_steps_that_were_trained_again_without_a_fault_are_lost_too() -> None:
    """The newest checkpoint was broken as the job began."""
    calm = replace(SUMMARY, faults=0, false_alarms=0, saved_steps=(), steps_lost=4, steps_again=4, lost_s=0.0)
    lost = "lost    4 steps (4 repeated: their checkpoint was broken or not used)"
    assert summary_lines(calm)[-1] == lost
    both = summary_lines(replace(SUMMARY, steps_lost=7, steps_again=4))
    assert both[-1] == f"{lost.replace('4', '7', 1)}; 31.2 s without training"
    assert summary_lines(replace(calm, steps_lost=4000, steps_again=4000))[-1] == lost.replace("4", "4,000")


def test_the_summary_of_a_job_that_never_began_counts_no_time_without_training() -> None:
    """Its script failed before `ttp.start`: whether it trained is not known."""
    failed = replace(SUMMARY, unknown_losses=2, false_alarms=0, saved_steps=(), protected=False)
    assert summary_lines(failed)[3:] == ["faults  2 faults", "lost    not protected: no rank called ttp.start()"]
    silent = summary_lines(replace(failed, protected=True))
    assert silent[-1] == "lost    unknown after 2 faults; 31.2 s without training"


def test_a_preemption_notice_is_not_counted_as_a_fault() -> None:
    """The summary of a preempted job has its faults and its notices."""

    one = replace(SUMMARY, faults=1, notices=1, false_alarms=0)
    assert "faults  0 faults, 1 preemption notice" in summary_lines(one)
    four = replace(SUMMARY, faults=4, notices=3, false_alarms=1)
    assert "faults  1 fault, 3 preemption notices, 1 false alarm" in summary_lines(four)
