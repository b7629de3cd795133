"""Publish a checkpoint where each node has directories of its own: every node makes what its ranks wrote its *part*.

A part is a directory `iter_0000042` with the files that this node's ranks wrote and a manifest that lists the files of
all nodes, with each one's host, size and checksum. A step counts as published when every file that a manifest lists is
found among the nodes: `exchange_files.py` finds out, and makes parts loadable.

Owns the publishing of one part. A publisher never removes what is published: a part of the same step from an earlier write is renamed
(`iter_0000042_superseded_1`), is found there all the same, and a publisher of a lower term gives way to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttp.checkpoint.format.file_index import Contents
from ttp.checkpoint.format.manifest import Manifest, TensorSpec, read_manifest
from ttp.checkpoint.node_local.parts import supersede, write_of
from ttp.checkpoint.publish import Publication
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry, ShareResult


def publish_part(directory: str | os.PathLike[str], tmp_name: str, **fields: Any) -> str:
    """Make what this rank's node has of `tmp_name` its part of the checkpoint; return its path: see `PartPublication`."""
    return PartPublication(Path(directory), tmp_name, **fields).run()


@dataclass(kw_only=True)
class PartPublication(Publication):
    """One publish of a node's part, by one rank of every node that wrote something. `results`: of the ranks of all nodes.

    `expected` and `trusted` do not matter: a node sees a part of the tensors, and the part of the same write is never read again.
    """

    hosts: Sequence[str]
    """Every rank's node."""
    start: int
    """This attempt's number; `term` is its controller's."""
    launch: str
    """The name of its launch."""
    advice = "is TTP_SHARED_DIRS the same on every node?"

    def make_manifest(self) -> Manifest:
        return replace(
            super().make_manifest(),
            files=tuple(self.files),
            hosts=tuple(self.hosts),
            start=self.start,
            launch=self.launch,
        )

    def own_files(self) -> list[FileEntry]:
        return [file for file in self.files if self.hosts[file.rank] == self.hosts[self.rank]]

    def published_by_other(self) -> bool:
        return False  # what is there may be an earlier write's

    def check(self, contents: Contents) -> None:
        tensors = {entry.key: TensorSpec(entry.dtype, entry.shape) for entry in contents.tensors}
        self.manifest = replace(self.manifest, tensors=tensors, finite=contents.finite)

    def complete(self, claim: Path, contents: Contents, added: ShareResult) -> None:
        files = sorted((*self.files, *added.files), key=lambda file: file.name)
        self.write_manifest(claim, replace(self.manifest, files=tuple(files)))

    def place(self, claim: Path) -> bool:
        """Rename the finished part; what has the name is renamed first."""
        while True:
            try:
                os.rename(claim, self.final)  # fails when it is there: a part is never empty
                return True
            except OSError:
                if not self.final.is_dir():
                    raise
            if self.is_published():
                return True
            supersede(self.final)

    def is_published(self) -> bool:
        """True when this write is published already. Raises CheckpointError when a later attempt's or term's is."""
        if not self.final.is_dir():
            return False
        try:
            there = read_manifest(self.final)
        except CorruptCheckpoint:
            return False
        if write_of(there) == write_of(self.manifest):
            return True
        if write_of(there)[:2] > write_of(self.manifest)[:2]:
            raise CheckpointError(
                f"{self.final} was published by a controller of term {there.term} in attempt {there.start}; this order is of term"
                f" {self.term} in attempt {self.start}: it comes late, and nothing is changed"
            )
        return False
