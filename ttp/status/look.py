"""One look at a job: what its controller answers and what its files know, as one status.

Owns which of the two is believed where: the controller for what is now, the files for what was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ttp.checkpoint.format.durable import steps_in
from ttp.checkpoint.format.manifest import MANIFEST_NAME, read_manifest
from ttp.checkpoint.passed_over import is_in, read_notes
from ttp.errors import CheckpointError
from ttp.launch.report.time_use import mean_step_s
from ttp.proto.address import split_address
from ttp.proto.messages import CauseKind, Phase
from ttp.proto.status import JobStatus, RankStatus
from ttp.status import ask, find_job, history, page_access
from ttp.status.answer import CheckpointRow, CoverageNow, FaultRow, JobView, Leader, RankLine, StragglerRow
from ttp.status.find_job import Job
from ttp.status.goodput import job_time
from ttp.status.history import History, PastAttempt
from ttp.status.remembered import Remembered, state_of

FEW_RANKS = 16
"""Up to so many have a line each, of more the first of those that need a look."""
FEW_CHECKPOINTS = 3
FEW_FAULTS = 10
FEW_HOLDERS = 64
FRESH_HEARTBEATS = 3
"""A rank that has sent none for so long may do something else by now."""
PHASES = {
    "standby": "no controller leads the ranks",
    "gathering": "taking over",
    "assembling": "starting",
    "running": "training",
    "freezing": "frozen",
    "rolling": "rolling forward",
    "regrouping": "regrouping",
    "writing": "writing",
    "publishing": "publishing",
    "exiting": "exiting",
    "over": "ending",
}
"""A controller's stage -> what the job does."""
STANDSTILL, PAUSED, BETWEEN, ENDED, UNKNOWN = "standstill", "paused", "between attempts", "ended", "unknown"


def look(
    job: Job, *, all_ranks: bool = False, clock: Callable[[], float] = time.time, ask_at: ask.AskAt | None = None
) -> JobView:
    """Return what a job does now. `ask_at`: asks one controller (default: as an operator). Raises ConfigError: there is nothing to show, as no
    controller answers and no file is known."""
    ask_at = ask_at or ask.ask_at
    if job.log_dir is None:
        reply = ask_at(job.address, "")
        log_dir = _log_dir_of(reply.status)
        known = history.read(log_dir) if log_dir is not None else History()
    else:
        log_dir, known, reply = job.log_dir, history.read(job.log_dir), ask.Reply(None)
        if known.end is None:
            reply, notes = _ask(log_dir, known, ask_at)
            known = replace(known, notes=(*known.notes, *notes))
    if reply.status is None and log_dir is None:
        raise find_job.no_answer(job.address, reply.error)
    now = clock()
    found = _of_controller(reply.status, known, now) if reply.status is not None else _of_files(known, now)
    directories, unseen = _directories(reply.status, known, log_dir)
    checkpoints, unread = _checkpoints(directories)
    place = page_access.read(log_dir) if log_dir is not None and found.end is None else None
    found = replace(
        found,
        log_dir=str(log_dir or ""),
        faults=[*reversed(found.faults)],
        checkpoints=checkpoints,
        page=place.url if place is not None else "",
        excluded=[*known.excluded],
        notes=[*known.notes, *([reply.error] if reply.error else []), *unseen, *unread],
    )
    return found if all_ranks else shortened(found)


def shortened(found: JobView) -> JobView:
    """Return it with the ranks to look at first, the newest faults and the first holders alone."""
    ranks = found.ranks if len(found.ranks) <= FEW_RANKS else sorted(found.ranks, key=_concern)[:FEW_RANKS]
    return replace(found, ranks=ranks, faults=found.faults[:FEW_FAULTS], holders=found.holders[:FEW_HOLDERS])


def _ask(log_dir: Path, known: History, ask_at: ask.AskAt) -> tuple[ask.Reply, list[str]]:
    newest = known.attempts[-1].number if known.attempts else 0
    try:
        numbers = [attempt for _, attempt, _ in find_job.journals(log_dir)]
        controllers = find_job.controllers(log_dir, max(numbers, default=newest))
    except (OSError, ValueError) as error:
        return ask.Reply(None), [f"the controllers' addresses in {log_dir} cannot be read: {error}"]
    if not controllers:
        return ask.Reply(None), [f"no controller is known: no journal in {log_dir} says where one listens"]
    return ask.ask(controllers, ask_at), []


def _log_dir_of(status: JobStatus | None) -> Path | None:
    """Return where a job's journals are, by its processes on this node."""
    if status is None:
        return None
    return next((each.log_dir for each in ask.local_processes() if each.job_id == status.job_id), None)


# --- now ---


