"""Tell a valid checkpoint from a broken one, and a whole set of shares from one with holes.

Owns the checks, from cheap to dear: manifest, names and sizes, torch's metadata and completeness, checksums. Changes
nothing.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.checksum import check_file
from ttp.checkpoint.format.durable import step_of_directory
from ttp.checkpoint.format.file_index import Contents
from ttp.checkpoint.format.manifest import Manifest, TensorSpec, read_manifest
from ttp.checkpoint.format.signature import VerifyKey
from ttp.checkpoint.format.tiling import tiling_error
from ttp.errors import CorruptCheckpoint
from ttp.proto.messages import FileEntry

Progress = Callable[[int, int], None]
"""Called with (bytes checked so far, bytes to check)."""


def verify(
    path: str | os.PathLike[str],
    *,
    deep: bool = True,
    share: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    key: VerifyKey | None = None,
) -> Manifest:
    """Check a published checkpoint and return its manifest. Raises CorruptCheckpoint naming what is broken.

    A node's part (its manifest names hosts) is judged by what is there: whether the rest exists, only all nodes together can say.

    deep: compare checksums as well as names, sizes and completeness.
    share: (i, n): do only the i-th of n nearly equal parts of the dear work, so that n ranks can do it together; the
    checkpoint is valid when all n find nothing. Names and sizes are checked by all, completeness by the first.
    key: who must have signed it; the files' checksums are SHA-256 then.
    """
    root = Path(path)
    index, count = share
    if not 0 <= index < count:
        raise ValueError(f"share is {share}: expected (i, n) with 0 <= i < n")
    if not root.is_dir():
        raise CorruptCheckpoint(f"{root} is not a directory: no checkpoint is there")
    manifest = read_manifest(root, key)
    named = step_of_directory(root)
    if named is not None and named != manifest.step:
        raise CorruptCheckpoint(f"{root} is named for step {named}, its manifest says step {manifest.step}")
    here = files_here(root, manifest)
    if not manifest.hosts:
        metadata_entry(root, manifest)
        if index == 0:
            _check_completeness(root, manifest)
    if deep:
        check_sums(root, share_of_files(here, index, count), progress)
    return manifest


def files_here(root: Path, manifest: Manifest) -> tuple[FileEntry, ...]:
    """Return which files are here, at their full sizes: all, or of a node's part those of its ranks. Raises CorruptCheckpoint."""
    found = []
    for file in manifest.files:
        try:
            nbytes = (root / file.name).stat().st_size
        except FileNotFoundError:
            if manifest.hosts:
                continue
            raise CorruptCheckpoint(f"{root / file.name} is missing; rank {file.rank} wrote it") from None
        if nbytes != file.nbytes:
            what = "truncated" if nbytes < file.nbytes else "longer than written"
            raise CorruptCheckpoint(
                f"{root / file.name} is {what}: it has {nbytes} bytes, expected {file.nbytes}; rank {file.rank} wrote it"
            )
        found.append(file)
    return tuple(found)


def share_of_files(files: Sequence[FileEntry], index: int, count: int) -> list[FileEntry]:
    """Return the i-th of n parts of `files`, nearly equal in bytes; all parts together are all files."""
    loads = [(0, part) for part in range(count)]
    mine = []
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        load, part = heapq.heappop(loads)
        heapq.heappush(loads, (load + file.nbytes, part))
        if part == index:
            mine.append(file)
    return mine


def metadata_entry(root: Path, manifest: Manifest) -> FileEntry:
    """Return what the manifest says of torch's index. Raises CorruptCheckpoint."""
    for file in manifest.files:
        if file.name == dcp.METADATA_NAME:
            return file
    raise CorruptCheckpoint(f"{root}: the manifest does not list {dcp.METADATA_NAME}")


def _check_completeness(root: Path, manifest: Manifest) -> None:
    """torch's metadata describes exactly the manifest's tensors, each stored whole and once, in files that are there."""
    metadata = dcp.read_metadata(root, metadata_entry(root, manifest))
    sizes = {file.name: file.nbytes for file in manifest.files}
    described: dict[str, TensorSpec] = {}
    for key, description in metadata.state_dict_metadata.items():
        if isinstance(description, BytesStorageMetadata):
            _check_place(root, metadata, MetadataIndex(key), sizes)
            continue
        described[key] = TensorSpec(dcp.dtype_name(description.properties.dtype), tuple(description.size))
        error = tiling_error(description.size, [(chunk.offsets, chunk.sizes) for chunk in description.chunks])
        if error is not None:
            raise CorruptCheckpoint(f"{root}: {key!r}: {error}")
        for chunk in description.chunks:
            _check_place(root, metadata, MetadataIndex(key, chunk.offsets), sizes)
    for key in sorted(described.keys() | manifest.tensors.keys()):
        if described.get(key) != manifest.tensors.get(key):
            raise CorruptCheckpoint(
                f"{root}: {key!r} is {described.get(key)} in {dcp.METADATA_NAME} and {manifest.tensors.get(key)} in the "
                "manifest"
            )


