"""The incident of ranks that saved a step without a controller, as lines that a controller's journal would have.

Owns what is believed of rank 0's account: a checkpoint only if its manifest is on disk. Never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttp.checkpoint.format.manifest import Manifest, read_manifest
from ttp.errors import CheckpointError
from ttp.launch.fault_story import NOTICE, Line
from ttp.proto.messages import EXIT_CODE_PERSISTED
from ttp.saved_alone import SavedAlone, cause_text

_OF_THE_START = ("registered", "assembled")


def lines_of(account: SavedAlone, lines: Sequence[Line]) -> list[Line]:
    """Return an attempt's lines as if a controller had led the save. `lines`: of the controllers, which were all lost before: of
    theirs, only those about the beginning count."""
    ranks = list(range(account.world_size))
    found: list[Line] = [line for line in lines if line["event"] in _OF_THE_START]

    def add(unix_s: float, event: str, **fields: Any) -> None:
        found.append({"unix_s": unix_s, "event": event, "fields": fields, "controller": 0})

    began_unix_s = min(account.began_unix_s, account.unix_s)  # a clock that was set back meanwhile
    text = f"SIGTERM; {cause_text(account.step)}"
    for rank in account.noticed or ranks:
        add(began_unix_s, "fault_reported", rank=rank, kind=NOTICE, text=text, detail="")
    each = {"phases": ["DONE"] * len(ranks), "steps": [account.step] * len(ranks)}
    add(began_unix_s, "frozen", ranks=ranks, **each, records=[account.step])
    manifest, why = _on_disk(account)
    if manifest is not None:
        for rank in sorted({file.rank for file in manifest.files}):
            nbytes = sum(file.nbytes for file in manifest.files if file.rank == rank)
            add(account.unix_s, "written", rank=rank, bytes=nbytes)
        add(account.unix_s, "published", step=account.step, path=account.path)
    else:
        add(account.unix_s, "refused", reason=f"no controller led the ranks, and {why}", goes_on_from=account.newest)
    add(account.unix_s, "exit_sent", code=EXIT_CODE_PERSISTED, reason=why, ranks=ranks)
    return found


def _on_disk(account: SavedAlone) -> tuple[Manifest | None, str]:
    """Return the manifest of the checkpoint, or why there is none."""
    if not account.path:
        return None, account.error
    try:
        manifest = read_manifest(Path(account.path))
    except (CheckpointError, OSError) as error:
        return None, f"what they saved is not on disk: {error}"
    if manifest.step != account.step:
        return None, f"{account.path} is of step {manifest.step}, expected step {account.step}"
    return manifest, ""
