"""The launcher's stdout and stderr, as streams that take every text: a console that is lost must not end a job.

A reader that has gone (`| head`), a terminal that was hung up or a descriptor that was closed is lost for good: /dev/null takes its place,
for the workers of later starts too, who would fail as they print. A full disk may have room again: what does not fit is
left out, and the next text is tried.
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
"""Errors of a file that nobody will ever read again."""


def make_streams_last() -> None:
    """Put streams that never fail in the place of `sys.stdout` and `sys.stderr`. Before anything is loaded that keeps them, as
    logging handlers do."""
    sys.stdout = _lasting(sys.stdout, STDOUT)
    sys.stderr = _lasting(sys.stderr, STDERR)


def replace_lost() -> list[str]:
    """Put /dev/null in the place of each of stdout and stderr that has lost its reader, and name them. Nothing is written to find
    out. Called before workers are started, who inherit both."""
    lost = [descriptor for descriptor in (STDOUT, STDERR) if _is_lost(descriptor)]
    for descriptor in lost:
        _replace(descriptor)
    return [{STDOUT: "stdout", STDERR: "stderr"}[descriptor] for descriptor in lost]


class _LastingFile(io.FileIO):
    """A descriptor of which every write succeeds, as far as the writer can tell."""

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
    """Keeps nothing back: `python -u`. Unlike the bare file, that may take a part only, it writes all it is given."""

    def write(self, content: Any) -> int:
        taken = super().write(content)
        self.flush()
        return taken


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream like this one to the same descriptor; None stands for one that was closed when Python began."""
    if stream is None:
        if _is_lost(descriptor):
            _replace(descriptor)  # else the next file that is opened gets its number, and the workers write into it
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
    """Say whether nobody can read what is written there: its reader has gone, or it is not open."""
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
