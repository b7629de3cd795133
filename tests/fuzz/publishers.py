"""The shipped publisher and its twin of the simulator, each with a disk, given the same calls one moment at a time.

A moment is what the twin does in one: claim, manifest, rename, tracker. The shipped publisher runs in a thread that stops where the twin does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.simulation.disk import OLDER_STEP, Disk
from tests.simulation.piece_work import PieceWorker
from tests.simulation.pieces import OwnDisks, is_published
from tests.simulation.work import Worker
from tests.unit.checkpoint.cluster import FIRST_LAUNCH
from ttp.checkpoint import publish as publish_module
from ttp.checkpoint.format.durable import advance_tracker, read_tracker
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.node_local import parts
from ttp.checkpoint.node_local import publish_part as part_module
from ttp.checkpoint.node_local.publish_part import PartPublication
from ttp.checkpoint.publish import Publication
from ttp.checkpoint.write import WrittenShare, WrittenShares, merge_results, write_share
from ttp.errors import TornShare, TTPError
from ttp.processor.core import events as ev
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord, Part, PublishOrder, ShareResult, WriteOrder

LONG_S = 30.0
HOSTS = ("host0", "host0", "host1", "host1")
ROOT = "/a"

Parts = frozenset[tuple[str, int, int]]
Answer = tuple[str, tuple[int, ...]]
"""`path` or `failed`, and whose files were torn."""
Seen = dict[tuple[str, str], tuple[int, str, Parts]]
"""(root, published name) -> term and staging directory of the write, where parts tell them apart, and the parts in its files."""


# --- the twin ---


class TwinRank:
    """What a worker of the simulator has of its rank. A later moment is taken when the test says so."""

    def __init__(self, job: SimpleNamespace, rank: int, kind: type[Worker]) -> None:
        self.job, self.rank = job, rank
        self.gate = Gate(rank)
        self.replica = SimpleNamespace(
            held=lambda step: dict.fromkeys(GROUPS, step), host_states=SimpleNamespace(get=lambda step: step)
        )
        self.waits = SimpleNamespace(gates_lock=None)
        self.slow_work: dict[str, float] = {}
        self.known_checkpoint = ""
        self.answers: list[ev.Event] = []
        self.moments: list[Callable[[], None]] = []
        self.put = self.answers.append
        self.worker = kind(self)  # type: ignore[arg-type]

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.moments.append(act)

    def run_beside(self, act: Callable[[], None]) -> None:
        act()

    def count_work(self) -> None:
        """No controller waits for it."""

    def begin(self, task: ev.WriteShare | ev.PublishCheckpoint) -> None:
        self.answers.clear()
        self.worker._now, self.worker._begun = task, True
        self.worker._hold_to(task)

    def move(self) -> ev.Event | None:
        """Take the next moment; return the answer, None: there is another moment."""
        self.moments.pop(0)()
        return self.answers[0] if self.answers else None


class Twin:
    """The simulator's disk and its workers."""

    def __init__(self, own: bool) -> None:
        self.disk = OwnDisks((ROOT,), HOSTS) if own else Disk((ROOT,))
        self.job = SimpleNamespace(
            disk=self.disk, rng=SimpleNamespace(uniform=lambda low, high: high), holds={}, hosts=HOSTS, own=own or None,
            struck=lambda *_: None, happened=lambda *_: None, renamed=lambda *_: None, committed=lambda: 0, broken=self._broken,
            root_of=lambda rank, directory: HOSTS[rank] + directory if own else directory,
        )  # fmt: skip
        self._kind = PieceWorker if own else Worker
        self._writers = {rank: self.rank(rank) for rank in range(len(HOSTS))}

    @staticmethod
    def _broken(text: str) -> None:
        raise AssertionError(text)

    def rank(self, rank: int) -> TwinRank:
        return TwinRank(self.job, rank, self._kind)

    def write(self, rank: int, order: WriteOrder) -> ShareResult | None:
        """Write a share at once; None: it has failed."""
        writer = self._writers[rank]
        writer.begin(ev.WriteShare(order))
        while (answer := writer.move()) is None:
            pass
        return answer.result if isinstance(answer, ev.WriteDone) else None

    def seen(self) -> Seen:
        found: Seen = {}
        for (root, name), directory in self.disk.directories.items():
            if is_published(name) and directory.manifest is not None and directory.manifest.step != OLDER_STEP:
                listed = [directory.files[file] for file in directory.manifest.files if file in directory.files]
                parts = frozenset(part[:3] for file in listed for part in file.parts)
                found[root, name] = (directory.manifest.term, directory.manifest.attempt, parts)
        return found

    def trackers(self) -> dict[str, int]:
        return {root: step for root, step in self.disk.tracker.items() if step != OLDER_STEP}


