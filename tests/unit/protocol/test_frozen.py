"""Frozen dataclasses that are made and copied fast are the library's, but for their speed."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from ttp.controller.core import machine
from ttp.controller.core.facts.events import ControllerSettings
from ttp.proto.frozen import dataclass, replace
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
    with pytest.raises(TypeError, match="StateAt has no field freezeid"):
        replace(state, freezeid=3)  # type: ignore[call-arg]


def order(made_by: Any, slots: bool) -> type[Any]:
    """Return a class made by this decorator."""

    class Order:
        rank: int
        name: str = "a"
        parts: tuple[int, ...] = ()

    kind: type[Any] = made_by(frozen=True, slots=slots)(Order)
    return kind


@pytest.mark.parametrize("slots", [True, False])
def test_a_fast_class_is_the_librarys(slots: bool) -> None:
    """Positions, keywords and defaults, text, order of fields, equality and hash; what is missing or too much is refused."""
    usual, fast = order(dataclasses.dataclass, slots), order(dataclass, slots)
    for made in ((1,), (1, "b"), (1, "b", (2, 3))):
        assert repr(fast(*made)) == repr(usual(*made))
        assert dataclasses.astuple(fast(*made)) == dataclasses.astuple(usual(*made))
    assert fast(1, parts=(2,)) == fast(rank=1, name="a", parts=(2,)) != fast(1)
    assert len({fast(1), fast(1), fast(2)}) == 2
    assert inspect.signature(fast) == inspect.signature(usual)
    wrong: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        ((), {}),
        ((1, "b", (), 4), {}),
        ((1,), {"rank": 1}),
        ((1,), {"ranks": 1}),
    )
    for positions, names in wrong:
        with pytest.raises(TypeError):
            fast(*positions, **names)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fast(1).rank = 2


def test_fields_that_cannot_be_parameters_are_made_as_the_library_makes_them() -> None:
    """A default that is made anew, a parameter by keyword only, and a constructor that goes on."""

    @dataclass(frozen=True, slots=True)
    class Made:
        rank: int
        seen: list[int] = dataclasses.field(default_factory=list)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named:
        rank: int

    @dataclass(frozen=True, slots=True)
    class Checked:
        rank: int

        def __post_init__(self) -> None:
            if self.rank < 0:
                raise ValueError(self.rank)

    assert Made(1).seen == [] and Made(1).seen is not Made(1).seen
    assert replace(Made(1), rank=2) == Made(2)
    assert replace(Named(rank=1), rank=2) == Named(rank=2)
    with pytest.raises(ValueError, match="-1"):
        Checked(-1)


def test_an_unknown_field_of_a_message_is_refused() -> None:
    """With slots as well."""
    with pytest.raises(TypeError, match="Thaw has no field freezeid; it has freeze_id"):
        replace(Thaw(1), freezeid=3)  # type: ignore[call-arg]