def _check_place(root: Path, metadata: Metadata, index: MetadataIndex, sizes: dict[str, int]) -> None:
    place = metadata.storage_data.get(index)
    if place is None:
        raise CorruptCheckpoint(f"{root}: {index.fqn!r} at {index.offset} is stored nowhere")
    if not 0 <= place.offset < place.offset + place.length <= sizes.get(place.relative_path, -1):
        raise CorruptCheckpoint(
            f"{root}: {index.fqn!r} is recorded at bytes {place.offset} to {place.offset + place.length} of "
            f"{place.relative_path}, which has {sizes.get(place.relative_path, 'no')} bytes"
        )


def check_sums(root: Path, files: Sequence[FileEntry], progress: Progress | None = None) -> None:
    """Read files and compare their checksums. Raises CorruptCheckpoint naming the first that was altered; OSError."""
    total, done = sum(file.nbytes for file in files), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for file in files:
        check_file(root / file.name, file, advance)


def check_complete(contents: Contents, expected: Mapping[str, Sequence[int]] | None = None) -> dict[str, TensorSpec]:
    """Prove by exact arithmetic that the shares hold every tensor exactly once; return what each tensor is.

    expected: shape by key; None: whatever the shares name. Raises CorruptCheckpoint naming the first hole, overlap,
    contradiction or missing key. Blobs may be there more than once: the first one counts.
    """
    files = {file.name: file for file in contents.files}
    if len(files) != len(contents.files):
        raise CorruptCheckpoint("two shares name the same file: every writer must use names of its own")
    specs: dict[str, TensorSpec] = {}
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    places: dict[str, list[tuple[int, int, str]]] = {}
    for entry in contents.tensors:
        spec = specs.setdefault(entry.key, TensorSpec(entry.dtype, entry.shape))
        if spec != TensorSpec(entry.dtype, entry.shape):
            raise CorruptCheckpoint(
                f"{entry.key!r} is {spec.dtype} of {spec.shape} in one share and {entry.dtype} of {entry.shape} in another"
            )
        dcp.dtype_of(entry.dtype)
        boxes.setdefault(entry.key, []).append((entry.offsets, entry.sizes))
        places.setdefault(entry.file, []).append((entry.position, entry.length, entry.key))
    for blob in contents.blobs:
        if blob.file not in files or not 0 <= blob.position <= blob.position + blob.length <= files[blob.file].nbytes:
            raise CorruptCheckpoint(f"blob {blob.key!r} is recorded outside the file {blob.file}")
    _check_places(places, files)
    for key, shape in sorted((expected or {}).items()):
        if key not in specs:
            raise CorruptCheckpoint(f"{key!r} of shape {tuple(shape)} is in no share: no live holder wrote it")
        if specs[key].shape != tuple(shape):
            raise CorruptCheckpoint(f"{key!r} has shape {specs[key].shape} in the shares, expected {tuple(shape)}")
    for key, spec in sorted(specs.items()):
        if expected is not None and key not in expected:
            raise CorruptCheckpoint(f"{key!r} of shape {spec.shape} is in a share but belongs to no expected tensor")
        # An empty tensor has nothing that could be there twice.
        error = tiling_error(spec.shape, boxes[key][:1] if math.prod(spec.shape) == 0 else boxes[key])
        if error is not None:
            raise CorruptCheckpoint(f"{key!r}: {error}")
    return specs


def _check_places(places: Mapping[str, list[tuple[int, int, str]]], files: Mapping[str, FileEntry]) -> None:
    """Every box has bytes of its own within a listed file."""
    for name, spans in sorted(places.items()):
        if name not in files:
            raise CorruptCheckpoint(f"{spans[0][2]!r} is recorded in {name}, which no share lists")
        end = 0
        for position, length, key in sorted(spans):
            if position < end or length <= 0 or position + length > files[name].nbytes:
                raise CorruptCheckpoint(
                    f"{key!r} is recorded at bytes {position} to {position + length} of {name}, which has "
                    f"{files[name].nbytes} bytes and whose last box ended at {end}"
                )
            end = position + length
