"""Turns messages into protobuf and back.

Owns the map between `messages.py`, `status.py` and `control.proto`, which is by name: a dataclass is the protobuf message of its name, a field
the field of its name, a member of an enum the value of its name behind the enum's. Text for people (`messages.Text`) is cut and escaped so that it gets
through; any other string must be what it is. Nothing is pickled and nothing is guessed. Never opens a socket and never decides anything.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from ttp.proto import control_pb2 as pb
from ttp.proto import messages as m
from ttp.proto import status as s
from ttp.proto.frozen import dataclass

MOST_TEXT = 1 << 16
"""Characters of one text for people; the rest of a longer one is left out."""


class CodecError(ValueError):
    """A message cannot be put on the wire, or what came over it is not one of ours."""


@dataclass(frozen=True, slots=True)
class UpwardParcel:
    """An upward envelope, decoded: messages in the order in which they were said."""

    job_id: str
    term: int
    messages: tuple[m.Upward, ...]


@dataclass(frozen=True, slots=True)
class DownwardParcel:
    """A downward envelope, decoded. `message` None: the controller's greeting to the stream itself."""

    job_id: str
    term: int
    ranks: tuple[int, ...]
    message: m.Downward | None


def encode_upward(job_id: str, term: int, messages: Sequence[m.Upward]) -> pb.UpwardEnvelope:
    """Return the envelope that says these messages. Raises CodecError for a value that protobuf cannot carry."""
    try:
        envelope = pb.UpwardEnvelope(job_id=job_id, term=term)
        for message in messages:
            _fill_body(envelope.messages.add(), _UPWARD, message)
    except (ValueError, TypeError) as error:  # out of range for the field, or a string that is not Unicode
        raise CodecError(f"cannot send {[type(message).__name__ for message in messages]}: {error}") from error
    return envelope


def decode_upward(wire: pb.UpwardEnvelope) -> UpwardParcel:
    """Raises CodecError when a message is of a kind that is unknown here."""
    return UpwardParcel(wire.job_id, wire.term, tuple(_read_body(message, _READ_UPWARD) for message in wire.messages))


def encode_downward(job_id: str, term: int, ranks: Sequence[int], message: m.Downward | None) -> pb.DownwardEnvelope:
    """Return the envelope of `message` for these ranks (None: the greeting). Raises CodecError as `encode_upward`."""
    try:
        envelope = pb.DownwardEnvelope(job_id=job_id, term=term, ranks=ranks)
        _fill_body(envelope, _DOWNWARD, message)
    except (ValueError, TypeError) as error:
        raise CodecError(f"cannot send {type(message).__name__} to ranks {list(ranks)}: {error}") from error
    return envelope


def decode_downward(wire: pb.DownwardEnvelope) -> DownwardParcel:
    """Raises CodecError when the message is of a kind that is unknown here."""
    return DownwardParcel(wire.job_id, wire.term, tuple(wire.ranks), _read_body(wire, _READ_DOWNWARD))


def encode_batch(job_id: str, term: int, messages: Sequence[tuple[Sequence[int], m.Downward]]) -> pb.DownwardEnvelope:
    """Return one envelope that says all of these, each to its ranks, in order. Raises CodecError as `encode_upward`."""
    if len(messages) == 1:
        return encode_downward(job_id, term, *messages[0])
    envelope = pb.DownwardEnvelope(job_id=job_id, term=term)
    for ranks, message in messages:
        try:
            _fill_body(envelope.batch.envelopes.add(ranks=ranks), _DOWNWARD, message)
        except (ValueError, TypeError) as error:
            raise CodecError(f"cannot send {type(message).__name__} to ranks {list(ranks)}: {error}") from error
    return envelope


def decode_parcels(wire: pb.DownwardEnvelope) -> tuple[DownwardParcel, ...]:
    """Return what an envelope says: one parcel, or those of a batch in order. Raises CodecError as `decode_downward`."""
    if wire.WhichOneof("body") != "batch":
        return (decode_downward(wire),)
    return tuple(
        DownwardParcel(wire.job_id, wire.term, tuple(inner.ranks), _read_body(inner, _READ_DOWNWARD))
        for inner in wire.batch.envelopes
    )


def encode_status(status: s.JobStatus) -> pb.JobStatus:
    """Return the wire form of what a controller shows to operators."""
    wire = pb.JobStatus()
    _CODE["fill_JobStatus"](wire, status)
    return wire


def decode_status(wire: pb.JobStatus) -> s.JobStatus:
    """Raises CodecError for a phase or cause that is unknown here."""
    return typing.cast(s.JobStatus, _CODE["read_JobStatus"](wire))


