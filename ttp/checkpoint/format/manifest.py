"""`manifest.json`: what a checkpoint holds, why it was written, and the trainer's host state.

Owns the manifest's format and its schema: what is read is checked in full, once, here. Never touches tensors. The file carries a SHA-256 of its own content,
so that an altered manifest is found; floats survive exactly (shortest repr, or hex in the commit record).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttp.checkpoint.format import checksum
from ttp.checkpoint.format.durable import open_regular, write_durably
from ttp.checkpoint.format.signature import SignKey, VerifyKey, read_signature
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.inputs import checked
from ttp.proto.messages import Cause, CauseKind, CommitRecord, FileEntry

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
_READABLE = (1, FORMAT_VERSION)
"""Of version 1 every file has `sha256`; since version 2 it has `checksum`, which names its algorithm, and `sha256` besides where it is signed."""
_NON_FINITE = "__float__"  # JSON has no NaN and infinities: {"__float__": "nan"}
_LAST_UNIX_S = 2.0**36
"""Of the year 4147: calendars end at 9999."""
_INTEGER_BITS = 8192
"""Of integers in the host state: Python does not read more than 4,300 digits."""

JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    dtype: str
    """torch's name without the module: `float32`."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


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
    """Name of the staging directory that it was written in."""
    term: int
    versions: Mapping[str, str]
    """Of torch and ttp, at writing."""
    hosts: tuple[str, ...] = ()
    """Every rank's node, where each node has directories of its own: this one then holds the files of its ranks (a
    *part*), and `tensors` is what is in those. Empty: the directory holds all files."""
    start: int = 0
    """Of a part: which attempt of a job wrote it. Rises from attempt to attempt, over all jobs of these directories."""
    launch: str = ""
    """Of a part: the launch of ttprun that wrote it; empty: an older version's."""
    finite: bool | None = None
    """No saved tensor holds NaN or infinity; None: not known (an older version's checkpoint)."""
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def to_bytes(manifest: Manifest) -> bytes:
    """Return the file's content. Raises CheckpointError naming a value that could not be read again."""
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
        "launch": manifest.launch,
        "finite": manifest.finite,
        "layout": _encode(manifest.layout, "layout"),
        "record": None if record is None else _encode_record(record),
        "state": _encode(manifest.state, "state"),
        "files": [file_fields(file) for file in manifest.files],
        "tensors": {
            key: {"dtype": spec.dtype, "shape": list(spec.shape)} for key, spec in sorted(manifest.tensors.items())
        },
    }
    try:
        _parse(body)
    except ValueError as error:
        raise CheckpointError(f"manifest of step {manifest.step}: {error}") from None
    return (json.dumps({"sha256": _digest(body), **body}, indent=1, allow_nan=False) + "\n").encode()


def file_fields(file: FileEntry) -> dict[str, JSON]:
    """Return what a manifest has of a file."""
    fields: dict[str, JSON] = {"name": file.name, "nbytes": file.nbytes, "checksum": file.checksum, "rank": file.rank}
    return {**fields, "sha256": file.digest} if file.digest else fields


def check_json_value(value: object, path: str) -> None:
    """Check that a manifest can carry a value within its state. Raises CheckpointError naming what it cannot."""
    _encode(value, path, 3)


def write_manifest(directory: Path, manifest: Manifest, like: os.stat_result | None = None) -> bytes:
    """Write it durably into `directory` (its name becomes durable with the directory's fsync); return the file's content. `like`: as
    `write_durably` takes it."""
    content = to_bytes(manifest)
    write_durably(directory / MANIFEST_NAME, content, like=like)
    return content


def sign_manifest(
    directory: Path, manifest: Manifest, content: bytes, key: SignKey, like: os.stat_result | None = None
) -> None:
    """Sign what `write_manifest` has written, as durably; `like` as there. Raises CheckpointError where a file has no SHA-256; OSError."""
    for file in manifest.files:
        if not checksum.digest_of(file):
            raise CheckpointError(f"{file.name} has no SHA-256: rank {file.rank} wrote it without TTP_SIGN_KEY")
    key.write_signature(directory, content, like)


def read_manifest(directory: Path, key: VerifyKey | None = None) -> Manifest:
    """Read a checkpoint's manifest. Raises CorruptCheckpoint when it is missing, altered, or violates the schema; OSError.

    key: as `from_bytes` takes it.
    """
    signature = None if key is None else read_signature(directory)
    return from_bytes(read_bytes(directory), str(directory / MANIFEST_NAME), key, signature)


def read_bytes(directory: Path) -> bytes:
    """Return the content of a checkpoint's manifest. Raises CorruptCheckpoint when it is missing; OSError."""
    path = directory / MANIFEST_NAME
    try:
        with open_regular(path) as stream:
            return stream.readall()
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpoint(f"{path} is missing: {directory} was never published, or was damaged") from None


