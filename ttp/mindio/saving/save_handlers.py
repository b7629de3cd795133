"""The trainer's save and rename handlers, as the publisher calls them.

Owns what is asked of a handler when it is registered, and what its answer means. A handler that could not be called is refused at the
start: at a fault it would cost the checkpoint.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ttp.errors import CheckpointError, ConfigError

SaveHandler = Callable[[int, int, list[int], Any], None]
"""(save_rank, step, rank_list, args)"""
RenameHandler = Callable[[int, Any], None]
"""(step, args); raises when nothing was published."""


def save_handler(handler: Callable[..., object]) -> SaveHandler:
    """Return MindIO's `handler(save_rank, step, rank_list, args)`. Raises ConfigError when it does not take these."""
    _check_takes(handler, "save", ("save_rank", "step", "rank_list", "args"))

    def save(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:
        with _named("save", step):
            handler(save_rank, step, rank_list, args)

    return save


def rename_handler(handler: Callable[[Any], object]) -> RenameHandler:
    """Return MindIO's `handler(args)`, which answers 0 or nothing when the checkpoint is visible. Raises ConfigError."""
    _check_takes(handler, "rename", ("args",))

    def rename(step: int, args: Any) -> None:
        with _named("rename", step):
            status = handler(args)
        _check_status(status, step)

    return rename


def newer_save_handler(handler: Callable[..., object], kinds: Callable[[], Sequence[int]], ctx: Any) -> SaveHandler:
    """Return the newer `handler(step, save_info, args, ctx)`. Raises ConfigError when it does not take these."""
    _check_takes(handler, "save", ("step", "save_info", "args", "ctx"))

    def save(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:
        with _named("save", step):
            handler(step, [{"type": int(kind), "ranks": rank_list} for kind in kinds()], args, ctx)

    return save


def newer_rename_handler(handler: Callable[..., object]) -> RenameHandler:
    """Return the newer `handler(step, args)`, which raises when it cannot. Raises ConfigError when it does not take these."""
    _check_takes(handler, "rename", ("step", "args"))

    def rename(step: int, args: Any) -> None:
        with _named("rename", step):
            status = handler(step, args)
        _check_status(status, step)

    return rename


def _check_takes(handler: object, what: str, names: tuple[str, ...]) -> None:
    if not callable(handler):
        raise ConfigError(f"{what} handler: got {handler!r}, expected a function of ({', '.join(names)})")
    try:
        signature = inspect.signature(handler)
    except ValueError:  # of a function in C: its parameters are unknown
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        called = getattr(handler, "__name__", repr(handler))
        raise ConfigError(
            f"the {what} handler {called}{signature} is called with ({', '.join(names)}), by position: {error}"
        ) from None


def _check_status(status: object, step: int) -> None:
    if status is not None and (isinstance(status, bool) or status != 0):
        raise CheckpointError(
            f"step {step}: the rename handler returned {status!r}, expected 0 (or nothing) when the checkpoint is visible; see what"
            " it has printed"
        )


@contextlib.contextmanager
def _named(what: str, step: int) -> Iterator[None]:
    """Say of whatever a handler raises whose it is. One that wants to exit must not end the work thread alone."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise CheckpointError(
            f"step {step}: the {what} handler raised {type(error).__name__}: {error}; its traceback is in this rank's output"
        ) from error
