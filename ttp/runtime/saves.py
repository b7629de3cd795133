"""Checkpoints that a trainer asks for, periodic or requested: waited for, or written beside training.

Owns the agreement of the ranks on one write attempt after the other (`PeriodicSaves`), what a rank does for a save that is not waited for
(`BackgroundSaves`: copied into its agent's memory, written by keepers), and what both share (`Saves`). Never called at a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttp.checkpoint.find import newest_finite
from ttp.checkpoint.format import tiling
from ttp.checkpoint.format.durable import newest_step, step_of_directory, steps_of_run
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.staging import discard_staging, make_staging
from ttp.config import Settings
from ttp.copies.checkpoints import share_name, write_share_file
from ttp.copies.copy_memory import CopyMemory
from ttp.copies.region import Description, places_of
from ttp.errors import CheckpointError, ConfigError
from ttp.exchange.agreed import agree
from ttp.exchange.json_collectives import exchange_json
from ttp.optim.on_divergence import OnDivergence
from ttp.proto.messages import Cause, CauseKind, FileEntry, Part, PublishOrder, ShareResult
from ttp.runtime.directory_agreement import JobDirectories
from ttp.runtime.rank_runtime import show
from ttp.runtime.retention import Retention
from ttp.runtime.standby import last_term_of, term_of
from ttp.runtime.state_provider import OptimizerStateProvider
from ttp.runtime.step_copies import facts_of

log = logging.getLogger("ttp")


@dataclasses.dataclass(frozen=True, slots=True)
class SaveMarks:
    """How far a rank is with the checkpoints that its trainer asks for."""

    newest: int
    """Step of the newest one that this run has written or loaded."""
    count: int
    """How many were begun."""
    under_way: tuple[str, ...] = ()
    """Directory and temporary name of one that has not ended."""


class Saves:
    """All checkpoints of one rank's attempt that a trainer asks for: waited for, or not."""

    def __init__(
        self,
        holder: OptimizerStateProvider,
        directories: JobDirectories,
        settings: Settings,
        rank: int,
        keep: int | None,
    ) -> None:
        """`keep`: how many checkpoints stay; None: all, or others look after these directories. All ranks make one together."""
        self._holder, self._directories, self._settings, self._rank = holder, directories, settings, rank
        self.together = PeriodicSaves(holder, directories, rank, settings.round_number)
        self._retention = None if keep is None else Retention(keep, holder.keys.verify, lambda: holder.passed_over)
        self._background: BackgroundSaves | None = None
        self.newest = 0
        """The newest step of which this run has written or loaded a checkpoint."""
        self._on_divergence: OnDivergence | None = getattr(holder.optimizer, "on_divergence", None)
        if self._on_divergence is not None:
            self._on_divergence.checkpoint_before = self._checkpoint_before
            self._on_divergence.searched = tuple(directories.used)

    def _checkpoint_before(self, step: int) -> str:
        """Return this run's newest checkpoint of this step or an older one; empty: none is in sight."""
        found = steps_of_run(self._directories.used, self._holder.passed_over)
        return next((str(path) for one, path in found if one <= step), "")

    def _check(self, step: int) -> None:
        """Compare replicas before they are saved, where a difference has consequences: what is saved is then from before it."""
        choice, optimizer = self._on_divergence, self._holder.optimizer
        if choice is not None and choice.acts and choice.equal_after < step == optimizer.current_step:
            check: Callable[[], object] = getattr(optimizer, "check_replicas")  # noqa: B009 - of the two that have the choice
            check()

    def save(self, step: int, kind: CauseKind, *, wait: bool) -> str:
        """Write `step`, the current one (all ranks call); return its path, empty where it is not waited for. Raises CheckpointError,
        ConfigError."""
        self._check(step)
        if not wait:
            self.prepare()
            assert self._background is not None
            self._background.save(step, kind)
            return ""
        path = self.together.save(step, Cause(kind, (), f"{kind.value} checkpoint of step {step}"))
        self.saved(step)
        return path

    def prepare(self) -> None:
        """Have memory for saves that are not waited for (all ranks call). Raises ConfigError."""
        if self._background is None:
            self._background = BackgroundSaves(
                self._holder,
                self._settings,
                self._rank,
                self._directories.used,
                self.together.writers,
                self._saved_beside,
            )

    def _saved_beside(self, step: int, path: str) -> None:
        self._holder.trust(path)
        self.saved(step)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is on disk: older ones may go."""
        self.newest = max(self.newest, step)
        if self._retention is not None:
            self._retention.saved_in(self._directories.used)

    def published(self, step: int) -> None:
        """A fault has published this step, by whatever rank, and training continues behind it: it counts as a save, and reports name it. A later
        publish reads it in full all the same: this rank has only seen its name."""
        path = self._checkpoint_before(step)
        if step_of_directory(Path(path)) == step:
            self._holder.checkpoint = path
        self.saved(step)

    def warn_not_finite(self, path: str, step: int) -> None:
        """Warn that what was resumed from has NaN or infinity in it, and name the newest checkpoint that has not."""
        try:
            newest = newest_finite(self._directories.serving, self._holder.passed_over)
        except OSError:
            newest = None
        whole = f"{newest}; move the newer ones away to resume from it" if newest is not None else "none of the others"
        show(
            logging.WARNING,
            f"resumed step {step} of {path}, whose state is not finite: it holds NaN or infinity, and training continues with it. The newest"
            f" checkpoint with a finite state is {whole}",
        )

    def newest_anywhere(self) -> int:
        """Return the step of this run's newest checkpoint, whoever has written it; 0: none."""
        return max(self.newest, newest_step(self._directories.used, self._holder.passed_over))

    def warn_unsaved(self, step: int) -> None:
        """Warn that the last step is not on disk, where that is so."""
        if step > self.newest_anywhere():
            newest = f"the newest is of step {self.newest}" if self.newest else "none was written"
            show(
                logging.WARNING,
                f"TTP has no checkpoint of step {step}, the last one: {newest}. Unless the trainer saves the weights itself, they are"
                " lost: call session.save() as the last line of train, on all ranks",
            )

    @property
    def marks(self) -> SaveMarks:
        return SaveMarks(self.newest, self.together.count, self.together.under_way)

    def take(self, marks: SaveMarks) -> None:
        """All ranks enter their training anew, with what they have agreed on of these."""
        self.newest, self.together.count = marks.newest, marks.count
        self.together.give_up(marks.under_way)

    def look(self) -> None:
        """Learn, without waiting, whether a save has ended that is not waited for."""
        if self._background is not None:
            self._background.look()

    @property
    def under_way(self) -> bool:
        """A save that is not waited for has not ended, as far as this rank knows."""
        self.look()
        return self._background is not None and self._background.pending > 0

    def finish(self, pause: contextlib.AbstractContextManager[None]) -> None:
        """Wait until this rank's part of all saves is done. Within `pause` this wait is not taken for a hang."""
        if self._background is not None and self.under_way:
            with pause:
                self._background.finish()

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        if self._retention is not None:
            self._retention.close()


