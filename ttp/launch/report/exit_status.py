"""How workers ended, as text: one line each, the exceptions that they recorded, and the root cause first.

Owns wording and order. Never waits, never signals, reads no files but the workers' error files, which torch's `@record` writes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttp.launch.watch.death_watch import Death
from ttp.processor.core.causes import classify
from ttp.proto.messages import EXIT_CODE_PERSISTED, EXIT_CODE_PREEMPTED, SAVED_EXIT_CODES, CauseKind, in_brief
from ttp.text.wording import ranks_text

TRACEBACK_LINES = 60
LONGEST_LINE = 400

_LEFT: dict[int | None, str] = {
    EXIT_CODE_PERSISTED: "exited for the restart",
    EXIT_CODE_PREEMPTED: "exited on a preemption notice",
}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A fault's cause and its one deadline, however many stages the fault has."""

    cause: str
    begun_monotonic_s: float
    deadline_monotonic_s: float

    def left_s(self, now_monotonic_s: float) -> float:
        return max(0.0, self.deadline_monotonic_s - now_monotonic_s)


def first_failure(deaths: Mapping[int, Death]) -> Death | None:
    """Return the failed worker that was first seen to exit; a survivor that saved only if there is no other."""
    failed = [death for death in deaths.values() if death.failed]
    if not failed:
        return None
    return min(failed, key=lambda d: (d.status == EXIT_CODE_PERSISTED, d.seen_monotonic_s, d.rank))


def describe(death: Death) -> str:
    """`rank 2 (pid 71) ended: signal SIGKILL`; of one that is not at fault `rank 0 (pid 70) exited for the restart (exit code 75)`."""
    return f"rank {death.rank} (pid {death.pid}) {_saved_text(death) or f'ended: {death.text}'}"


def outcome_text(deaths: Mapping[int, Death], ended: Collection[int] = ()) -> str:
    """Summarize how workers ended: `rank 2: signal SIGKILL; ranks 0-1, 3: exited for the restart (exit code 75)`.

    `ended`: those that the agent itself has ended.
    """
    groups: dict[str, list[Death]] = {}
    for death in sorted(deaths.values(), key=lambda d: (d.status == EXIT_CODE_PERSISTED, d.seen_monotonic_s, d.rank)):
        text = _saved_text(death) or death.text
        if death.rank in ended:
            text = f"ended by ttprun ({death.text})"
        groups.setdefault(text, []).append(death)
    return "; ".join(f"{ranks_text(d.rank for d in group)}: {text}" for text, group in groups.items())


def _saved_text(death: Death) -> str:
    """Return the text for a worker that exited with its state saved; empty: it ended otherwise."""
    return f"{_LEFT[death.status]} ({death.text})" if death.status in _LEFT else ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The exception that a worker recorded in its error file."""

    text: str
    """`ValueError: boom`; may have several lines."""
    trace: str
    """Its traceback; empty: none was recorded."""

    @property
    def name(self) -> str:
        """The exception's class, without the module."""
        return self.text.partition(":")[0]

    @property
    def line(self) -> str:
        """Its message, in one line."""
        first = next((line.strip() for line in self.text.splitlines() if line.strip()), "")
        return first if len(first) <= LONGEST_LINE else f"{first[:LONGEST_LINE]}..."


def recorded(failure: ProcessFailure) -> Recorded | None:
    """Return what a worker recorded in its error file; None if it recorded nothing, or nothing that can be read."""
    message = failure.error_file_data.get("message")
    text = message.get("message", "") if isinstance(message, dict) else message
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    if not os.path.exists(failure.error_file) or not isinstance(text, str):
        return None
    return Recorded(text.strip(), trace if isinstance(trace, str) else "")


def is_peer_error(error: Recorded) -> bool:
    """Return whether the exception is what a collective raises when another rank is gone."""
    return classify(error.text, error.name) is CauseKind.PEER_ERROR


def recorded_by(failures: Mapping[int, ProcessFailure]) -> dict[int, Recorded]:
    """Return by rank what failed workers recorded. The first of `failures` is the root cause; of the others, one that exited with its state
    saved recorded another rank's failure, and is omitted."""
    errors = {rank: recorded(failure) for rank, failure in failures.items()}
    root = next(iter(failures), None)
    return {
        rank: each
        for rank, each in errors.items()
        if each is not None and (rank == root or failures[rank].exitcode not in SAVED_EXIT_CODES)
    }


def summarize(failure: ProcessFailure) -> ProcessFailure:
    """Return a copy for torch's report with the exception in brief, without the traceback that the worker has printed. The error file is not
    changed."""
    error = recorded(failure)
    if error is None:
        return failure
    brief = copy.copy(failure)
    brief.message = f"{in_brief(error.text)} (in the error file)"
    return brief


def exception_text(failure: ProcessFailure) -> str:
    """Return in brief the exception that a worker recorded in its error file; empty if it recorded none."""
    error = recorded(failure)
    return f"{in_brief(error.text)} (traceback: {failure.error_file})" if error is not None else ""


def traceback_text(failure: ProcessFailure) -> str:
    """Return the traceback that a worker recorded in its error file, indented, without its middle when it is very long."""
    error = recorded(failure)
    lines = error.trace.rstrip().splitlines() if error is not None else []
    if len(lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "\n".join(f"    {line}" for line in lines)


def sort_root_cause_first(
    failures: Mapping[int, ProcessFailure], first_seen_unix_s: Mapping[int, float]
) -> dict[int, ProcessFailure]:
    """Order failures (by global rank) so that torch reports the true root cause, and make its timestamps agree.

    torch takes the smallest timestamp, in full seconds, and the first of equals; after a hold it reads all of them at the same moment. A
    survivor that saved is the cause only if there is no other failure. The time of a failure is that of its error file, if that is older than
    the process's end.
    """

    def moment(rank: int) -> float:
        failure = failures[rank]
        seen = first_seen_unix_s.get(rank, float(failure.timestamp))
        try:
            return min(seen, os.stat(failure.error_file).st_mtime)
        except OSError:
            return seen

    def persisted(rank: int) -> bool:
        failure = failures[rank]
        return failure.exitcode == EXIT_CODE_PERSISTED and not os.path.exists(failure.error_file)

    order = sorted(failures, key=lambda rank: (persisted(rank), moment(rank), rank))
    earliest = min((int(moment(rank)) for rank in order), default=0)
    for position, rank in enumerate(order):
        failures[rank].timestamp = earliest if position == 0 else max(earliest, int(moment(rank)))
    return {rank: failures[rank] for rank in order}
