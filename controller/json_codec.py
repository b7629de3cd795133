"""JSON for the machine's plain values: frozen dataclasses, enums, tuples, frozensets, mappings, numbers, text.

Serves the journal, so that a run can be replayed: what is read back equals what was written, floats to the bit (NaN and
infinities too). It knows types of this project only, and builds nothing else. Never used on the wire.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ttp.proto.messages import Heartbeat

from .core.facts.events import ControllerSettings
from .core.facts.state import STAGES, ControllerState, StateAt

TYPE_KEY = "$"
"""Marks an object that is not a plain JSON value; its value names the kind or the type."""

_FACTS = "ttp.controller.core.facts"
_MODULES = {
    f"{_FACTS}.{now}": f"ttp.controller.{then}"
    for now, then in {
        "coverage": "coverage",
        "decision": "decision",
        "events": "events",
        "membership": "membership",
        "pace": "progress",
        "per_rank": "rank_table",
        "state": "state",
    }.items()
}
"""Modules whose types journals name by where they were when journals began: so every version reads those of every other."""
_TYPES = {
    f"{_FACTS}.events:HeartbeatBatch": "ttp.controller.events:Beats",
    f"{_FACTS}.per_rank:PerRank": "ttp.controller.rank_table:RankTable",
    f"{_FACTS}.state:StateAt": "ttp.controller.state:ControllerState",
    "ttp.proto.messages:Progress": "ttp.proto.messages:Working",
    "ttp.proto.shares:FileEntry": "ttp.proto.messages:FileEntry",
    "ttp.proto.shares:Part": "ttp.proto.messages:Part",
    "ttp.proto.shares:ShareResult": "ttp.proto.messages:ShareResult",
}
"""Types that had another name then."""
_FIELDS = {
    "checksum": "sha256",
    "last_message_at": "heard_at",
    "leases_renewed_at": "amnesty",
    "received_at": "heard",
}
"""Fields that had another name then."""
_LEFT_OUT = frozenset({"digest", "workload"})
"""Fields that came later, where they are empty: journals without signatures are as older versions read them."""
_UNREAD = frozenset({"own_s", "waited_s", "loss"})
"""Fields of heartbeats that no machine reads: a replay does without them."""
_MOSTLY_DEFAULTS = frozenset({Heartbeat})
"""Types of which fields that have their default are left out: ten thousand ranks send as many heartbeats a second."""
_MODULES_READ = {written: module for module, written in _MODULES.items()}
_TYPES_READ = {written: name for name, written in _TYPES.items()}
_FIELDS_READ = {written: name for name, written in _FIELDS.items()}
_STAGES = {stage.name: stage for stage in STAGES}
_PLAIN = frozenset({str, int, bool, type(None)})
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: Any) -> Any:
    """Return `value` as what the json module takes. Raises TypeError for a value of another kind, naming it."""
    kind: Any = type(value)
    return value if kind in _PLAIN else _writer(kind)(value)


@cache
def _writer(kind: Any) -> Callable[[Any], Any]:
    """Return what `to_json` does with values of this type. Found once a type: an input of each rank is written at every fault."""
    if kind is float:
        return lambda value: value if math.isfinite(value) else {TYPE_KEY: "float", "value": repr(value)}
    if kind is tuple or kind is list:
        return lambda value: [to_json(item) for item in value]
    if issubclass(kind, enum.Enum):
        return {member: {TYPE_KEY: _name(kind), "name": member.name} for member in kind}.__getitem__
    if issubclass(kind, frozenset):
        return lambda value: {TYPE_KEY: "frozenset", "items": [to_json(item) for item in sorted(value)]}
    if kind is StateAt:
        return lambda value: _written(_name(kind), _flat(value))
    if kind is ControllerSettings:
        return lambda value: _written(_name(kind), _fields(value))
    if (names := _field_names(kind)) is not None:
        return _fields_writer(kind, [name for name in names if name not in _UNREAD])
    if issubclass(kind, Mapping):
        return lambda value: {TYPE_KEY: "mapping", "items": [[to_json(k), to_json(v)] for k, v in value.items()]}

    def refuse(value: Any) -> Any:
        raise TypeError(f"a {kind.__name__} cannot go into the journal: {value!r}")

    return refuse


def _fields_writer(kind: Any, names: Sequence[str]) -> Callable[[Any], Any]:
    """Make the function that one would write by hand: an input of each rank is written at every fault, and ten thousand heartbeats a second."""
    defaults: dict[str, Any] = {name: "" for name in names if name in _LEFT_OUT}
    if kind in _MOSTLY_DEFAULTS:
        defaults |= {field.name: field.default for field in dataclasses.fields(kind) if field.name in names}
    always = [name for name in names if defaults.get(name, dataclasses.MISSING) is dataclasses.MISSING]
    keys = {name: repr(_FIELDS.get(name, name)) for name in names}
    items = {name: f"value.{name} if type(value.{name}) in plain else to_json(value.{name})" for name in names}
    lines = [
        "def write(value):",
        f"encoded = {{key: tag, {', '.join(f'{keys[name]}: {items[name]}' for name in always)}}}",
        *(
            f"if value.{name} != defaults[{name!r}]: encoded[{keys[name]}] = {items[name]}"
            for name in names
            if name not in always
        ),
        "return encoded",
    ]
    scope: dict[str, Any] = {
        "key": TYPE_KEY,
        "tag": _name(kind),
        "plain": _PLAIN,
        "to_json": to_json,
        "defaults": defaults,
    }
    exec("\n    ".join(lines), scope)
    written: Callable[[Any], Any] = scope["write"]
    return written


def _written(tag: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    encoded: dict[str, Any] = {TYPE_KEY: tag}
    for name, item in fields.items():
        encoded[_FIELDS.get(name, name)] = item if type(item) in _PLAIN else to_json(item)
    return encoded


def from_json(value: Any) -> Any:
    """Return what `to_json` was given. Raises ValueError for a type that is not this project's."""
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value[TYPE_KEY]
    if kind == "float":
        return _SPECIAL[value["value"]]
    if kind == "frozenset":
        return frozenset(from_json(item) for item in value["items"])
    if kind == "mapping":
        return {from_json(key): from_json(item) for key, item in value["items"]}
    cls = _find(kind)
    if issubclass(cls, enum.Enum):
        return cls[value["name"]]
    fields = {_FIELDS_READ.get(name) or name: from_json(item) for name, item in value.items() if name != TYPE_KEY}
    if cls is ControllerSettings:
        return ControllerSettings.from_flat(fields)
    return cls(**fields) if cls is not StateAt else _state(fields)


