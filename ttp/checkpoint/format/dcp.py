"""The bridge to `torch.distributed.checkpoint` (DCP): planners for explicit boxes, and its metadata file.

Owns every contact with DCP's classes. Uses no collective and no process group; decides nothing about when or what to
save. `.metadata` is a pickle: it is read by an unpickler that knows DCP's own classes and nothing else, so that a
checkpoint can never run code.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ttp.checkpoint.format import checksum
from ttp.checkpoint.format.durable import open_regular, write_durably
from ttp.checkpoint.format.file_index import BlobEntry, Contents, TensorEntry
from ttp.checkpoint.format.keys import nested_path
from ttp.checkpoint.format.tiling import Box, boxes_of
from ttp.checkpoint.format.types import HeldTensor
from ttp.errors import CheckpointMismatch, CorruptCheckpoint
from ttp.inputs import checked
from ttp.proto.messages import FileEntry

METADATA_NAME = ".metadata"


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box to write: its place in the tensor `held.key`, and its elements (1-D, on the holder's device)."""

    held: HeldTensor
    box: Box

    @property
    def values(self) -> torch.Tensor:
        begin = self.box.start - self.held.start
        return self.held.values[begin : begin + self.box.numel]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.held.values.element_size()


class BoxSavePlanner(DefaultSavePlanner):
    """Plans the writing of explicit boxes and blobs; one plan is one file.

    `to_cpu` is called with each box's elements, by the writing thread, in the plan's order.
    """

    def __init__(
        self,
        boxes: Sequence[HeldBox],
        blobs: Mapping[str, bytes],
        to_cpu: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._boxes = {(held_box.held.key, held_box.box.offsets): held_box for held_box in boxes}
        self._blobs = blobs
        self._to_cpu = to_cpu

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._blobs]
        for held_box in self._boxes.values():
            held, box = held_box.held, held_box.box
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=held.values.dtype), torch.Size(held.shape))
            items.append(WriteItem(MetadataIndex(held.key, box.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._blobs[index.fqn])
        held_box = self._boxes[index.fqn, tuple(index.offset or ())]
        return self._to_cpu(held_box.values.detach()).view(held_box.box.sizes)


class _YieldingPickler(pickle.Pickler):
    """Lets other threads run: torch's own `pickle.dump` of a million boxes holds the interpreter for seconds on end, and a
    publisher that sends no heartbeat meanwhile counts as dead. The bytes are the same."""

    def __init__(self, stream: IO[bytes], advance: Callable[[int], None]) -> None:
        super().__init__(stream)
        self._advance = advance

    def persistent_id(self, value: object) -> None:
        self._advance(1)


def write_metadata(
    directory: Path,
    contents: Contents,
    final_path: str,
    save_id: str,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write `.metadata` (fsync) from what all writers wrote, so that stock `dcp.load` reads `directory`.

    The checkpoint's place is recorded as plain text: torch's writer pickles a `Path`, which another version of Python may
    not be able to read.
    """
    metadata = metadata_of(contents)
    metadata.storage_meta = StorageMeta(checkpoint_id=final_path, save_id=save_id)
    stream = io.BytesIO()
    _YieldingPickler(stream, advance).dump(metadata)
    write_durably(directory / METADATA_NAME, stream.getvalue())


def metadata_of(contents: Contents) -> Metadata:
    """Return torch's index of what all writers wrote."""
    blobs: dict[str, BlobEntry] = {}
    for entry in contents.blobs:
        blobs.setdefault(entry.key, entry)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Any] = {}
    for e in sorted(contents.tensors, key=lambda e: (e.key, e.offsets)):
        description = described.get(e.key)
        if description is None:
            size = torch.Size(e.shape)
            description = TensorStorageMetadata(TensorProperties(dtype=dtype_of(e.dtype)), size, [])
            described[e.key] = description
        assert isinstance(description, TensorStorageMetadata)
        offsets = torch.Size(e.offsets)
        stored[MetadataIndex(e.key, offsets, len(description.chunks))] = _place(e)
        description.chunks.append(ChunkStorageMetadata(offsets, torch.Size(e.sizes)))
    for key in sorted(blobs):
        described[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = _place(blobs[key])
    metadata = Metadata(described, planner_data={key: nested_path(key) for key in described}, storage_data=stored)
    if (version := getattr(dcp_filesystem, "CURRENT_DCP_VERSION", None)) is not None:  # not in older torch
        metadata.version = version
    return metadata


def _place(entry: TensorEntry | BlobEntry) -> Any:
    # DCP's reader unpickles exactly this class, so its name and its first three fields are part of the file format.
    return dcp_filesystem._StorageInfo(entry.file, entry.position, entry.length)


def dtype_of(name: str) -> torch.dtype:
    """Turn `float32` into torch.float32. Raises CorruptCheckpoint for a name that is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f"{checked.shown(name)} is not the name of a torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DCP_CLASSES = {
    "torch.distributed.checkpoint.metadata": frozenset(
        [
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        ]
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(["_StorageInfo"]),
    "torch.serialization": frozenset(["_get_layout"]),
    "torch": frozenset(["Size"]),
    "pathlib": frozenset(["PosixPath", "PurePosixPath"]),
    "pathlib._local": frozenset(["PosixPath", "PurePosixPath"]),
    "collections": frozenset(["OrderedDict"]),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _DCP_CLASSES.get(module, ()):
            return super().find_class("pathlib" if module == "pathlib._local" else module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")


def read_metadata(path: Path, entry: FileEntry | None) -> Metadata:
    """Read a checkpoint's `.metadata` without running code from it. Raises CorruptCheckpoint, OSError.

    entry: what the manifest says of the file; nothing is unpickled before size and checksum are right. None: a checkpoint that torch wrote
    alone, which has no checksums.
    """
    file = path / METADATA_NAME
    try:
        with open_regular(file) as stream:
            content = stream.readall() if entry is None else _exactly(stream, file, entry)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{file} is missing") from None
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CorruptCheckpoint(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if type(metadata) is not Metadata:
        raise CorruptCheckpoint(f"{file} is not the metadata of a torch checkpoint: got a {type(metadata).__name__}")
    try:
        _check_structure(metadata)
    except (ValueError, AttributeError, TypeError) as error:  # an attribute may be missing, or unhashable
        raise CorruptCheckpoint(f"{file}: {error}") from None
    return metadata


def _exactly(stream: io.FileIO, file: Path, entry: FileEntry) -> bytes:
    content = bytearray()
    while len(content) <= entry.nbytes and (more := stream.read(entry.nbytes + 1 - len(content))):
        content += more
    if len(content) != entry.nbytes:
        raise CorruptCheckpoint(f"{file} was altered: got another size, expected {entry.nbytes} bytes")
    found = checksum.for_file(entry)
    found.update(content)
    checksum.check(file, entry, found.text)
    return bytes(content)


def _check_structure(metadata: Metadata) -> None:
    """Raise ValueError for what torch's own writer does not write; the unpickler builds its classes from any values."""
    if type(metadata.state_dict_metadata) is not dict or type(metadata.storage_data) is not dict:
        raise ValueError("got no tables of tensors and places, expected two mappings")
    for key, description in metadata.state_dict_metadata.items():
        where = checked.string(key, "key")
        if type(description) is BytesStorageMetadata:
            continue
        if type(description) is not TensorStorageMetadata or type(description.chunks) is not list:
            raise checked.Invalid(where, description, "a tensor or plain values")
        if not isinstance(description.properties.dtype, torch.dtype):
            raise checked.Invalid(f"{where}.dtype", description.properties.dtype, "a torch dtype")
        checked.integers(list(description.size), f"{where}.size")
        for chunk in description.chunks:
            if not checked.are_naturals((*chunk.offsets, *chunk.sizes)):
                raise checked.Invalid(where, [chunk.offsets, chunk.sizes], "a box of integers >= 0")
    for index, place in metadata.storage_data.items():
        where = checked.string(index.fqn, "place")
        name = checked.string(place.relative_path, where)
        if name in ("", ".", "..") or "/" in name:
            raise ValueError(f"{where} is recorded in {checked.shown(name)}, outside the checkpoint")
        if not checked.are_naturals((place.offset, place.length)):
            raise checked.Invalid(where, [place.offset, place.length], "two integers >= 0")


def check_shape(where: object, key: str, found: Sequence[int] | None, expected: Sequence[int] | None) -> None:
    """Compare a tensor of a checkpoint with the job's; None: one has no such tensor. Raises CheckpointMismatch."""
    if found is not None and expected is not None and tuple(found) == tuple(expected):
        return
    if found is None:
        text = f"{where} has no tensor {key!r} (expected, of shape {tuple(expected or ())})"
    elif expected is None:
        text = f"{where} has a tensor {key!r} of shape {tuple(found)} that this job has not"
    else:
        text = f"{where}: {key!r} has shape {tuple(found)}, expected {tuple(expected)}"
    raise CheckpointMismatch(
        f"{text}: it was written by another model or optimizer; start with the configuration that wrote it, or name another checkpoint"
    )


class RunLoadPlanner(LoadPlanner):
    """Fills flat runs from stored boxes, whatever the cuts: reads every stored box that is needed exactly once.

    Calls, in order: `set_up_planner`, `create_local_plan`, then the reader calls `resolve_tensor` (where to put a stored
    box: a scratch tensor of its size) and `commit_tensor` (copy from it what the runs need) for every item.
    """

    def __init__(self, targets: Sequence[HeldTensor], where: str) -> None:
        self._targets = targets
        self._where = where
        self._metadata: Metadata | None = None
        self._uses: dict[MetadataIndex, list[tuple[HeldTensor, Box, ReadItem]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.filled = [0] * len(targets)
        """Elements copied so far, by target."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads. Raises CheckpointMismatch naming the first key or shape that differs."""
        assert self._metadata is not None
        self._uses.clear()
        chunks: dict[MetadataIndex, ChunkStorageMetadata] = {}
        for number, target in enumerate(self._targets):
            description = self._described(target)
            self._dtypes[target.key] = description.properties.dtype
            boxes = boxes_of(target)
            expected = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            for item in create_read_items_for_chunk_list(target.key, description, expected):
                stored, box = item.storage_index, boxes[item.dest_index.index or 0]
                chunks[stored] = description.chunks[stored.index or 0]
                self._uses.setdefault(stored, []).append((target, box, item))
                self.filled[number] += math.prod(item.lengths)
        return LoadPlan([self._whole(stored, chunk) for stored, chunk in chunks.items()])

    def _described(self, target: HeldTensor) -> TensorStorageMetadata:
        assert self._metadata is not None
        description = self._metadata.state_dict_metadata.get(target.key)
        found = tuple(description.size) if isinstance(description, TensorStorageMetadata) else None
        check_shape(self._where, target.key, found, target.shape)
        assert isinstance(description, TensorStorageMetadata)
        return description

    @staticmethod
    def _whole(stored: MetadataIndex, chunk: ChunkStorageMetadata) -> ReadItem:
        zeros = torch.Size([0] * len(chunk.sizes))
        return ReadItem(LoadItemType.TENSOR, stored, zeros, stored, zeros, chunk.sizes)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn}: no blob was planned to be read")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self._dtypes[read_item.storage_index.fqn])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        for target, box, use in self._uses[read_item.storage_index]:
            begin = box.start - target.start
            local = target.values.detach()[begin : begin + box.numel].view(box.sizes)
            for axis, length in enumerate(use.lengths):
                local = local.narrow(axis, use.dest_offsets[axis], length)
            source = tensor
            for axis, length in enumerate(use.lengths):
                source = source.narrow(axis, use.storage_offsets[axis], length)
            local.copy_(source)


def files_of_runs(path: Path, targets: Sequence[HeldTensor], metadata: Metadata) -> set[str]:
    """Return the names of the files that `read_runs` would read. Raises as it does."""
    planner = RunLoadPlanner(targets, str(path))
    planner.set_up_planner({}, metadata, is_coordinator=True)
    items = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


def read_runs(path: Path, targets: Sequence[HeldTensor], metadata: Metadata) -> None:
    """Fill the targets' values from the checkpoint at `path`, converting dtypes. Raises as `RunLoadPlanner` does, or
    CorruptCheckpoint; the values are then undefined. `metadata`: torch's index, as `read_metadata` returns it."""
    planner = RunLoadPlanner(targets, str(path))
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    for target, filled in zip(targets, planner.filled, strict=True):
        if filled != target.values.numel():
            raise CorruptCheckpoint(
                f"{path}: {target.values.numel() - filled} elements of {target.key!r} are stored nowhere or more than once"
            )
    try:
        reader.read_data(planner.finish_plan(reader.prepare_local_plan(plan)), planner).wait()
    except torch.OutOfMemoryError:
        raise
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path}: {error.filename} is missing") from None
    except OSError:
        raise
    except Exception as error:  # a damaged archive raises anything
        raise CorruptCheckpoint(f"{path}: its tensors cannot be read: {type(error).__name__}: {error}") from error


def read_blobs(path: Path, metadata: Metadata) -> dict[str, object]:
    """Return the plain values of a checkpoint by key, without running code from it. Raises CorruptCheckpoint."""
    found: dict[tuple[str, int], object] = {}
    blobs: dict[str, object] = {}
    for key, description in metadata.state_dict_metadata.items():
        if not isinstance(description, BytesStorageMetadata):
            continue
        place = metadata.storage_data.get(MetadataIndex(key))
        if place is None:
            raise CorruptCheckpoint(f"{path / METADATA_NAME}: {key!r} is stored nowhere")
        where = (place.relative_path, place.offset)
        if where not in found:  # many keys share one value
            with open(path / place.relative_path, "rb") as stream:
                stream.seek(place.offset)
                content = stream.read(place.length)
            try:
                found[where] = torch.load(io.BytesIO(content), weights_only=True)
            except Exception as error:  # a damaged archive raises anything
                text = f"{path / place.relative_path}: {key!r} cannot be read: {type(error).__name__}: {error}"
                raise CorruptCheckpoint(text) from error
        blobs[key] = found[where]
    return blobs
