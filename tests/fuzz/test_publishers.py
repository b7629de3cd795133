"""The simulator's publisher does what the shipped one does: the same calls, moment by moment, the same answers, and the same things are visible."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fuzz.conftest import CASES
from tests.fuzz.publishers import HOSTS, PARTS, RECORD, ROOT, Real, Stepped, Twin, TwinRank, answer_of
from tests.fuzz.test_processor import CAUSE
from ttp.checkpoint.staging import discard_staging, names_of_staging
from ttp.processor.core import events as ev
from ttp.proto.messages import FileEntry, Part, PublishOrder, ShareResult, WriteOrder

settings.load_profile("fuzz")

T = TypeVar("T")
RANKS = st.integers(0, len(HOSTS) - 1)
KINDS = ("full", "unsynced", "tearing")
ATTEMPTS = st.sampled_from([(5, 1), (5, 2), (5, 3), (6, 2)])
"""Step, and the term of the controller that has ordered it: a staging directory each."""


@dataclass
class Write:
    """One staging directory, on all hosts."""

    step: int
    term: int
    parts: dict[Part, int] = field(default_factory=dict)
    """What is written, and by which rank."""
    twin: list[ShareResult] = field(default_factory=list)
    real: list[ShareResult] = field(default_factory=list)

    @property
    def tmp_name(self) -> str:
        return f"iter_{self.step:07d}_tmp_{self.term}_1_1"


@dataclass
class Publisher:
    write: Write
    twin: TwinRank
    real: Stepped
    over: bool = False


class BothPublishers(RuleBasedStateMachine):
    """Ranks write shares and publish them, beside each other; they die, and their disks fail."""

    own = False

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ttp_fuzz_"))
        self.twin, self.real = Twin(self.own), Real(self.own, self.folder)
        self.disk = self.real.disk()
        self.disk.__enter__()
        self.writes: dict[tuple[int, int], Write] = {}
        self.publishers: list[Publisher] = []

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            for each in self.publishers:
                each.real.kill()
            self.disk.__exit__(None, None, None)
            shutil.rmtree(self.folder)

    @invariant()
    def the_same_is_visible(self) -> None:
        if hasattr(self, "twin"):
            assert self.twin.seen() == self.real.seen()
            assert self.twin.trackers() == self.real.trackers()

    def under_way(self, write: Write | None = None) -> list[Publisher]:
        return [each for each in self.publishers if not each.over and write in (None, each.write)]

    @staticmethod
    def one_of(data: st.DataObject, items: list[T]) -> T:
        return items[data.draw(st.integers(0, len(items) - 1))]

    # --- shares ---

    @rule(rank=RANKS, attempt=ATTEMPTS, count=st.sampled_from((4, 4, 2, 1)))
    def writes_a_share(self, rank: int, attempt: tuple[int, int], count: int) -> None:
        """Of parts that the directory does not have yet: no part is ordered twice into one."""
        write = self.writes.setdefault(attempt, Write(*attempt))
        parts = tuple(part for part in PARTS if part not in write.parts)[:count]
        if not parts or self.under_way(write):
            return
        given = (1, write.step, ROOT, write.tmp_name, parts)
        twin, real = self.twin.write(rank, WriteOrder(*given)), self.real.write(rank, WriteOrder(*given))
        assert (twin is None) == (real is None), (twin, real)
        if twin is not None and real is not None:
            write.parts |= dict.fromkeys(parts, rank)
            write.twin.append(twin)
            write.real.append(real)

    # --- publishing ---

    @precondition(lambda self: self.whole() and len(self.under_way()) < 3)
    @rule(data=st.data())
    def begins_to_publish(self, data: st.DataObject) -> None:
        """Any rank may be ordered to, of a host that has written something."""
        write = self.one_of(data, self.whole())
        hosts = {HOSTS[rank] for rank in write.parts.values()} if self.own else set(HOSTS)
        busy = {each.twin.rank for each in self.under_way()}
        ranks = [rank for rank, host in enumerate(HOSTS) if host in hosts and rank not in busy]
        if not ranks:
            return
        rank = data.draw(st.sampled_from(ranks))
        given = (1, write.step, ROOT, write.tmp_name)
        twin = self.twin.rank(rank)
        twin.begin(ev.PublishCheckpoint(PublishOrder(*given, tuple(write.twin), CAUSE, RECORD, write.term)))
        real = self.real.publish(rank, PublishOrder(*given, tuple(write.real), CAUSE, RECORD, write.term))
        self.publishers.append(Publisher(write, twin, real))

    def whole(self) -> list[Write]:
        return (
            [write for write in self.writes.values() if len(write.parts) == len(PARTS)]
            if hasattr(self, "writes")
            else []
        )

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), moments=st.integers(1, 3))
    def goes_on(self, data: st.DataObject, moments: int) -> None:
        publisher = self.one_of(data, self.under_way())
        for _ in range(moments):
            if not publisher.over:
                self.move(publisher)
                self.the_same_is_visible()

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        publisher = self.one_of(data, self.under_way())
        while not publisher.over:
            self.move(publisher)
            self.the_same_is_visible()

    def move(self, publisher: Publisher) -> None:
        event = publisher.twin.move()
        publisher.real.go()
        real = publisher.real.answer
        assert (event is None) == (real is None), f"{event}; {real}, at {publisher.real.stopped_at}"
        if event is not None and real is not None:
            twin = answer_of(event)
            assert twin[0] == real[0], f"{event}; {real}"
            if publisher.twin.rank not in self.real.full | self.real.unsynced:
                assert twin[1] == real[1], f"{event}; {real}"
            publisher.over = True

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        publisher = self.one_of(data, self.under_way())
        publisher.real.kill()
        publisher.over = True

    # --- what goes wrong ---

    @rule(rank=RANKS, kind=st.sampled_from(KINDS))
    def fails(self, rank: int, kind: str) -> None:
        self.real_set(kind).add(rank)
        self.twin_set(kind).add((rank, self.twin.job.root_of(rank, ROOT)))

    @precondition(lambda self: any(map(self.real_set, KINDS)))
    @rule()
    def all_serve_again(self) -> None:
        for kind in KINDS:
            self.real_set(kind).clear()
            self.twin_set(kind).clear()

    def real_set(self, kind: str) -> set[int]:
        found: set[int] = getattr(self.real, kind)
        return found

    def twin_set(self, kind: str) -> set[tuple[int, str]]:
        found: set[tuple[int, str]] = getattr(self.twin.disk, {"full": "broken_for"}.get(kind, kind))
        return found

    @rule(attempt=ATTEMPTS, rank=RANKS)
    def is_discarded(self, attempt: tuple[int, int], rank: int) -> None:
        """What was written is written anew, into an empty directory."""
        write = self.writes.pop(attempt, None)
        if write is None:
            return
        discard_staging(self.real.path(rank), write.tmp_name)
        root = self.twin.job.root_of(rank, ROOT)
        for where, name in [*self.twin.disk.directories]:
            if where == root and (name == write.tmp_name or name.startswith(f"{write.tmp_name}_claim_")):
                del self.twin.disk.directories[where, name]

    @precondition(lambda self: self.whole() and not self.under_way())
    @rule(data=st.data())
    def loses_a_file(self, data: st.DataObject) -> None:
        """Of a staging directory that no publisher has its hands on."""
        write = self.one_of(data, self.whole())
        number = data.draw(st.integers(0, len(write.twin) - 1))
        twin, real = write.twin[number].files[-1], write.real[number].files[-1]
        self._lose(write, twin, real)

    def _lose(self, write: Write, twin: FileEntry, real: FileEntry) -> None:
        for (_, name), directory in self.twin.disk.directories.items():
            if name == write.tmp_name or name.startswith(f"{write.tmp_name}_claim_"):
                directory.files.pop(twin.name, None)
        for root in self.real.roots():
            for name in names_of_staging(self.folder / root, write.tmp_name):
                (self.folder / root / name / real.name).unlink(missing_ok=True)


class BothPartPublishers(BothPublishers):
    """The same, where every host has directories of its own."""

    own = True


def test_a_directory_that_was_discarded_and_written_in_vain_is_not_published() -> None:
    """Its publisher had completed it, and comes to rename it."""
    first: Any = SimpleNamespace(draw=lambda choices: find(choices, lambda _: True))
    both = BothPublishers()
    both.begin()
    try:
        both.writes_a_share(rank=0, attempt=(5, 2), count=4)
        both.begins_to_publish(first)
        both.goes_on(first, moments=1)
        both.is_discarded(attempt=(5, 2), rank=0)
        both.fails(rank=0, kind="full")
        both.writes_a_share(rank=0, attempt=(5, 2), count=4)
        both.all_serve_again()
        both.ends(first)
        assert both.publishers[0].real.answer == ("failed", ()) and both.real.seen() == {}
    finally:
        both.teardown()


@pytest.mark.parametrize("machine", [BothPublishers, BothPartPublishers])
def test_a_rename_that_cannot_be_made_durable_fails_at_once(machine: type[BothPublishers]) -> None:
    """The directory has its name, and another publisher may find it so."""
    first: Any = SimpleNamespace(draw=lambda choices: find(choices, lambda _: True))
    both = machine()
    both.begin()
    try:
        both.writes_a_share(rank=0, attempt=(5, 1), count=4)
        both.begins_to_publish(first)
        while both.publishers[0].real.stopped_at != "rename":
            both.goes_on(first, moments=1)
        both.fails(rank=0, kind="unsynced")
        both.goes_on(first, moments=1)
        assert both.publishers[0].over and both.publishers[0].real.answer == ("failed", ()) and both.real.seen()
    finally:
        both.teardown()


TestBothPublishers = BothPublishers.TestCase
TestBothPartPublishers = BothPartPublishers.TestCase
TestBothPublishers.settings = TestBothPartPublishers.settings = settings(max_examples=CASES, stateful_step_count=40)
