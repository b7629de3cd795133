"""The modules that a worker had imported at its first step, for the agent: later workers find them imported.

Owns the file `imported_modules.json` in the attempt's directory. Only modules from installed packages are listed, and TTP's own from wherever it is: a
script's own may change, and may do at import what each worker must do for itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

NAME = "imported_modules.json"
MOST_BYTES = 4 << 20
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


def write(directory: Path) -> None:
    """List this process's modules, in the order in which they were imported. Raises OSError."""
    paths = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    names = [name for name, file in paths.items() if any(folder in file for folder in INSTALLED)]
    files.replace(directory / NAME, json.dumps(names))


def read(directory: Path) -> list[str]:
    """Return what was listed; nothing so far: empty. Raises ValueError, OSError."""
    try:
        content = read_json(directory / NAME, MOST_BYTES)
    except FileNotFoundError:
        return []
    return [checked.string(*item) for item in checked.items(content, "modules")]
