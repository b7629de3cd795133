"""A worker's error file: the exception that ends it, with the traceback, where the launcher looks for it.

torch's `@record` writes the file TORCHELASTIC_ERROR_FILE, and scripts that do not use it end with a bare exit code 1.
`install` does the same for them, and `install_in_worker` as soon as the script imports ttp. The form is that of torch's handler; a
file that is there already is not replaced. Never changes the exit status, and what the process prints only for a refusal (`print_one_line`);
`before_end` may have somebody else called first, who does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from ttp import files
from ttp.config import error_file, worker_error_file
from ttp.errors import STAY_WRONG, STAY_WRONG_AT_FIRST, ConfigError

_path = ""
"""The file of this process; empty: nothing is recorded."""
_pid = 0
"""This process: a child that is forked inherits the hook, and is not the worker."""
_installed = False
_before_end: Callable[[BaseException], None] | None = None


def install() -> None:
    """Record the exception that ends this process, if a launcher wants to know (any number of times). A hook that the script has set
    since `import ttp` is called, too."""
    global _installed
    try:
        path = error_file()
    except ConfigError:  # of ENABLE_TTP: ttp.start and ttp.protect refuse it in a line
        return
    if path and not _installed:
        _installed = True
        _install(path)


def install_in_worker() -> None:
    """Do so at `import ttp`, in a process that ttprun has started: it may end before it has called anything of ttp's."""
    if path := worker_error_file():
        _install(path)


def _install(path: str) -> None:
    global _path, _pid
    _path, _pid = path, os.getpid()
    _call_first(record)


def before_end(call: Callable[[BaseException], None]) -> None:
    """Have `call` called with the exception that ends this process, before its traceback is printed (once, for good)."""
    global _before_end
    if _before_end is None:
        _before_end = call
        _call_first(call)


def _call_first(call: Callable[[BaseException], None]) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        call(exc)
        previous(kind, exc, trace)

    sys.excepthook = hook


def print_one_line(refused: BaseException) -> None:
    """If this exception ends the process, have its message printed in place of its traceback: its text says what to correct."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        if exc is not refused:
            previous(kind, exc, trace)
            return
        for call in (_before_end, record):
            if call is not None:
                call(exc)
        print(f"ttp: error: {kind.__name__}: {exc}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def withdraw() -> None:
    """Remove the error file: the exception in it has not ended this process, which trains on."""
    if _path and os.getpid() == _pid:
        with contextlib.suppress(OSError):
            os.unlink(_path)


def record(exc: BaseException) -> None:
    """Write the error file, whole or not at all (no launcher, or one that is there already: nothing)."""
    if not _path or os.getpid() != _pid or not isinstance(exc, Exception) or os.path.exists(_path):
        return
    extra = {"py_callstack": "".join(traceback.format_exception(exc)), "timestamp": str(int(time.time()))}
    body = json.dumps({"message": {"message": f"{type(exc).__name__}: {exc}", "extraInfo": extra}})
    with contextlib.suppress(OSError):  # a full disk costs the incident report a line, not the job its checkpoint
        files.replace(Path(_path), body)


@contextlib.contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Show a refusal of the start as one line without a traceback, if nothing in the program catches it."""
    try:
        yield
    except (*STAY_WRONG, *STAY_WRONG_AT_FIRST) as refused:
        print_one_line(refused)
        raise
