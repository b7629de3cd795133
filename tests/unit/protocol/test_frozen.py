"""The fast copy of a frozen dataclass is the library's, but for its speed."""

from __future__ import annotations

import dataclasses

import pytest

from ttp.controller import machine
from ttp.controller.events import ControllerSettings
from ttp.proto.frozen import replace
from ttp.proto.messages import Thaw


def test_a_changed_copy_equals_the_librarys() -> None:
    """With and without slots; the original stays as it was, and its hash with it."""
    state = machine.initial(ControllerSettings("job", 1, 4), 0.0)
    before = hash(state)
    assert replace(state, freeze_id=3) == dataclasses.replace(state, freeze_id=3) != state
    assert hash(replace(state, freeze_id=3)) == hash(dataclasses.replace(state, freeze_id=3))
    assert hash(state) == before and state.freeze_id == 0
    assert replace(Thaw(1), freeze_id=2) == Thaw(2)


def test_a_copy_is_frozen_as_well() -> None:
    state = replace(machine.initial(ControllerSettings("job", 1, 4), 0.0), freeze_id=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.freeze_id = 4  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    """A misspelled name changes nothing by accident."""
    state = machine.initial(ControllerSettings("job", 1, 4), 0.0)
    with pytest.raises(TypeError, match="ControllerState has no field freezeid"):
        replace(state, freezeid=3)  # type: ignore[call-arg]
