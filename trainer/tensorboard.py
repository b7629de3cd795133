"""TensorBoard's event files of a run (`training_config.tensorboard`), beside `metrics.jsonl`, which is the exact account.

Owns which curves there are. Rank 0 alone writes; a thread of torch's writer does, so that no step waits for a disk.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ttp.errors import ConfigError

from .metrics import StepMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_S = 5
"""A rank that is killed loses the points of so many seconds at most."""


def prepare(folder: str | None, rank: int) -> None:
    """Check, before the session begins, that the files can be written (every rank calls). Raises ConfigError."""
    if folder is None:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            f"training_config.tensorboard is {folder!r}: the package tensorboard is not installed; run"
            " pip install 'try-to-persist[tensorboard]', or set the key to null"
        )
    try:
        if rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"training_config.tensorboard is {folder!r}: {error.strerror or error}; name a folder that this user can write"
        ) from None


def open_board(folder: str | None, done: int) -> Board | None:
    """Return where the steps after `done` are written (rank 0); None: nowhere."""
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # Of later steps, which an earlier attempt has written, TensorBoard shows the new points alone.
    return Board(SummaryWriter(folder, purge_step=done + 1, flush_secs=FLUSH_S))


class Board:
    """Writes the curves of each step."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def step(self, metrics: StepMetrics) -> None:
        """Add one step's points; what is not finite has none."""
        values = {
            "train/loss": metrics.loss,
            "train/grad_norm": metrics.grad_norm,
            "train/learning_rate": metrics.learning_rates[0],
            "train/loss_scale": metrics.loss_scale,
        }
        if metrics.tokens and metrics.time_s:
            values |= {"speed/tokens_per_second": metrics.tokens / metrics.time_s, "speed/step_seconds": metrics.time_s}
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()