def answer_of(event: ev.Event) -> Answer:
    return ("failed", event.torn) if isinstance(event, ev.WorkFailed) else ("path", ())


# --- the shipped publisher ---


class Killed(BaseException):
    """The process is gone."""


class Stepped:
    """An act in a thread that goes on to its next stop when the test says so."""

    def __init__(self, real: Real, rank: int, act: Callable[[Stepped], str]) -> None:
        self.rank = rank
        self.stopped_at = "begin"
        self.renames = 0
        self._real = real
        self._go, self._news = queue.SimpleQueue[bool](), queue.SimpleQueue[str]()
        self.answer: Answer | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def _run(self, act: Callable[[Stepped], str]) -> None:
        with contextlib.suppress(Killed):
            if self._go.get():
                try:
                    act(self)
                    self.answer = ("path", ())
                except TornShare as error:
                    self.answer = ("failed", error.ranks)
                except TTPError:
                    self.answer = ("failed", ())
                except Exception as error:
                    self.answer = (f"{type(error).__name__}: {error}", ())
        self._news.put("end")

    def stop(self, name: str) -> None:
        self._news.put(name)
        if not self._go.get():
            raise Killed

    def go(self) -> None:
        """Run to the next stop, or to the end."""
        self._real.acting = self
        self._go.put(True)
        self.stopped_at = self._news.get(timeout=LONG_S)
        self._real.acting = None

    def kill(self) -> None:
        if self.stopped_at != "end":
            self._go.put(False)
            self._thread.join(LONG_S)
            self.stopped_at = "end"


class _Shared(Publication):
    stepped: Stepped

    def place(self, claim: Path) -> bool:
        if not self.stepped.renames:
            self.stepped.renames = 1
            self.stepped.stop("rename")
        return super().place(claim)

    def is_published(self) -> bool:
        found = super().is_published()
        if found and not self.stepped.renames:
            self.stepped.renames = 1
            self.stepped.stop("rename")
        return found


class _Part(PartPublication):
    stepped: Stepped
    placing = False

    def is_published(self) -> bool:
        if not self.placing and self.stepped.renames:
            self.stepped.stop("claim")
        self.stepped.renames += 1
        return super().is_published()

    def check(self, contents: Any) -> None:
        self.stepped.stop("manifest")
        super().check(contents)

    def place(self, claim: Path) -> bool:
        self.stepped.stop("rename")
        self.placing = True
        try:
            return super().place(claim)
        finally:
            self.placing = False


