"""Where a run's words go: per-rank files, and rank 0's console.

    <output_dir>/log/rank_N/info.log    everything; a step's line stands alone, other lines begin with time, rank and level
    <output_dir>/log/rank_N/error.log   errors with their tracebacks, and the stacks of a crash in native code

Files are appended to: a restart goes on in the same ones. The console is rank 0's alone: a progress bar on a terminal,
plain lines otherwise.
"""

from __future__ import annotations

import copy
import faulthandler
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ttp import files
from ttp.errors import ConfigError

from .metrics import StepMetrics

LOGGER = logging.getLogger("ttp")
"""Parent of all loggers of the trainer and of ttp itself."""

_STEP = {"step_line": True}


@contextmanager
def open_logs(output_dir: Path, rank: int) -> Iterator[RunLog]:
    """Open this rank's files (every rank calls). Raises ConfigError when they cannot be written."""
    folder = output_dir / "log" / f"rank_{rank}"
    try:
        files.make_folder(folder.parent)
        files.make_folder(folder)
        info, errors = _open_log(folder / "info.log"), _open_log(folder / "error.log")
    except OSError as exc:
        raise ConfigError(
            f"training_config.output_dir is {str(output_dir)!r}: rank {rank} cannot write {exc.filename}: {exc.strerror};"
            " name a folder that this user can write"
        ) from None
    console = Console(highlight=False, soft_wrap=True) if rank == 0 else None
    handlers: list[logging.Handler] = [info, errors]
    if console is not None:
        handlers.append(_ConsoleHandler(console))
    for handler in handlers:
        handler.setFormatter(_Formatter(rank))
    errors.setLevel(logging.ERROR)
    level, propagate = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # else a library that configures the root logger would print every line twice
    for handler in handlers:
        LOGGER.addHandler(handler)
    # A file of its own for native crashes: the handler of logging may be gone when they come.
    with open(folder / "error.log", "ab") as crash_file:
        faulthandler.enable(crash_file)
        try:
            yield RunLog(console)
        finally:
            faulthandler.disable()
            for handler in handlers:
                LOGGER.removeHandler(handler)
                handler.close()
            LOGGER.setLevel(level)
            LOGGER.propagate = propagate


class _LogFile(logging.FileHandler):
    """Stays closed: a record that another thread brings after `close` would open the file again."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None:
            super().emit(record)


def _open_log(path: Path) -> logging.FileHandler:
    open(path, "a", opener=files.opener).close()  # the handler takes what is there
    return _LogFile(path, encoding="utf-8")


class RunLog:
    """Logs each step. `console` is None on every rank but 0."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._logged: BaseException | None = None

    @contextmanager
    def errors(self, rank: int) -> Iterator[None]:
        """Leave the traceback of whatever ends this block in the error log (blocks may nest: it is logged once)."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as exc:
            if exc is not self._logged:
                LOGGER.exception("rank %d ends: %s: %s", rank, type(exc).__name__, exc)
                self._logged = exc
            raise

    @property
    def on_terminal(self) -> bool:
        return self._console is not None and self._console.is_terminal

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """Show a bar while the block runs, where there is a terminal."""
        if not self.on_terminal:
            yield
            return
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as self._progress:
            self._progress.add_task("train", total=total, completed=done, figures="")
            try:
                yield
            finally:
                self._progress.refresh()
        self._progress = None

    def step(self, metrics: StepMetrics, *, line: bool) -> None:
        """Advance the bar to this step; with `line`, also log the step's line."""
        if line:
            LOGGER.info(metrics.text(), extra=_STEP)
        if self._progress is not None:
            speed = f"{metrics.tokens / metrics.time_s:,.0f} tokens/s" if metrics.tokens and metrics.time_s else ""
            figures = f"loss {metrics.loss:.4f}  lr {metrics.learning_rates[0]:.2e}  {speed}"
            self._progress.update(self._progress.task_ids[0], completed=metrics.step, figures=figures)


class _Formatter(logging.Formatter):
    def __init__(self, rank: int) -> None:
        super().__init__(f"%(asctime)s rank {rank} %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if getattr(record, "step_line", False) else super().format(record)


class _ConsoleHandler(logging.Handler):
    """Prints through rich, so that a bar stays below the lines; a bar makes the steps' own lines needless."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:  # the console gets the line, error.log the traceback
            record = copy.copy(record)
            record.exc_info, record.exc_text = None, None
            record.msg = f"{record.getMessage().splitlines()[0]} (traceback: error.log)"
            record.args = ()
        if self._console.is_terminal and getattr(record, "step_line", False):
            return
        try:
            self._console.print(self.format(record), markup=False)
            sys.stdout.flush()
        except (OSError, ValueError):
            self.handleError(record)
