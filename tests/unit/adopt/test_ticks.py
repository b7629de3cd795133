"""How often a schedule advances for an update, counted at each update and repeated on resume."""

from __future__ import annotations

from types import SimpleNamespace

import accelerate.scheduler
import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, OneCycleLR

from ttp.adopt.trainer_state.ticks import Ticks


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def repeated(scheduler: LRScheduler, advances: list[int], *, passes: bool = True) -> int:
    """Return how far a resume advances the schedule, after updates that were followed by so many steps each. `passes`: forward passes are seen."""
    ticks = Ticks(scheduler)
    for count in [*advances, 0]:
        if passes:
            ticks.begin_pass()
        ticks.count()
        scheduler.optimizer.step()
        for _ in range(count):
            scheduler.step()
    before = scheduler.last_epoch
    ticks.repeat()
    return scheduler.last_epoch - before


def test_what_follows_an_update_is_repeated() -> None:
    """Once, or once for each process; a step more at an epoch's end belongs to that epoch."""
    for advances, expected in (([], 1), ([1], 1), ([3, 3], 3), ([1, 1, 2], 1), ([4, 4, 5], 4), ([1, 0], 0)):
        for passes in (True, False):
            assert repeated(ExponentialLR(optimizer(), 0.9), advances, passes=passes) == expected, advances


def test_a_one_cycle_schedule_is_not_repeated_past_its_end() -> None:
    """It raises there. accelerate's wrapper stops as well."""
    scheduler = OneCycleLR(optimizer(), max_lr=1.0, total_steps=10)
    assert repeated(scheduler, [3, 3, 3]) == 1
    assert scheduler.last_epoch == 10


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_what_is_known_of_a_run_is_kept_over_its_attempts() -> None:
    """At an epoch's end that is done again the schedule steps in front of an attempt's first pass: that is not a loop which always does."""
    for early in (False, True):
        ticks = Ticks(ExponentialLR(optimizer(), 0.9))
        ticks.begin(0 if early else 1, early)
        ticks.scheduler.step()
        ticks.begin_pass()
        ticks.count()
        assert (ticks.ticks, ticks.early) == (0 if early else 1, early)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("early", [False, True])
def test_what_accelerates_wrapper_does_for_two_processes_is_repeated_once(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps the scheduler within once for each process; whoever calls it at the begin of the loop's body calls it again by itself."""
    monkeypatch.setattr(accelerate.scheduler, "AcceleratorState", lambda: SimpleNamespace(num_processes=2))
    monkeypatch.setattr(accelerate.scheduler, "GradientState", lambda: SimpleNamespace(sync_gradients=True))
    inner = ExponentialLR(optimizer(), 0.9)
    wrapper = AcceleratedScheduler(inner, [SimpleNamespace(step_was_skipped=False)])
    ticks = Ticks(wrapper)
    for _ in range(3):
        if early:
            wrapper.step()
        ticks.begin_pass()
        ticks.count()
        inner.optimizer.step()
        if not early:
            wrapper.step()
    before = inner.last_epoch
    assert before == 6
    ticks.repeat()
    assert inner.last_epoch - before == (0 if early else 2)
