"""Which checkpoint a job is resumed from: the newest valid one that all ranks can use, and why newer ones were passed over.

Owns the search and its refusals, by collectives of all ranks. Loads nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp.checkpoint.format.durable import step_directory_name
from ttp.checkpoint.format.manifest import Manifest
from ttp.checkpoint.passed_over import write_notes
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.store import Request
from ttp.errors import CorruptCheckpoint
from ttp.exchange.json_collectives import JobRanks, exchange_json
from ttp.proto.messages import CommitRecord
from ttp.runtime.directory_agreement import JobDirectories
from ttp.runtime.state_provider import OptimizerStateProvider

if TYPE_CHECKING:
    from ttp.runtime.mirror_resume import MirrorResume

log = logging.getLogger("ttp")


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


class ResumeSearch:
    """One session's."""

    def __init__(
        self,
        holder: OptimizerStateProvider,
        directories: JobDirectories,
        mirror: MirrorResume | None,
        rank: int,
        restarted: bool,
        on_skip: Callable[[Path], None],
    ) -> None:
        """`restarted`: this is not the job's first start. `on_skip(path)`: that checkpoint is broken, and is not taken."""
        self._holder, self._directories, self._mirror = holder, directories, mirror
        self._rank, self._restarted, self._on_skip = rank, restarted, on_skip

    def newest(self, choice: str, check: Callable[[Mapping[str, Any]], None]) -> tuple[Reader | None, list[str]]:
        """Return the checkpoint to load, None for none, and why others were passed over (all ranks call). `choice`, `check` and what is raised: as
        in `Session.resume`."""
        optimizer, device = self._holder.optimizer, self._holder.optimizer.device
        candidates = self._directories.candidates(choice)
        anything = any(exchange_json(bool(candidates), device))
        reasons: list[str] = []

        def skip(path: Path, reason: str) -> None:
            reasons.append(reason)
            self._log(f"skipping checkpoint {path}: {reason}", logging.WARNING)
            self._on_skip(path)

        def usable(manifest: Manifest) -> None:
            for part, judge in (("optimizer", optimizer.check_host_state), ("trainer", check)):
                try:
                    judge(manifest.state[part])
                except ValueError as error:
                    raise CorruptCheckpoint(f"manifest.json: state.{part}.{error}") from error

        request = Request(
            save_dirs=self._directories.named,
            serving=self._directories.serving,
            expected=optimizer.expected_tensors(),
            targets=optimizer.load_targets,
            check=usable,
            on_skip=skip,
            key=self._holder.keys.verify,
            report=self._log,
        )
        found = self._directories.store.open_newest(candidates, JobRanks(device), request)
        if self._mirror is not None:

            def open_step(step: int) -> Reader | None:
                paths = [
                    path
                    for path in self._directories.candidates("auto")
                    if Path(path).name == step_directory_name(step)
                ]
                return self._directories.store.open_newest(paths, JobRanks(device), request)

            found = self._mirror.look(choice, found, open_step, passed_over=bool(reasons))
        if found is not None:
            self._holder.resumes_from(str(found.path), found.manifest.step)
        if self._directories.keeps:
            write_notes(self._directories.used, self._holder.passed_over)
        if self._mirror is not None and (others := self._holder.passed_over):
            self._mirror.tell_agent(others)
        if found is not None:
            self._directories.begin_launch(found.manifest.step)
            return found, reasons
        if choice not in ("auto", "never"):
            raise CorruptCheckpoint(
                f"resume: {choice} is not a valid checkpoint ({reasons[-1] if reasons else 'nothing is there'}); name another"
                " one, or resume 'auto'"
            )
        if self._holder.keys.verify is not None and anything:
            raise CorruptCheckpoint(
                f"no checkpoint in {', '.join(self._directories.named)} is valid and signed for {self._holder.keys.verify.path}"
                f" ({reasons[0] if reasons else 'another node found out'}). Sign one that you trust with `ttp ckpt sign`, name"
                " another TTP_VERIFY_KEY, or begin in an empty directory"
            )
        if self._rank == 0 and (anything or self._restarted):
            log.warning(
                "no valid checkpoint found in %s; restarting from step 1 (previous progress is lost)",
                ", ".join(self._directories.named),
            )
        self._directories.begin_launch(0)
        return None, reasons

    def _log(self, text: str, level: int = logging.INFO) -> None:
        if self._rank == 0:
            log.log(level, "%s", text)
