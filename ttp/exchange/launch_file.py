"""Which launch of ttprun an attempt belongs to, from the ranks of one attempt to those of the next: a small file in the attempt's directory.

A *launch* is one start of ttprun on all its nodes, with all of its attempts. Owns the file `launch.json`: a rank of each node writes it once it is known what the
launch began from, and the node's agent puts it into the next attempt's directory. A node that joins later has none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

NAME = "launch.json"
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """What all attempts of a launch know of it."""

    name: str
    """Of 32 random hexadecimal digits."""
    began_after: int
    """The step that its first attempt was resumed from; 0: from none."""


def write(directory: Path, launch: Launch) -> None:
    """Raises OSError."""
    files.replace(directory / NAME, json.dumps(asdict(launch)))


def read(directory: Path) -> Launch | None:
    """Return what was written; None: this node has taken part in no attempt of the launch. Raises ValueError, OSError, each with one line."""
    try:
        content = read_json(directory / NAME, _MOST_BYTES)
    except FileNotFoundError:
        return None
    fields = checked.mapping(content, "launch")
    name, path = checked.field(fields, "name", "")
    if not is_name(checked.string(name, path)):
        raise checked.Invalid(path, name, "32 hexadecimal digits")
    return Launch(name, checked.integer(*checked.field(fields, "began_after", "")))


def is_name(text: str) -> bool:
    """Return whether it may name a launch."""
    return len(text) == 32 and set(text) <= set("0123456789abcdef")
