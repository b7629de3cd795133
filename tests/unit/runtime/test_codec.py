"""The codec: every message survives the wire; nothing is missing from it; the generated code is fresh."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.proto import control_pb2 as pb
from ttp.proto import messages as m
from ttp.proto import status as s
from ttp.proto.codec import (
    CodecError,
    decode_downward,
    decode_parcels,
    decode_status,
    decode_upward,
    encode_batch,
    encode_downward,
    encode_status,
    encode_upward,
)

PROTO = Path(m.__file__).resolve().parent
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT32_FIELDS = {"rank", "ranks", "world_size", "index", "count", "code", "torn", "replaced", "source", "target"}

for kind, strategy in ((str, TEXT), (float, st.floats(allow_nan=True, allow_infinity=True, width=64))):
    st.register_type_strategy(kind, strategy)


def strategy_for(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Build values of a field from its type; integers are as wide as the wire's field."""
    if hint is int:
        return INT32 if name in INT32_FIELDS else INT64
    if typing.get_origin(hint) is tuple:
        return st.lists(strategy_for(typing.get_args(hint)[0], name), max_size=3).map(tuple)
    if typing.get_args(hint):  # X | None
        return st.one_of(*[strategy_for(part, name) for part in typing.get_args(hint)])
    if dataclasses.is_dataclass(hint):
        return values_of(typing.cast(type, hint))
    return st.from_type(hint)


def values_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: strategy_for(hint, name) for name, hint in hints.items()})


UPWARD = st.one_of(*[values_of(cls) for cls in typing.get_args(m.Upward)])
DOWNWARD = st.one_of(*[values_of(cls) for cls in typing.get_args(m.Downward)])


def bits(value: object) -> object:
    """Make values comparable to the bit: NaN equals NaN, -0.0 does not equal 0.0."""
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else struct.pack("<d", value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *[bits(getattr(value, field.name)) for field in dataclasses.fields(value)])
    if isinstance(value, tuple):
        return tuple(bits(item) for item in value)
    return value


@settings(max_examples=300, deadline=None, print_blob=True)
@given(job_id=TEXT, term=INT64, said=st.lists(UPWARD, max_size=3))
def test_every_upward_message_survives_the_wire(job_id: str, term: int, said: list[m.Upward]) -> None:
    """decode(encode(x)) equals x, floats to the bit, over serialized bytes."""
    wire = encode_upward(job_id, term, said).SerializeToString()
    parcel = decode_upward(pb.UpwardEnvelope.FromString(wire))
    assert (parcel.job_id, parcel.term) == (job_id, term)
    assert bits(parcel.messages) == bits(tuple(said))


@settings(max_examples=300, deadline=None, print_blob=True)
@given(job_id=TEXT, term=INT64, ranks=st.lists(INT32, max_size=3), message=st.one_of(st.none(), DOWNWARD))
def test_every_downward_message_survives_the_wire(
    job_id: str, term: int, ranks: list[int], message: m.Downward | None
) -> None:
    wire = encode_downward(job_id, term, ranks, message).SerializeToString()
    parcel = decode_downward(pb.DownwardEnvelope.FromString(wire))
    assert (parcel.job_id, parcel.term, parcel.ranks) == (job_id, term, tuple(ranks))
    assert bits(parcel.message) == bits(message)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(job_id=TEXT, term=INT64, said=st.lists(st.tuples(st.lists(INT32, max_size=3), DOWNWARD), min_size=1, max_size=4))
def test_a_batch_says_what_its_messages_say_in_order(
    job_id: str, term: int, said: list[tuple[list[int], m.Downward]]
) -> None:
    """One message goes as itself; each of several keeps its ranks, under the envelope's job and term."""
    wire = encode_batch(job_id, term, said).SerializeToString()
    parcels = decode_parcels(pb.DownwardEnvelope.FromString(wire))
    assert [(p.job_id, p.term, p.ranks) for p in parcels] == [(job_id, term, tuple(ranks)) for ranks, _ in said]
    assert [bits(p.message) for p in parcels] == [bits(message) for _, message in said]


