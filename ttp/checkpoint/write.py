"""Write one rank's share of a checkpoint, durable and checksummed, without a collective.

Owns the way from a rank's memory to `*.distcp` files, and the memory of shares that a later staging directory of the same step links
instead of writing them again. Runs on any thread while the training thread may be stuck; never changes a tensor, never publishes.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from ttp.checkpoint.format import file_index
from ttp.checkpoint.format.checksum import Checksum
from ttp.checkpoint.format.dcp import BoxSavePlanner, HeldBox, dtype_name
from ttp.checkpoint.format.durable import fsync_directory
from ttp.checkpoint.format.file_index import BlobEntry, TensorEntry
from ttp.checkpoint.format.manifest import check_json_value
from ttp.checkpoint.format.tiling import boxes_of
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.host_copy import HostCopier
from ttp.checkpoint.staging import claimed, make_staging
from ttp.errors import CheckpointError, NotWritable
from ttp.proto.messages import FileEntry, Part, ShareResult
from ttp.text.wording import size_text

CPU = torch.device("cpu")
FILE_BYTES = 512 << 20
"""A share is cut into files of about this size: torch's writer keeps a host copy of a whole file's tensors at once."""
BOX_BYTES = 128 << 20
"""Larger boxes are cut: a reader loads a stored box whole, however little of it is expected."""
SYNC_BYTES = 64 << 20
"""A file's blocks are on their way to the disk every so many bytes: else the disk waits for the writer, then the writer for the disk."""
BLOCK_BYTES = 1 << 20
"""Bytes are hashed and written in blocks of this size, which stay in the processor's cache in between."""


