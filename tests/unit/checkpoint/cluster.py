"""Nodes with disks of their own, as threads of this process: they publish pieces, and gather them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.unit.checkpoint.conftest import CAUSE, Job
from ttp.checkpoint.format.signature import NO_KEYS, Keys
from ttp.checkpoint.node_local.publish_part import publish_part
from ttp.checkpoint.node_local.store import NodeLocalStore
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.store import Request
from ttp.checkpoint.write import write_share
from ttp.proto.messages import ShareResult

FIRST_LAUNCH, SECOND_LAUNCH = "a" * 32, "b" * 32
HOSTS = ("a", "a", "b", "b")


class Threads:
    """Ranks as threads of this process, which meet at a barrier."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.values: list[Any] = [None] * count
        self.wires: dict[tuple[int, int], queue.Queue[bytes]] = {}
        self.lock = threading.Lock()

    def wire(self, source: int, target: int) -> queue.Queue[bytes]:
        with self.lock:
            return self.wires.setdefault((source, target), queue.Queue(4))


@dataclass
class Rank:
    index: int
    threads: Threads
    spoil: Callable[[bytes], bytes] = lambda chunk: chunk

    @property
    def count(self) -> int:
        return self.threads.count

    def exchange(self, value: Any) -> list[Any]:
        self.threads.barrier.wait()
        self.threads.values[self.index] = value
        self.threads.barrier.wait()
        return list(self.threads.values)

    def send(self, chunk: memoryview, rank: int) -> None:
        self.threads.wire(self.index, rank).put(self.spoil(bytes(chunk)), timeout=60)

    def receive(self, chunk: memoryview, rank: int) -> None:
        chunk[:] = self.threads.wire(rank, self.index).get(timeout=60)


@dataclass
class Cluster:
    """Nodes with a disk each, seen by the ranks on them."""

    root: Path
    hosts: tuple[str, ...] = HOSTS
    said: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    advanced: list[int] = field(default_factory=list)
    spare: tuple[str, ...] = ()
    """Hosts whose disk takes nothing new: theirs goes to a second one."""
    spoil: Callable[[bytes], bytes] = lambda chunk: chunk
    own_folder: str = ""
    """Below a node's disk, where its checkpoints lie."""
    keys: Keys = NO_KEYS

    def disk(self, rank: int) -> Path:
        return self.root / self.hosts[rank] / self.own_folder

    def spare_disk(self, rank: int) -> Path:
        return self.root / f"{self.hosts[rank]} spare"

    def save(
        self,
        job: Job,
        step: int,
        attempt: str = "x",
        *,
        start: int = 1,
        term: int = 1,
        launch: str = FIRST_LAUNCH,
        publishers: Sequence[int] = (0, 2),
    ) -> None:
        """Every rank writes its share on its node's disk; these ranks publish their nodes' pieces."""
        name = f"iter_{step:07d}_tmp_{attempt}"
        shares = job.shares(len(self.hosts))
        results = [
            write_share(self.disk(rank), name, rank, share, {}, digests=self.keys.sign is not None)
            for rank, share in enumerate(shares)
        ]
        for rank in publishers:
            self.publish(rank, name, step, results, start, term, launch)

    def publish(
        self,
        rank: int,
        name: str,
        step: int,
        results: Sequence[ShareResult],
        start: int = 1,
        term: int = 1,
        launch: str = FIRST_LAUNCH,
    ) -> Path:
        given: dict[str, Any] = {"cause": CAUSE, "record": None, "layout": {}, "blobs": {"group": 0.5}}
        state = {"optimizer": {"param_groups": []}, "trainer": {"samples": step * 8}}
        fields: dict[str, Any] = {
            "step": step,
            "results": results,
            "hosts": self.hosts,
            "rank": rank,
            "start": start,
            "launch": launch,
            "term": term,
            "state": state,
            "advance": self.advanced.append,
            "keys": self.keys,
        }
        return Path(publish_part(self.disk(rank), name, **fields, **given))

    def gather(
        self, job: Job, hosts: tuple[str, ...] | None = None, began_after: int | None = None
    ) -> list[Reader | None]:
        """Have all ranks look for the newest checkpoint; rank i reads the i-th share. began_after: the step from which their launch, the first, began;
        None: this is its first attempt. Raises what they all raise."""
        if hosts is not None:
            self.hosts = hosts
        threads = Threads(len(self.hosts))
        found: list[Any] = [None] * threads.count

        def run(rank: int) -> None:
            disk = self.disk(rank)
            disk.mkdir(parents=True, exist_ok=True)
            try:
                request = Request(
                    save_dirs=[str(disk), str(self.spare_disk(rank))],
                    serving=[str(self.spare_disk(rank))] if self.hosts[rank] in self.spare else [str(disk)],
                    expected=job.shapes(),
                    targets=lambda: job.shares(threads.count)[rank],
                    on_skip=lambda path, reason: self.skipped.append(f"{path.name}: {reason}") if rank == 0 else None,
                    key=self.keys.verify,
                    report=lambda text: self.said.append(text) if rank == 0 else None,
                )
                store = NodeLocalStore(self.hosts, 1, rank, FIRST_LAUNCH, began_after)
                paths = [str(path) for path in store.list_published(request.save_dirs)]
                found[rank] = store.open_newest(paths, Rank(rank, threads, self.spoil), request)
            except Exception as error:
                found[rank] = error

        ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(threads.count)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        if errors := [other for other in found if isinstance(other, Exception)]:
            assert len(errors) == threads.count, f"not all ranks raised: {found}"
            raise errors[0]
        return found

    def read(self, job: Job, found: Sequence[Reader | None]) -> dict[str, torch.Tensor]:
        """Every rank reads its share from what its own disk has."""
        blank = Job({key: torch.full_like(t, 77) for key, t in job.tensors.items()})
        for rank, share in enumerate(blank.shares(len(self.hosts))):
            mine = found[rank]
            expected = self.spare_disk if self.hosts[rank] in self.spare else self.disk
            assert mine is not None and mine.path.parent == expected(rank)
            mine.read_into(share)
        return dict(blank.tensors)
