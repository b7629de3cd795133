"""The trainer's save handler on one rank: with the state of the step that is saved, and the trainer's objects of that step.

Owns the order on one rank: read this rank's model part from the shares (the save rank alone), wait for the training thread's
bookkeeping, restore the random numbers, call the handler. Owns the stream in which handlers run on an accelerator. Never publishes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ttp.checkpoint.format.file_index import read_contents
from ttp.errors import CheckpointError
from ttp.mindio.saving.save_handlers import RenameHandler, SaveHandler
from ttp.mindio.saving.step_args import StepArgsBox
from ttp.mindio.state_files.whole_state import WholeState, read_whole
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.proto.messages import ShareResult

log = logging.getLogger("ttp")


class TrainerHandlers(Protocol):
    """What saving needs of the trainer's side."""

    step_args: StepArgsBox
    save_handler: SaveHandler | None
    rename_handler: RenameHandler | None
    parts: Sequence[Sequence[int]]
    """The ranks of each model part: those that can save its file."""

    def part_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return key and shape of every tensor of this rank's model part."""

    def show(self, state: WholeState) -> None:
        """Make the optimizer and the model that the handlers save be those of `state`; training does not go on."""

    def leave_to_save_rank(self) -> None:
        """The save handler runs here while another rank writes the file."""


@dataclass(frozen=True, slots=True)
class Saving:
    """One call of a save handler."""

    step: int
    save_rank: int
    ranks: tuple[int, ...]


class LocalSave:
    """Runs the save handler on this rank, once at a time. Any thread but the training thread."""

    def __init__(self, rank: int, optimizer: TTPReplicaOptimizer, trainer: TrainerHandlers) -> None:
        self._rank, self._optimizer, self._trainer = rank, optimizer, trainer
        self._lock = threading.Lock()
        device = optimizer.device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        # Made now: at a fault a driver may have anything but launches wait for the whole device.
        self._stream = None if self._module is None else self._module.Stream(device)
        self._began_at: int | None = None  # written by the thread that saves, read by any
        self._done = 0

    @property
    def work_done(self) -> int:
        """Bytes that this process has written while handlers ran: nothing else is known of their progress."""
        began_at = self._began_at
        return self._done if began_at is None else self._done + max(0, _bytes_written() - began_at)

    def check_handlers(self, step: int) -> None:
        """Raise CheckpointError when the trainer has registered none."""
        if self._trainer.save_handler is None or self._trainer.rename_handler is None:
            raise CheckpointError(
                f"rank {self._rank}: step {step} cannot be saved: no handlers; call ttp_register_save_ckpt_handler and"
                " ttp_register_rename_handler right after ttp_start_processor"
            )

    def save(
        self,
        saving: Saving,
        folder: Path,
        results: Sequence[ShareResult],
        host: Mapping[str, Any],
        advance: Callable[[int], None],
    ) -> Any:
        """Call the save handler; return the trainer's objects that it was given, for the rename handler.

        folder: where the shares are. host: the optimizer's host state, where this rank does not have that of the step.
        """
        trainer, step = self._trainer, saving.step
        self.check_handlers(step)
        assert trainer.save_handler is not None
        with self._lock, self.on_device():
            if saving.save_rank == self._rank:
                contents = read_contents(folder, results, advance)
                trainer.show(read_whole(folder, contents, step, self._host(step, host), trainer.part_tensors()))
            else:
                trainer.leave_to_save_rank()
            args = self._args(step, advance)
            with torch.no_grad(), self.counted():
                trainer.save_handler(saving.save_rank, step, list(saving.ranks), args)
        return args

    def on_device(self) -> AbstractContextManager[Any]:
        """Enter this rank's device and the handlers' own stream there. The training thread's may wait for a dead peer's collective for ever."""
        return nullcontext() if self._stream is None else self._module.stream(self._stream)

    def counted(self) -> _Counted:
        """Count what a handler writes as work."""
        return _Counted(self)

    def _host(self, step: int, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._optimizer.host_state(step)
        except CheckpointError:  # this rank has another step; its part's file gets the publisher's hyper-parameters
            return otherwise

    def _args(self, step: int, advance: Callable[[int], None]) -> Any:
        mine = self._trainer.step_args.await_step(step, advance)
        if mine.step != step or not mine.settled:
            log.error(
                "rank %d: step %d is saved with the trainer's own objects as they are%s after step %d: its training thread did not"
                " continue with the next step, so schedule, counters and random numbers may be another step's",
                *(self._rank, step, "" if mine.settled else " half way", mine.step),
            )
        if mine.randomness is not None:
            mine.randomness.restore(self._optimizer.device)
        return mine.labelled(step)

    def begin_count(self) -> None:
        self._began_at = _bytes_written()

    def end_count(self) -> None:
        self._done, self._began_at = self.work_done, None


class _Counted:
    def __init__(self, save: LocalSave) -> None:
        self._save = save

    def __enter__(self) -> None:
        self._save.begin_count()

    def __exit__(self, *_: object) -> None:
        self._save.end_count()


def _bytes_written() -> int:
    """Bytes that this process has asked the kernel to write."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux, or not permitted: then a long handler is bounded by the fault's total time only
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)
