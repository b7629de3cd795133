"""`manifest.json`: what a checkpoint holds, why it was written, and the trainer's host state.

Owns the manifest's format and its checked reading. Never touches tensors. The file carries a SHA-256 of its own content,
so that an altered manifest is told from a true one; floats survive exactly (shortest repr, or hex in the commit record).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ttp.checkpoint.durable import write_durably
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import Cause, CauseKind, CommitRecord, FileEntry

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_NON_FINITE = "__float__"  # JSON has no NaN and infinities: {"__float__": "nan"}

T = TypeVar("T")
JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    dtype: str
    """torch's name without the module: `float32`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about one published checkpoint but the tensors' bytes.

    `files` lists every file of the directory but the manifest; `state` is the trainer's and the optimizer's host state
    (tuples come back as lists); `record` is the commit record of `step`, where one survived.
    """

    step: int
    cause: Cause
    layout: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorSpec]
    state: Mapping[str, Any]
    record: CommitRecord | None
    created_unix_s: float
    attempt: str
    """Name of the temporary directory that it was written in: the attempt, for the logs."""
    term: int
    versions: Mapping[str, str]
    """Of torch and ttp, at writing."""
    hosts: tuple[str, ...] = ()
    """Every rank's node, where each node has directories of its own: this one then holds the files of its ranks (a
    *piece*), and `tensors` is what lies in those. Empty: the directory holds all files."""
    start: int = 0
    """Of a piece: which start of a job wrote it. Rises from start to start, over all jobs of these directories."""
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def to_bytes(manifest: Manifest) -> bytes:
    """Return the file's content. Raises CheckpointError naming a value that JSON cannot carry."""
    record = manifest.record
    body: dict[str, JSON] = {
        "format_version": manifest.format_version,
        "step": manifest.step,
        "cause": {
            "kind": manifest.cause.kind.value,
            "ranks": list(manifest.cause.ranks),
            "text": manifest.cause.text,
        },
        "created_unix_s": float(manifest.created_unix_s),
        "attempt": manifest.attempt,
        "term": manifest.term,
        "versions": dict(manifest.versions),
        "hosts": list(manifest.hosts),
        "start": manifest.start,
        "layout": _encode(manifest.layout, "layout"),
        "record": None if record is None else _encode_record(record),
        "state": _encode(manifest.state, "state"),
        "files": [asdict(file) for file in manifest.files],
        "tensors": {
            key: {"dtype": spec.dtype, "shape": list(spec.shape)} for key, spec in sorted(manifest.tensors.items())
        },
    }
    return (json.dumps({"sha256": _digest(body), **body}, indent=1, allow_nan=False) + "\n").encode()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it durably into `directory` (its name becomes durable with the directory's fsync)."""
    write_durably(directory / MANIFEST_NAME, to_bytes(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises CorruptCheckpoint when it is missing, altered, or of an unknown version."""
    path = directory / MANIFEST_NAME
    if path.exists() and not path.is_file():  # a pipe would never end
        raise CorruptCheckpoint(f"{path} is no file: {directory} was damaged")
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpoint(f"{path} is missing: {directory} was never published, or was damaged") from None
    return from_bytes(content, str(path))


def from_bytes(content: bytes, where: str) -> Manifest:
    """Check and parse the file's content; `where` names it in errors. Raises CorruptCheckpoint."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} is not JSON ({error}): it is truncated or altered") from None
    if not isinstance(body, dict):
        raise CorruptCheckpoint(f"{where} holds a {type(body).__name__}: wanted a JSON object")
    version = body.get("format_version")
    if version != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{where} has format version {version!r}; this ttp reads version {FORMAT_VERSION}. "
            "Read it with the ttp that wrote it (see `versions` in the file)"
        )
    digest = body.pop("sha256", None)
    if digest != _digest(body):
        raise CorruptCheckpoint(f"{where} was altered: its content has sha256 {_digest(body)}, it says {digest}")
    try:
        return _parse(body)
    except KeyError as error:
        raise CorruptCheckpoint(f"{where}: field {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{where}: a field has a wrong type or value: {error}") from None


def _parse(body: dict[str, JSON]) -> Manifest:
    cause = _object(body, "cause")
    record = body["record"]
    return Manifest(
        step=_typed(body, "step", int),
        cause=Cause(CauseKind(cause["kind"]), _ints(cause["ranks"], "cause.ranks"), _typed(cause, "text", str)),
        layout=_decoded(body, "layout"),
        files=tuple(
            FileEntry(
                _typed(f, "name", str), _typed(f, "nbytes", int), _typed(f, "sha256", str), _typed(f, "rank", int)
            )
            for f in _objects(body["files"], "files")
        ),
        tensors={
            key: TensorSpec(_typed(spec, "dtype", str), _ints(spec["shape"], f"tensors.{key}.shape"))
            for key in _object(body, "tensors")
            for spec in [_object(_object(body, "tensors"), key)]
        },
        state=_decoded(body, "state"),
        record=None if record is None else _decode_record(_object(body, "record")),
        created_unix_s=_typed(body, "created_unix_s", float),
        attempt=_typed(body, "attempt", str),
        term=_typed(body, "term", int),
        hosts=_texts(body["hosts"], "hosts"),
        start=_typed(body, "start", int),
        versions={key: _typed(_object(body, "versions"), key, str) for key in _object(body, "versions")},
    )


def _encode_record(record: CommitRecord) -> JSON:
    return {
        "step": record.step,
        "grad_norm": record.grad_norm.hex(),
        "clip_factor": record.clip_factor.hex(),
        "skipped": record.skipped,
        "loss_scale": record.loss_scale.hex(),
        "learning_rates": [x.hex() for x in record.learning_rates],
        "sums": [x.hex() for x in record.sums],
    }


def _decode_record(fields: dict[str, JSON]) -> CommitRecord:
    def hexes(name: str) -> tuple[float, ...]:
        values = fields[name]
        if not isinstance(values, list):
            raise TypeError(f"record.{name} is {values!r}, wanted a list")
        return tuple(float.fromhex(str(value)) for value in values)

    return CommitRecord(
        step=_typed(fields, "step", int),
        grad_norm=float.fromhex(_typed(fields, "grad_norm", str)),
        clip_factor=float.fromhex(_typed(fields, "clip_factor", str)),
        skipped=_typed(fields, "skipped", bool),
        loss_scale=float.fromhex(_typed(fields, "loss_scale", str)),
        learning_rates=hexes("learning_rates"),
        sums=hexes("sums"),
    )


def _digest(body: Mapping[str, JSON]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _encode(value: object, path: str) -> JSON:
    """Turn plain values into JSON that comes back exactly (tuples as lists)."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_NON_FINITE: repr(value)}
        case list() | tuple():
            return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str) or key == _NON_FINITE:
                    raise CheckpointError(f"{path} has the key {key!r}: wanted strings (JSON), and not {_NON_FINITE!r}")
            return {key: _encode(item, f"{path}.{key}") for key, item in value.items()}
        case _:
            raise CheckpointError(
                f"{path} is a {type(value).__name__}: a manifest carries numbers, strings, booleans, None, lists and "
                "dictionaries. Put tensors among the held tensors"
            )


def _decode(value: JSON) -> JSON:
    match value:
        case list():
            return [_decode(item) for item in value]
        case dict():
            if value.keys() == {_NON_FINITE}:
                return float(str(value[_NON_FINITE]))
            return {key: _decode(item) for key, item in value.items()}
        case _:
            return value


def _decoded(fields: Mapping[str, JSON], name: str) -> dict[str, JSON]:
    value = _decode(_object(fields, name))
    return _object({name: value}, name)


def _typed(fields: Mapping[str, JSON], name: str, kind: type[T]) -> T:
    value = fields[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} is {value!r}, wanted {kind.__name__}")
    return value


def _object(fields: Mapping[str, JSON], name: str) -> dict[str, JSON]:
    value = fields[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {value!r}, wanted an object")
    return value


def _objects(value: JSON, name: str) -> list[dict[str, JSON]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError(f"{name} is {value!r}, wanted a list of objects")
    return [item for item in value if isinstance(item, dict)]


def _texts(value: JSON, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} is {value!r}, wanted a list of names")
    return tuple(item for item in value if isinstance(item, str))


def _ints(value: JSON, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise TypeError(f"{name} is {value!r}, wanted a list of integers")
    return tuple(item for item in value if isinstance(item, int))
