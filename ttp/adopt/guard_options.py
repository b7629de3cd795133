"""What `ttp.protect` was asked for, checked."""

from __future__ import annotations

import numbers
import os
from dataclasses import dataclass

from ttp.adopt.trainer_state.seen import CHOICES
from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """What `ttp.protect` was asked for. Raises ConfigError for what cannot be."""

    resume: str
    save_interval: int
    save_wait: bool
    compare_every: int
    reseed: bool
    on_data_mismatch: str
    tensorboard: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, number in (("save_interval", self.save_interval), ("compare_every", self.compare_every)):
            if not isinstance(number, numbers.Real) or number < 0 or number % 1:  # 1e3 is what a YAML file may say
                raise ConfigError(f"{name}: got {number!r}, expected a number of steps, or 0 for never")
        if self.on_data_mismatch not in CHOICES:
            raise ConfigError(
                f"invalid on_data_mismatch: got {self.on_data_mismatch!r}, expected one of {', '.join(map(repr, CHOICES))}"
            )
        board = self.tensorboard
        if board is not None and not (isinstance(board, str | os.PathLike) and os.fspath(board)):
            raise ConfigError(f"invalid tensorboard: got {board!r}, expected a folder, or None for no curves")
