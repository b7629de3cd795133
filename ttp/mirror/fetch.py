"""Fetch the newest whole checkpoint of a mirror into a checkpoint directory: staged, every file verified, published by one rename.

Owns the order: the manifest is read first and written last; what has its name already and is not valid is renamed. A checkpoint counts as whole when
its manifest is there and each file has the manifest's size and checksum as it arrives.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint.format import checksum
from ttp.checkpoint.format.durable import (
    advance_tracker,
    fsync_directory,
    step_directory_name,
    step_of_directory,
    write_durably,
)
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, from_bytes
from ttp.checkpoint.format.signature import SIGNATURE_NAME, VerifyKey
from ttp.checkpoint.node_local.parts import supersede
from ttp.checkpoint.staging import free_name
from ttp.checkpoint.verify import Progress, verify
from ttp.errors import CorruptCheckpoint
from ttp.mirror.remote import Remote
from ttp.proto.messages import FileEntry

_FILES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint of which the manifest is in the mirror."""

    folder: str
    manifest: Manifest
    content: bytes
    signature: bytes | None


def steps_of(remote: Remote) -> list[int]:
    """Return the steps that have a folder, newest first. Raises RemoteError."""
    return sorted(filter(None, (step_of_directory(Path(name)) for name in remote.folders())), reverse=True)


def find(remote: Remote, step: int, key: VerifyKey | None = None) -> Found | None:
    """Return a step's checkpoint with all files at their sizes; None: its manifest is not there. Raises CorruptCheckpoint, RemoteError."""
    folder = step_directory_name(step)
    where = remote.place(f"{folder}/{MANIFEST_NAME}")
    content = remote.read(f"{folder}/{MANIFEST_NAME}")
    if content is None:
        return None
    signature = remote.read(f"{folder}/{SIGNATURE_NAME}")
    manifest = from_bytes(content, where, key, signature)
    if manifest.step != step:
        raise CorruptCheckpoint(f"{where} says step {manifest.step}")
    sizes = remote.sizes(folder)
    for file in manifest.files:
        if sizes.get(file.name) != file.nbytes:
            raise CorruptCheckpoint(
                f"{remote.place(folder)}/{file.name} has {sizes.get(file.name, 'no')} bytes, expected {file.nbytes}"
            )
    return Found(folder, manifest, content, signature)


def fetch_newest(
    remote: Remote,
    directory: Path,
    *,
    above: int,
    below: int | None = None,
    key: VerifyKey | None = None,
    on_skip: Callable[[str, str], None],
    progress: Progress = lambda done, total: None,
) -> Path | None:
    """Fetch the newest whole checkpoint between two steps, both excluded; return its path; None: there is none.

    `on_skip`: called with the URL of each newer one that is not whole, and why. Raises RemoteError, OSError.
    """
    for step in steps_of(remote):
        if step <= above or (below is not None and step >= below):
            continue
        try:
            found = find(remote, step, key)
            if found is not None:
                return fetch(remote, found, directory, progress)
        except CorruptCheckpoint as error:
            on_skip(remote.place(step_directory_name(step)), str(error))
    return None


def fetch(remote: Remote, found: Found, directory: Path, progress: Progress = lambda done, total: None) -> Path:
    """Fetch one checkpoint and publish it in `directory`; return its path. Raises CorruptCheckpoint, RemoteError, OSError."""
    final = directory / found.folder
    work = directory / f"{found.folder}_tmp_mirror_{uuid.uuid4().hex[:12]}"
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory).free < found.manifest.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
    work.mkdir()
    try:
        _fetch_files(remote, found, work, progress)
        if found.signature is not None:
            write_durably(work / SIGNATURE_NAME, found.signature)
        write_durably(work / MANIFEST_NAME, found.content)
        fsync_directory(work)
        verify(work, deep=False)
        if final.is_dir():  # it was not valid, or not all of it is here
            supersede(final) if found.manifest.hosts else os.rename(final, free_name(final, "_broken_"))
        os.rename(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    fsync_directory(directory)
    advance_tracker(directory, found.manifest.step)
    return final


def check_sums(remote: Remote, found: Found, progress: Progress = lambda done, total: None) -> None:
    """Read every file and compare its checksum, keeping nothing. Raises CorruptCheckpoint, RemoteError."""
    _each_file(remote, found, lambda file, chunk: None, progress)


def _fetch_files(remote: Remote, found: Found, work: Path, progress: Progress) -> None:
    def keep(file: FileEntry, chunk: bytes) -> None:
        with open(work / file.name, "ab") as stream:
            stream.write(chunk)

    for file in found.manifest.files:
        (work / file.name).touch()
    _each_file(remote, found, keep, progress)
    for file in found.manifest.files:
        with open(work / file.name, "rb") as stream:
            os.fsync(stream.fileno())


def _each_file(remote: Remote, found: Found, keep: Callable[[FileEntry, bytes], None], progress: Progress) -> None:
    """Read all files, some at a time; `keep` takes each file's bytes in order. Raises CorruptCheckpoint for the first that is not as recorded."""
    total, done, lock, failed = found.manifest.nbytes, 0, threading.Lock(), threading.Event()

    def read(file: FileEntry) -> None:
        nonlocal done
        arrived, name = checksum.for_file(file), f"{found.folder}/{file.name}"
        try:
            for chunk in remote.chunks(name, file.nbytes):
                if failed.is_set():
                    return
                arrived.update(chunk)
                keep(file, chunk)
                with lock:
                    done += len(chunk)
                    progress(done, total)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{remote.place(name)} is missing") from None
        if arrived.text != file.checksum:
            raise CorruptCheckpoint(
                f"{remote.place(name)} was altered since rank {file.rank} wrote it: checksum {arrived.text}, expected {file.checksum}"
            )

    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="ttp-mirror") as readers:
        try:
            for reading in as_completed([readers.submit(read, file) for file in found.manifest.files]):
                reading.result()
        except BaseException:
            failed.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise
