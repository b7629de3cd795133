"""stdout and stderr as streams that never fail: a lost console, or a full disk, must not end a job.

Owns the replacement of a lost stream by /dev/null: its reader has exited (`| head`), the terminal hung up, or the descriptor was closed. The
workers of later attempts inherit it; they would fail on a print. On a full disk a write is dropped, and the next is tried.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import IO, Any, TextIO

STDOUT, STDERR = 1, 2
_GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO})
"""Errors of a file that has lost its reader for good."""


def make_streams_last() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never fail. Call it before anything keeps them, as logging handlers do."""
    sys.stdout = _lasting(sys.stdout, STDOUT)
    make_stderr_last()


def make_stderr_last() -> None:
    """Replace `sys.stderr` alone: of a process whose stdout is read by the one that has started it."""
    sys.stderr = _lasting(sys.stderr, STDERR)


def replace_lost() -> list[str]:
    """Replace each of stdout and stderr that has lost its reader by /dev/null, and return their names. Writes nothing to find out. Called
    before workers start, which inherit both."""
    lost = [descriptor for descriptor in (STDOUT, STDERR) if _is_lost(descriptor)]
    for descriptor in lost:
        _replace(descriptor)
    return [{STDOUT: "stdout", STDERR: "stderr"}[descriptor] for descriptor in lost]


class _LastingFile(io.FileIO):
    """A descriptor whose writes never raise."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, content: Any) -> int:
        with memoryview(content) as view:
            whole = view.nbytes
        try:
            written = super().write(content)
        except OSError as error:
            if error.errno in _GONE:
                _replace(self.fileno())
            return whole
        return whole if written is None else written  # None: a pipe that does not block, and is full


class _UnkeptWriter(io.BufferedWriter):
    """Unbuffered, as for `python -u`. Unlike the raw file, which may write a part only, it writes all it is given."""

    def write(self, content: Any) -> int:
        taken = super().write(content)
        self.flush()
        return taken


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream like this one to the same descriptor; None means one that was closed when Python began."""
    if stream is None:
        if _is_lost(descriptor):
            _replace(descriptor)  # else the next opened file gets its number, and the workers write into it
            return _text_stream(descriptor, "utf-8", "backslashreplace")
        return open(os.devnull, "w", encoding="utf-8")  # another file has the number already
    with suppress(OSError, ValueError):
        stream.flush()
        if stream.fileno() == descriptor:
            return _text_stream(descriptor, stream.encoding, stream.errors or "strict", stream)
    return stream


def _text_stream(descriptor: int, encoding: str, errors: str, like: IO[str] | None = None) -> TextIO:
    unbuffered = bool(getattr(like, "write_through", False))
    return io.TextIOWrapper(
        (_UnkeptWriter if unbuffered else io.BufferedWriter)(_LastingFile(descriptor)),
        encoding=encoding,
        errors=errors,
        line_buffering=bool(getattr(like, "line_buffering", True)),
        write_through=unbuffered,
    )


def _is_lost(descriptor: int) -> bool:
    """Return whether the descriptor has lost its reader, or is not open."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, events in poll.poll(0))


def _replace(descriptor: int) -> None:
    """Let a descriptor write to /dev/null, and let workers inherit it."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:
            os.dup2(null, descriptor, inheritable=True)
            os.close(null)
        else:
            os.set_inheritable(null, True)
