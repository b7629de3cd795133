"""A checkpoint that keepers write of copies: what each rank's keeper has written of it, and its publication.

Owns the file with which a keeper reports its share, and what of a copy's host state goes into the manifest. Copies may come from another node, and
shares from another process: what cannot be read is a CheckpointError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttp.checkpoint.format.durable import write_durably
from ttp.checkpoint.format.keys import param_group_blobs
from ttp.checkpoint.format.signature import keys_at
from ttp.checkpoint.publish import publish
from ttp.copies.region import Region
from ttp.errors import CheckpointError, ConfigError
from ttp.inputs import checked
from ttp.inputs.input_file import read_json
from ttp.proto.messages import Cause, CommitRecord, FileEntry, ShareResult

MOST_BYTES = 64 << 20
"""Of a share's file."""
_UNREADABLE = (ConfigError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What a host state, or a description, may raise that is not as ranks write it."""


def share_name(rank: int) -> str:
    """Return the name of the file in which one rank's keeper says what it has written."""
    return f"share_{rank}.json"


def write_share_file(folder: Path, rank: int, share: Mapping[str, Any]) -> None:
    """Write what `read_share` reads, durable but for its name. Raises OSError."""
    fields = {name: [asdict(file) for file in value] if name == "files" else value for name, value in share.items()}
    write_durably(folder / share_name(rank), json.dumps(fields).encode())


def read_share(path: Path) -> dict[str, Any]:
    """Return what one rank's keeper has written: `files`, or an `error`. Raises CheckpointError, OSError."""
    try:
        share = checked.mapping(read_json(path, MOST_BYTES), "share")
        if "error" in share:
            return {"error": checked.string(share["error"], "error") or "unknown"}
        return {"files": [_file(*each) for each in checked.items(*checked.field(share, "files", ""))]}
    except ValueError as error:
        raise CheckpointError(f"{path} is invalid: {error}. Save again") from None


def _file(value: object, path: str) -> FileEntry:
    fields = checked.mapping(value, path)
    name, checksum, digest = (
        checked.string(*checked.field(fields, each, path)) for each in ("name", "checksum", "digest")
    )
    nbytes, rank = (checked.integer(*checked.field(fields, each, path)) for each in ("nbytes", "rank"))
    return FileEntry(checked.file_name(name, f"{path}.name"), nbytes, checksum, rank, digest)


def publish_copy(
    region: Region, slot: int, place: Mapping[str, Any], cause: Cause, results: Sequence[ShareResult]
) -> str:
    """Make shares of a step a checkpoint, with the host state of one copy of it; return its path. Raises CheckpointError."""
    copy, what = region.read(slot), region.description
    if copy is None or what is None:
        raise CheckpointError(f"the copy of step {place['step']} is gone")
    facts = what.facts
    try:
        kept = json.loads(copy.state)
        state, blobs = kept["state"], param_group_blobs(_named_groups(kept["state"], facts["param_names"]))
        record = _record(kept["record"])
        expected = {key: tuple(shape) for key, shape in facts["expected"].items()}
        layout, keys = facts["layout"], keys_at(facts["sign_key"], facts["verify_key"])
    except _UNREADABLE as error:
        raise CheckpointError(
            f"the copy of step {place['step']} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None
    return publish(
        place["directory"],
        place["tmp_name"],
        step=copy.step,
        results=results,
        cause=cause,
        record=record,
        state=state,
        layout=layout,
        blobs=blobs,
        rank=what.rank,
        term=place["term"],
        expected=expected,
        passed_over=facts["passed_over"],
        keys=keys,
    )


def _named_groups(state: Mapping[str, Any], param_names: Sequence[Any]) -> list[dict[str, Any]]:
    groups = state["optimizer"]["param_groups"]
    return [{**group, "params": names} for group, names in zip(groups, param_names, strict=True)]


def _record(value: object) -> CommitRecord | None:
    """Return the commit record of the step; None: there is none. Raises ValueError."""
    if value is None:
        return None
    fields = checked.mapping(value, "record")

    def number(name: str) -> float:
        return _float(*checked.field(fields, name, "record"))

    def numbers(name: str) -> tuple[float, ...]:
        return tuple(_float(*each) for each in checked.items(*checked.field(fields, name, "record")))

    return CommitRecord(
        checked.integer(*checked.field(fields, "step", "record")), number("grad_norm"), number("clip_factor"),
        checked.boolean(*checked.field(fields, "skipped", "record")), number("loss_scale"), numbers("learning_rates"), numbers("sums"),
    )  # fmt: skip


def _float(value: object, path: str) -> float:
    """Return a number, which may be NaN: that of a step that was skipped."""
    if type(value) not in (int, float):
        raise checked.Invalid(path, value, "a number")
    return float(value)  # type: ignore[arg-type]
