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

import json
import logging
import os
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttp.chaos.inject import injector, parse_faults
from ttp.checkpoint import load, writer
from ttp.checkpoint.manifest import Manifest
from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError, ControllerError, CorruptCheckpoint
from ttp.exchange import broadcast_json, exchange_json
from ttp.holder import OptimizerHolder
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.proto.messages import Cause, CauseKind, CommitRecord

log = logging.getLogger("ttp")

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
    optimizer: TTPReplicaOptimizer,
    *,
    save_dirs: Sequence[str | os.PathLike[str]],
    layout: Mapping[str, Any] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
) -> Session:
    """Protect this rank (all ranks call, after `init_process_group` and after the optimizer was built).

    save_dirs: checkpoint directories in order of preference, shared by all ranks; each is tried at once.
    layout: JSON facts for the manifest (the axes' sizes, the model's shape).
    log_dir: where the controller's journal goes (default: `ttp_log` in the first save directory).
    Raises NotWritable, ControllerError (no controller could be started or reached), ConfigError.
    """
    global _current
    if _current is not None:
        raise ConfigError(
            "ttp.start was called twice in this process: call session.close() on the first session before"
        )
    session = Session(optimizer, save_dirs, layout or {}, log_dir, settings or Settings.from_env())
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
        optimizer: TTPReplicaOptimizer,
        save_dirs: Sequence[str | os.PathLike[str]],
        layout: Mapping[str, Any],
        log_dir: str | os.PathLike[str] | None,
        settings: Settings,
    ) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.rank, self.world_size = world()
        self.save_dirs = tuple(str(Path(d).resolve()) for d in save_dirs)
        self.log_dir = Path(log_dir).resolve() if log_dir is not None else Path(self.save_dirs[0]) / "ttp_log"
        self._prepare_directories()
        self.holder = OptimizerHolder(
            optimizer,
            rank=self.rank,
            world_size=self.world_size,
            host=settings.host,
            pid=os.getpid(),
            save_dirs=self.save_dirs,
            layout={**layout, "optimizer": json.loads(optimizer.layout_json())},
        )
        holders = exchange_json([group.group_id for group in optimizer.shard_groups()], self._device)
        self._writers = {
            group_id: [rank for rank, groups in enumerate(holders) if group_id in groups]
            for groups in holders
            for group_id in groups
        }
        self._save_count = 0
        self._protection = Protection(self) if settings.enable else None
        optimizer.on_point = injector(parse_faults(settings.faults), self.rank, settings.round_number)

    @property
    def protected(self) -> bool:
        """False with `ENABLE_TTP=False`: saving and resuming work, a fault is not survived."""
        return self._protection is not None

    @property
    def _device(self) -> torch.device:
        return self.optimizer.device

    def _prepare_directories(self) -> None:
        """Find out now, not at the fault, that a directory cannot take a checkpoint."""
        for directory in self.save_dirs:
            writer.probe_writable(directory)
        if self.rank == 0:
            for directory in self.save_dirs:
                writer.clean_stale(directory)

    # --- resume ---

    def resume(self, choice: str = "auto") -> ResumePoint | None:
        """Load the newest valid checkpoint into the optimizer (all ranks call) and return where it stands.

        choice: `auto` (newest valid one of save_dirs, None when there is none), `never` (a fresh start; refused when the
        directories hold checkpoints already, for they would be mixed up with this run's; a restart of the same job resumes
        all the same), or the path of one checkpoint.
        Raises CheckpointMismatch (another model), CorruptCheckpoint (the named path is not valid), CheckpointError.
        """
        candidates = broadcast_json(self._candidates(choice) if self.rank == 0 else None, self._device)
        skipped: list[str] = []
        for path in candidates:
            reason = self._verify_together(path)
            if not reason:
                return self._load(path, tuple(skipped))
            skipped.append(f"{path}: {reason}")
            if self.rank == 0:
                log.warning("skipping checkpoint %s: %s", path, reason)
        if choice not in ("auto", "never") and skipped:
            raise CorruptCheckpoint(f"{skipped[0]}; name another checkpoint, or resume from 'auto'")
        if skipped and self.rank == 0:
            log.warning("no valid checkpoint in %s: starting from step 0", ", ".join(self.save_dirs))
        return None

    def _candidates(self, choice: str) -> list[str]:
        if choice not in ("auto", "never"):
            return [str(Path(choice).resolve())]
        found = [str(path) for path in load.list_checkpoints(self.save_dirs)]
        if choice == "never" and found and self.settings.round_number == 0:
            raise CheckpointError(
                f"resume is 'never', but {Path(found[0]).parent} holds checkpoints already (newest: {Path(found[0]).name});"
                " use an empty directory, or resume 'auto'"
            )
        return found

    def _verify_together(self, path: str) -> str:
        """Every rank checks its share of the files; return the first reason against the checkpoint, or empty."""
        try:
            load.verify(path, share=(self.rank, self.world_size))
            mine = ""
        except (CheckpointError, OSError) as error:
            mine = str(error)
        return next((reason for reason in exchange_json(mine, self._device) if reason), "")

    def _load(self, path: str, skipped: tuple[str, ...]) -> ResumePoint:
        manifest: Manifest = load.read_manifest(path)
        load.read_into(path, self.optimizer.load_begin())
        self.optimizer.load_end(manifest.step, manifest.state["optimizer"])
        self.holder.step_states.put(manifest.step, manifest.state["trainer"])
        if self._protection is not None:
            self._protection.gate.resumed(manifest.step, manifest.record)
        if self.rank == 0:
            log.info("resumed from %s: step %d (%s)", path, manifest.step, manifest.cause.kind.value)
        return ResumePoint(manifest.step, manifest.state["trainer"], manifest.record, path, skipped)

    # --- training ---

    def set_step_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Say what step + 1 needs in order to go on, once `step` is committed (JSON values; called before its update)."""
        self.holder.step_states.put(step, state)

    def save(self, step: int | None = None) -> str:
        """Write a periodic checkpoint of the current step (all ranks call, between two steps); return its path.

        Each shard's replicas share its bytes. A directory that cannot be written falls through to the next one.
        Raises CheckpointError on every rank when no directory took it.
        """
        step = self.optimizer.current_step if step is None else step
        self._save_count += 1
        errors = []
        for directory in self.save_dirs:
            path, error = self._save_in(directory, step)
            if path:
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
        try:
            mine["result"] = encode_share(self.holder.write_parts(directory, tmp_name, step, parts))
        except (CheckpointError, OSError) as error:
            mine["error"] = f"rank {self.rank}: {error}"
        everyone = exchange_json(mine, self._device)
        error = next((answer["error"] for answer in everyone if "error" in answer), "")
        if error:
            return "", error
        outcome: list[str] | None = None
        if self.rank == 0:
            try:
                results = tuple(decode_share(answer["result"]) for answer in everyone)
                outcome = [self.holder.publish(self._periodic_order(directory, tmp_name, step, results)), ""]
            except (CheckpointError, OSError) as problem:
                outcome = ["", str(problem)]
        path, error = broadcast_json(outcome, self._device)
        return path, error

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
        )

    # --- the end of train ---

    def hold_after(self, exc: BaseException) -> None:
        """Keep this rank as a holder after `train` raised; returns when the exception may go on."""
        if self._protection is not None:
            self._protection.hold_after(exc)

    def hold_until_all_finish(self) -> None:
        """Keep this rank as a holder until every rank's `train` has returned."""
        if self._protection is not None:
            self._protection.finished()

    def close(self) -> None:
        """Stop this process's part; afterwards nothing is protected and `ttp.start` may be called again."""
        global _current
        if self._protection is not None:
            self._protection.close()
        if _current is self:
            _current = None


def world() -> tuple[int, int]:
    """Return (rank, world_size) of this process, (0, 1) without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
