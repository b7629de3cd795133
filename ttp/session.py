"""One process's part in TTP: starts the controller (rank 0) and the processor, resumes, saves, and holds the training
thread at its end until the job's fate is known.

Owns the handles of this process and the order in which they start and stop. Never decides anything about a fault: that
is the controller's.

    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), lr=3e-4)
    session = ttp.start(optimizer, save_dirs=["checkpoints"])
    point = session.resume()                         # None: a fresh start

    @ttp.ttp_to_persist
    def train():
        for step in range(optimizer.current_step + 1, last_step + 1):
            loss = ...; loss.backward()
            session.set_step_state(step, {"samples": ...})   # what step + 1 needs to go on
            optimizer.step()

    train()
    session.close()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttp import error_file
from ttp.chaos.hook import RankFaults
from ttp.checkpoint import gather, load, writer
from ttp.config import Settings
from ttp.directories import RunDirectories, check_same, why_unusable
from ttp.errors import CheckpointError, ConfigError, CorruptCheckpoint, NotWritable
from ttp.exchange import JobRanks, exchange_json, world
from ttp.holder import OptimizerHolder, Publisher
from ttp.protected import ProtectedOptimizer
from ttp.protection import Protection, show
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    FileEntry,
    Part,
    PublishOrder,
    ShareResult,
)
from ttp.standby import term_of

log = logging.getLogger("ttp")

SAVE_AT_MOST_S = 600.0
"""A periodic save that takes longer counts as a standstill: its disk may be what hangs."""

RESUME_AT_MOST_S = 3600.0
"""The same for verifying and loading a checkpoint."""

_current: Session | None = None


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a job goes on: the state is that after update `step`."""

    step: int
    state: Mapping[str, Any]
    """What `set_step_state(step, ...)` was given."""
    record: CommitRecord | None
    """Commit record of `step`: its loss sums and grad norm, in case they were never logged."""
    path: str
    skipped: tuple[str, ...]
    """Newer checkpoints that were not usable, with the reason each."""


def start(
    optimizer: ProtectedOptimizer,
    *,
    save_dirs: Sequence[str | os.PathLike[str]],
    layout: Mapping[str, Any] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    publisher: Publisher | None = None,
) -> Session:
    """Protect this rank (all ranks call, after `init_process_group` and after the optimizer was built).

    save_dirs: checkpoint directories in order of preference; each is tried at once. Shared by all ranks, or, with
    TTP_SHARED_DIRS=False, each node's own under the same names.
    layout: JSON facts for the manifest (the axes' sizes, the model's shape).
    log_dir: where the controller's journal goes (default: `ttp_log` in the first save directory).
    publisher: for a trainer that writes and loads checkpoints in a form of its own (`ttp.holder.Publisher`): it makes them of the
    shares that the ranks write into save_dirs at a fault. Then `resume` and `save` are not used.
    Raises NotWritable, ControllerError (no controller could be started or reached), ConfigError.
    """
    global _current
    if _current is not None:
        raise ConfigError(
            "ttp.start was called twice in this process: call session.close() on the first session before"
        )
    error_file.install()
    session = Session(optimizer, save_dirs, layout or {}, log_dir, settings or Settings.from_env(), publisher)
    _current = session
    return session


def current_session() -> Session:
    """Return this process's session. Raises ConfigError when `ttp.start` has not been called."""
    if _current is None:
        raise ConfigError("no session in this process: call ttp.start(optimizer, save_dirs=...) first")
    return _current


def find_session() -> Session | None:
    """Return this process's session, or None."""
    return _current