def _flat(state: ControllerState) -> dict[str, Any]:
    """Return a state as journals have always had it: its stage by name, beside it what that stage knows."""
    fields = _fields(state)
    stage = fields.pop("at")
    coverage = state.coverage if state.coverage.hosts else None
    return {**fields, "deadline": math.inf, **_fields(stage), "stage": stage.name, "coverage": coverage}


def _state(fields: Mapping[str, Any]) -> ControllerState:
    known = {name: item for name, item in fields.items() if item is not None}  # no coverage: it was not known yet
    stage = _STAGES[fields["stage"]]
    at = stage(**{name: fields[name] for name in _field_names(stage) or () if name in fields})
    return StateAt(at=at, **{name: known[name] for name in _field_names(StateAt) or () if name in known})


def plain_json(value: object) -> Any:
    """Return a journal field for people: mappings as objects, enums by value, odd floats as text. Not read back."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        if _PLAIN.issuperset(map(type, value)):  # 10,000 ranks: the thread that decides waits for this one
            return list(value)
        return [plain_json(item) for item in value]
    if isinstance(value, frozenset):
        return [plain_json(item) for item in sorted(value)]
    return value


def _fields(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    if kind is ControllerSettings:
        return ControllerSettings.flat(value)
    return {name: getattr(value, name) for name in _field_names(kind) or ()}


@cache
def _field_names(cls: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's or named tuple's fields, None for another type. Cached: this runs ten thousand times
    a second."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return getattr(cls, "_fields", None) if issubclass(cls, tuple) else None


@cache
def _name(cls: type) -> str:
    return _translated(f"{cls.__module__}:{cls.__qualname__}", _TYPES, _MODULES)


def _translated(name: str, types: Mapping[str, str], modules: Mapping[str, str]) -> str:
    module, _, qualname = name.partition(":")
    return types.get(name) or f"{modules.get(module, module)}:{qualname}"


@cache
def _find(name: str) -> type[Any]:
    module, _, qualname = _translated(name, _TYPES_READ, _MODULES_READ).partition(":")
    if not module.startswith("ttp.") or "." in qualname:
        raise ValueError(f"{name!r} in a journal is not a type of ttp; is the file altered?")
    cls = getattr(importlib.import_module(module), qualname, None)
    if not isinstance(cls, type) or (_field_names(cls) is None and not issubclass(cls, enum.Enum)):
        raise ValueError(f"{name!r} in a journal is not known here; was it written by another version?")
    return cls