def _of_controller(status: JobStatus, known: History, now: float) -> JobView:
    pace, coverage = status.pace, status.coverage
    trains = status.stage == "running"
    faults = list(known.faults)
    if (current := _current(status, now)) is not None:
        faults.append(current)
    use = job_time(known, now, pace.step_s, status.fault.age_s if status.fault is not None else 0.0)
    return JobView(
        state="running",
        source="controller",
        phase=_phase(status),
        unix_s=now,
        job=status.job_id,
        attempt=_attempt_of(status.job_id),
        log_dir="",
        world_size=status.world_size,
        step=_finished(status) or known.last_step,
        steps_per_s=1 / pace.step_s if trains and pace.step_s else None,
        step_s=pace.step_s,
        slow_step_s=pace.slow_s,
        still_s=pace.still_s if trains else None,
        hang_limit_s=pace.limit_s,
        since_unix_s=_since(known),
        goodput=use.goodput if use is not None else None,
        time_use=use,
        leader=_leader(status),
        standbys=list(status.standbys),
        survives=status.survives,
        coverage=CoverageNow(
            coverage.groups, coverage.least, coverage.uncovered, list(coverage.fatal_ranks), coverage.fatal_rank_count,
            list(coverage.fatal_nodes), coverage.fatal_node_count, coverage.copies,
        ) if coverage.groups else None,
        rank_count=len(status.ranks),
        ranks=_rank_rows(status),
        fault_count=len(faults),
        faults=faults,
        **_held(known),
        checkpoints=[],
        end=None,
        steps_lost=known.steps_lost,
        stragglers=[StragglerRow(each.rank, each.host, each.ratio, each.own_s, each.others_s, each.steps) for each in status.stragglers],
        stragglers_compared=_compared(status),
        loss=status.loss if status.loss is not None and math.isfinite(status.loss) else None,
        loss_finite=None if status.loss is None else math.isfinite(status.loss),
    )  # fmt: skip


def _compared(status: JobStatus) -> bool | None:
    """Say whether slow ranks can be found. A controller keeps own times of ranks alone that it compares: on accelerators there are none."""
    if sum(rank.own_s is not None for rank in status.ranks) > 1:
        return True
    known = status.pace.step_s is not None or any(rank.step_s is not None for rank in status.ranks)
    return False if known else None


def _phase(status: JobStatus) -> str:
    if status.stage == "running":
        fresh_s = FRESH_HEARTBEATS * status.heartbeat_s
        if any(rank.paused and rank.silent_s is not None and rank.silent_s < fresh_s for rank in status.ranks):
            return PAUSED
        pace = status.pace
        if pace.still_s is not None and pace.limit_s is not None and pace.still_s > pace.limit_s / 2:
            return STANDSTILL
    return PHASES.get(status.stage, status.stage)


def _finished(status: JobStatus) -> int | None:
    """Return the newest step that a rank has finished by its last heartbeat; None: none has."""
    newest = max((rank.step if rank.phase is Phase.DONE else rank.step - 1 for rank in status.ranks), default=0)
    return newest if newest > 0 else None


def _leader(status: JobStatus) -> Leader | None:
    if status.role != "active":
        return None
    host = split_address(status.address)[0].rpartition(":")[0].strip("[]") if status.address else ""
    return Leader(status.place, status.term, host, status.pid, status.address)


def _current(status: JobStatus, now: float) -> FaultRow | None:
    """Return the fault that is handled now. That collectives fail on the other ranks follows from a cause, and may be noticed before it."""
    if status.fault is None:
        return None
    causes = [cause for cause in status.fault.causes if cause.kind is not CauseKind.PEER_ERROR] or status.fault.causes
    return FaultRow(
        attempt=_attempt_of(status.job_id) or 0,
        unix_s=now - status.fault.age_s,
        kind=causes[0].kind.value if causes else "suspicion",
        ranks=sorted({rank for cause in causes for rank in cause.ranks}),
        cause=causes[0].text if causes else "",
        outcome="now",
        detail="",
        step=None,
        steps_lost=None,
        took_s=round(status.fault.age_s, 3),
    )


def _rank_rows(status: JobStatus) -> list[RankLine]:
    slower = {each.rank: each.ratio for each in status.stragglers}
    return [_rank_row(rank, slower.get(rank.rank)) for rank in status.ranks]


def _rank_row(rank: RankStatus, slower: float | None) -> RankLine:
    state = rank.phase.name.lower()
    for name, holds in (
        ("missing", not rank.pid),
        ("dead", rank.dead),
        ("detached", not rank.attached),
        ("suspect", rank.suspect),
        ("finished", rank.finished),
        ("paused", rank.paused),
    ):
        if holds:
            state = name
            break
    cause = rank.cause.brief if rank.cause is not None else ""
    place = (rank.rank, rank.host, rank.pid, state, rank.step, rank.step_s, rank.silent_s, cause)
    return RankLine(*place, rank.own_s, rank.waited_s, slower)


_FIRST = ("dead", "missing", "detached", "suspect")


def _concern(row: RankLine) -> tuple[int, bool, float, int, float, float]:
    """Order ranks by how much they need a look: gone, at fault, stragglers, behind, slow, silent."""
    place = _FIRST.index(row.state) if row.state in _FIRST else len(_FIRST)
    slow_s = row.own_s if row.own_s is not None else row.step_s
    return place, not row.cause, -(row.slower or 0.0), row.step, -(slow_s or 0.0), -(row.heartbeat_age_s or 0.0)


