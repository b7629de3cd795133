"""What a node's mirror process copies, as the rank that looks after the directories writes it for its agent.

Owns the file `mirror_source.json` in the attempt's directory. Where all ranks share directories only one rank writes it, so that one node copies.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

_NAME = "mirror_source.json"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MirrorSource:
    """The directories of one node."""

    save_dirs: tuple[str, ...]
    host: str = ""
    """This node's name where each node has directories of its own; empty: all share them."""
    keep: int = 0
    """Checkpoints that stay in the mirror; 0: all."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """Checkpoints, inode by path, that are not the run's."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def write(self, attempt_dir: Path) -> None:
        """Raises OSError, also for more than is read."""
        content = self.to_json()
        if len(content) > _MOST_BYTES:  # of ASCII
            what = f"{len(content)} bytes that name {len(self.passed_over)} checkpoints of other runs, expected at most {_MOST_BYTES}"
            raise OSError(errno.EFBIG, f"got {what}. Move those checkpoints to another directory")
        files.replace(attempt_dir / _NAME, content)


def parse(content: object) -> MirrorSource:
    """Raises ValueError."""
    fields = checked.mapping(content, "source")
    dirs = checked.items(*checked.field(fields, "save_dirs", "source"))
    return MirrorSource(
        tuple(checked.string(path, where) for path, where in dirs),
        checked.string(*checked.field(fields, "host", "source")),
        checked.integer(*checked.field(fields, "keep", "source")),
        checked.inodes(*checked.field(fields, "passed_over", "source")),
    )


def read(attempt_dir: Path) -> MirrorSource | None:
    """Return what was written; None: nothing so far. Raises ValueError, OSError."""
    try:
        return parse(read_json(attempt_dir / _NAME, _MOST_BYTES))
    except FileNotFoundError:
        return None
