"""Which values a message may carry, whoever sent it and in whatever stage it comes (PURE).

Owns the bounds that the wire does not have: a 64-bit step leaves no room for the next one, a rank may be outside the world, a number may
not be one. A machine asks here before it takes a message. Never knows what a message means: the machines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ttp.errors import ProtocolError
from ttp.proto import messages as m

LAST_STEP = 2**53
"""Steps and freezes are counted, and compared with floats."""
MOST_RECORDS = 16
"""Commit records in one report: a rank keeps those of its last steps."""
MOST_ADDRESSES = 1024
"""Standbys of one job, those that have ended among them; with the first one a job has one controller more."""
MOST_STEP_TIMES = 4096
MOST_PARTS = 1 << 20
LONGEST_S = 1e9


def check_upward(message: m.Upward, world_size: int) -> None:
    """Refuse a message to the controller with a value that it cannot mean. Raises ProtocolError."""
    match message:
        case m.Heartbeat():
            step, frozen, steps = message.step, message.frozen, message.steps
            if not (0 <= step <= LAST_STEP and 0 <= frozen <= LAST_STEP and 0 <= steps <= LAST_STEP):
                _counts(message, step=step, frozen=frozen, steps=steps)
            if message.step_times_s:
                _step_times(message, message.step_times_s)
        case m.StateReport():
            _counts(message, step=message.step, state_step=message.state_step, freeze_id=message.freeze_id)
            _count(message, "backup_step", message.backup_step, -1)
            _length(message, "records", len(message.records), MOST_RECORDS)
            for record in message.records:
                _count(message, "records.step", record.step)
            for digest in message.digests:
                _count(message, "digests.holders", digest.holders, 1)
        case m.Registration():
            _counts(message, state_step=message.state_step, pid=message.pid, job_groups=message.job_groups)
            _counts(message, vacant=message.vacant, generation=message.generation, regrouped=message.regrouped)
            _length(message, "controllers", len(message.controllers), MOST_ADDRESSES + 1)
            _step_times(message, message.step_times_s)
            for group in message.groups:
                _count(message, "groups.nbytes", group.nbytes)
        case m.FaultReport():
            _ranks(message, "cause.ranks", message.cause.ranks, world_size)
        case m.AgentHello():
            _ranks(message, "ranks", message.ranks, world_size)
            if len(message.pids) != len(message.ranks):
                raise _wrong(message, "pids", message.pids, f"{len(message.ranks)} of them, one for each rank")
            if not 0 <= message.places <= (0 if message.ranks else world_size):
                raise _wrong(message, "places", message.places, f"0 to {world_size}, and 0 with ranks of its own")
        case m.WorkerExit():
            if not math.isfinite(message.seen_unix_s):
                raise _wrong(message, "seen_unix_s", message.seen_unix_s, "a finite number")
        case m.RolledForward():
            _counts(message, freeze_id=message.freeze_id, state_step=message.state_step)
        case m.Written():
            _count(message, "freeze_id", message.freeze_id)
            _parts(message, message.parts)
            _share(message, message.result, world_size)
        case m.Published():
            _counts(message, freeze_id=message.freeze_id, step=message.step)
        case m.StepFailed() | m.Regrouped() | m.ReplaceFailed():
            _count(message, "freeze_id", message.freeze_id)
        case m.Progress():
            _count(message, "freeze_id", message.freeze_id)


def check_downward(message: m.Downward) -> None:
    """Refuse a message to a rank with a value that it cannot mean. Raises ProtocolError."""
    match message:
        case m.KeepAlive():  # the one that comes most often
            pass
        case m.Welcome():
            _counts(message, term=message.term, job_groups=message.job_groups)
            _seconds(message, "heartbeat_s", message.heartbeat_s, above_zero=True)
            _seconds(message, "lease_s", message.lease_s, above_zero=True)
            _length(message, "successors", len(message.successors), MOST_ADDRESSES)
        case m.Freeze() | m.Thaw():
            _count(message, "freeze_id", message.freeze_id)
        case m.RollForward():
            _counts(message, freeze_id=message.freeze_id, step=message.record.step)
        case m.WriteOrder():
            _counts(message, freeze_id=message.freeze_id, step=message.step)
            _parts(message, message.parts)
        case m.PublishOrder():
            _counts(message, freeze_id=message.freeze_id, step=message.step, term=message.term)
            if message.record is not None:
                _count(message, "record.step", message.record.step)
            for share in message.results:
                _share(message, share, LAST_STEP)
        case m.Regroup():
            _counts(message, freeze_id=message.freeze_id, step=message.step)
            _ranks(message, "replaced", message.replaced, LAST_STEP)
            if message.record is not None:
                _count(message, "record.step", message.record.step)
        case m.Replace():
            _counts(message, freeze_id=message.freeze_id, pid=message.pid)
            _ranks(message, "rank", (message.rank,), LAST_STEP)
        case m.TakePlaces():
            _count(message, "freeze_id", message.freeze_id)
            _ranks(message, "ranks", message.ranks, LAST_STEP)
        case m.Exit(code):
            if not 0 <= code <= 255:
                raise _wrong(message, "code", code, "an exit status from 0 to 255")
        case m.StandbyList():
            _length(message, "addresses", len(message.addresses), MOST_ADDRESSES)
            _seconds(message, "lease_s", message.lease_s, above_zero=True)


def _counts(message: object, **values: int) -> None:
    for name, value in values.items():
        _count(message, name, value)


def _count(message: object, name: str, value: int, least: int = 0) -> None:
    least = -1 if name == "freeze_id" else least  # -1: before the first freeze
    if not least <= value <= LAST_STEP:
        raise _wrong(message, name, value, f"{least} to 2**53")


def _seconds(message: object, name: str, value: float, *, above_zero: bool = False) -> None:
    if not 0 <= value <= LONGEST_S or (above_zero and value == 0):
        raise _wrong(message, name, value, f"seconds {'above' if above_zero else 'from'} 0 to {LONGEST_S:g}")


def _length(message: object, name: str, length: int, most: int) -> None:
    if length > most:
        raise _wrong(message, name, f"{length} entries", f"at most {most}")


def _step_times(message: object, times: Sequence[float]) -> None:
    _length(message, "step_times_s", len(times), MOST_STEP_TIMES)
    for seconds in times:
        _seconds(message, "step_times_s", seconds)


def _ranks(message: object, name: str, ranks: Iterable[int], world_size: int) -> None:
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise _wrong(message, name, rank, f"ranks from 0 to {world_size - 1}")


def _parts(message: object, parts: Iterable[m.Part]) -> None:
    for part in parts:
        if not 0 <= part.index < part.count <= MOST_PARTS:
            raise _wrong(message, "parts", f"part {part.index} of {part.count}", f"0 <= index < count <= {MOST_PARTS}")


def _share(message: object, share: m.ShareResult, world_size: int) -> None:
    for file in share.files:
        if not 0 <= file.rank < world_size or not 0 <= file.nbytes <= LAST_STEP:
            raise _wrong(
                message, "result.files", f"{file.nbytes} bytes of rank {file.rank}", "a size and a rank of the job"
            )
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise _wrong(message, "result.files", repr(file.name[:80]), "the name of a file, without a directory")


def _wrong(message: object, name: str, value: object, expected: str) -> ProtocolError:
    sender = getattr(message, "rank", None)
    of = "" if sender is None else f" of rank {sender}"
    return ProtocolError(
        f"{type(message).__name__}{of}: {name}: got {value}, expected {expected}; does its sender run another version?"
    )