def from_bytes(content: bytes, where: str, key: VerifyKey | None = None, signature: bytes | None = None) -> Manifest:
    """Check and parse the file's content; `where` names it in errors. Raises CorruptCheckpoint, with the path of the key.

    key: who must have signed it; the checksum of each file is its SHA-256 then, so that whoever compares it relies on the signature.
    """
    if key is None:
        return _from_bytes(content, where)
    key.check(content, signature, where)
    manifest = _from_bytes(content, where)
    for file in manifest.files:
        if not checksum.digest_of(file):
            raise CorruptCheckpoint(f"{where} is signed and has no SHA-256 of {file.name}: expected one of every file")
    sums = (f"{checksum.SHA256}:{checksum.digest_of(file)}" for file in manifest.files)
    files = tuple(replace(file, checksum=text) for file, text in zip(manifest.files, sums, strict=True))
    return replace(manifest, files=files)


def _from_bytes(content: bytes, where: str) -> Manifest:
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
        checked.check_depth(body, "content")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} is not JSON ({error}): it is truncated or altered") from None
    if not isinstance(body, dict):
        raise CorruptCheckpoint(f"{where}: content: got a {type(body).__name__}, expected a JSON object")
    version = body.pop("format_version", None)
    if type(version) is not int or version not in _READABLE:
        raise CorruptCheckpoint(
            f"{where}: format_version: got {checked.shown(version)}, expected {' or '.join(map(str, _READABLE))}. Read it with the ttp that"
            " wrote it (see `versions` in the file)"
        )
    recorded, digest = body.pop("sha256", None), _digest({"format_version": version, **body})
    if recorded != digest:
        raise CorruptCheckpoint(
            f"{where} was altered: got content of sha256 {digest}, expected {checked.shown(recorded)}"
        )
    try:
        return _parse(body)
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse(body: dict[str, Any]) -> Manifest:
    """The schema. Raises ValueError naming the key's path."""

    def get(name: str) -> tuple[Any, str]:
        return checked.field(body, name, "")

    cause, record = checked.mapping(*get("cause")), get("record")[0]
    try:
        kind = CauseKind(checked.string(*checked.field(cause, "kind", "cause")))
    except ValueError:
        raise checked.Invalid(
            "cause.kind", cause.get("kind"), f"one of {', '.join(each.value for each in CauseKind)}"
        ) from None
    versions = checked.mapping(*get("versions"))
    hosts = tuple(checked.string(host, where) for host, where in checked.items(*get("hosts")))
    files = _parse_files(*get("files"), len(hosts))
    if hosts and not files:
        raise checked.Invalid("files", [], "the files of all nodes")
    return Manifest(
        step=checked.integer(*get("step")),
        cause=Cause(
            kind,
            checked.integers(*checked.field(cause, "ranks", "cause")),
            checked.string(*checked.field(cause, "text", "cause")),
        ),
        layout=checked.mapping(_decode(*get("layout")), "layout"),
        files=files,
        tensors={
            checked.string(key, "tensors"): _parse_spec(value, f"tensors.{key}")
            for key, value in checked.mapping(*get("tensors")).items()
        },
        state=_parse_state(*get("state")),
        record=None if record is None else _parse_record(record, "record"),
        created_unix_s=checked.number(*get("created_unix_s"), least=0, most=_LAST_UNIX_S),
        attempt=checked.string(*get("attempt")),
        term=checked.integer(*get("term")),
        hosts=hosts,
        start=checked.integer(*get("start")),
        launch=checked.string(body.get("launch", ""), "launch"),
        finite=checked.optional_boolean(body.get("finite"), "finite"),
        versions={
            checked.string(key, "versions"): checked.string(value, f"versions.{key}") for key, value in versions.items()
        },
    )


def _parse_files(value: object, path: str, world_size: int) -> tuple[FileEntry, ...]:
    """`world_size`: how many ranks have a host; 0: the directory has the files of all."""
    files: dict[str, FileEntry] = {}
    for item, where in checked.items(value, path):
        fields = checked.mapping(item, where)
        name = checked.file_name(*checked.field(fields, "name", where))
        sums = _parse_checksums(fields, where)
        if name in files:
            raise checked.Invalid(f"{where}.name", name, "a name that no other file has")
        nbytes = checked.integer(*checked.field(fields, "nbytes", where))
        rank = checked.integer(*checked.field(fields, "rank", where))
        if world_size and rank >= world_size:
            raise checked.Invalid(f"{where}.rank", rank, f"a rank below {world_size}, as many as `hosts` has")
        files[name] = FileEntry(name, nbytes, sums[0], rank, sums[1])
    return tuple(files.values())


