"""`ttp ckpt sign`: verify a checkpoint, or all of a folder, and sign what is valid.

Owns what is shown of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ttp.checkpoint import find
from ttp.checkpoint.cli.output import Answer, Status, UsageError, invalid
from ttp.checkpoint.cli.verify import progress_of, still_there
from ttp.checkpoint.format.signature import SignKey, read_sign_key
from ttp.checkpoint.sign import sign
from ttp.errors import CheckpointError, ConfigError
from ttp.text.wording import counted


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Sign a checkpoint, or all of a folder. NO: one of them is not valid, and is as it was."""
    try:
        key = read_sign_key(given.sign_key, "--sign-key")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    answers = still_there([_signed(path, key, console) for path in find.all_at(given.path)])
    return Answer(
        max(answer.status for answer in answers),
        {"checkpoints": [answer.fields for answer in answers]},
        [item for answer in answers for item in answer.shown],
    )


def _signed(path: Path, key: SignKey, console: Console) -> Answer:
    try:
        with progress_of(console, f"checking {path.name}") as progress:
            found = sign(path, key, progress)
    except (CheckpointError, FileNotFoundError) as error:
        return invalid(path, str(error))
    text = f"[green]SIGNED[/] {escape(str(path))}: step {found.step}, {counted(len(found.files), 'file')}"
    return Answer(Status.YES, {"path": str(path), "valid": True, "signed": True, "step": found.step}, [text])