def write_share(
    directory: str | os.PathLike[str],
    tmp_name: str,
    rank: int,
    tensors: Sequence[HeldTensor],
    blobs: Mapping[str, object],
    *,
    suffix: str = "0",
    make: bool = True,
    advance: Callable[[int], None] = lambda count: None,
    digests: bool = False,
    copier: HostCopier | None = None,
) -> ShareResult:
    """Write tensors and blobs into `directory/tmp_name/__<rank>_<suffix>_<n>.distcp`; durable on return.

    tmp_name: the staging directory (`iter_0000042_tmp_NAME`), made if it is not there; other ranks write into
    it at the same time. An existing file is never touched: `n` is the first free number.
    advance: called with bytes written, on the calling thread.
    make: False for a publisher, which must find the directory that it claimed or fail.
    digests: take the SHA-256 of each file besides its checksum, for a signature.
    blobs: plain values (numbers, strings, booleans, None, and lists, tuples and dictionaries of them) by key.
    copier: brings tensors of a device to the host; may be left out where all tensors are on the CPU.
    Called by the processor's work thread with the gate closed, so that the values are stable.
    Raises NotWritable when the file system refuses (the share's files are removed again, so that a full disk gets its
    space back), CheckpointError for a blob that is not plain, a name that is not a staging directory's, or a link in the directory's place.
    """
    if not re.fullmatch(r"[\w.-]*", suffix):
        raise ValueError(f"suffix is {suffix!r}: expected letters, digits, '_', '-' and '.'")
    root = Path(directory)
    path = root / tmp_name if make else claimed(root, tmp_name)
    boxes = [HeldBox(held, box) for held in tensors for box in boxes_of(held, BOX_BYTES // held.values.element_size())]
    packed, aliases = _pack_blobs(blobs)
    written: list[_Target] = []
    try:
        if make:
            make_staging(root, tmp_name)
        copier = copier or HostCopier(CPU)
        with ThreadPoolExecutor(1, thread_name_prefix="ttp-sync") as beside:
            for number, batch in enumerate(_batches(boxes) or [[]]):
                if batch or (packed and number == 0):
                    written.append(_Target(path, f"__{rank}_{suffix}", advance, beside, digests))
                    _write_file(written[-1], batch, packed if number == 0 else {}, aliases, copier)
                    for earlier in written[-2:-1]:  # the disk has had a whole file's time for it
                        earlier.finish()
            for last in written[-1:]:
                last.finish()
        fsync_directory(path)
    except BaseException as error:
        for target in written:
            target.discard()
        if isinstance(error, OSError):
            raise NotWritable(_refusal(rank, path, error)) from error
        raise
    return ShareResult(tuple(FileEntry(each.name, each.nbytes, each.checksum, rank, each.digest) for each in written))


def _batches(boxes: Sequence[HeldBox]) -> list[list[HeldBox]]:
    """Cut the boxes, in order, into files of about FILE_BYTES."""
    batches: list[list[HeldBox]] = []
    room = 0
    for box in boxes:
        if not batches or box.nbytes > room:
            batches.append([])
            room = FILE_BYTES
        batches[-1].append(box)
        room -= box.nbytes
    return batches


def _pack_blobs(blobs: Mapping[str, object]) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """Serialize each distinct value once; return {first key: bytes} and {first key: all keys with that value}.

    The hyperparameters of a thousand parameters are a handful of values: their entries share the bytes.
    """
    packed: dict[str, bytes] = {}
    aliases: dict[str, list[str]] = {}
    first_of: dict[str, str] = {}
    for key, value in blobs.items():
        check_json_value(value, f"blob {key!r}")
        _ExactPickler(io.BytesIO()).dump(value)
        first = first_of.setdefault(repr(value), key)
        aliases.setdefault(first, []).append(key)
        if first == key:
            stream = io.BytesIO()
            torch.save(value, stream)
            packed[key] = stream.getvalue()
    return packed, aliases


class _ExactPickler(pickle.Pickler):
    """Refuses a subclass of a plain type: its class would be pickled by name, and loading it would run code."""

    def reducer_override(self, value: object) -> Any:
        raise CheckpointError(f"invalid blob: got a {type(value).__name__}, expected a plain value. Convert it")


def _write_file(
    target: _Target,
    batch: Sequence[HeldBox],
    packed: Mapping[str, bytes],
    aliases: Mapping[str, Sequence[str]],
    copier: HostCopier,
) -> None:
    """Write one file by DCP's own writer, with its table of contents; durable when `target` is finished. Raises OSError."""

    def to_cpu(values: torch.Tensor) -> torch.Tensor:
        target.raise_error()  # no use in copying more once the disk has refused
        copied = copier(values)
        finite.append(is_finite(copied))
        return copied

    finite: list[bool] = []

    planner = BoxSavePlanner(batch, packed, to_cpu)
    # No copy-ahead: torch would copy on the current stream and keep the elements in an order of its own.
    # No fsync yet: the table comes after it.
    writer = FileSystemWriter(target.path, sync_files=False, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
    writer.fs = target
    writer.set_up_storage_writer(False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    (plan,) = writer.prepare_global_plan([plan])
    try:
        results = writer.write_data(planner.finish_plan(plan), planner).value()
    except Exception:
        target.raise_error()  # the disk's own words, rather than what torch made of them
        raise
    target.raise_error()
    dtypes = {box.held.key: (dtype_name(box.held.values.dtype), tuple(box.held.shape)) for box in batch}
    sizes = {(box.held.key, box.box.offsets): box.box.sizes for box in batch}
    tensors: list[TensorEntry] = []
    blobs: list[BlobEntry] = []
    for r in results:
        key, place = r.index.fqn, r.storage_data
        if key in packed:
            blobs += [BlobEntry(name, target.name, place.offset, place.length) for name in aliases[key]]
            continue
        offsets = tuple(r.index.offset or ())
        dtype, shape = dtypes[key]
        size = sizes[key, offsets]
        tensors.append(TensorEntry(key, dtype, shape, offsets, size, target.name, place.offset, place.length))
    target.seal(file_index.to_bytes(tensors, blobs, all(finite)))


def is_finite(values: torch.Tensor) -> bool:
    """Say whether no element is NaN or infinity, in one pass without a copy. -inf counts as finite beside other values: masks have it."""
    if not values.is_floating_point() or not values.numel():
        return True
    highest = float((values.float() if values.element_size() == 1 else values).max())  # of NaN and anything: NaN
    return math.isfinite(highest)


def _refusal(rank: int, path: Path, error: OSError) -> str:
    try:
        free = f"{size_text(shutil.disk_usage(path.parent).free)} are free"
    except OSError:
        free = "its free space is unknown"
    return (
        f"rank {rank} cannot write into {path}: {error.strerror or error} ({free}); "
        f"make room in {path.parent} or list another checkpoint directory after it"
    )


class _Target(FileSystem):
    """The one file that DCP's writer writes next: names it, takes its checksum on the way, and keeps the disk's first refusal.

    torch's archive writer turns an OSError of its stream into a message about positions; so the stream never raises: it
    keeps the error, drops what follows, and `raise_error` raises it.
    """

    def __init__(
        self, path: Path, stem: str, advance: Callable[[int], None], beside: ThreadPoolExecutor, digests: bool
    ) -> None:
        self.path = path
        self._digests = digests
        self._advance = advance
        self._beside = beside
        self.name = ""
        self.nbytes = 0
        self.checksum = self.digest = ""
        self._stem = stem
        self._stream: _SummedStream | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        self._stream = _SummedStream(self._open_new(), self._beside, self._advance, Checksum(digest=self._digests))
        yield self._stream

    def seal(self, table: bytes) -> None:
        """Put the table at the file's end. Raises OSError."""
        assert self._stream is not None
        self._stream.seal(table)
        self.raise_error()
        self.nbytes, checksum = self._stream.position, self._stream.checksum
        self.checksum, self.digest = checksum.text, checksum.digest

    def finish(self) -> None:
        """Make the file durable and close it. Raises OSError."""
        assert self._stream is not None
        self._stream.finish()
        self.raise_error()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: a directory that went away belongs to another publisher, and must not come back half empty."""

    def _open_new(self) -> IO[bytes]:
        number = 0
        while True:
            name = f"{self._stem}_{number}.distcp"
            try:
                file = io.BufferedWriter(io.FileIO(self.path / name, "x"), BLOCK_BYTES)
            except FileExistsError:
                number += 1
            else:
                self.name = name  # from here on it is ours to discard
                return file

    def raise_error(self) -> None:
        if self._stream is not None and self._stream.error is not None:
            raise self._stream.error

    def discard(self) -> None:
        """Remove the file, whole or not."""
        if self._stream is not None:
            self._stream.release()
        if self.name:
            with contextlib.suppress(OSError):
                os.unlink(self.path / self.name)


class _SummedStream(io.RawIOBase):
    """Writes to a file, and takes the checksum of what was meant to be in it. Never raises: see `_Target`."""

    def __init__(
        self, file: IO[bytes], beside: ThreadPoolExecutor, advance: Callable[[int], None], checksum: Checksum
    ) -> None:
        super().__init__()
        self._advance = advance
        self.checksum = checksum
        self.position = 0
        self.error: OSError | None = None
        self._file = file
        self._beside = beside
        self._synced_to = 0
        self._sync: Future[None] | None = None

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        view = memoryview(block).cast("B")
        for begin in range(0, len(view), BLOCK_BYTES):
            part = view[begin : begin + BLOCK_BYTES]
            self.position += len(part)
            if self.error is None:
                self._write_block(part)
        return len(view)

    def _write_block(self, block: memoryview) -> None:
        """Hash it, and write it while it is in the processor's cache."""
        self.checksum.update(block)
        try:
            self._file.write(block)
        except OSError as error:
            self.error = error
            return
        self._advance(len(block))
        if self.position - self._synced_to >= SYNC_BYTES:
            self._start_sync()

    def _start_sync(self) -> None:
        """Have the disk work on what is there while the rest is written, if it is not busy with what was there before."""
        if self._sync is not None and not self._sync.done():
            return
        self._end_sync()
        if self.error is None:
            self._synced_to = self.position
            self._sync = self._beside.submit(os.fdatasync, self._file.fileno())

    def _end_sync(self) -> None:
        """Wait for it. The system names an error once: a later fsync may not fail for it again."""
        try:
            if self._sync is not None:
                self._sync.result()
        except OSError as error:
            self.error = self.error or error

    def flush(self) -> None:
        if self.error is None and not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self.error = error

    def tell(self) -> int:
        return self.position

    def fileno(self) -> int:
        return self._file.fileno()

    def seal(self, table: bytes) -> None:
        """Write what comes after torch's part, and send it on its way to the disk. Called after torch has closed the stream."""
        self.write(table)
        self.flush()
        self._end_sync()
        if self.error is None:
            self._sync = self._beside.submit(os.fdatasync, self._file.fileno())

    def finish(self) -> None:
        """Make all durable and close."""
        self._end_sync()
        try:
            if self.error is None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
        self.release()

    def release(self) -> None:
        """Close the file; after an error without another try to write what is buffered."""
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error


@dataclass(frozen=True, slots=True)
class WrittenShare:
    """What one write order left behind, durable: files never change, so that two names of one do no harm."""

    directory: str
    tmp_name: str
    parts: frozenset[Part]
    result: ShareResult


def link_files(directory: str, share: WrittenShare, tmp_name: str) -> bool:
    """Hard-link all files of a share into another staging directory; False, with nothing left there, where one cannot be: the directory is
    published or gone, or on another file system."""
    root = Path(directory)
    linked: list[Path] = []
    try:
        make_staging(root, tmp_name)
        for file in share.result.files:
            name = root / tmp_name / file.name
            os.link(root / share.tmp_name / file.name, name)
            linked.append(name)
            if name.stat().st_size != file.nbytes:
                raise OSError(f"{name} is not what was written")
        fsync_directory(root / tmp_name)
    except OSError:
        for name in linked:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return False
    return True


class WrittenShares:
    """One rank's shares of one step, in whatever staging directories. Used by one thread.

    A controller that dies in the middle of a dump is replaced, and its successor orders the step to be written anew, in a directory of its
    own: what this rank has written by then gets a second name there, and no byte is written again.
    """

    def __init__(self, link: Callable[[str, WrittenShare, str], bool] = link_files) -> None:
        """`link(directory, share, tmp_name)`: see `link_files`; the simulation has disks of its own."""
        self._link = link
        self._step = -1
        self._shares: list[WrittenShare] = []

    def add(self, step: int, share: WrittenShare) -> None:
        """Remember a share; those of every other step are forgotten."""
        if step != self._step:
            self._step, self._shares = step, []
        self._shares.append(share)

    def take(self, step: int, directory: str, tmp_name: str, parts: Iterable[Part]) -> tuple[ShareResult, set[Part]]:
        """Link what is there into `directory/tmp_name`; return it, and the parts that remain to be written.

        The files are durable under their new names when this returns.
        """
        left = set(parts)
        result = ShareResult(())
        for share in self._shares if step == self._step else []:
            if share.directory != directory or not share.parts <= left:
                continue
            if share.tmp_name != tmp_name and self._link(directory, share, tmp_name):
                left -= share.parts
                result = merge_results(result, share.result)
        return result, left


def merge_results(first: ShareResult, second: ShareResult) -> ShareResult:
    """Return both shares as one."""
    return ShareResult(first.files + second.files)
