"""A folder in an object store, by fsspec: reads, uploads that are whole or not there, and puts of names that must be new.

Owns every call to fsspec, its retries, and the text of its errors, in which no credential is quoted. Knows no checkpoint. Credentials are the library's
matter (environment, profile, instance role). Imports no torch: the mirror process is small.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from ttp.checkpoint.format.durable import fsync_directory, step_of_directory
from ttp.config import credentials
from ttp.mirror.url import S3, check_url

PART_BYTES = 16 << 20
"""Of a multipart upload; four at a time are in memory."""
CHUNK_BYTES = 8 << 20
"""Read at a time."""
_PARTS_AT_ONCE = 4
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{12}")


class RemoteError(OSError):
    """The store did not do what was asked, after all tries."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that has not ended."""

    folder: str
    name: str
    """The file's, once it is whole."""
    id: str
    """The store's name of the upload; of a folder on a file system: the unfinished file's."""


def error_text(error: BaseException) -> str:
    """Return an error of a library as one line without credentials."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for secret in credentials():
        text = text.replace(secret, "***")
    return re.sub(r"//[^/@\s]*@", "//", text)[:400]


class Remote:
    """One folder of a store. Names are relative to it."""

    def __init__(self, url: str, *, name: str = "TTP_MIRROR", tries: int = 4) -> None:
        """Nothing is connected. `tries`: of each call, with pauses that double. Raises ConfigError."""
        self.url = check_url(url, name)
        self._scheme = self.url.partition(":")[0]
        self._tries = tries
        options: dict[str, Any] = {}
        if self._scheme in S3:  # s3fs's own repetition multiplies botocore's: one of them is enough
            options = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 3}}}
        self._fs, self._root = fsspec.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True, **options)
        if self._scheme in S3:
            self._fs.retries = 1
        self._local = self._scheme in ("file", "local")
        self.conditional = True
        """The store refuses a second put of a name that must be new."""

    def place(self, name: str) -> str:
        """Return the URL of a name."""
        return f"{self.url}/{name}"

    def folders(self) -> list[str]:
        """Return the names of the folders. Raises RemoteError, also where the bucket is not there: an empty answer would be taken for a new one."""
        found = self._listed("")
        if not found and self._scheme in S3:
            bucket, of = self._root.partition("/")[0], {"MaxKeys": 1}
            self._call("", self._needed, self._fs.call_s3, "list_objects_v2", Bucket=bucket, **of)
        return [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file of a folder, by name; empty: it is not there. Raises RemoteError."""
        found = self._listed(folder)
        return {str(e["name"]).rpartition("/")[2]: int(e["size"] or 0) for e in found if e["type"] == "file"}

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None: it is not there. Raises RemoteError."""
        try:
            content: bytes = self._call(name, self._fs.cat_file, self._path(name))
        except FileNotFoundError:
            return None
        return content

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Raises RemoteError, FileNotFoundError."""
        content: bytes = (
            self._call(name, self._fs.cat_file, self._path(name), start=start, end=end) if start < end else b""
        )
        return content

    def chunks(self, name: str, nbytes: int) -> Iterator[bytes]:
        """Yield a file's first bytes in order; each chunk is retried by itself. Raises RemoteError, FileNotFoundError."""
        for start in range(0, nbytes, CHUNK_BYTES):
            yield self.read_range(name, start, min(start + CHUNK_BYTES, nbytes))

    def put(self, path: Path, name: str) -> None:
        """Upload a file; its name is there when it is whole. Raises RemoteError, and OSError of `path`."""
        with open(path, "rb"):  # its own errors are not the store's
            pass
        target = self._path(name)
        if self._local:
            self._call(name, self._needed, _copy_locally, path, Path(target))
            return
        sizes = {"chunksize": PART_BYTES, "max_concurrency": _PARTS_AT_ONCE} if self._scheme in S3 else {}
        self._call(name, self._needed, self._fs.put_file, str(path), target, **sizes)

    def put_new(self, name: str, content: bytes) -> bool:
        """Put a file that must not be there; False: it is (perhaps by a try whose answer was lost). Raises RemoteError."""
        try:
            return bool(self._call(name, self._needed, self._put_new, self._path(name), content))
        except RemoteError:
            if self.read(name) is None:
                raise
            return False  # some stores refuse it by another error

    def check_conditional(self) -> None:
        """Find out whether the store can be written, and refuses a second put: sets `conditional`. Raises RemoteError."""
        probe = f".ttp_probe_{uuid.uuid4().hex[:12]}"
        try:
            self.put_new(probe, b"1")
            self.put_new(probe, b"2")
            self.conditional = self.read(probe) == b"1"
        finally:
            self.remove(probe)

    def remove(self, name: str) -> None:
        """Remove a file or a whole folder; nothing where it is gone. Raises RemoteError."""
        try:
            self._call(name, self._fs.rm, self._path(name), recursive=True)
        except FileNotFoundError:
            return

    def unfinished(self) -> list[Unfinished]:
        """Return what interrupted or running uploads, of whatever program, have so far of files in published steps' folders. Raises RemoteError."""
        if self._local:
            left = [path for path in Path(self._root).glob("*/.*") if _UNFINISHED.fullmatch(path.name)]
            found = [Unfinished(path.parent.name, path.name[1:-13], path.name) for path in left]
        elif self._scheme in S3:
            bucket, _, prefix = self._root.partition("/")
            of = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else ""}
            uploads = self._call("", self._fs.call_s3, "list_multipart_uploads", **of).get("Uploads", [])
            parts = [(each["Key"].removeprefix(of["Prefix"]).split("/"), each["UploadId"]) for each in uploads]
            found = [Unfinished(names[0], names[1], upload) for names, upload in parts if len(names) == 2]
        else:
            found = []
        return [each for each in found if step_of_directory(Path(each.folder)) is not None]

    def abort(self, upload: Unfinished) -> None:
        """Remove what an upload has so far: it cannot be finished then. Raises RemoteError."""
        name = f"{upload.folder}/{upload.name}"
        if self._local:
            (Path(self._root) / upload.folder / upload.id).unlink(missing_ok=True)
            return
        bucket, _, key = self._path(name).partition("/")
        of = {"Bucket": bucket, "Key": key, "UploadId": upload.id}
        self._call(name, self._fs.call_s3, "abort_multipart_upload", **of)

    @staticmethod
    def _needed(act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what needs its folder: that it is not there is an error of the store."""
        try:
            return act(*args, **kwargs)
        except FileNotFoundError as error:
            raise RemoteError(str(error)) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self._call(folder, self._fs.ls, self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return found

    def _put_new(self, path: str, content: bytes) -> bool:
        if self._local:
            return _link_new(Path(path), content)
        if not self.conditional:
            if self._fs.exists(path):
                return False
            self._fs.pipe_file(path, content)
            return True
        try:
            self._fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        return True

    def _call(self, name: str, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do it, again after a failure that may pass. Raises RemoteError, FileNotFoundError."""
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(self._tries)):
            try:
                return act(*args, **kwargs)
            except FileNotFoundError:
                raise
            except Exception as error:
                if not left or isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                    raise RemoteError(f"{self.place(name)}: {error_text(error)}") from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _neighbour(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")


def _copy_locally(source: Path, path: Path) -> None:
    unfinished = _neighbour(path)
    shutil.copyfile(source, unfinished)
    _sync(unfinished)
    os.replace(unfinished, path)
    fsync_directory(path.parent)


def _link_new(path: Path, content: bytes) -> bool:
    unfinished = _neighbour(path)
    try:
        unfinished.write_bytes(content)
        _sync(unfinished)
        os.link(unfinished, path)
    except FileExistsError:
        return False
    finally:
        unfinished.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
