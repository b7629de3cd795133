"""Turns messages into protobuf and back, field by field.

Owns the map between `messages.py` and `control.proto`. It is total: a message type without a case here is an error of
the type checker. Never opens a socket and never decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ttp.proto import control_pb2 as pb
from ttp.proto import messages as m
from ttp.proto import status as s
from ttp.proto.fields import (
    CodecError,
    clean,
    decode_cause,
    decode_groups,
    decode_parts,
    decode_phase,
    decode_record,
    decode_share,
    encode_cause,
    encode_groups,
    encode_parts,
    encode_phase,
    encode_record,
    encode_share,
)
from ttp.proto.frozen import dataclass

__all__ = [
    "CodecError",
    "DownwardParcel",
    "UpwardParcel",
    "decode_downward",
    "decode_parcels",
    "decode_status",
    "decode_upward",
    "encode_batch",
    "encode_downward",
    "encode_status",
    "encode_upward",
]


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
        return pb.UpwardEnvelope(job_id=job_id, term=term, messages=[_encode_up(message) for message in messages])
    except (ValueError, TypeError) as error:  # out of range for the field, or a string that is not Unicode
        raise CodecError(f"cannot send {[type(message).__name__ for message in messages]}: {error}") from error


def decode_upward(wire: pb.UpwardEnvelope) -> UpwardParcel:
    """Raises CodecError when a message is of a kind that is unknown here."""
    return UpwardParcel(wire.job_id, wire.term, tuple(_decode_up(message) for message in wire.messages))


def encode_downward(job_id: str, term: int, ranks: Sequence[int], message: m.Downward | None) -> pb.DownwardEnvelope:
    """Return the envelope of `message` for these ranks (None: the greeting). Raises CodecError as `encode_upward`."""
    try:
        envelope = pb.DownwardEnvelope(job_id=job_id, term=term, ranks=ranks)
        _fill_down(envelope, message)
    except (ValueError, TypeError) as error:
        raise CodecError(f"cannot send {type(message).__name__} to ranks {list(ranks)}: {error}") from error
    return envelope


def decode_downward(wire: pb.DownwardEnvelope) -> DownwardParcel:
    """Raises CodecError when the message is of a kind that is unknown here."""
    return DownwardParcel(wire.job_id, wire.term, tuple(wire.ranks), _decode_down(wire))


def encode_batch(job_id: str, term: int, messages: Sequence[tuple[Sequence[int], m.Downward]]) -> pb.DownwardEnvelope:
    """Return one envelope that says all of these, each to its ranks, in order. Raises CodecError as `encode_upward`."""
    if len(messages) == 1:
        return encode_downward(job_id, term, *messages[0])
    envelope = pb.DownwardEnvelope(job_id=job_id, term=term)
    for ranks, message in messages:
        try:
            _fill_down(envelope.batch.envelopes.add(ranks=ranks), message)
        except (ValueError, TypeError) as error:
            raise CodecError(f"cannot send {type(message).__name__} to ranks {list(ranks)}: {error}") from error
    return envelope


def decode_parcels(wire: pb.DownwardEnvelope) -> tuple[DownwardParcel, ...]:
    """Return what an envelope says: one parcel, or those of a batch in order. Raises CodecError as `decode_downward`."""
    if wire.WhichOneof("body") != "batch":
        return (decode_downward(wire),)
    return tuple(
        DownwardParcel(wire.job_id, wire.term, tuple(inner.ranks), _decode_down(inner))
        for inner in wire.batch.envelopes
    )


def _encode_up(message: m.Upward) -> pb.Upward:
    match message:
        case m.Heartbeat():
            return pb.Upward(heartbeat=_encode_heartbeat(message))
        case m.Registration():
            return pb.Upward(registration=_encode_registration(message))
        case m.StateReport():
            return pb.Upward(state_report=_encode_report(message))
        case m.FaultReport(rank, cause, detail):
            return pb.Upward(fault_report=pb.FaultReport(rank=rank, cause=encode_cause(cause), detail=clean(detail)))
        case m.Finished(rank):
            return pb.Upward(finished=pb.Finished(rank=rank))
        case m.AgentHello(host, ranks, pids):
            return pb.Upward(agent_hello=pb.AgentHello(host=host, ranks=ranks, pids=pids))
        case m.WorkerExit(rank, pid, text, seen):
            return pb.Upward(worker_exit=pb.WorkerExit(rank=rank, pid=pid, text=clean(text), seen_unix_s=seen))
        case m.Vouch(ranks, pids):
            return pb.Upward(vouch=pb.Vouch(ranks=ranks, pids=pids))
        case m.RolledForward(rank, freeze_id, state_step):
            return pb.Upward(rolled_forward=pb.RolledForward(rank=rank, freeze_id=freeze_id, state_step=state_step))
        case m.Written(rank, freeze_id, tmp_name, parts, result):
            written = pb.Written(rank=rank, freeze_id=freeze_id, tmp_name=tmp_name, parts=encode_parts(parts))
            written.result.CopyFrom(encode_share(result))
            return pb.Upward(written=written)
        case m.Published(rank, freeze_id, step, path):
            return pb.Upward(published=pb.Published(rank=rank, freeze_id=freeze_id, step=step, path=path))
        case m.StepFailed(rank, freeze_id, stage, tmp_name, error, torn):
            failed = pb.StepFailed(rank=rank, freeze_id=freeze_id, stage=stage, tmp_name=tmp_name, error=clean(error))
            failed.torn.extend(torn)
            return pb.Upward(step_failed=failed)
        case m.Working(rank, freeze_id):
            return pb.Upward(working=pb.Working(rank=rank, freeze_id=freeze_id))
        case m.StandbyReport(rank, address, runs, error):
            report = pb.StandbyReport(rank=rank, address=address, runs=runs, error=clean(error))
            return pb.Upward(standby_report=report)
        case _:
            assert_never(message)


def _decode_up(wire: pb.Upward) -> m.Upward:
    match wire.WhichOneof("body"):
        case "heartbeat":
            return _decode_heartbeat(wire.heartbeat)
        case "registration":
            return _decode_registration(wire.registration)
        case "state_report":
            return _decode_report(wire.state_report)
        case "fault_report":
            fault = wire.fault_report
            return m.FaultReport(fault.rank, decode_cause(fault.cause), fault.detail)
        case "finished":
            return m.Finished(wire.finished.rank)
        case "agent_hello":
            hello = wire.agent_hello
            return m.AgentHello(hello.host, tuple(hello.ranks), tuple(hello.pids))
        case "worker_exit":
            ended = wire.worker_exit
            return m.WorkerExit(ended.rank, ended.pid, ended.text, ended.seen_unix_s)
        case "vouch":
            return m.Vouch(tuple(wire.vouch.ranks), tuple(wire.vouch.pids))
        case "rolled_forward":
            rolled = wire.rolled_forward
            return m.RolledForward(rolled.rank, rolled.freeze_id, rolled.state_step)
        case "written":
            written = wire.written
            parts, share = decode_parts(written.parts), decode_share(written.result)
            return m.Written(written.rank, written.freeze_id, written.tmp_name, parts, share)
        case "published":
            published = wire.published
            return m.Published(published.rank, published.freeze_id, published.step, published.path)
        case "step_failed":
            failed = wire.step_failed
            torn = tuple(failed.torn)
            return m.StepFailed(failed.rank, failed.freeze_id, failed.stage, failed.tmp_name, failed.error, torn)
        case "working":
            return m.Working(wire.working.rank, wire.working.freeze_id)
        case "standby_report":
            report = wire.standby_report
            return m.StandbyReport(report.rank, report.address, report.runs, report.error)
        case _:
            raise CodecError("an upward message of a kind that is unknown here came in; is the peer newer?")


def _fill_down(wire: pb.DownwardEnvelope, message: m.Downward | None) -> None:
    """Put a message into an envelope. The kinds of which each rank gets its own are filled in place, which takes half the time
    of building and copying: a plan for 10,000 ranks has as many orders."""
    match message:
        case m.WriteOrder(freeze_id, step, directory, tmp_name, parts):
            order = wire.write_order
            order.freeze_id, order.step = freeze_id, step
            order.directory, order.tmp_name = directory, tmp_name
            for part in parts:
                order.parts.add(group_id=part.group_id, index=part.index, count=part.count)
        case m.Welcome():
            _fill_welcome(wire.welcome, message)
        case None:
            wire.stream_opened.SetInParent()
        case m.Freeze(freeze_id, cause):
            wire.freeze.CopyFrom(pb.Freeze(freeze_id=freeze_id, cause=encode_cause(cause)))
        case m.Thaw(freeze_id):
            wire.thaw.CopyFrom(pb.Thaw(freeze_id=freeze_id))
        case m.RollForward(freeze_id, record):
            wire.roll_forward.CopyFrom(pb.RollForward(freeze_id=freeze_id, record=encode_record(record)))
        case m.PublishOrder():
            wire.publish_order.CopyFrom(_encode_publish(message))
        case m.Exit(code, reason):
            wire.exit.CopyFrom(pb.Exit(code=code, reason=clean(reason)))
        case m.Dismiss():
            wire.dismiss.SetInParent()
        case m.Beat():
            wire.beat.SetInParent()
        case m.Successors(addresses, lease_s):
            wire.successors.CopyFrom(pb.Successors(addresses=addresses, lease_s=lease_s))
        case m.StartStandby():
            wire.start_standby.SetInParent()
        case _:
            assert_never(message)


def _decode_down(wire: pb.DownwardEnvelope) -> m.Downward | None:
    match wire.WhichOneof("body"):
        case "stream_opened":
            return None
        case "welcome":
            return _decode_welcome(wire.welcome)
        case "freeze":
            return m.Freeze(wire.freeze.freeze_id, decode_cause(wire.freeze.cause))
        case "thaw":
            return m.Thaw(wire.thaw.freeze_id)
        case "roll_forward":
            return m.RollForward(wire.roll_forward.freeze_id, decode_record(wire.roll_forward.record))
        case "write_order":
            w_o = wire.write_order
            return m.WriteOrder(w_o.freeze_id, w_o.step, w_o.directory, w_o.tmp_name, decode_parts(w_o.parts))
        case "publish_order":
            return _decode_publish(wire.publish_order)
        case "exit":
            return m.Exit(wire.exit.code, wire.exit.reason)
        case "dismiss":
            return m.Dismiss()
        case "beat":
            return m.Beat()
        case "successors":
            return m.Successors(tuple(wire.successors.addresses), wire.successors.lease_s)
        case "start_standby":
            return m.StartStandby()
        case _:
            raise CodecError("a downward message of a kind that is unknown here came in; is the controller newer?")


def _encode_heartbeat(message: m.Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        rank=message.rank,
        phase=encode_phase(message.phase),
        step=message.step,
        waiting=message.waiting,
        paused=message.paused,
        frozen=message.frozen,
        owes=message.owes,
        finished=message.finished,
        steps=message.steps,
        step_times_s=message.step_times_s,
    )


def _decode_heartbeat(wire: pb.Heartbeat) -> m.Heartbeat:
    return m.Heartbeat(
        rank=wire.rank,
        phase=decode_phase(wire.phase),
        step=wire.step,
        waiting=wire.waiting,
        paused=wire.paused,
        frozen=wire.frozen,
        owes=wire.owes,
        finished=wire.finished,
        steps=wire.steps,
        step_times_s=tuple(wire.step_times_s),
    )


def _encode_registration(message: m.Registration) -> pb.Registration:
    return pb.Registration(
        rank=message.rank,
        world_size=message.world_size,
        host=message.host,
        pid=message.pid,
        groups=encode_groups(message.groups),
        state_step=message.state_step,
        save_dirs=message.save_dirs,
        layout=message.layout,
        standby=message.standby,
        controllers=message.controllers,
        job_groups=message.job_groups,
        step_times_s=message.step_times_s,
        finished=message.finished,
        steps=message.steps,
    )


def _decode_registration(wire: pb.Registration) -> m.Registration:
    return m.Registration(
        rank=wire.rank,
        world_size=wire.world_size,
        host=wire.host,
        pid=wire.pid,
        groups=decode_groups(wire.groups),
        state_step=wire.state_step,
        save_dirs=tuple(wire.save_dirs),
        layout=wire.layout,
        standby=wire.standby,
        controllers=tuple(wire.controllers),
        job_groups=wire.job_groups,
        step_times_s=tuple(wire.step_times_s),
        finished=wire.finished,
        steps=wire.steps,
    )


def _fill_welcome(wire: pb.Welcome, message: m.Welcome) -> None:
    wire.rank, wire.term = message.rank, message.term
    wire.heartbeat_s, wire.lease_s = message.heartbeat_s, message.lease_s
    wire.survives = clean(message.survives)
    wire.successors.extend(message.successors)
    wire.job_groups = message.job_groups
    wire.overview.extend(clean(line) for line in message.overview)
    wire.warnings.extend(clean(line) for line in message.warnings)


def _decode_welcome(wire: pb.Welcome) -> m.Welcome:
    return m.Welcome(
        rank=wire.rank,
        term=wire.term,
        heartbeat_s=wire.heartbeat_s,
        lease_s=wire.lease_s,
        survives=wire.survives,
        successors=tuple(wire.successors),
        job_groups=wire.job_groups,
        overview=tuple(wire.overview),
        warnings=tuple(wire.warnings),
    )


def _encode_report(message: m.StateReport) -> pb.StateReport:
    return pb.StateReport(
        rank=message.rank,
        freeze_id=message.freeze_id,
        closed=message.closed,
        phase=encode_phase(message.phase),
        step=message.step,
        state_step=message.state_step,
        torn=message.torn,
        backup_step=message.backup_step,
        records=[encode_record(record) for record in message.records],
        final=message.final,
        checkpoint=clean(message.checkpoint),
    )


def _decode_report(wire: pb.StateReport) -> m.StateReport:
    return m.StateReport(
        rank=wire.rank,
        freeze_id=wire.freeze_id,
        closed=wire.closed,
        phase=decode_phase(wire.phase),
        step=wire.step,
        state_step=wire.state_step,
        torn=wire.torn,
        backup_step=wire.backup_step,
        records=tuple(decode_record(record) for record in wire.records),
        final=wire.final,
        checkpoint=wire.checkpoint,
    )


def _encode_publish(message: m.PublishOrder) -> pb.PublishOrder:
    return pb.PublishOrder(
        freeze_id=message.freeze_id,
        step=message.step,
        directory=message.directory,
        tmp_name=message.tmp_name,
        results=[encode_share(share) for share in message.results],
        cause=encode_cause(message.cause),
        record=None if message.record is None else encode_record(message.record),
        term=message.term,
    )


def _decode_publish(wire: pb.PublishOrder) -> m.PublishOrder:
    return m.PublishOrder(
        freeze_id=wire.freeze_id,
        step=wire.step,
        directory=wire.directory,
        tmp_name=wire.tmp_name,
        results=tuple(decode_share(share) for share in wire.results),
        cause=decode_cause(wire.cause),
        record=decode_record(wire.record) if wire.HasField("record") else None,
        term=wire.term,
    )


def encode_status(status: s.JobStatus) -> pb.JobStatus:
    published = status.published
    return pb.JobStatus(
        job_id=status.job_id,
        term=status.term,
        world_size=status.world_size,
        stage=status.stage,
        survives=clean(status.survives),
        ranks=[_encode_rank_status(rank) for rank in status.ranks],
        published=None if published is None else pb.PublishedCheckpoint(step=published.step, path=published.path),
        pid=status.pid,
        role=status.role,
    )


def decode_status(wire: pb.JobStatus) -> s.JobStatus:
    published = s.PublishedCheckpoint(wire.published.step, wire.published.path) if wire.HasField("published") else None
    return s.JobStatus(
        job_id=wire.job_id,
        term=wire.term,
        world_size=wire.world_size,
        stage=wire.stage,
        survives=wire.survives,
        ranks=tuple(_decode_rank_status(rank) for rank in wire.ranks),
        published=published,
        pid=wire.pid,
        role=wire.role,
    )


def _encode_rank_status(rank: s.RankStatus) -> pb.RankStatus:
    return pb.RankStatus(
        rank=rank.rank,
        host=rank.host,
        pid=rank.pid,
        attached=rank.attached,
        phase=encode_phase(rank.phase),
        step=rank.step,
        dead=rank.dead,
        cause=None if rank.cause is None else encode_cause(rank.cause),
        finished=rank.finished,
    )


def _decode_rank_status(wire: pb.RankStatus) -> s.RankStatus:
    return s.RankStatus(
        rank=wire.rank,
        host=wire.host,
        pid=wire.pid,
        attached=wire.attached,
        phase=decode_phase(wire.phase),
        step=wire.step,
        dead=wire.dead,
        cause=decode_cause(wire.cause) if wire.HasField("cause") else None,
        finished=wire.finished,
    )
