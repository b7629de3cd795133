"""Any message of the wire, by its description in control.proto: a field that is added later is drawn as well."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
_INT32_TYPES = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 3.0)
STRINGS = (
    "",
    "a",
    "/a",
    "/b",
    "g0",
    "g1",
    "host0",
    "exit code 0",
    "\n",
    "\0",
    "a/../b",
    "..",
    "\u2028",
    "x" * 300,
    "🙂",
)

Pools = Mapping[str, Sequence[Any]]
"""Likely values by field name: without them no message would get past the first check."""


def fill(message: Message, rng: random.Random, pools: Pools, depth: int = 0) -> Message:
    """Set fields of a message at random; of a `oneof` one."""
    for oneof in message.DESCRIPTOR.oneofs:
        _set(message, rng.choice(list[Any](oneof.fields)), rng, pools, depth)
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is None and field.name not in ("chunk", "more") and rng.random() < 0.85:
            _set(message, field, rng, pools, depth)
    return message


def _set(message: Message, field: Any, rng: random.Random, pools: Pools, depth: int) -> None:
    repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if depth > 4:
            return
        if repeated:
            for _ in range(rng.choice((0, 1, 1, 2, 3))):
                fill(getattr(message, field.name).add(), rng, pools, depth + 1)
            return
        inner = getattr(message, field.name)
        inner.SetInParent()
        fill(inner, rng, pools, depth + 1)
        return
    if repeated:
        getattr(message, field.name).extend(_value(field, rng, pools) for _ in range(rng.choice((0, 1, 1, 2, 5))))
    else:
        setattr(message, field.name, _value(field, rng, pools))


def _value(field: Any, rng: random.Random, pools: Pools) -> Any:
    if (likely := pools.get(field.name)) and rng.random() < 0.8:
        return rng.choice(likely)
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(FLOATS)
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(STRINGS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.randrange(20))
    low, high = INT32 if field.type in _INT32_TYPES else INT64
    if rng.random() < 0.75:
        return rng.randrange(-1, 8)
    return rng.choice((low, low + 1, high, high - 1, rng.randint(low, high), min(high, 2**53), min(high, 2**53 + 1)))
