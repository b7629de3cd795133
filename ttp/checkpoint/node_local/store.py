"""Where a job keeps its checkpoints when each node has directories of its own: see `ttp.checkpoint.store`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ttp.checkpoint.find import StrPath
from ttp.checkpoint.format.manifest import Manifest
from ttp.checkpoint.node_local import parts
from ttp.checkpoint.node_local.exchange_files import NodeFiles, find_newest
from ttp.checkpoint.node_local.publish_part import publish_part
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.store import Peers, Request
from ttp.errors import CheckpointError


class NodeLocalStore:
    """Each node's own directories, under the same names on all of them."""

    in_use_advice = (
        "; if that is a rank of this job, its nodes share this directory: set TTP_SHARED_DIRS=True on all of them"
    )

    def __init__(
        self, hosts: Sequence[str], start: int, rank: int, launch: str = "", began_after: int | None = None
    ) -> None:
        """hosts: every rank's node. start: this attempt's number, above those of all attempts that have left parts (`parts.next_start`). launch: its
        launch's name; began_after: the step from which an earlier attempt began that launch; None: this is the first."""
        self.hosts = tuple(hosts)
        self.start = start
        self.launch = launch
        self.began_after = began_after
        self.node = self.hosts[rank]
        self.leader = NodeFiles(self.hosts).leader_of(rank)

    def list_published(self, directories: Iterable[StrPath]) -> list[Path]:
        return parts.list_parts(directories)

    def check_choice(self, path: Path, save_dirs: Sequence[str]) -> None:
        # What other nodes lack is put beside it, and it gets its name there: that is for this job's directories only.
        if str(path.parent) not in map(os.path.realpath, save_dirs):
            raise CheckpointError(
                f"resume is {str(path)!r} with TTP_SHARED_DIRS=False: expected a checkpoint in one of this run's directories"
                f" ({', '.join(save_dirs)}), got one in {path.parent}; copy it there, or name its directory among them"
            )

    def open_newest(self, paths: Sequence[str], ranks: Peers, request: Request) -> Reader | None:
        return find_newest(paths, NodeFiles(self.hosts), ranks, request, self._stranger)

    def publish(self, directory: str, tmp_name: str, **fields: Any) -> str:
        return publish_part(directory, tmp_name, hosts=self.hosts, start=self.start, launch=self.launch, **fields)

    def remove_superseded(self, directories: Iterable[StrPath], below: int) -> list[Path]:
        return parts.remove_superseded(directories, below)

    def _stranger(self, manifest: Manifest) -> str:
        """Return why a restart may not go on from a part; empty: it may. Where nothing was whole as the launch began, a node that came later may have
        completed a step of another one."""
        if self.began_after is None or manifest.launch == self.launch or manifest.step <= self.began_after:
            return ""
        return f"another launch wrote it, and this one began after step {self.began_after}"