@settings(max_examples=50, deadline=None, print_blob=True)
@given(status=values_of(s.JobStatus))
def test_a_status_survives_the_wire(status: s.JobStatus) -> None:
    assert bits(decode_status(pb.JobStatus.FromString(encode_status(status).SerializeToString()))) == bits(status)


@pytest.mark.parametrize(
    "cls", [*typing.get_args(m.Upward), *typing.get_args(m.Downward)], ids=lambda cls: cls.__name__
)
def test_every_field_of_every_message_has_its_own_field_on_the_wire(cls: type) -> None:
    """A field added to a dataclass and forgotten in control.proto fails here."""
    wire = {field.name for field in pb.DESCRIPTOR.message_types_by_name[cls.__name__].fields}
    assert wire == {field.name for field in dataclasses.fields(cls)}


def test_a_cause_kind_or_phase_without_a_number_is_noticed() -> None:
    assert {kind.name for kind in m.CauseKind} == {
        value.name.removeprefix("CAUSE_KIND_") for value in pb.DESCRIPTOR.enum_types_by_name["CauseKind"].values
    } - {"UNSPECIFIED"}
    assert {phase.name: int(phase) for phase in m.Phase} == {
        value.name.removeprefix("PHASE_"): value.number for value in pb.DESCRIPTOR.enum_types_by_name["Phase"].values
    }


def test_an_unknown_phase_cause_or_message_is_refused_and_not_guessed() -> None:
    heartbeat = pb.Heartbeat(rank=1)
    heartbeat.phase = 9  # type: ignore[assignment]
    with pytest.raises(CodecError, match="Phase: got 9"):
        decode_upward(pb.UpwardEnvelope(messages=[pb.Upward(heartbeat=heartbeat)]))
    with pytest.raises(CodecError, match="CauseKind: got 0"):
        decode_upward(pb.UpwardEnvelope(messages=[pb.Upward(fault_report=pb.FaultReport(rank=1))]))
    with pytest.raises(CodecError, match="unknown"):
        decode_upward(pb.UpwardEnvelope(messages=[pb.Upward()]))
    with pytest.raises(CodecError, match="unknown"):
        decode_downward(pb.DownwardEnvelope())


def test_a_value_that_the_wire_cannot_carry_is_a_codec_error() -> None:
    with pytest.raises(CodecError, match="Finished"):
        encode_upward("job", 1, [m.Finished(2**40)])


def test_text_with_lone_surrogates_gets_through_escaped() -> None:
    """A traceback that quotes an undecodable file name must not stop the report of the fault."""
    report = m.FaultReport(1, m.Cause(m.CauseKind.EXCEPTION, (1,), "bad name \udcff"), "trace \udcff")
    parcel = decode_upward(encode_upward("job", 1, [report]))
    assert parcel.messages == (
        m.FaultReport(1, m.Cause(m.CauseKind.EXCEPTION, (1,), "bad name \\udcff"), "trace \\udcff"),
    )
    welcome = m.Welcome(1, 1, 1.0, 3.0, "any rank", overview=("rank 0 on \udcff",))
    decoded = decode_downward(encode_downward("job", 1, [1], welcome)).message
    assert isinstance(decoded, m.Welcome) and decoded.overview == ("rank 0 on \\udcff",)


def test_a_path_is_never_escaped() -> None:
    """It would be another path."""
    with pytest.raises(CodecError, match="WriteOrder"):
        encode_downward("job", 1, [1], m.WriteOrder(1, 1, "/disk/\udcff", "name", ()))


def test_generated_code_is_fresh() -> None:
    """control.proto and its generated files are the ones that `proto/generate.sh` last recorded together."""
    for line in (PROTO / "generated.sha256").read_text().splitlines():
        digest, name = line.split()
        got = hashlib.sha256((PROTO / name).read_bytes()).hexdigest()
        assert got == digest, (
            f"proto/{name} differs from what proto/generate.sh recorded: run it, and commit the result"
        )
    recorded = {line.split()[1] for line in (PROTO / "generated.sha256").read_text().splitlines()}
    assert recorded == {"control.proto", "control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"}