def clean(text: str) -> str:
    """Return text for people as valid Unicode: a traceback may hold lone surrogates, and must get through."""
    if len(text) > MOST_TEXT:
        text = f"{text[: MOST_TEXT // 2]}\n... ({len(text) - MOST_TEXT} characters left out) ...\n{text[-MOST_TEXT // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- for each dataclass, the two functions that one would write by hand ---

_CODE: dict[str, Any] = {"clean": clean}
"""`fill_NAME(wire, value)` and `read_NAME(wire)` of each dataclass, `number_NAME` and `member_NAME` of each enum."""


def _write_code(cls: Any) -> str:
    """Make the functions of a dataclass from its type hints, and those of what it is made of. Returns its name.

    A message is filled in place, which takes half the time of building and copying: a plan for 10,000 ranks has as many orders.
    """
    name: str = cls.__name__
    if f"fill_{name}" not in _CODE:
        fields = [_field(field, hint) for field, hint in typing.get_type_hints(cls, include_extras=True).items()]
        fills, reads = [fill for fill, _ in fields] or ["pass"], [read for _, read in fields]
        _CODE[name] = cls
        exec("\n    ".join([f"def fill_{name}(wire, value):", *fills]), _CODE)
        exec(f"def read_{name}(wire):\n    return {name}({', '.join(reads)})", _CODE)
    return name


def _field(name: str, hint: Any) -> tuple[str, str]:
    """Return the statement that fills one field, and the expression that reads it."""
    here, there = f"value.{name}", f"wire.{name}"
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if dataclasses.is_dataclass(args[0]):
            of = _write_code(args[0])
            return f"for item in {here}: fill_{of}({there}.add(), item)", f"tuple(map(read_{of}, {there}))"
        return f"{there}.extend({f'map(clean, {here})' if args[0] is m.Text else here})", f"tuple({there})"
    if types.NoneType in args:
        fill, read = _field(name, args[0])
        return f"if {here} is not None: {fill}", f"{read} if wire.HasField({name!r}) else None"
    if dataclasses.is_dataclass(hint):
        of = _write_code(hint)
        return f"{there}.SetInParent(); fill_{of}({there}, {here})", f"read_{of}({there})"
    if hint is not m.Text and issubclass(hint, enum.Enum):
        of = _write_enum(hint)
        return f"{there} = number_{of}[{here}]", f"member_{of}({there})"
    return f"{there} = {f'clean({here})' if hint is m.Text else here}", there


def _write_enum(cls: type[enum.Enum]) -> str:
    values = pb.DESCRIPTOR.enum_types_by_name[cls.__name__].values_by_name
    numbers = {member: values[f"{_snake(cls.__name__).upper()}_{member.name}"].number for member in cls}
    members = {number: member for member, number in numbers.items()}

    def member(number: int) -> enum.Enum:
        if number not in members:
            raise CodecError(f"{cls.__name__}: got {number}, expected one of {sorted(members)}; is the peer newer?")
        return members[number]

    _CODE[f"number_{cls.__name__}"], _CODE[f"member_{cls.__name__}"] = numbers, member
    return cls.__name__


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# --- which message an envelope carries ---


def _bodies(union: Any) -> dict[type, tuple[str, Any, Any]]:
    """Return for each message the envelope's field, and what fills and reads it."""
    names = {cls: _write_code(cls) for cls in typing.get_args(union)}
    return {cls: (_snake(name), _CODE[f"fill_{name}"], _CODE[f"read_{name}"]) for cls, name in names.items()}


_UPWARD = _bodies(m.Upward)
_DOWNWARD = _bodies(m.Downward) | {types.NoneType: ("stream_opened", lambda wire, value: None, lambda wire: None)}
_READ_UPWARD = {field: read for field, _, read in _UPWARD.values()}
_READ_DOWNWARD = {field: read for field, _, read in _DOWNWARD.values()}
_write_code(s.JobStatus)


def _fill_body(wire: Any, bodies: dict[type, tuple[str, Any, Any]], message: Any) -> None:
    name, fill, _ = bodies[type(message)]
    body = getattr(wire, name)
    body.SetInParent()  # a message without fields, or with zeros only, is said too
    fill(body, message)


def _read_body(wire: Any, reads: dict[str, Any]) -> Any:
    name = wire.WhichOneof("body")
    if name not in reads:
        raise CodecError("a message of a kind that is unknown here came in; is the peer newer?")
    return reads[name](getattr(wire, name))
