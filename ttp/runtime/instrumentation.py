"""Where a harness observes a rank and injects faults into it: an interface, without effect unless it is configured.

Owns the interface and its null object. Never imports a harness by itself: only where TTP_FAULTS or TTP_CHAOS is set is `PLUG_IN` loaded,
which plugs its faults in here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from ttp.config import Settings
from ttp.proto.messages import CommitRecord

PLUG_IN = "ttp.chaos.faults.rank_hook"
"""The module that has `instrument(settings, rank, world_size, save_dirs) -> Instrumentation`."""

Around = Callable[[str, int, str], contextlib.AbstractContextManager[None]]
"""(point of a dump, step, path) -> what is entered around it."""


class HookedOptimizer(Protocol):
    """What is hooked of an optimizer."""

    on_point: Callable[[str, int], None] | None

    @property
    def last_record(self) -> CommitRecord | None: ...


class HookedHolder(Protocol):
    """What is hooked of what writes and publishes."""

    around: Around


class Instrumentation(Protocol):
    """What a session reports to its instrumentation, in the order of the calls."""

    def at_start(self, point: str) -> None:
        """The attempt's startup has come to this point."""

    def logs_in(self, log_dir: Path) -> None:
        """Controllers of this attempt write their journals there."""

    def attach(self, optimizer: HookedOptimizer, holder: HookedHolder) -> None:
        """Hook the points of a step and of a dump, where something is meant for them."""

    def resumed(self, step: int, path: str, skipped: Sequence[str], record: CommitRecord | None) -> None:
        """A checkpoint was loaded; step 0 and no path: there was none."""

    def close(self) -> None:
        """The session ends."""


class NoInstrumentation:
    """The one of every job that is not under test: it does nothing, and hooks nothing."""

    def at_start(self, point: str) -> None:
        pass

    def logs_in(self, log_dir: Path) -> None:
        pass

    def attach(self, optimizer: HookedOptimizer, holder: HookedHolder) -> None:
        pass

    def resumed(self, step: int, path: str, skipped: Sequence[str], record: CommitRecord | None) -> None:
        pass

    def close(self) -> None:
        pass


def instrumentation(settings: Settings, rank: int, world_size: int, save_dirs: Sequence[str]) -> Instrumentation:
    """Return the object to which this rank's session reports its start. Raises ConfigError: TTP_FAULTS is wrong, or TTP_CHAOS names no harness."""
    if not settings.faults and not settings.chaos:
        return NoInstrumentation()
    plugged: Instrumentation = import_module(PLUG_IN).instrument(settings, rank, world_size, save_dirs)
    return plugged
