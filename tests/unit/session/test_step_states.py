"""The host state of a step is kept as it was when it was given."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

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
