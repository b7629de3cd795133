"""Protobuf forms of the values that messages are made of: causes, commit records, shard groups, shares.

Serves `codec.py` only. Every function here maps one dataclass of `messages.py` field by field; nothing is pickled and
nothing is guessed. Unknown enum numbers (a newer peer) raise CodecError.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttp.proto import control_pb2 as pb
from ttp.proto import messages as m


class CodecError(ValueError):
    """A message cannot be put on the wire, or what came over it is not one of ours."""


_KINDS = {
    m.CauseKind.PERIODIC: pb.CAUSE_KIND_PERIODIC,
    m.CauseKind.EXITED: pb.CAUSE_KIND_EXITED,
    m.CauseKind.SILENT: pb.CAUSE_KIND_SILENT,
    m.CauseKind.EXCEPTION: pb.CAUSE_KIND_EXCEPTION,
    m.CauseKind.PEER_ERROR: pb.CAUSE_KIND_PEER_ERROR,
    m.CauseKind.PREEMPTED: pb.CAUSE_KIND_PREEMPTED,
    m.CauseKind.AGENT_LOST: pb.CAUSE_KIND_AGENT_LOST,
    m.CauseKind.HUNG: pb.CAUSE_KIND_HUNG,
    m.CauseKind.CONTROLLER_LOST: pb.CAUSE_KIND_CONTROLLER_LOST,
    m.CauseKind.REQUESTED: pb.CAUSE_KIND_REQUESTED,
}
_KINDS_BACK = {int(number): kind for kind, number in _KINDS.items()}
_PHASES = {
    m.Phase.COMPUTE: pb.PHASE_COMPUTE,
    m.Phase.READY: pb.PHASE_READY,
    m.Phase.UPDATING: pb.PHASE_UPDATING,
    m.Phase.DONE: pb.PHASE_DONE,
}
_PHASES_BACK = {int(number): phase for phase, number in _PHASES.items()}


MOST_TEXT = 1 << 16
"""Characters of one text for people; the rest of a longer one is left out."""


def clean(text: str) -> str:
    """Return text for people as valid Unicode: a traceback may hold lone surrogates, and must get through."""
    if len(text) > MOST_TEXT:
        text = f"{text[: MOST_TEXT // 2]}\n... ({len(text) - MOST_TEXT} characters left out) ...\n{text[-MOST_TEXT // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_phase(phase: m.Phase) -> pb.Phase:
    return _PHASES[phase]


def decode_phase(number: int) -> m.Phase:
    if number not in _PHASES_BACK:
        raise CodecError(f"phase {number} is unknown here, expected one of {sorted(_PHASES_BACK)}; is the peer newer?")
    return _PHASES_BACK[number]


def encode_cause(cause: m.Cause) -> pb.Cause:
    return pb.Cause(kind=_KINDS[cause.kind], ranks=cause.ranks, text=clean(cause.text))


def decode_cause(wire: pb.Cause) -> m.Cause:
    if wire.kind not in _KINDS_BACK:
        raise CodecError(
            f"cause {wire.kind} is unknown here, expected one of {sorted(_KINDS_BACK)}; is the peer newer?"
        )
    return m.Cause(_KINDS_BACK[wire.kind], tuple(wire.ranks), wire.text)


def encode_record(record: m.CommitRecord) -> pb.CommitRecord:
    return pb.CommitRecord(
        step=record.step,
        grad_norm=record.grad_norm,
        clip_factor=record.clip_factor,
        skipped=record.skipped,
        loss_scale=record.loss_scale,
        learning_rates=record.learning_rates,
        sums=record.sums,
    )


def decode_record(wire: pb.CommitRecord) -> m.CommitRecord:
    return m.CommitRecord(
        step=wire.step,
        grad_norm=wire.grad_norm,
        clip_factor=wire.clip_factor,
        skipped=wire.skipped,
        loss_scale=wire.loss_scale,
        learning_rates=tuple(wire.learning_rates),
        sums=tuple(wire.sums),
    )


def encode_groups(groups: Iterable[m.ShardGroup]) -> list[pb.ShardGroup]:
    return [pb.ShardGroup(group_id=g.group_id, label=clean(g.label), nbytes=g.nbytes) for g in groups]


def decode_groups(wire: Iterable[pb.ShardGroup]) -> tuple[m.ShardGroup, ...]:
    return tuple(m.ShardGroup(g.group_id, g.label, g.nbytes) for g in wire)


def encode_parts(parts: Iterable[m.Part]) -> list[pb.Part]:
    return [pb.Part(group_id=p.group_id, index=p.index, count=p.count) for p in parts]


def decode_parts(wire: Iterable[pb.Part]) -> tuple[m.Part, ...]:
    return tuple(m.Part(p.group_id, p.index, p.count) for p in wire)


def encode_share(share: m.ShareResult) -> pb.ShareResult:
    files = [pb.FileEntry(name=f.name, nbytes=f.nbytes, sha256=f.checksum, rank=f.rank) for f in share.files]
    return pb.ShareResult(files=files)


def decode_share(wire: pb.ShareResult) -> m.ShareResult:
    return m.ShareResult(tuple(m.FileEntry(f.name, f.nbytes, f.sha256, f.rank) for f in wire.files))
