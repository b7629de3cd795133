"""Files that come from outside, opened and read without ever waiting for them.

Owns the refusal of what is not a regular file (the open of a pipe that nothing writes to never returns), and of what is too large to be
meant. Never decides what a file must hold.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

TEXT_BYTES = 16 << 20
"""Of a configuration, a scenario, a rank table: a larger file is something else."""


class NotRegular(OSError):
    """A pipe, a socket, a device or a directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EINVAL, "expected a regular file", str(path))


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading. Raises OSError, NotRegular among them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a path with NUL
        raise OSError(errno.EINVAL, "expected a path without NUL and lone surrogates", repr(str(path))) from None
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device that is not there
            raise NotRegular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(path)
    return io.FileIO(descriptor, "rb")


def open_text(path: str | os.PathLike[str]) -> io.TextIOWrapper:
    """Open a regular file for reading as UTF-8. Raises OSError."""
    return io.TextIOWrapper(io.BufferedReader(open_regular(path)), encoding="utf-8")


def read_text(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> str:
    """Return the text of a regular file of at most `most` bytes. Raises OSError, also for what is not UTF-8."""
    with open_regular(path) as raw, io.BufferedReader(raw) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes", str(Path(path)))
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise OSError(
            errno.EINVAL, f"expected UTF-8, got byte {content[error.start]:#x} at {error.start}", str(path)
        ) from None


def read_json(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> Any:
    """Return the value of a JSON file, as `read_text` reads it. Raises OSError, and ValueError for what is not JSON, nested too deep, or has
    a number of thousands of digits."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("got values nested too deep to be read") from None
