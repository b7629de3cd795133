"""The trainer's own handlers in the place of the job's own publishing.

Owns the order of one publish: claim the staging directory, prove the shares whole, have the save handler run on every rank that wrote a
share (`rank_list`, for each model part one), have the rename handler publish on this rank, and leave a note that it is done. The
shares were written, checksummed and replaced where a writer died, by the same machines as any dump. A publisher that fails or
dies in it is followed by the next rank, which begins again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.durable import fsync_directory, step_directory_name, write_durably
from ttp.checkpoint.format.file_index import read_contents
from ttp.checkpoint.publish import claim_staging
from ttp.checkpoint.staging import check_files, check_name
from ttp.checkpoint.verify import check_complete
from ttp.errors import CheckpointError
from ttp.mindio.saving.local_save import LocalSave, TrainerHandlers
from ttp.mindio.saving.save_calls import Call, SavePlan, savings
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.proto.messages import PublishOrder

_NOTE = "_tmp_published"
"""`iter_0000042_tmp_published`: the handlers have published step 42. Like every name with `_tmp`, gone at the next attempt."""


class HandlerPublisher:
    """Publishes with the trainer's handlers. Work thread, but for `work_done`."""

    def __init__(self, rank: int, optimizer: TTPReplicaOptimizer, trainer: TrainerHandlers, save: LocalSave) -> None:
        self._rank, self._optimizer, self._trainer, self._save = rank, optimizer, trainer, save

    @property
    def work_done(self) -> int:
        """Grows while a handler of this rank writes."""
        return self._save.work_done

    def publish(self, order: PublishOrder, state: Mapping[str, Any], advance: Callable[[int], None]) -> str:
        """See `ttp.runtime.state_provider.Publisher`."""
        root, step = Path(order.directory), order.step
        check_name(order.tmp_name, step)
        note = root / f"{step_directory_name(step)}{_NOTE}"
        if note.exists():
            return note.read_text(encoding="utf-8")
        self._save.check_handlers(step)
        files = [file for result in order.results for file in result.files]
        check_files(files)
        claim = claim_staging(root, order.tmp_name, files, note.exists, f"is {root} the same directory on every node?")
        if claim is None:
            raise CheckpointError(f"step {step}: {root / order.tmp_name} was taken over by another publisher")
        self._check_shares(claim, order, advance)
        where = self._have_saved(claim, order, state, {file.rank for file in files}, advance)
        write_durably(note, where.encode(), private=True)
        fsync_directory(root)
        shutil.rmtree(claim, ignore_errors=True)  # it only takes room
        return where

    def _check_shares(self, claim: Path, order: PublishOrder, advance: Callable[[int], None]) -> None:
        """Raise CorruptCheckpoint unless the shares hold the order's step whole."""
        contents = read_contents(claim, order.results, advance)
        check_complete(contents, self._optimizer.expected_tensors())
        dcp.write_metadata(claim, contents, str(claim), order.tmp_name, advance)

    def _have_saved(
        self,
        claim: Path,
        order: PublishOrder,
        state: Mapping[str, Any],
        writers: set[int],
        advance: Callable[[int], None],
    ) -> str:
        """Call the handlers; return where the checkpoint is, for people."""
        parts, others = [list(ranks) for ranks in self._trainer.parts], writers - {self._rank}
        call = Call.begin(claim.parent, order.step, advance) if others or len(parts) > 1 else None
        args: Any = None
        lost: set[int] = set()
        number = 0
        try:
            while parts:
                number += 1
                usable = {self._rank} if call is None else call.usable(self._rank, parts, others, lost)
                planned = savings(order.step, parts, usable, self._rank)
                if call is not None:
                    call.post(SavePlan(number, claim.name, order.step, state, order.results, planned))
                own = next((saving for saving in planned if saving.save_rank == self._rank), None)
                if own is not None:  # in the first plan, and in no other: this rank is there
                    args = self._save.save(own, claim, order.results, state, advance)
                asked = {rank for saving in planned for rank in saving.ranks} - {self._rank}
                gone = call.wait(asked) if call is not None else set()
                lost |= gone
                unsaved = {saving.save_rank for saving in planned} & gone
                parts = [ranks for ranks in parts if unsaved.intersection(ranks)]
            if not claim.exists():
                raise CheckpointError(f"step {order.step}: another publisher took {claim} over while this one saved")
            assert self._trainer.rename_handler is not None
            with torch.no_grad(), self._save.on_device(), self._save.counted():
                self._trainer.rename_handler(order.step, args)
        finally:
            if call is not None:
                call.end()
        count = len(self._trainer.parts)
        several = f" and published, {count} model parts," if count > 1 else ""
        return f"the trainer's own checkpoint, saved{several} by rank {self._rank}"