# --- by the files alone ---


def _of_files(known: History, now: float) -> JobView:
    newest = known.attempts[-1] if known.attempts else None
    end = known.end
    last_unix_s = max((attempt.last_unix_s for attempt in known.attempts), default=now)
    until = end.unix_s if end is not None else last_unix_s
    processes = newest.processes if newest is not None else {}
    state = ENDED if end is not None else UNKNOWN
    rows = [RankLine(rank, *processes[rank], state, 0, None, None, "") for rank in sorted(processes)]
    use = job_time(known, until, None)
    return JobView(
        state=state,
        source="files",
        phase=ENDED if end is not None else BETWEEN if known.next.startswith("restart") else UNKNOWN,
        unix_s=until,
        job="",
        attempt=newest.number if newest is not None else None,
        log_dir="",
        world_size=newest.world_size if newest is not None else 0,
        step=known.last_step,
        steps_per_s=None,
        step_s=_step_time(known) if end is not None else None,
        slow_step_s=None,
        still_s=None,
        hang_limit_s=None,
        since_unix_s=until - use.whole_s if use is not None else _since(known),
        goodput=use.goodput if use is not None else None,
        time_use=use,
        leader=None,
        standbys=[],
        survives=newest.survives if newest is not None else "",
        coverage=None,
        rank_count=len(rows),
        ranks=rows,
        fault_count=len(known.faults),
        faults=list(known.faults),
        **_held(known),
        checkpoints=[],
        end=end,
        steps_lost=known.steps_lost,
    )


def _step_time(known: History) -> float | None:
    """Return the mean time of a step in the newest attempt of which it is known."""
    means = (mean_step_s(attempt) for attempt in reversed(known.times))
    return next((step_s for step_s in means if step_s is not None and step_s > 0), None)


def _held(known: History) -> dict[str, Any]:
    rows = known.attempts[-1].holders if known.attempts else ()
    return {"holder_count": len(rows), "holders": list(rows)}


def _since(known: History) -> float | None:
    first: PastAttempt | None = known.attempts[0] if known.attempts else None
    return first.begun_unix_s if first is not None and first.number == 0 else None


def _attempt_of(job_id: str) -> int | None:
    number = job_id.rpartition("/")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


# --- checkpoints ---


def _directories(status: JobStatus | None, known: History, log_dir: Path | None) -> tuple[list[Path], list[str]]:
    """Return the checkpoint directories of a job, by its ranks, by what its journals have written, or beside its journals, and what cannot be read."""
    named: list[str] = list(status.save_dirs) if status is not None else []
    named += [directory for attempt in reversed(known.attempts) for directory in attempt.directories]
    named += [str(Path(fault.detail).parent) for fault in known.faults if fault.step is not None and fault.detail]
    found = [Path(directory) for directory in dict.fromkeys(named)]
    if log_dir is not None and not found:
        found = [log_dir.parent if log_dir.name == "ttp_log" else log_dir.parent / "checkpoints"]
    there, notes = [], []
    for directory in found:
        try:
            if directory.is_dir():
                there.append(directory)
        except OSError as error:
            notes.append(f"checkpoints in {directory} cannot be listed: {error.strerror or error}")
    return there, notes


def _checkpoints(directories: Iterable[Path]) -> tuple[list[CheckpointRow], list[str]]:
    rows: list[CheckpointRow] = []
    notes = []
    for directory in directories:
        try:
            others = _passed_over(directory)
            mine = (row for row in steps_in(directory) if not is_in(others, row[1]))
            newest = list(islice(mine, FEW_CHECKPOINTS))
        except OSError as error:
            notes.append(f"checkpoints in {directory} cannot be listed: {error.strerror or error}")
            continue
        rows += [_checkpoint_row(directory, step, path) for step, path in newest]
    return rows, notes


def _passed_over(directory: Path) -> Mapping[str, int]:
    """Return what is another run's there. A note that this user cannot read says nothing."""
    try:
        return read_notes([directory])
    except (CheckpointError, OSError):
        return {}


def _checkpoint_row(directory: Path, step: int, path: Path) -> CheckpointRow:
    try:
        state = state_of([path / MANIFEST_NAME])
        cause, written_unix_s, nbytes = _manifests.get(path, state, partial(_manifest, path))
    except (CheckpointError, OSError):
        return CheckpointRow(str(directory), step, str(path), "", None, None)
    return CheckpointRow(str(directory), step, str(path), cause, written_unix_s, nbytes)


_manifests: Remembered[Path, tuple[str, float, int]] = Remembered(1024)
"""By checkpoint: another one may take its place."""


def _manifest(path: Path) -> tuple[str, float, int]:
    """Return cause, time and size of a published checkpoint. Raises CheckpointError, OSError."""
    manifest = read_manifest(path)
    return manifest.cause.kind.value, manifest.created_unix_s, manifest.nbytes
