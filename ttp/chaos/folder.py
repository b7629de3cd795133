"""The folder that a campaign, the kills or the demo write into: emptied of an earlier one, and of nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ttp.errors import ConfigError

_MADE = r"run_\d+|baseline(\.json)?|lap_\d+|unbroken(\.json)?|result\.json|report\.html|killed|in_place|kills\.json|loss\.png"
"""What these tools make, or once made."""


def empty(output: Path, *, keep: bool = False) -> None:
    """Remove what an earlier run left. `keep`: leave it. Raises ConfigError for a folder with anything else in it, and for one that cannot be
    used."""
    try:
        _empty(output, keep)
    except OSError as error:
        raise ConfigError(f"--output: got {output}: {error.strerror}, expected a folder that can be written") from None


def _empty(output: Path, keep: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: got {output}, a file, expected a folder")
    if not output.exists() or keep:
        return
    known = [path for path in output.iterdir() if re.fullmatch(_MADE, path.name)]
    if strange := sorted(path.name for path in output.iterdir() if path not in known):
        raise ConfigError(
            f"--output is {output}: it holds {strange[0]!r}, which no campaign makes; name another folder, or empty it"
        )
    for path in known:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
