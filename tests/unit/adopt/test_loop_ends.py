"""Loops that end before their loader does: `limit` is kept by a restart, a break behind the step is warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from tests.unit.adopt.test_guard import Unwatched
from tests.unit.adopt.test_position import by_torch, trained
from ttp.adopt.trainer_state import position as position_module
from ttp.adopt.trainer_state.loader_parts import length
from ttp.adopt.trainer_state.position import DataPosition
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.config import Settings
from ttp.errors import ConfigError

LIMIT, EPOCHS = 3, 2
LEFT = "the loop over guard.batches ended by break or return after the step of batch 2 of epoch 0: "


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(
        position_module, "show", lambda level, line: lines.extend([line] if level == logging.WARNING else [])
    )
    return lines


class Trainer:
    """Trains on batches of six that the loader has."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.guard = ttp.protect(self.model, self.optimizer, save_dirs=[folder], settings=Settings(enable=False))
        self.batches = torch.arange(6.0).view(6, 1)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch.view(1, 1)).sum().backward()
        self.optimizer.step()

    def by_break(self) -> Iterator[tuple[int, float]]:
        """Yield what follows an epoch, and what was trained on."""
        for epoch in self.guard.epochs(EPOCHS):
            for i, batch in self.guard.enumerate(self.batches):
                self.step(batch)
                yield epoch, batch.item()
                if i + 1 == LIMIT:
                    break

    def by_limit(self) -> Iterator[tuple[int, float]]:
        for epoch in self.guard.epochs(EPOCHS):
            for batch in self.guard.batches(self.batches, limit=LIMIT):
                self.step(batch)
                yield epoch, batch.item()

    def by_number(self) -> Iterator[tuple[int, float]]:
        for epoch in self.guard.epochs(EPOCHS):
            for _, batch in self.guard.enumerate(self.batches, limit=LIMIT):
                self.step(batch)
                yield epoch, batch.item()


@pytest.mark.parametrize("loop", [Trainer.by_limit, Trainer.by_number])
def test_an_epoch_of_so_many_batches_has_no_more_after_a_restart(
    tmp_path: Path, loop: Callable[[Trainer], Iterator[Any]], said: list[str]
) -> None:
    """The fault comes behind the step of an epoch's last batch."""
    baseline = Trainer(tmp_path / "whole")
    whole = list(loop(baseline))
    baseline.guard.close()
    assert whole == [(epoch, batch) for epoch in range(EPOCHS) for batch in (0, 1, 2)]
    trainer = Trainer(tmp_path / "cut")
    steps = loop(trainer)
    first = [next(steps) for _ in range(LIMIT)]
    trainer.guard.save()
    trainer.guard.close()
    assert [*first, *loop(Trainer(tmp_path / "cut"))] == whole and not said


def test_a_loop_that_is_left_behind_a_step_is_warned_of_once(tmp_path: Path, said: list[str]) -> None:
    """As the next epoch begins, with what to do."""
    list(Trainer(tmp_path).by_break())
    assert len(said) == 1 and said[0].startswith(LEFT)
    assert said[0].endswith("Expected guard.batches(loader, limit=3), or the test before the step")
    assert "\n" not in said[0]


def test_a_last_loop_that_is_left_is_warned_of_by_the_save(tmp_path: Path, said: list[str]) -> None:
    """Which a fault may come before. A save within the loop leaves nothing."""

    def train(trainer: Trainer) -> None:
        for _ in trainer.guard.epochs(1):
            for i, batch in trainer.guard.enumerate(trainer.batches):
                trainer.step(batch)
                trainer.guard.save()
                if i + 1 == LIMIT:
                    return

    trainer = Trainer(tmp_path)
    train(trainer)
    assert not said
    trainer.guard.save()
    assert len(said) == 1 and said[0].startswith(LEFT)


def left(
    position: DataPosition, loader: Any = range(6), numbers: tuple[int, ...] = (3,), step: bool = True, **options: Any
) -> None:
    """Leave a loop behind its batch `number`, with a step or without one; for each number another loop."""
    for number in numbers:
        for done, _ in enumerate(position.batches(loader, **options), 1):
            if step:
                position.state_dict()
            if done == number:
                break


def recovered(position: DataPosition) -> None:
    left(position)
    position.load_state_dict({"epoch": 0, "batch": 3})


def at(rank: int = 0) -> DataPosition:
    return DataPosition(Unwatched(), SeenBatches(rank, 2, "error"))


class Itself(list[int]):
    counts_itself = True


LEAVING: dict[str, tuple[Callable[[DataPosition], None], bool]] = {
    "behind a step": (left, True),
    "before the step": (lambda position: left(position, step=False), False),
    "behind the loader's last batch": (lambda position: left(position, by_torch(4, 0), (8,)), False),
    "behind the last batch of the limit": (lambda position: left(position, limit=3), False),
    "another one goes on": (lambda position: left(position, numbers=(3, 9)), False),
    "another one goes on, and ends so, too": (lambda position: left(position, numbers=(3, 2)), True),
    "Lightning's": (lambda position: left(position, Itself(range(6))), False),
    "by a recovery in place": (recovered, False),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", LEAVING)
def test_which_loops_that_are_left_rank_0_warns_of(how: str, rank: int, said: list[str]) -> None:
    leave, warned = LEAVING[how]
    position = at(rank)
    for _ in position.epochs(1):
        leave(position)
        assert not said
    assert len(said) == (warned and rank == 0)
    position.warn_if_left()
    assert len(said) <= 1


def test_a_trainer_that_counts_steps_by_itself_is_not_warned(said: list[str]) -> None:
    """It tests before it asks for a batch, and lets go of the iterator behind its last step."""
    position = at()
    left(position)
    position.warn_if_left()
    assert not said


def test_an_exception_is_not_taken_for_the_end_of_a_loop(said: list[str]) -> None:
    position = at()
    with pytest.raises(ZeroDivisionError):
        for _ in position.epochs(1):
            for _ in position.batches(range(6)):
                position.state_dict()
                raise ZeroDivisionError
    assert not said


def test_an_epoch_that_was_over_by_its_limit_is_over_on_another_number_of_ranks() -> None:
    """Of a loader without a length, too; an epoch is not longer than its loader."""
    loader = by_torch(2, 0)
    assert [length(loader, 3), length(loader, 99), length("abc", 3), length("abc")] == [3, 16, 3, 0]
    place = at()
    assert len([place.state_dict() for _ in place.batches(loader, limit=3)]) == 3
    assert trained(by_torch, 4, place.state_dict())[0] == []
    with pytest.raises(ConfigError, match="again after the end of epoch 0"):
        list(place.batches(loader, limit=3))


def test_an_epoch_is_not_left_after_batches_that_were_not_asked_for() -> None:
    """A limit that the place is beyond ends the epoch, and none of its batches comes again."""
    place = at()
    place.load_state_dict({"epoch": 0, "batch": 5})
    assert list(place.batches(range(6), limit=3)) == []
    place.load_state_dict({"epoch": 0, "batch": 0})
    assert list(place.batches(range(6), limit=0)) == []


@pytest.mark.parametrize("limit", [-1, 2.5, "3"])
def test_a_wrong_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"^invalid limit: got .*, expected a number of batches, or None for all$"):
        list(at().batches(range(6), limit=limit))