class PeriodicSaves:
    """The periodic and requested checkpoints of one attempt of the job, as one rank takes part in them."""

    def __init__(
        self, holder: OptimizerStateProvider, directories: JobDirectories, rank: int, round_number: int
    ) -> None:
        """All ranks make one together: they tell each other who holds what."""
        self._holder = holder
        self._optimizer = holder.optimizer
        self._directories = directories
        self._rank = rank
        self._round_number = round_number
        self._device = holder.optimizer.device
        self.count = 0
        """Saves that were begun: a part of their temporary names, the same on all ranks."""
        self.under_way: tuple[str, ...] = ()
        """The directory, and the temporary name in it, of a save that has not ended."""
        own = [group.group_id for group in self._optimizer.shard_groups()]
        holders = agree("shards of the ranks", lambda: exchange_json(own, self._device))
        self.writers = {
            group_id: [rank for rank, groups in enumerate(holders) if group_id in groups]
            for groups in holders
            for group_id in groups
        }
        """The ranks that hold each shard group."""

    def save(self, step: int, cause: Cause) -> str:
        """Write `step`, the current one, into the first directory that takes it (all ranks call); return its path.

        `cause`: PERIODIC, REQUESTED, or PREEMPTED where no controller leads the ranks. Raises CheckpointError on every rank when no
        directory took it.
        """
        self.count += 1
        errors = []
        for directory in self._directories.used:
            path, error = self._save_in(directory, step, cause)
            if path:
                self._holder.trust(path)
                return path
            errors.append(f"{directory}: {error}")
            if self._rank == 0:
                log.error("%s checkpoint of step %d: %s", cause.kind.value, step, errors[-1])
        raise CheckpointError(f"step {step}: no directory took the {cause.kind.value} checkpoint: {'; '.join(errors)}")

    def give_up(self, under_way: tuple[str, ...]) -> None:
        """A save that was under way is not ended: a rank was lost, and all enter their training anew. `under_way`: what any rank knows of it."""
        if under_way:
            self._discard(*under_way)
        self.under_way = ()

    def _save_in(self, directory: str, step: int, cause: Cause) -> tuple[str, str]:
        """Return the path and nothing, or nothing and why not."""
        tmp_name = f"iter_{step:07d}_tmp_{cause.kind.value}_{self._round_number}_{self.count}"
        self.under_way = directory, tmp_name
        answer = self._try_in(directory, tmp_name, step, cause)
        self.under_way = ()
        return answer

    def _try_in(self, directory: str, tmp_name: str, step: int, cause: Cause) -> tuple[str, str]:
        parts = tuple(
            Part(group_id, ranks.index(self._rank), len(ranks))
            for group_id, ranks in sorted(self.writers.items())
            if self._rank in ranks
        )
        mine: dict[str, Any] = {}
        self._optimizer.lane.drain()  # on an accelerator the update may still be under way
        try:
            mine["result"] = dataclasses.asdict(self._holder.write_parts(directory, tmp_name, step, parts))
        except (CheckpointError, OSError) as error:
            mine["error"] = f"rank {self._rank}: {error}"
        everyone = exchange_json(mine, self._device)
        refusal = next((answer["error"] for answer in everyone if "error" in answer), "")
        if refusal:
            self._discard(directory, tmp_name)
            return "", refusal
        outcome = ["", ""]
        if self._directories.keeps:
            try:
                results = tuple(decode_share(answer["result"]) for answer in everyone)
                outcome = [self._holder.publish(self._order(directory, tmp_name, step, cause, results)), ""]
            except (CheckpointError, OSError) as problem:
                outcome = ["", f"{self._directories.node}{problem}"]
        outcomes = exchange_json(outcome, self._device)
        refusal = next((problem for _, problem in outcomes if problem), "")
        path = "" if refusal else next(path for path, _ in outcomes if path)
        if refusal:
            self._discard(directory, tmp_name)
        return path, refusal

    def _discard(self, directory: str, tmp_name: str) -> None:
        """Give a failed write attempt's room back: the dying gasp may need it. A directory that has just refused a write may refuse this as well;
        the others of the job know nothing of it, so nothing is raised."""
        if not self._directories.keeps:
            return
        try:
            discard_staging(directory, tmp_name)
        except (CheckpointError, OSError) as error:
            log.warning("%s: %s, left by a failed write, cannot be removed: %s", directory, tmp_name, error)

    def _order(
        self, directory: str, tmp_name: str, step: int, cause: Cause, results: tuple[ShareResult, ...]
    ) -> PublishOrder:
        record = self._optimizer.last_record
        return PublishOrder(
            freeze_id=0,
            step=step,
            directory=directory,
            tmp_name=tmp_name,
            results=results,
            cause=cause,
            record=record if record is not None and record.step == step else None,
            # No controller orders it, and any controller's dump may replace it. But where all ranks save without one they execute no
            # order any more: of nodes' own directories one may have a piece of a dump that will never be whole, which gives way.
            term=(last_term_of if cause.kind is CauseKind.PREEMPTED else term_of)(self._round_number),
        )


