"""TensorBoard's event files of a run (`training_config.tensorboard`), beside `metrics.jsonl`, which is the exact account.

Owns which curves there are, and that no step waits for their disk or fails with it: rank 0 alone writes, on a thread of its own, and what that has no
time for is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ttp.errors import ConfigError

from .metrics import StepMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("ttp.trainer")

FLUSH_S = 5
"""A rank that is killed loses the points of so many seconds at most."""
MOST_WAITING = 1024
"""Steps whose points wait for the disk; those of further steps are left out."""
CLOSE_S = 10.0
"""So long the run's end waits for the last points."""


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
            with tempfile.NamedTemporaryFile(prefix=".writable", dir=folder) as file:
                file.write(b"x")
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
    return Board(lambda: SummaryWriter(folder, purge_step=done + 1, flush_secs=FLUSH_S))


class Board:
    """Writes the curves of each step, until the disk refuses one."""

    def __init__(self, open_writer: Callable[[], SummaryWriter]) -> None:
        """`open_writer()` is called on the thread that writes."""
        self._waiting: queue.Queue[StepMetrics | None] = queue.Queue(MOST_WAITING)
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, args=(open_writer,), name="ttp-tensorboard", daemon=True)
        self._thread.start()

    def step(self, metrics: StepMetrics) -> None:
        """Add one step's points. Returns at once, and raises nothing."""
        if not self._thread.is_alive():  # it has said why
            return
        try:
            self._waiting.put_nowait(metrics)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                log.warning("TensorBoard: the points of %d steps wait for the disk: others are left out", MOST_WAITING)

    def close(self, end_s: float = CLOSE_S) -> None:
        """Wait until all points are written, for `end_s` at most."""
        deadline = time.monotonic() + end_s
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=end_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                log.warning("TensorBoard: the last points are not written within %g s: they are left out", end_s)
        if self._left_out:
            log.warning("TensorBoard: the points of %d steps were left out", self._left_out)

    def _run(self, open_writer: Callable[[], SummaryWriter]) -> None:
        try:
            writer = open_writer()
            while (metrics := self._waiting.get()) is not None:
                for name, value in points(metrics).items():
                    writer.add_scalar(name, value, metrics.step)
            writer.close()
        except Exception as error:
            log.warning("TensorBoard: no points are written from here on: %s: %s", type(error).__name__, error)


def points(metrics: StepMetrics) -> dict[str, float]:
    """Return one step's points by their curves' names; what is not finite has none."""
    values = {
        "train/loss": metrics.loss,
        "train/grad_norm": metrics.grad_norm,
        "train/learning_rate": metrics.learning_rates[0],
        "train/loss_scale": metrics.loss_scale,
    }
    if metrics.tokens and metrics.time_s:
        values |= {"speed/tokens_per_second": metrics.tokens / metrics.time_s, "speed/step_seconds": metrics.time_s}
    return {name: value for name, value in values.items() if math.isfinite(value)}