class Real:
    """Directories below a folder, and what fails there."""

    def __init__(self, own: bool, folder: Path) -> None:
        self.own, self.folder = own, folder
        self.acting: Stepped | SimpleNamespace | None = None
        self.full: set[int] = set()
        """Ranks whose disk takes nothing."""
        self.unsynced: set[int] = set()
        self.tearing: set[int] = set()
        self.parts_of: dict[str, Parts] = {}
        """File name -> what is in it."""
        self._written = {rank: WrittenShares() for rank in range(len(HOSTS))}
        self._writes = 0
        for root in self.roots():
            (folder / root).mkdir(parents=True)

    def roots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.root(rank) for rank in range(len(HOSTS))))

    def root(self, rank: int) -> str:
        return HOSTS[rank] + ROOT if self.own else ROOT[1:]

    def path(self, rank: int) -> Path:
        return self.folder / self.root(rank)

    def write(self, rank: int, order: WriteOrder) -> ShareResult | None:
        """As `OptimizerStateProvider.write` does; None: it has failed."""
        directory, written = str(self.path(rank)), self._written[rank]
        self.acting = SimpleNamespace(rank=rank)
        try:
            reused, left = written.take(order.step, directory, order.tmp_name, order.parts)
            parts = [part for part in order.parts if part in left]
            result = reused
            if parts:
                result = merge_results(reused, self._write(rank, directory, order, parts))
        except TTPError:
            return None
        finally:
            self.acting = None
        written.add(order.step, WrittenShare(directory, order.tmp_name, frozenset(order.parts), result))
        return result

    def _write(self, rank: int, directory: str, order: WriteOrder, parts: list[Part]) -> ShareResult:
        self._writes += 1
        held = [
            HeldTensor(f"{p.group_id}.{p.index}.{p.count}", (2,), 0, torch.full((2,), float(order.step))) for p in parts
        ]
        result = write_share(directory, order.tmp_name, rank, held, {}, suffix=f"w{self._writes}")
        for file in result.files:
            self.parts_of[file.name] = frozenset((p.group_id, p.index, p.count) for p in parts)
            if rank in self.tearing:
                os.truncate(Path(directory) / order.tmp_name / file.name, 1)
        return result

    def publish(self, rank: int, order: PublishOrder) -> Stepped:
        """Begin a publish, which stops before each moment."""
        fields: dict[str, Any] = {
            "step": order.step, "results": order.results, "cause": order.cause, "record": order.record, "layout": {},
            "state": {"optimizer": {"param_groups": []}, "trainer": {}}, "blobs": {"a": 1}, "rank": rank, "term": order.term,
        }  # fmt: skip
        publication: _Shared | _Part
        if self.own:
            publication = _Part(self.path(rank), order.tmp_name, **fields, hosts=HOSTS, start=1, launch=FIRST_LAUNCH)
        else:
            publication = _Shared(self.path(rank), order.tmp_name, **fields)

        def act(stepped: Stepped) -> str:
            publication.stepped = stepped
            return publication.run()

        return Stepped(self, rank, act)

    def seen(self) -> Seen:
        found: Seen = {}
        for root in self.roots():
            for path in (self.folder / root).iterdir():
                if is_published(path.name):
                    manifest = read_manifest(path)
                    listed = [file.name for file in manifest.files if (path / file.name).exists()]
                    parts = frozenset(part for name in listed for part in self.parts_of.get(name, ()))
                    shown = (manifest.term, manifest.attempt) if self.own else (0, "")
                    found[root if self.own else ROOT, path.name] = (*shown, parts)
        return found

    def trackers(self) -> dict[str, int]:
        found = {root if self.own else ROOT: read_tracker(self.folder / root) for root in self.roots()}
        return {root: step for root, step in found.items() if step is not None}

    @contextlib.contextmanager
    def disk(self) -> Iterator[None]:
        """Have the calls of whoever acts fail as its disk does, and stop where a moment of the twin ends."""
        fsync, fdatasync, rename, link = os.fsync, os.fdatasync, os.rename, os.link
        advance, supersede = advance_tracker, parts.supersede

        def sync(descriptor: int, act: Callable[[int], None]) -> None:
            rank = self.acting.rank if self.acting is not None else -1
            if rank in self.unsynced:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if rank in self.full and stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            act(descriptor)

        def renames(source: Any, target: Any) -> None:
            if (
                self.acting is not None
                and self.acting.rank in self.full
                and os.path.lexists(source)
                and not os.path.lexists(target)
            ):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rename(source, target)

        def links(source: Any, target: Any) -> None:
            if self.acting is not None and self.acting.rank in self.full | self.unsynced | self.tearing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            link(source, target)

        def advances(directory: Path, step: int) -> int:
            if isinstance(self.acting, Stepped):
                self.acting.stop("tracker")
            return advance(directory, step)

        def supersedes(final: Path) -> None:
            supersede(final)
            if isinstance(self.acting, Stepped):
                self.acting.stop("rename")

        with contextlib.ExitStack() as stack:
            for owner, name, change in (
                (os, "fsync", lambda descriptor: sync(descriptor, fsync)), (os, "fdatasync", lambda descriptor: sync(descriptor, fdatasync)),
                (os, "rename", renames), (os, "link", links), (publish_module, "advance_tracker", advances), (part_module, "supersede", supersedes),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, name, change))
            yield


GROUPS = ("g0", "g1")
PARTS = tuple(Part(group, index, 2) for group in GROUPS for index in range(2))
RECORD = CommitRecord(5, 1.5, 1.0, False, 1.0, (0.1,), (2.0,))
