"""Files, folders and sockets that TTP makes beside checkpoints: a new one has the mode that TTP_FILE_MODE says, whatever the umask is.

Owns these modes. Never changes a file or folder that was there before. Checkpoints follow the umask, and are made elsewhere.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ttp.config import FILE_MODE, file_mode
from ttp.errors import ConfigError

_FOLDER_MODE = 0o700


def opener(path: str, flags: int) -> int:
    """Open a file, as `open(..., opener=opener)` asks for it. Raises OSError."""
    mode = _mode()
    if flags & os.O_CREAT:
        try:
            descriptor = os.open(path, flags | os.O_EXCL, mode)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        else:
            _set_mode(descriptor, mode)
            return descriptor
    return os.open(path, flags, mode)


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there; those above it that are missing follow the umask. Raises OSError."""
    mode = _mode()
    mode |= (mode & 0o444) >> 2
    try:
        try:
            path.mkdir(mode)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode)
    except OSError:
        if not path.is_dir():
            raise
    else:
        _set_mode(path, mode)


def replace(path: Path, text: str) -> None:
    """Write a file that readers see whole, or as it was before. Raises OSError."""
    # By chance, not by the process id: containers share a folder, and process ids.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8", opener=opener) as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def name_durably(unfinished: Path, path: Path) -> None:
    """Give a file or folder that is finished its name: a power cut leaves all of it there, or nothing. Raises OSError."""
    inside = [Path(folder, name) for folder, folders, names in os.walk(unfinished) for name in (*folders, *names)]
    for each in (*inside, unfinished):
        _fsync(each)
    os.replace(unfinished, path)
    _fsync(path.absolute().parent)


def make_temporary(prefix: str) -> Path:
    """Make a folder for temporary files that this user alone can enter, whatever TTP_FILE_MODE says. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    _set_mode(path, _FOLDER_MODE)
    return path


def bind(listener: socket.socket, path: Path) -> None:
    """Bind a socket in a folder of `make_temporary`: this user alone can connect. Raises OSError."""
    listener.bind(str(path))
    _set_mode(path, FILE_MODE)


def _mode() -> int:
    try:
        return file_mode()
    except ConfigError:  # an attempt refuses it when it begins; until then this is the safe one
        return FILE_MODE


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_mode(new: int | Path, mode: int) -> None:
    """Give a file that was just made its mode, where the umask has taken bits away. A folder keeps the group that it hands on."""
    found = os.stat(new).st_mode
    if found & 0o777 != mode:
        with suppress(OSError):  # a file system without modes
            os.chmod(new, mode | stat.S_IMODE(found) & ~0o777)
