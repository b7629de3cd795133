"""What ranks do without a controller when one of them has a preemption notice: they save the step that all have finished, together, and exit.

Owns the save at that step's boundary, and the promise that the process exits afterwards, whatever happened. Never decides whether it is
done: every rank has read the same sums in the step's spanning collective (`ttp.optim.step_agreement.participation.ending_of`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ttp.checkpoint.format.durable import step_directory_name
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError
from ttp.exchange.json_collectives import exchange_json
from ttp.exchange.saved_alone import SavedAlone, cause_text, write
from ttp.processor.driver import Processor
from ttp.proto.messages import Cause, CauseKind
from ttp.runtime.saves import PeriodicSaves
from ttp.runtime.state_provider import OptimizerStateProvider

log = logging.getLogger("ttp")


class BoundarySave:
    """Called by every rank's training thread behind the step (`StepBoundary.on_unled`)."""

    def __init__(
        self, saves: PeriodicSaves, holder: OptimizerStateProvider, directories: Sequence[str], rank: int, account: Path
    ) -> None:
        """directories: those that `saves` uses. account: the file that rank 0 writes."""
        self._saves = saves
        self._directories = tuple(directories)
        self._holder = holder
        self._rank = rank
        self._account = account

    def __call__(self, step: int, notice: bool, processor: Processor) -> None:
        """Save `step` with all other ranks (a collective), and have `processor` end this process. `notice`: this rank has to
        leave.

        Until every rank is here a controller may come back and lead this one; then the training threads are just where another
        step's collective would have them. So a failure of the first collective comes out, like any that a peer's death causes.
        """
        began_unix_s = time.time()
        answers = exchange_json(notice, self._holder.optimizer.device)
        noticed = [rank for rank, has_notice in enumerate(answers) if has_notice]
        processor.saves_alone(step)
        path, error = "", ""
        try:
            path = self._saves.save(step, Cause(CauseKind.PREEMPTED, tuple(noticed), f"SIGTERM; {cause_text(step)}"))
        except Exception as problem:  # whatever it was, no controller ends this process
            error = f"{type(problem).__name__}: {problem}"
            if path := self._published(step):  # others had learned of it and exited, which ended this rank's collective
                error = ""
            else:
                log.error("rank %d: step %d could not be saved without a controller: %s", self._rank, step, error)
        if self._rank == 0:
            newest = self._holder.checkpoint
            write(
                self._account,
                SavedAlone(began_unix_s, time.time(), step, path, error, tuple(noticed), len(answers), newest),
            )
        processor.saved_alone(step, path, error)

    def _published(self, step: int) -> str:
        """Return the valid checkpoint of this step that is on disk, all bytes read; empty: this rank sees none.

        One that an earlier job has left may be broken. Of nodes' own directories a rank sees those of its node: a piece is not a checkpoint.
        """
        for path in (Path(directory) / step_directory_name(step) for directory in self._directories):
            with contextlib.suppress(CheckpointError, OSError):
                manifest = verify(path, key=self._holder.keys.verify)
                if all((path / file.name).exists() for file in manifest.files):
                    return str(path)
        return ""
