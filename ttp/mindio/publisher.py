"""The trainer's own handlers in the place of the job's own publishing.

Owns the order of one publish: claim the attempt, prove the shares whole, read them, have the save handler write and the
rename handler publish, and leave a note that it is done. The shares were written, checksummed and replaced where a writer
died, by the same machines as any dump; what is called here runs on one rank, the save rank, on its work thread. A rank that
fails or dies in it is followed by the next one, which begins again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ttp.checkpoint import dcp
from ttp.checkpoint.contents import read_contents
from ttp.checkpoint.durable import fsync_directory, step_directory_name, write_durably
from ttp.checkpoint.publish import check_complete, claim_attempt
from ttp.checkpoint.staging import check_files, check_name
from ttp.errors import CheckpointError
from ttp.mindio.handlers import RenameHandler, SaveHandler
from ttp.mindio.state import WholeState, read_whole
from ttp.mindio.step_args import StepArgsBox
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.proto.messages import PublishOrder

log = logging.getLogger("ttp")

_NOTE = "_tmp_published"
"""`iter_0000042_tmp_published`: the handlers have published step 42. Like every name with `_tmp`, gone at the next start."""


class Trainer(Protocol):
    """What the publisher needs of the trainer's side."""

    step_args: StepArgsBox
    save_handler: SaveHandler | None
    rename_handler: RenameHandler | None

    def show(self, state: WholeState) -> None:
        """Make the optimizer and the model that the handlers save be those of `state`; training does not go on."""


class HandlerPublisher:
    """Publishes with the trainer's handlers. Work thread, but for `work_done`."""

    def __init__(self, rank: int, optimizer: TTPReplicaOptimizer, trainer: Trainer) -> None:
        self._rank, self._optimizer, self._trainer = rank, optimizer, trainer
        self._began_at: int | None = None  # written by the work thread, read by any
        self._done = 0

    @property
    def work_done(self) -> int:
        """Bytes that this process has written while handlers ran: nothing else is known of how they get on."""
        began_at = self._began_at
        return self._done if began_at is None else self._done + max(0, _bytes_written() - began_at)

    def publish(self, order: PublishOrder, state: Mapping[str, Any], advance: Callable[[int], None]) -> str:
        """See `ttp.holder.Publisher`."""
        root, step = Path(order.directory), order.step
        check_name(order.tmp_name, step)
        note = root / f"{step_directory_name(step)}{_NOTE}"
        if note.exists():
            return note.read_text(encoding="utf-8")
        trainer = self._trainer
        if trainer.save_handler is None or trainer.rename_handler is None:
            raise CheckpointError(
                f"rank {self._rank}: step {step} cannot be saved: no handlers; call ttp_register_save_ckpt_handler and"
                " ttp_register_rename_handler right after ttp_start_processor"
            )
        files = [file for result in order.results for file in result.files]
        check_files(files)
        claim = claim_attempt(root, order.tmp_name, files, note)
        if claim is None:
            raise CheckpointError(f"step {step}: {root / order.tmp_name} was taken over by another publisher")
        trainer.show(self._read(claim, order, state, advance))
        where = self._have_saved(claim, order, sorted({file.rank for file in files}), advance)
        write_durably(note, where.encode())
        fsync_directory(root)
        shutil.rmtree(claim, ignore_errors=True)  # it only takes room
        return where

    def _read(
        self, claim: Path, order: PublishOrder, state: Mapping[str, Any], advance: Callable[[int], None]
    ) -> WholeState:
        """Return the whole state of the order's step. Raises CorruptCheckpoint."""
        contents = read_contents(claim, order.results, advance)
        check_complete(contents, self._optimizer.expected_tensors())
        dcp.write_metadata(claim, contents, str(claim), order.tmp_name, advance)
        return read_whole(claim, contents, order.step, state)

    def _have_saved(self, claim: Path, order: PublishOrder, ranks: list[int], advance: Callable[[int], None]) -> str:
        """Call the handlers; return where the checkpoint is, for people."""
        trainer, step = self._trainer, order.step
        assert trainer.save_handler is not None and trainer.rename_handler is not None
        mine = trainer.step_args.await_step(step, advance)
        if mine.step != step or not mine.settled:
            log.error(
                "rank %d: step %d is saved with the trainer's own objects as they are%s after step %d: its training thread did not"
                " get on to the next step, so schedule, counters and random numbers may be another step's",
                *(self._rank, step, "" if mine.settled else " half way", mine.step),
            )
        args = mine.labelled(step)
        if mine.randomness is not None:
            mine.randomness.restore(self._optimizer.device)
        self._began_at = _bytes_written()
        try:
            with torch.no_grad():
                trainer.save_handler(self._rank, step, ranks, args)
                if not claim.exists():
                    raise CheckpointError(f"step {step}: another publisher took {claim} over while this one saved")
                trainer.rename_handler(step, args)
        finally:
            self._done, self._began_at = self.work_done, None
        return f"the trainer's own checkpoint, saved by rank {self._rank}"


def _bytes_written() -> int:
    """Bytes that this process has asked the kernel to write."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux, or not permitted: then a long handler is bounded by the fault's total time only
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)
