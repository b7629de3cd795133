"""The report of ranks that saved a step without a controller.

Owns the check of rank 0's account: a checkpoint counts only if its manifest is on disk. Never writes.
"""

from __future__ import annotations

from pathlib import Path

from ttp.checkpoint.format.durable import step_of_directory
from ttp.checkpoint.format.manifest import Manifest, read_manifest
from ttp.errors import CheckpointError
from ttp.exchange.saved_alone import SavedAlone, cause_text
from ttp.launch.report.incident import NOTICE, Report
from ttp.proto.incident import Culprit, Incident, RankPlace, Saved

_DONE = "DONE"


def report_of_save(start: int, account: SavedAlone) -> Report:
    """Return the report of a save. All controllers were lost before: their journals do not count."""
    began_unix_s = min(account.began_unix_s, account.unix_s)  # the clock may have gone back meanwhile
    took_ms = round(1e3 * (account.unix_s - began_unix_s), 1)
    ranks, text = range(account.world_size), f"SIGTERM; {cause_text(account.step)}"
    noticed = account.noticed or tuple(ranks)
    others = tuple(rank for rank in ranks if rank not in noticed)
    manifest, why = _on_disk(account)
    saved, path, stages = None, account.newest, {"seen": 0.0, "frozen": 0.0}
    if manifest is not None:
        writers = tuple(sorted({file.rank for file in manifest.files}))
        nbytes = sum(file.nbytes for file in manifest.files)
        saved, path = Saved(step=account.step, path=account.path, bytes=nbytes, ranks=writers), account.path
        stages |= {"written": took_ms, "published": 0.0}
    kept = account.step if saved is not None else step_of_directory(Path(path)) or 0
    incident = Incident(
        kind=NOTICE,
        culprits=tuple(
            Culprit(rank=rank, kind=NOTICE, cause=text, phase=_DONE, step=account.step, reported=True)
            for rank in dict.fromkeys(noticed)
        ),
        survivors=(RankPlace(phase=_DONE, step=account.step, ranks=others),) if others else (),
        saved=saved,
        not_saved="" if saved is not None else f"no controller led the ranks, and {why}",
        goes_on_from=path,
        steps_lost=max(0, account.step - kept),
        took_ms={**stages, "total": took_ms},
    )
    return Report(start=start, began_unix_s=began_unix_s, incident=incident)


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
