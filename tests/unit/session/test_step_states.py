"""The host state of a step is kept as it was when it was given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.session.test_session import OFF, ON, new_run
from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError
from ttp.runtime.state_provider import KEPT_STEPS, StepStates


def test_a_mutated_mapping_does_not_change_what_was_kept() -> None:
    """Trainers like to keep one dictionary and count it up."""
    states, mine = StepStates(), {"samples": 0}
    for step in (1, 2, 3):
        mine["samples"] = 8 * step
        states.put(step, mine)
    assert [states.get(step) for step in (1, 2, 3)] == [{"samples": 8}, {"samples": 16}, {"samples": 24}]


def test_only_the_last_steps_are_kept_and_a_missing_one_is_named() -> None:
    """A dump never wants more than the step in flight and the one before."""
    states = StepStates()
    for step in range(1, KEPT_STEPS + 3):
        states.put(step, {"s": step})
    assert states.get(KEPT_STEPS + 2) == {"s": KEPT_STEPS + 2}
    with pytest.raises(CheckpointError, match="step 1: no host state is kept"):
        states.get(1)


def test_without_any_state_there_is_an_empty_one() -> None:
    """Not every trainer has one."""
    assert StepStates().get(5) == {}


@pytest.mark.parametrize(
    "state",
    [
        {"n": np.int64(3)},
        {1: 2},
        {"x": {2: 3}},
        {"s": {4}},
        {"b": b"x"},
        [("a", object())],
        {"__float__": "nan"},
        {"n": 1 << 20_000},
        {"deep": json.loads("[" * 70 + "]" * 70)},
    ],
)
def test_what_json_cannot_carry_is_refused_at_once(state: Any) -> None:
    """Not at the fault, when every publisher would fail on it."""
    with pytest.raises(ConfigError, match="step 7: the step state is"):
        StepStates().put(7, state)


def test_numbers_keep_their_bits() -> None:
    """Floats too, and those that JSON proper does not have."""
    states = StepStates()
    states.put(1, {"x": 0.1 + 0.2, "inf": float("inf"), "deep": [{"t": (1, 2)}]})
    assert states.get(1) == {"x": 0.1 + 0.2, "inf": float("inf"), "deep": [{"t": [1, 2]}]}


class Trainer:
    """A session of one rank, and a step of it."""

    def __init__(self, folder: Path, settings: Settings = ON) -> None:
        self.model, self.optimizer, self.session = new_run(folder, settings)

    def update(self) -> None:
        self.model(torch.ones(2, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.session.close()


def test_a_state_is_given_for_the_step_whose_update_comes_next(trainer: Trainer) -> None:
    """Behind the update it comes too late for a fault in between, and steps that count from 0 would be shifted by one."""
    trainer.session.set_step_state(0, {"samples": 0})
    trainer.session.set_step_state(1, {"samples": 8})
    trainer.update()
    for step in (0, 1, 3):
        with pytest.raises(
            ConfigError,
            match=f"set_step_state: got step {step} after 1 updates, expected 2, the step whose update comes next. Call it before",
        ):
            trainer.session.set_step_state(step, {})
    trainer.session.set_step_state(2, {"samples": 16})


def test_before_training_no_other_step_than_0_and_1_can_have_a_state(trainer: Trainer) -> None:
    for step in (-1, 2):
        with pytest.raises(ConfigError, match=f"got step {step} after 0 updates, expected 1"):
            trainer.session.set_step_state(step, {})


def test_a_trainer_that_gives_states_gives_one_for_every_step(trainer: Trainer) -> None:
    """Its next update is refused before anything has changed, so that a fault costs none of the steps before."""
    trainer.session.set_step_state(1, {"samples": 8})
    trainer.update()
    before = trainer.model.weight.detach().clone()  # type: ignore[operator]
    with pytest.raises(
        ConfigError, match=r"step 2: no host state is kept \(kept: steps 1\); call session.set_step_state"
    ):
        trainer.update()
    assert trainer.optimizer.current_step == 1 and torch.equal(trainer.model.weight, before)  # type: ignore[arg-type]
    trainer.session.set_step_state(2, {"samples": 16})
    trainer.update()
    assert trainer.session.step_state() == {"samples": 16}


def test_a_trainer_without_states_saves_after_a_resume_too(tmp_path: Path) -> None:
    """Its checkpoints have an empty one."""
    for settings in (ON, OFF):
        trainer = Trainer(tmp_path, settings)
        point = trainer.session.resume()
        assert point is None or point.state == {}
        for _ in range(2):
            trainer.update()
        trainer.session.save()
        trainer.session.close()
    assert trainer.optimizer.current_step == 4


def test_a_run_that_goes_on_without_the_states_of_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """Nothing could be saved at a fault."""
    first = Trainer(tmp_path, OFF)
    first.session.set_step_state(1, {"samples": 8})
    first.update()
    first.session.save()
    first.session.close()
    again = Trainer(tmp_path)
    again.session.resume()
    with pytest.raises(ConfigError, match="step 2: no host state is kept"):
        again.update()
    again.session.close()