def _parse_checksums(fields: dict[str, Any], path: str) -> tuple[str, str]:
    """Return a file's checksum, and its SHA-256 where that is recorded besides."""
    digits = ""
    if checksum.SHA256 in fields:
        digits = checked.string(*checked.field(fields, checksum.SHA256, path))
        checksum.parse(f"{checksum.SHA256}:{digits}", f"{path}.{checksum.SHA256}")
    if digits and "checksum" not in fields:  # version 1
        return f"{checksum.SHA256}:{digits}", ""
    return checksum.parse(*checked.field(fields, "checksum", path)), digits


def _parse_spec(value: object, path: str) -> TensorSpec:
    fields = checked.mapping(value, path)
    shape = checked.integers(*checked.field(fields, "shape", path))
    if math.prod(shape) > checked.INT64_MAX:
        raise checked.Invalid(f"{path}.shape", list(shape), "fewer than 2**63 elements")
    return TensorSpec(checked.string(*checked.field(fields, "dtype", path)), shape)


def _parse_state(value: object, path: str) -> dict[str, Any]:
    """The optimizer's and the trainer's; what a trainer puts into its own, `Session.resume(check=...)` judges."""
    state = checked.mapping(_decode(value, path), path)
    checked.mapping(*checked.field(state, "trainer", path))
    optimizer = checked.mapping(*checked.field(state, "optimizer", path))
    where = f"{path}.optimizer"
    for item, group_path in checked.items(*checked.field(optimizer, "param_groups", where)):
        _check_param_group(checked.mapping(item, group_path), group_path)
    if (scale := optimizer.get("loss_scale")) is not None:
        fields, scale_path = checked.mapping(scale, f"{where}.loss_scale"), f"{where}.loss_scale"
        checked.number(*checked.field(fields, "scale", scale_path), least=0)
        checked.integer(*checked.field(fields, "good_steps", scale_path))
        checked.integer(fields.get("forgiven", 0), f"{scale_path}.forgiven")
    return state


def _check_param_group(group: dict[str, Any], path: str) -> None:
    """The settings of torch's own optimizers are numbers, lists of numbers or None; others are the optimizer's matter."""
    for name in ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum"):
        value = group.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str | list | dict):
                raise checked.Invalid(f"{path}.{name}", value, "a number or a list of numbers")


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


def _parse_record(value: object, path: str) -> CommitRecord:
    fields = checked.mapping(value, path)

    def exact(value: object, where: str) -> float:
        try:
            return float.fromhex(checked.string(value, where))
        except (ValueError, OverflowError):
            raise checked.Invalid(where, value, "a float in hexadecimal") from None

    def exacts(name: str) -> tuple[float, ...]:
        return tuple(exact(item, where) for item, where in checked.items(*checked.field(fields, name, path)))

    return CommitRecord(
        step=checked.integer(*checked.field(fields, "step", path)),
        grad_norm=exact(*checked.field(fields, "grad_norm", path)),
        clip_factor=exact(*checked.field(fields, "clip_factor", path)),
        skipped=checked.boolean(*checked.field(fields, "skipped", path)),
        loss_scale=exact(*checked.field(fields, "loss_scale", path)),
        learning_rates=exacts("learning_rates"),
        sums=exacts("sums"),
    )


def _digest(body: Mapping[str, JSON]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return checksum.sha256(canonical.encode()).hex()


def _encode(value: object, path: str, depth: int = 2) -> JSON:
    """Turn plain values into JSON that comes back exactly (tuples as lists). `depth`: levels around the value."""
    match value:
        case None | bool() | str():
            return value
        case int() if value.bit_length() <= _INTEGER_BITS:
            return value
        case float():
            return value if math.isfinite(value) else {_NON_FINITE: repr(value)}
        case list() | tuple() | Mapping() if depth > checked.DEEPEST:
            raise CheckpointError(f"{path} is nested too deep: expected at most {checked.DEEPEST} levels")
        case list() | tuple():
            return [_encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str) or key == _NON_FINITE:
                    raise CheckpointError(
                        f"{path} has the key {key!r}: expected strings (JSON), and not {_NON_FINITE!r}"
                    )
            return {key: _encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        case int():
            raise CheckpointError(
                f"{path} is an integer of {value.bit_length()} bits: expected at most {_INTEGER_BITS}"
            )
        case _:
            raise CheckpointError(
                f"{path} is a {type(value).__name__}: expected a plain value: numbers, strings, booleans, None, lists and dictionaries."
                " Put tensors among the held tensors"
            )


def _decode(value: Any, path: str) -> Any:
    """Return what `_encode` was given."""
    match value:
        case list():
            return [_decode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        case dict():
            if _NON_FINITE not in value:
                return {key: _decode(item, f"{path}.{key}") for key, item in value.items()}
            if len(value) > 1 or value[_NON_FINITE] not in ("nan", "inf", "-inf"):
                raise checked.Invalid(path, value, f"{_NON_FINITE} of nan, inf or -inf alone")
            return float(value[_NON_FINITE])
        case _:
            return value
