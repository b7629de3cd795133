"""The curves of a trainer whose loop is its own (`ttp.protect`): its steps are known as they end, its losses when it reports them.

Owns which step a loss is of.
"""

from __future__ import annotations

import atexit
from dataclasses import replace

from ttp.curves.board import Board, StepPoints
from ttp.proto.messages import CommitRecord


class GuardCurves:
    """Does nothing without a board."""

    def __init__(self, board: Board | None, done: int) -> None:
        """`done`: steps, before this process's first one."""
        self._board = board
        self._newest = done
        self._ended: StepPoints | None = None
        """The newest step, whose loss may still come."""
        self._loss: float | None = None
        if board is not None:
            atexit.register(self.close)

    def step_begins(self) -> None:
        """The first forward pass of a step: losses that come from now on are that step's."""
        self._write()
        self._loss = None

    def loss(self, loss: float) -> None:
        """The trainer reports a loss: of the step in flight, or behind its end and before the next forward pass."""
        self._loss = loss

    def step_ends(self, step: int, record: CommitRecord | None, time_s: float | None) -> None:
        """A step is finished, in so many seconds (None: not known)."""
        self._write()
        self._newest = step
        rates = record.learning_rates if record is not None else ()
        norm = record.grad_norm if record is not None else 0.0  # 0: it was not taken
        rate = rates[0] if rates else None
        self._ended = StepPoints(step=step, grad_norm=norm or None, learning_rate=rate, time_s=time_s)

    def step_back(self, step: int, record: CommitRecord | None) -> None:
        """Training is entered again after `step`, which another thread may have finished."""
        if step > self._newest:
            self.step_ends(step, record, None)

    def close(self) -> None:
        """Write what is there (any number of times)."""
        self._write()
        board, self._board = self._board, None
        if board is not None:
            atexit.unregister(self.close)
            board.close()

    def _write(self) -> None:
        if self._ended is None:
            return
        if self._board is not None:
            self._board.step(replace(self._ended, loss=self._loss))
        self._ended = self._loss = None
