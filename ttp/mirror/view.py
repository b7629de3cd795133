"""Checkpoints of a mirror as directories that `ttp ckpt` can look at: small files and tables whole, tensors' bytes left out.

Owns those directories: each file of tensors has its size, and holes in the place of its bytes. `check_sums` reads the bytes themselves from the store.
Which directories these are is known to this process alone: nothing in a directory can say that its bytes are elsewhere.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttp.checkpoint.format.dcp import METADATA_NAME
from ttp.checkpoint.format.durable import step_directory_name, step_of_directory
from ttp.checkpoint.format.file_index import TAIL_BYTES, table_begin
from ttp.checkpoint.format.manifest import MANIFEST_NAME, from_bytes
from ttp.checkpoint.format.signature import SIGNATURE_NAME, VerifyKey
from ttp.checkpoint.verify import Progress
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.mirror import fetch
from ttp.mirror.remote import Remote

_made: dict[Path, Remote] = {}
"""Where the bytes of each such directory are."""


@contextlib.contextmanager
def folder_of_views() -> Iterator[Path]:
    """Give a temporary folder for such directories; they end with the block."""
    with tempfile.TemporaryDirectory(prefix="ttp_ckpt_") as made:
        try:
            yield Path(made).resolve()
        finally:
            _made.clear()


def open_url(url: str) -> tuple[Remote, int | None]:
    """Return the folder of checkpoints that a URL means, and the step where it names one. Raises ConfigError."""
    parent, _, name = url.rstrip("/").rpartition("/")
    step = step_of_directory(Path(name))
    return Remote(parent if step is not None else url, name="URL"), step


def steps_at(remote: Remote, step: int | None) -> Sequence[int]:
    """Return the steps that have a manifest there, newest first; the one that is named. Raises CheckpointError where there is none."""
    steps = fetch.steps_of(remote) if step is None else [step]
    whole = [each for each in steps if MANIFEST_NAME in remote.sizes(step_directory_name(each))]
    if not whole:
        raise CheckpointError(
            f"no checkpoint in {remote.url}: expected folders like iter_0000042 with a {MANIFEST_NAME}"
        )
    return whole


def make(remote: Remote, step: int, below: Path, *, tables: bool) -> Path:
    """Make a directory for a step; `tables`: with the tables of contents of all files. Raises RemoteError."""
    folder = step_directory_name(step)
    path = below / folder
    path.mkdir(parents=True)
    _made[path] = remote
    for name in (MANIFEST_NAME, SIGNATURE_NAME, METADATA_NAME):
        if (content := remote.read(f"{folder}/{name}")) is not None:
            (path / name).write_bytes(content)
    for name, nbytes in remote.sizes(folder).items():
        if not (path / name).exists():
            with open(path / name, "wb") as stream:
                stream.truncate(nbytes)
    if tables:
        with contextlib.suppress(CorruptCheckpoint, FileNotFoundError):  # whoever looks at it says so
            for file in from_bytes((path / MANIFEST_NAME).read_bytes(), folder).files:
                if file.name != METADATA_NAME:
                    _read_table(remote, f"{folder}/{file.name}", path / file.name, file.nbytes)
    return path


def _read_table(remote: Remote, name: str, path: Path, nbytes: int) -> None:
    tail = remote.read_range(name, max(0, nbytes - TAIL_BYTES), nbytes)
    begin = table_begin(nbytes, tail)
    if begin < 0:
        return
    with open(path, "r+b") as stream:
        stream.seek(begin)
        stream.write(remote.read_range(name, begin, nbytes))


def is_view(path: Path) -> bool:
    """Tell such a directory from a checkpoint's own."""
    return path in _made


def check_sums(path: Path, progress: Progress, key: VerifyKey | None) -> None:
    """Compare the checksums of the bytes in the store. Nothing where this is a checkpoint's own directory. Raises CorruptCheckpoint, RemoteError."""
    remote = _made.get(path)
    if remote is None:
        return
    found = fetch.find(remote, step_of_directory(path) or 0, key)
    if found is None:
        raise CorruptCheckpoint(f"{path} has no {MANIFEST_NAME}")
    fetch.check_sums(remote, found, progress)