class Session:
    """The handles of one process. Made by `ttp.start`; see there."""

    def __init__(
        self,
        optimizer: ProtectedOptimizer,
        save_dirs: Sequence[str | os.PathLike[str]],
        layout: Mapping[str, Any],
        log_dir: str | os.PathLike[str] | None,
        settings: Settings,
        publisher: Publisher | None,
    ) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.rank, self.world_size = world()
        self.save_dirs = tuple(str(Path(d).resolve()) for d in save_dirs)
        self.log_dir = Path(log_dir).resolve() if log_dir is not None else Path(self.save_dirs[0]) / "ttp_log"
        self._faults = RankFaults(settings, self.rank, self.world_size, self.save_dirs)
        self._faults.at_start("start")
        self._directories = RunDirectories(
            self.save_dirs, settings.job_id, settings.round_number == 0, pieces=not settings.shared_dirs
        )
        self._hosts, start = self._agree_on_hosts()
        self._keeps = self.rank == self._keeper()
        """This rank looks after the directories: for all ranks, or for those of its node."""
        self._prepare_directories()
        self._faults.logs_in(self.log_dir)
        self.holder = OptimizerHolder(
            optimizer,
            rank=self.rank,
            world_size=self.world_size,
            host=settings.host,
            pid=os.getpid(),
            save_dirs=self.save_dirs,
            layout={**layout, "optimizer": json.loads(optimizer.layout_json())},
            publisher=publisher,
        )
        self.holder.hosts, self.holder.start = self._hosts, start
        holders = exchange_json([group.group_id for group in optimizer.shard_groups()], self._device)
        self._writers = {
            group_id: [rank for rank, groups in enumerate(holders) if group_id in groups]
            for groups in holders
            for group_id in groups
        }
        self._save_count = 0
        self._over = False
        self._protection = (
            Protection(self.holder, settings, self.log_dir, self.rank, self.world_size) if settings.enable else None
        )
        if self._protection is not None and optimizer.current_step:  # the trainer has loaded a checkpoint of its own
            self._protection.resumed(optimizer.current_step, None)
        self._faults.attach(optimizer, self.holder)
        self._faults.at_start("protected")

    @property
    def protected(self) -> bool:
        """False with `ENABLE_TTP=False`: saving and resuming work, a fault is not survived."""
        return self._protection is not None

    @property
    def protection(self) -> Protection | None:
        """This rank's gate and processor; None when the session is not `protected`."""
        return self._protection

    @property
    def _device(self) -> torch.device:
        return self.optimizer.device

    def _agree_on_hosts(self) -> tuple[tuple[str, ...], int]:
        """Return every rank's node and this start's number where nodes have directories of their own, nothing where all
        share them."""
        shared_dirs, host = self.settings.shared_dirs, self.settings.host
        start = 0 if shared_dirs else writer.next_start(self.save_dirs)
        told = exchange_json([shared_dirs, host, start], self._device)
        shared = {bool(value) for value, _, _ in told}
        if len(shared) > 1:
            alone = [rank for rank, (value, _, _) in enumerate(told) if not value]
            raise ConfigError(f"TTP_SHARED_DIRS is False on ranks {alone} only: wanted the same on all nodes")
        if shared_dirs:
            return (), 0
        return tuple(str(host) for _, host, _ in told), max(int(start) for _, _, start in told)

    def _keeper(self) -> int:
        """Return the rank that looks after this rank's directories."""
        return self._hosts.index(self.settings.host) if self._hosts else 0

    def _prepare_directories(self) -> None:
        """Find out now, not at the fault, that a directory cannot take a checkpoint; on all ranks if on one."""
        refusal = ""
        if self._keeps:
            try:
                self._directories.claim()
            except NotWritable as error:
                refusal = f"{self._node}{error}"
        # No attempt begins before old ones are removed.
        told = exchange_json([refusal, self._directories.mark, self._directories.failing], self._device)
        refusal = next((text for text, _, _ in told if text), "")
        keeper = self._keeper()
        failing: dict[str, str] = dict(told[keeper][2])
        try:
            for directory in () if refusal else self.save_dirs:
                if directory not in failing:
                    check_same(directory, told[keeper][1], keeper, self.settings.host if self._hosts else "")
                    failing |= self._found_failing(directory)
        except NotWritable as error:
            refusal = f"rank {self.rank}: {error}"
        answers = exchange_json([refusal, failing], self._device)
        self._directories.remove_mark()
        everywhere = {directory: why for _, reasons in answers for directory, why in reasons.items()}
        refusals = [text for text, _ in answers if text]
        refusals += [why_unusable(self.save_dirs, everywhere, self.settings.round_number == 0)]
        if refusals[0]:
            self._directories.release()
            raise NotWritable(refusals[0])
        for why in everywhere.values() if self.rank == 0 else ():
            show(logging.WARNING, f"going on without a directory: {why}")

    def _found_failing(self, directory: str) -> dict[str, str]:
        try:
            writer.probe_writable(directory)
        except NotWritable as error:
            return {directory: f"rank {self.rank}: {error}"}
        return {}

    # --- resume ---

    def resume(self, choice: str = "auto") -> ResumePoint | None:
        """Load the newest valid checkpoint into the optimizer (all ranks call) and return where it stands.

        choice: `auto` (newest valid one of save_dirs, None when there is none), `never` (a fresh start), or the path of one
        checkpoint. `never` and a path are about the job's first start, and are refused when save_dirs hold newer
        checkpoints, which would be mixed up with this run's, and a path must lie in save_dirs where TTP_SHARED_DIRS is False; a restart after a fault goes on where the fault left off.
        Raises CheckpointMismatch (another model), CorruptCheckpoint (the named path is not valid), CheckpointError,
        ConfigError (the optimizer has trained already).
        """
        if self.optimizer.current_step:
            raise ConfigError(
                f"resume after step {self.optimizer.current_step}: a checkpoint is loaded once, before the first step; start the"
                " job again to go back"
            )
        with self.pause(RESUME_AT_MOST_S):
            return self._resume(choice)

    def _resume(self, choice: str) -> ResumePoint | None:
        voters = JobRanks(self._device)
        candidates = self._agree_on_candidates(choice)
        anything = bool(self._first("some" if candidates else ""))
        reasons: list[str] = []

        def skip(path: Path, reason: str) -> None:
            reasons.append(reason)
            self._say_skipped(path, reason)

        if self._hosts:
            found = gather.newest(
                candidates,
                save_dirs=self.save_dirs,
                hosts=self._hosts,
                peers=voters,
                expected=self.optimizer.expected_tensors(),
                targets=self.optimizer.load_targets(),
                on_skip=skip,
                say=self._say,
            )
        else:
            found = load.first_valid(candidates, voters=voters, on_skip=skip)
        if found is not None:
            return self._load(found)
        if choice not in ("auto", "never"):
            raise CorruptCheckpoint(
                f"resume: {choice} is not a valid checkpoint ({reasons[-1] if reasons else 'nothing is there'}); name another"
                " one, or resume 'auto'"
            )
        if self.rank == 0 and (anything or self.settings.round_number):
            log.warning(
                "no valid checkpoint in %s: starting again at step 1; what was trained before is lost",
                ", ".join(self.save_dirs),
            )
        self._faults.resumed(0, "", reasons, None)
        return None

    def _agree_on_candidates(self, choice: str) -> list[str]:
        """Take the list of rank 0, or of the node's keeper, or a refusal of any, on every rank."""
        paths: list[str] = []
        refusal = ""
        if self._keeps:
            try:
                paths = self._directories.candidates(choice)
            except (CheckpointError, OSError) as error:
                refusal = f"{self._node}{error}"
        if refusal := self._first(refusal):
            raise CheckpointError(refusal)
        lists: list[list[str]] = exchange_json(paths, self._device)
        return lists[self._keeper()]

    def _first(self, text: str) -> str:
        """Return the first text of any rank that is not empty, to all; a collective."""
        return next((other for other in exchange_json(text, self._device) if other), "")

    @property
    def _node(self) -> str:
        return f"node {self.settings.host}: " if self._hosts else ""

    def _say(self, text: str) -> None:
        if self.rank == 0:
            log.info("%s", text)

    def _say_skipped(self, path: Path, reason: str) -> None:
        if self.rank == 0:
            log.warning("skipping checkpoint %s: %s", path, reason)

    def _load(self, found: load.Found) -> ResumePoint:
        path, manifest = str(found.path), found.manifest
        self._faults.at_start("resume")
        if not self._hosts:  # else checked by all tables: a piece's manifest knows a part
            load.check_matches(path, self.optimizer.expected_tensors())
        load.read_into(path, self.optimizer.load_begin())
        self._faults.at_start("loaded")
        self.optimizer.load_end(manifest.step, manifest.state["optimizer"])
        self.holder.step_states.put(manifest.step, manifest.state["trainer"])
        self.holder.trust(path)
        if self._hosts and not self._first("") and self._keeps:  # all ranks have loaded it
            self._directories.forget_superseded(manifest.step)
        if self._protection is not None:
            self._protection.resumed(manifest.step, manifest.record)
        self._faults.resumed(manifest.step, path, found.skipped, manifest.record)
        if self.rank == 0:
            log.info("resumed from %s: step %d (%s)", path, manifest.step, manifest.cause.kind.value)
        return ResumePoint(manifest.step, manifest.state["trainer"], manifest.record, path, found.skipped)

    # --- training ---

    def set_step_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Say what step + 1 needs in order to go on, once `step` is committed (JSON values; called before its update)."""
        self.holder.step_states.put(step, state)

    @contextlib.contextmanager
    def pause(self, at_most_s: float = 3600.0) -> Iterator[None]:
        """Say that this rank does something else than steps for a while (an evaluation, a long save): no hang.

        `at_most_s`: a pause that lasts longer counts as a standstill from then on. Ends where the `with` does.
        """
        if self._protection is None:
            yield
            return
        before = self._protection.processor.pause(at_most_s)
        try:
            yield
        finally:
            self._protection.processor.end_pause(before)

    def save(self, step: int | None = None) -> str:
        """Write a periodic checkpoint of the current step (all ranks call, between two steps); return its path.

        Each shard's replicas share its bytes. A directory that cannot be written falls through to the next one.
        Raises CheckpointError on every rank when no directory took it.
        """
        with self.pause(SAVE_AT_MOST_S):
            return self._save(self.optimizer.current_step if step is None else step)

    def _save(self, step: int) -> str:
        self._save_count += 1
        errors = []
        for directory in self.save_dirs:
            path, error = self._save_in(directory, step)
            if path:
                self.holder.trust(path)
                return path
            errors.append(f"{directory}: {error}")
            if self.rank == 0:
                log.error("periodic checkpoint of step %d: %s", step, errors[-1])
        raise CheckpointError(f"step {step}: no directory took the periodic checkpoint: {'; '.join(errors)}")

    def _save_in(self, directory: str, step: int) -> tuple[str, str]:
        tmp_name = f"iter_{step:07d}_tmp_periodic_{self.settings.round_number}_{self._save_count}"
        parts = tuple(
            Part(group_id, ranks.index(self.rank), len(ranks))
            for group_id, ranks in sorted(self._writers.items())
            if self.rank in ranks
        )
        mine: dict[str, Any] = {}
        self.optimizer.drain()  # on an accelerator the update may still be under way
        try:
            mine["result"] = dataclasses.asdict(self.holder.write_parts(directory, tmp_name, step, parts))
        except (CheckpointError, OSError) as error:
            mine["error"] = f"rank {self.rank}: {error}"
        everyone = exchange_json(mine, self._device)
        refusal = next((answer["error"] for answer in everyone if "error" in answer), "")
        if refusal:
            self._discard(directory, tmp_name)
            return "", refusal
        outcome = ["", ""]
        if self._keeps:
            try:
                results = tuple(decode_share(answer["result"]) for answer in everyone)
                outcome = [self.holder.publish(self._periodic_order(directory, tmp_name, step, results)), ""]
            except (CheckpointError, OSError) as problem:
                outcome = ["", f"{self._node}{problem}"]
        outcomes = exchange_json(outcome, self._device)
        refusal = next((problem for _, problem in outcomes if problem), "")
        path = "" if refusal else next(path for path, _ in outcomes if path)
        if refusal:
            self._discard(directory, tmp_name)
        return path, refusal

    def _discard(self, directory: str, tmp_name: str) -> None:
        """Give a failed attempt's room back: the dying gasp may need it."""
        if self._keeps:
            writer.discard_attempt(directory, tmp_name)

    def _periodic_order(
        self, directory: str, tmp_name: str, step: int, results: tuple[ShareResult, ...]
    ) -> PublishOrder:
        record = self.optimizer.last_record
        return PublishOrder(
            freeze_id=0,
            step=step,
            directory=directory,
            tmp_name=tmp_name,
            results=results,
            cause=Cause(CauseKind.PERIODIC, (), f"periodic checkpoint of step {step}"),
            record=record if record is not None and record.step == step else None,
            term=term_of(self.settings.round_number),  # no controller orders it: any controller's dump may replace it
        )

    # --- the end of train ---

    def begin_train(self) -> None:
        """`train` is called. Raises ConfigError when it has returned before: the ranks have parted, nothing is protected."""
        if self._over:
            raise ConfigError(
                "the function decorated with ttp_to_persist was called again: the session ended when every rank had returned"
                " from it; decorate the function that holds the whole training loop"
            )

    def hold_after(self, exc: BaseException) -> None:
        """Keep this rank as a holder after `train` raised; returns when the exception may go on."""
        if self._protection is not None:
            self._protection.hold_after(exc)

    def hold_until_all_finish(self) -> None:
        """Keep this rank as a holder until every rank's `train` has returned."""
        self._over = True
        if self._protection is not None:
            self._protection.finished()

    def close(self) -> None:
        """Stop this process's part; afterwards nothing is protected and `ttp.start` may be called again."""
        global _current
        if self._protection is not None:
            self._protection.close()
        self._faults.close()
        self._directories.release()
        if _current is self:
            _current = None


def decode_share(fields: Mapping[str, Any]) -> ShareResult:
    """Make a ShareResult of what `dataclasses.asdict` made of one, and JSON of that."""
    return ShareResult(tuple(FileEntry(**entry) for entry in fields["files"]))
