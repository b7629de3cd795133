"""How often a schedule advances for an update, counted at each update and repeated on resume."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, OneCycleLR

from ttp.adopt.ticks import Ticks


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def repeated(scheduler: LRScheduler, advances: list[int]) -> int:
    """Return how far a resume advances the schedule, after updates that were followed by so many steps each."""
    ticks = Ticks(scheduler)
    for count in [*advances, 0]:
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
        assert repeated(ExponentialLR(optimizer(), 0.9), advances) == expected, advances


def test_a_one_cycle_schedule_is_not_repeated_past_its_end() -> None:
    """It raises there. accelerate's wrapper stops as well."""
    scheduler = OneCycleLR(optimizer(), max_lr=1.0, total_steps=10)
    assert repeated(scheduler, [3, 3, 3]) == 1
    assert scheduler.last_epoch == 10