def decode_share(fields: Mapping[str, Any]) -> ShareResult:
    """Make a ShareResult of what `dataclasses.asdict` made of one, and JSON of that."""
    return ShareResult(tuple(FileEntry(**entry) for entry in fields["files"]))


class BackgroundSaves:
    """One rank's saves that are not waited for, on the training thread."""

    def __init__(
        self,
        holder: OptimizerStateProvider,
        settings: Settings,
        rank: int,
        directories: Sequence[str],
        writers: Mapping[str, Sequence[int]],
        saved: Callable[[int, str], None],
    ) -> None:
        """writers: the ranks that hold each shard group. saved: called on rank 0 with step and path when a save is published. All ranks make
        one together. Raises ConfigError on every rank: there is no memory for it."""
        self._holder, self._rank, self._saved = holder, rank, saved
        self._number = settings.round_number
        self._directory = directories[0]
        self._writers = writers
        self._count = 0
        self.pending = 0
        """The step of the save that is under way; 0: none is."""
        self._tmp_name = ""
        """Its staging directory's."""
        places = places_of(self._share(holder.optimizer.current_step))
        world_size = max(rank for ranks in writers.values() for rank in ranks) + 1
        description = Description(
            rank,
            settings.round_number,
            world_size,
            tuple(sorted(writers)),
            (places,),
            facts_of(holder, settings, directories),
        )
        error = ""
        try:
            if not settings.copies or not settings.shared_dirs:
                raise ConfigError(
                    "a save that is not waited for: got no ttprun, or TTP_SHARED_DIRS=False, expected its agent to write into shared"
                    " directories. Wait for the save (wait=True)"
                )
            self._memory = CopyMemory(settings.copies, description, "save")
        except (ConfigError, OSError, EOFError, CheckpointError) as problem:
            error = str(problem)
        everyone = exchange_json(error, holder.optimizer.device)
        self._ranks = len(everyone)
        if errors := [said for said in everyone if said]:
            raise ConfigError(error or f"another rank cannot save without waiting: {errors[0]}")

    def _share(self, step: int) -> dict[str, list[HeldTensor]]:
        """Return this rank's part of each group that it holds, so that replicas share the bytes."""
        held = self._holder.optimizer.holdings(step)
        return {
            group: tiling.split_parts(tensors, len(self._writers[group]))[list(self._writers[group]).index(self._rank)]
            for group, tensors in sorted(held.items())
        }

    def save(self, step: int, kind: CauseKind) -> None:
        """Copy this rank's share of `step`, the current one; return when that is done. The share of the save before is waited for. Raises
        CheckpointError: the keeper was lost."""
        self.finish()
        self._count += 1
        optimizer = self._holder.optimizer
        optimizer.lane.drain()
        record = optimizer.last_record
        state = {
            "state": self._holder.host_state(step),
            "record": dataclasses.asdict(record) if record and record.step == step else None,
        }
        tensors = [held.values for _, part in sorted(self._share(step).items()) for held in part]
        self._tmp_name = f"iter_{step:07d}_tmp_{kind.value}_background_{self._number}_{self._count}"
        try:
            self._memory.take(0, step, self._count, json.dumps(state).encode(), tensors)
            self._memory.say(
                {
                    "do": "save", "step": step, "rank": self._rank, "ranks": self._ranks, "publishes": self._rank == 0,
                    "directory": self._directory, "cause": kind.value, "term": term_of(self._number),
                    "tmp_name": self._tmp_name,
                }
            )  # fmt: skip
            self.pending = step
        except (OSError, EOFError) as error:
            raise CheckpointError(f"step {step} could not be copied for a save: {error}") from error

    def look(self) -> None:
        """Learn, without waiting, whether the save that is under way has ended."""
        self._next_message(0.0)

    def finish(self) -> None:
        """Wait until this rank's share is written; on rank 0, until the checkpoint is published or has failed."""
        while self.pending:
            self._next_message(None)

    def _next_message(self, timeout_s: float | None) -> None:
        if not self.pending:
            return
        try:
            answer = self._memory.next_message(timeout_s)
        except OSError as error:
            answer = {"saved": self.pending, "path": "", "error": str(error)}
            self._pass_on(str(error))
        if answer is None or answer.get("saved") != self.pending:
            return
        step, self.pending = self.pending, 0
        if answer["path"]:
            self._saved(step, answer["path"])
        elif self._rank == 0 or answer["error"]:
            show(
                logging.ERROR,
                f"rank {self._rank}: the save of step {step} into {self._directory} has failed: {answer['error']}; training continues"
                " without it",
            )

    def _pass_on(self, error: str) -> None:
        """Write in the keeper's place that it could not: rank 0's waits for this rank's share. Where that has ended, the folder is removed as any that an attempt
        leaves."""
        folder = Path(self._directory, self._tmp_name)
        with contextlib.suppress(CheckpointError, OSError):
            make_staging(folder.parent, folder.name)
            if not (folder / share_name(self._rank)).exists():
                write_share_file(folder, self._rank, {"error": f"rank {self._rank}: {error}"})

    def close(self) -> None:
        self._memory.close()
