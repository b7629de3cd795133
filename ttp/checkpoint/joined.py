"""A checkpoint of several nodes whose pieces were copied together into one folder: read like any other.

Owns the proof that all is there, by the files' own tables of contents: a piece's manifest lists the tensors of its node only, and torch's
index may be missing. Changes nothing on disk.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint import dcp
from ttp.checkpoint.contents import read_contents
from ttp.checkpoint.manifest import Manifest
from ttp.checkpoint.publish import check_complete
from ttp.checkpoint.verify import files_here
from ttp.errors import CorruptCheckpoint
from ttp.proto.messages import ShareResult


def joined(path: Path, manifest: Manifest) -> tuple[Manifest, Metadata]:
    """Return the whole checkpoint's manifest and torch's index, from a verified piece in whose folder the other pieces' files are.

    Raises CorruptCheckpoint naming a file that is not here.
    """
    here = {file.name for file in files_here(path, manifest)}
    lacking = [file for file in manifest.files if file.name not in here]
    if lacking:
        owner = (
            f"node {manifest.hosts[lacking[0].rank]} has it" if lacking[0].rank < len(manifest.hosts) else "it is gone"
        )
        others = len(lacking) - 1
        more = f", nor {'is' if others == 1 else 'are'} {others} more" if others else ""
        raise CorruptCheckpoint(
            f"{path} is one node's piece of a checkpoint of {len(set(manifest.hosts))} nodes: {lacking[0].name} is not here ({owner})"
            f"{more}; copy the *.distcp files of all nodes' pieces of that step into this folder"
        )
    files = tuple(file for file in manifest.files if file.name != dcp.METADATA_NAME)
    contents = read_contents(path, [ShareResult(files)])
    return replace(manifest, tensors=check_complete(contents), hosts=()), dcp.metadata_of(contents)
