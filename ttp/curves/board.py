"""TensorBoard's event files of a run.

Owns which curves there are, and that no step waits for their disk or fails with it: rank 0 alone writes, on a thread of its own, and what that has no
time for is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttp.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("ttp")

FLUSH_S = 5
"""A rank that is killed loses the points of so many seconds at most."""
MOST_WAITING = 1024
"""Steps whose points wait for the disk; those of further steps are left out."""
CLOSE_S = 10.0
"""So long the run's end waits for the last points."""

Folder = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoints:
    """What is known of one step; None, and what is not finite, has no point."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    """Before clipping."""
    learning_rate: float | None = None
    loss_scale: float | None = None
    tokens: int | None = None
    """Over all ranks."""
    time_s: float | None = None

    def named(self) -> dict[str, float]:
        """Return the points by their curves' names."""
        values = {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": self.learning_rate,
            "train/loss_scale": self.loss_scale,
            "speed/tokens_per_second": self.tokens / self.time_s if self.tokens and self.time_s else None,
            "speed/step_seconds": self.time_s or None,
        }
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def prepare(folder: Folder | None, rank: int, name: str) -> None:
    """Check, before the session begins, that the files can be written (every rank calls). `name`: of the setting. Raises ConfigError."""
    if folder is None:
        return
    folder = os.fspath(folder)
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            f"{name} is {folder!r}: the package tensorboard is not installed; run"
            f" pip install 'try-to-persist[tensorboard]', or leave {name} out"
        )
    try:
        if rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".writable", dir=folder) as file:
                file.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"{name} is {folder!r}: {error.strerror or error}; name a folder that this user can write"
        ) from None


def open_board(folder: Folder | None, done: int) -> Board | None:
    """Return where the steps after `done` are written (rank 0); None: nowhere."""
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # Of later steps, which an earlier attempt has written, TensorBoard shows the new points alone.
    return Board(lambda: SummaryWriter(os.fspath(folder), purge_step=done + 1, flush_secs=FLUSH_S))


class Board:
    """Writes the curves of each step, until the disk refuses one."""

    def __init__(self, open_writer: Callable[[], SummaryWriter]) -> None:
        """`open_writer()` is called on the thread that writes."""
        self._waiting: queue.Queue[StepPoints | None] = queue.Queue(MOST_WAITING)
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, args=(open_writer,), name="ttp-tensorboard", daemon=True)
        self._thread.start()

    def step(self, points: StepPoints) -> None:
        """Add one step's points. Returns at once, and raises nothing."""
        try:
            self._waiting.put_nowait(points)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                log.warning("TensorBoard: the points of %d steps wait for the disk: others are left out", MOST_WAITING)

    def close(self, end_s: float = CLOSE_S) -> None:
        """Wait until all points are written, for `end_s` at most."""
        deadline = time.monotonic() + end_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=end_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("TensorBoard: the last points are not written within %g s: they are left out", end_s)
        if self._left_out:
            log.warning("TensorBoard: the points of %d steps were left out", self._left_out)

    def _run(self, open_writer: Callable[[], SummaryWriter]) -> None:
        points: StepPoints | None = StepPoints(step=0)
        try:
            writer = open_writer()
            while (points := self._waiting.get()) is not None:
                for name, value in points.named().items():
                    writer.add_scalar(name, value, points.step)
            writer.close()
        except Exception as error:
            log.warning("TensorBoard: no points are written from here on: %s: %s", type(error).__name__, error)
            while points is not None:  # what waits for room at the end is not kept waiting
                points = self._waiting.get()
