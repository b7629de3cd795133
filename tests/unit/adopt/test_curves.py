"""`ttp.protect(tensorboard=DIR)`: each step once, with its own loss, over restarts and where training is entered again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from tests.tensorboard_files import points, single, written
from tests.unit.adopt.test_protect import BASES, OFF, ON, Trainer
from ttp.config import Settings
from ttp.curves.board import StepPoints
from ttp.curves.guard_curves import GuardCurves
from ttp.errors import ConfigError
from ttp.proto.messages import CommitRecord

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STEPS = 12
SPEED, LOSS, RATE, NORM = "speed/step_seconds", "train/loss", "train/learning_rate", "train/grad_norm"


def trainer(tmp_path: Path, settings: Settings = ON, **options: Any) -> Trainer:
    """A trainer that reports each loss before its update."""
    found = Trainer(tmp_path / "checkpoints", settings, BASES["SGD"], tensorboard=tmp_path / "board", **options)
    found.optimizer.register_step_pre_hook(lambda *_: found.guard.session.report_loss(losses[-1]))
    losses: list[float] = []
    found.model.register_forward_hook(lambda module, args, output: losses.append(output.square().mean().item()))
    return found


def test_every_step_is_there_once_with_its_loss_over_a_restart(tmp_path: Path) -> None:
    """Step 6 is not finished by the first attempt, and begins again."""
    first = trainer(tmp_path, clip=ttp.ClipNorm(1.0))
    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(first.train)(dies_at=6)
    first.close()
    again = trainer(tmp_path, clip=ttp.ClipNorm(1.0))
    assert again.guard.step == 5
    reported = ttp.ttp_to_persist(again.train)()
    again.close()
    found = points(tmp_path / "board")
    assert found.keys() == {SPEED, LOSS, RATE, NORM} and len(list((tmp_path / "board").iterdir())) == 2
    assert all(list(found[name]) == list(range(1, STEPS + 1)) for name in (LOSS, RATE, NORM))
    assert set(written(tmp_path / "board").values()) == {1}
    assert {step: (found[LOSS][step], found[RATE][step]) for step in reported} == {
        step: (single(loss), single(rate)) for step, (loss, rate) in reported.items()
    }
    assert list(found[SPEED]) == [2, 3, 4, 5, *range(7, STEPS + 1)], "what an attempt's first step takes is not known"


def test_steps_that_are_trained_again_replace_those_before(tmp_path: Path) -> None:
    first = trainer(tmp_path, OFF)
    first.train()
    first.close()
    again = trainer(tmp_path, OFF)
    assert again.guard.step == 0, "nothing was saved"
    again.guard.close()
    assert points(tmp_path / "board") == {name: {} for name in (LOSS, RATE)}


@pytest.mark.parametrize("every", [1, 3])
def test_no_step_is_there_twice_where_training_is_entered_again(tmp_path: Path, every: int) -> None:
    """As after a recovery in place."""
    one = trainer(tmp_path, Settings(enable=True, rehearse_every=every))
    reported = ttp.ttp_to_persist(one.train)()
    one.close()
    counts = written(tmp_path / "board")
    assert set(counts.values()) == {1} and {step for name, step in counts if name == LOSS} == set(range(1, STEPS + 1))
    found = points(tmp_path / "board")[LOSS]
    assert {step: found[step] for step in reported} == {step: single(loss) for step, (loss, _) in reported.items()}


class Kept:
    """A board of the test."""

    def __init__(self) -> None:
        self.steps: list[StepPoints] = []
        self.closed = 0

    def step(self, points: StepPoints) -> None:
        self.steps.append(points)

    def close(self) -> None:
        self.closed += 1


def record(step: int, norm: float = 0.0, rates: tuple[float, ...] = (0.1,)) -> CommitRecord:
    return CommitRecord(step, norm, 1.0, False, 1.0, rates, ())


def curves(done: int = 0) -> tuple[GuardCurves, list[StepPoints], Kept]:
    kept = Kept()
    return GuardCurves(kept, done), kept.steps, kept  # type: ignore[arg-type]


def test_a_loss_is_of_the_step_in_flight_or_of_the_one_that_has_ended() -> None:
    """Reported before the update, behind it, several times, or not at all."""
    here, steps, kept = curves()
    here.step_begins()
    here.loss(9.0)
    here.loss(1.0)
    here.step_ends(1, record(1), 0.5)
    here.step_begins()
    here.step_ends(2, record(2), None)
    here.loss(2.0)
    here.step_begins()
    here.step_ends(3, record(3, norm=4.0, rates=()), 0.5)
    here.step_begins()
    here.loss(5.0)  # of a step that is not finished
    here.step_begins()
    here.step_ends(4, None, 0.5)
    here.close()
    here.close()
    assert [(each.step, each.loss, each.grad_norm, each.learning_rate, each.time_s) for each in steps] == [
        (1, 1.0, None, 0.1, 0.5), (2, 2.0, None, 0.1, None), (3, None, 4.0, None, 0.5), (4, None, None, None, 0.5),
    ]  # fmt: skip
    assert kept.closed == 1


def test_a_model_without_forward_hooks_has_points_too() -> None:
    here, steps, _ = curves()
    for step in (1, 2):
        here.step_ends(step, record(step), 0.5)
        here.loss(float(step))
    here.step_ends(3, record(3), 0.5)
    here.close()
    assert [(each.step, each.loss) for each in steps] == [(1, 1.0), (2, 2.0), (3, None)]


def test_a_step_that_another_thread_has_finished_is_there_once() -> None:
    here, steps, _ = curves(done=5)
    here.step_back(5, record(5))
    here.step_begins()
    here.loss(6.0)
    here.step_back(6, record(6))
    here.step_back(6, record(6))
    here.step_begins()
    here.close()
    assert [(each.step, each.loss, each.time_s) for each in steps] == [(6, 6.0, None)]


def test_without_a_folder_nothing_is_written_or_held() -> None:
    here = GuardCurves(None, 0)
    here.step_ends(1, record(1), 0.5)
    here.close()


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (5, "invalid tensorboard: got 5, expected a folder, or None for no curves"),
        ("", "invalid tensorboard: got '', expected a folder"),
        ("/proc/self", "tensorboard is '/proc/self': .*; name a folder that this user can write"),
    ],
)
def test_a_folder_that_is_none_is_one_line_before_the_session(tmp_path: Path, folder: Any, message: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        ttp.protect(model, optimizer, save_dirs=[tmp_path / "checkpoints"], settings=OFF, tensorboard=folder)
    assert not (tmp_path / "checkpoints").exists()


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name))
    with pytest.raises(ConfigError, match=r"run pip install 'try-to-persist\[tensorboard\]', or leave tensorboard out"):
        trainer(tmp_path, OFF)


def test_a_step_that_the_work_thread_has_finished_is_written_where_training_is_entered_again(tmp_path: Path) -> None:
    """A fault stops the training thread in front of an update that another thread then does."""
    one = trainer(tmp_path)
    one.train()
    one.guard._curves, steps, _ = curves(done=STEPS - 1)
    one.guard._step_back()
    one.close()
    assert [(each.step, each.learning_rate is not None) for each in steps] == [(STEPS, True)]
