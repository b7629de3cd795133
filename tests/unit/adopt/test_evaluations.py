"""An evaluation within an epoch that changes the learning rate: where it comes again after a restart, and what a restart without it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

import ttp
from ttp.adopt.trainer_state import seen
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.config import Settings
from ttp.errors import DataMismatch

OFF = Settings(enable=False)
STEPS, SAVED = 7, 4
DATA = torch.randn(STEPS + 1, 3, generator=torch.Generator().manual_seed(1))
CUTS = ["saved", "in the next step"]
WARNED = (
    "the learning rate of param group 0 was 0.05 when the checkpoint of step 4 was written, and is 0.1 in step 5: a change behind an update"
    " is not repeated."
)


class Evaluating:
    """Evaluates every second step, and is never better than the first time."""

    def __init__(self, folder: Path, place: str, fed: bool = False, by_hand: bool = False, **options: Any) -> None:
        """`place`: `front` of the step, or `behind` it. `fed`: its batches are the guard's. `by_hand`: the rate is set in front of each step, too."""
        torch.manual_seed(0)
        self.place, self.fed, self.by_hand = place, fed, by_hand
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.plateau = ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        state = {"plateau": self.plateau}
        self.guard = ttp.protect(self.model, self.optimizer, state=state, save_dirs=[folder], settings=OFF, **options)

    def evaluate(self) -> None:
        if self.guard.step and self.guard.step % 2 == 0:
            self.plateau.step(1.0)

    def batches(self) -> Any:
        if not self.fed:
            yield from (DATA[step] for step in range(self.guard.step + 1, STEPS + 1))
        for _ in self.guard.epochs(1 if self.fed else 0):
            yield from self.guard.batches(list(DATA[1:]))

    def train(self, cut: str = "") -> dict[int, tuple[float, float]]:
        """Return loss and learning rate of each step. `cut`: where it ends, step `SAVED` being saved."""
        reported = {}
        try:
            for x in self.batches():
                if self.place == "front":
                    self.evaluate()
                    if cut == "saved" and self.guard.step == SAVED:
                        break
                if self.by_hand:
                    self.optimizer.param_groups[0]["lr"] = 0.1 / (self.guard.step + 1)
                rate = self.optimizer.param_groups[0]["lr"]
                loss = self.model(x).square().mean()
                if cut == "in the next step" and self.guard.step == SAVED:
                    break
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                reported[self.guard.step] = loss.item(), rate
                if self.place == "behind":
                    self.evaluate()
                    if cut == "saved" and self.guard.step == SAVED:
                        break
            self.guard.save()
        finally:
            self.guard.close()
        return reported


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(seen, "show", lambda level, line: lines.append(line))
    return lines


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_an_evaluation_in_front_of_the_step_comes_again(tmp_path: Path, cut: str, fed: bool, said: list[str]) -> None:
    """Each loss and learning rate is that of the run without a restart."""
    whole = Evaluating(tmp_path / "whole", "front", fed).train()
    first = Evaluating(tmp_path / "cut", "front", fed).train(cut)
    assert {**first, **Evaluating(tmp_path / "cut", "front", fed).train()} == whole
    assert min(whole.values(), key=lambda each: each[1])[1] < 0.05 and not said


def test_an_evaluation_behind_the_step_is_warned_of(tmp_path: Path, said: list[str]) -> None:
    """The checkpoint has the rate of before, and no step that had begun to compare with."""
    Evaluating(tmp_path, "behind").train("saved")
    Evaluating(tmp_path, "behind").train()
    assert len(said) == 1 and said[0].startswith(WARNED) and "at the beginning of the loop's body" in said[0]


def test_an_evaluation_behind_the_step_is_an_error_where_the_next_step_had_begun(
    tmp_path: Path, said: list[str]
) -> None:
    Evaluating(tmp_path, "behind").train("in the next step")
    with pytest.raises(
        DataMismatch, match=r"others as state=\{\.\.\.\}\. What an evaluation .* at the beginning of the loop's body"
    ):
        Evaluating(tmp_path, "behind").train()
    assert not said


@pytest.mark.parametrize("cut", CUTS)
def test_rates_that_are_set_in_front_of_each_step_are_not_warned_of(tmp_path: Path, cut: str, said: list[str]) -> None:
    whole = Evaluating(tmp_path / "whole", "none", by_hand=True).train()
    first = Evaluating(tmp_path / "cut", "none", by_hand=True).train(cut)
    assert {**first, **Evaluating(tmp_path / "cut", "none", by_hand=True).train()} == whole and not said


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("saves", ["periodically", "behind the scheduler"])
def test_schedulers_that_were_given_are_not_warned_of(tmp_path: Path, saves: str, every: int, said: list[str]) -> None:
    """`every` update, or by epochs of two steps, whose end comes again."""

    def train(until: int) -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = ExponentialLR(optimizer, 0.5) if every == 1 else StepLR(optimizer, 1)
        given: dict[str, Any] = {"schedulers": [scheduler]} if every == 1 else {"state": {"scheduler": scheduler}}
        interval = SAVED if saves == "periodically" else 0
        guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF, save_interval=interval, **given)
        try:
            for _ in guard.epochs(4):
                for x in guard.batches([DATA[0]] * 2):
                    model(x).sum().backward()
                    optimizer.step()
                    if every == 1:
                        scheduler.step()
                    if every == 1 and guard.step == SAVED and saves != "periodically":
                        guard.save()
                if every == 2:
                    scheduler.step()
                if every == 2 and guard.step == SAVED and saves != "periodically":
                    guard.save()
                if guard.step >= until:
                    return
        finally:
            guard.close()

    train(SAVED)
    train(8)
    assert not said


# --- the record ---


def written(**change: Any) -> dict[str, Any]:
    """Return the record of rank 1 of 2, written behind step 3, when another rate was set."""
    rates = [0.1]
    record = SeenBatches(1, 2, "error", rates=lambda: rates)
    for step in (1, 2, 3):
        record.forward(step, (), rates.copy(), counted=True)
    rates[0] = 0.05
    return {**record.record(), **change}


@pytest.mark.parametrize(
    ("rank", "world_size", "change", "warned"),
    [
        (0, 2, {}, True),
        (1, 2, {}, False),
        (0, 3, {}, False),
        (0, 2, {"rates": []}, False),
        (0, 2, {"passes": []}, False),
    ],
)
def test_rank_0_warns_once_in_a_job_of_the_same_size(
    rank: int, world_size: int, change: dict[str, Any], warned: bool, said: list[str]
) -> None:
    again = SeenBatches(rank, world_size, "error")
    again.expect(written(**change))
    again.forward(4, (), [0.1], counted=True)
    again.forward(5, (), [0.1], counted=True)
    assert len(said) == warned


def test_a_checkpoint_without_the_rates_is_not_compared(said: list[str]) -> None:
    record = written()
    del record["rates"]
    seen.check_record(record, "seen")
    again = SeenBatches(0, 2, "error")
    again.expect(written())
    again.expect(record)
    again.forward(4, (), [0.1], counted=True)
    assert not said


@pytest.mark.parametrize("rates", [None, [1], {}, ["0.1"]])
def test_damaged_rates_are_refused(rates: object) -> None:
    with pytest.raises(ValueError, match=r"seen\.rates"):
        seen.check_record(written(rates=rates), "seen")
    with pytest.raises(ValueError, match=r"seen\.passes"):
        seen.check_record(written(passes=[[3, "", rates]]), "seen")
