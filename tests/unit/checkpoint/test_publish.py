"""A checkpoint becomes visible whole or not at all, once, and never goes back: at every crash and every refusal."""

from __future__ import annotations

import builtins
import io
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.checkpoint.signing import make_keys, save_signed, write
from ttp.checkpoint import find, publish
from ttp.checkpoint import verify as checks
from ttp.checkpoint.format import checksum, durable
from ttp.checkpoint.format.manifest import write_manifest
from ttp.checkpoint.staging import clean_stale, probe_writable
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, NotWritable
from ttp.proto.messages import FileEntry, ShareResult

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

SYSTEM_CALLS = [
    *(
        (os, name)
        for name in ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "listdir", "stat")
    ),
    (io, "open"),
    (builtins, "open"),
]
BLOBS = {"optim.param_groups.0.lr": 3e-4}


class Killed(BaseException):
    """The process ended here: nothing after it happens."""


@contextmanager
def at_call(number: int, act: Callable[[Callable[[], Any]], Any], calls: list[str]) -> Iterator[None]:
    """Let `act` stand for the number-th call to the system and, if it raises Killed, for every later one."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in SYSTEM_CALLS:
            patch.setattr(module, name, _counted(getattr(module, name), name, number, act, calls))
        yield


def _counted(
    original: Callable[..., Any], name: str, number: int, act: Callable[[Callable[[], Any]], Any], calls: list[str]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "dead" in calls:
            raise Killed
        calls.append(name)
        if len(calls) - 1 != number:
            return original(*args, **kwargs)
        try:
            return act(lambda: original(*args, **kwargs))
        except Killed:
            calls.append("dead")
            raise

    return call


def killed_before(call: Callable[[], Any]) -> Any:
    raise Killed


def killed_after(call: Callable[[], Any]) -> Any:
    with suppress(OSError):
        left = call()
        if hasattr(left, "close"):
            left.close()  # the system closes what a dead process had open
    raise Killed


def refused(call: Callable[[], Any]) -> Any:
    raise OSError(5, "Input/output error", "somewhere")


def count_of_calls(job: Job, directory: Path) -> int:
    """How many calls to the system an undisturbed publish makes."""
    calls: list[str] = []
    results = job.write(directory, "iter_0000042_tmp_a", 2)
    with at_call(-1, refused, calls):
        job.publish(directory, "iter_0000042_tmp_a", results, 42, blobs=BLOBS)
    assert {"rename", "replace", "fsync", "listdir"} <= set(calls)
    return len(calls)


@pytest.mark.parametrize("act", [killed_before, killed_after, refused])
def test_at_every_system_call_a_death_leaves_a_whole_newest_checkpoint(
    job: Job, tmp_path: Path, act: Callable[[Callable[[], Any]], Any]
) -> None:
    """Either the older one is the newest or the new one is whole; the tracker names no other; another publisher succeeds."""
    total = count_of_calls(job, tmp_path / "count")
    seen = set()
    for number in range(total):
        directory = tmp_path / str(number)
        job.later().save(directory, 41)
        results = job.write(directory, "iter_0000042_tmp_a", 2)
        with at_call(number, act, []), suppress(Killed, CheckpointError):
            job.publish(directory, "iter_0000042_tmp_a", results, 42, blobs=BLOBS)
        found = find.find_newest_valid([directory])
        assert found is not None and not found.skipped, f"call {number}"
        seen.add(found.manifest.step)
        (job if found.manifest.step == 42 else job.later()).assert_equal(job.read(found.path))
        assert (durable.read_tracker(directory) or 0) in ((41, 42) if found.manifest.step == 42 else (41,))
        path = job.publish(directory, "iter_0000042_tmp_a", results, 42, blobs=BLOBS, rank=1)
        assert path == directory / "iter_0000042" and verify(path).step == 42
        assert durable.read_tracker(directory) == 42
        clean_stale(directory)
        assert sorted(os.listdir(directory)) == ["iter_0000041", "iter_0000042", durable.TRACKER_NAME]
    assert seen == {41, 42}


def test_at_every_system_call_a_death_leaves_no_checkpoint_without_its_signature(job: Job, tmp_path: Path) -> None:
    """It appears with the checkpoint's name, or the older one is the newest; another publisher signs as well."""
    keys = make_keys(tmp_path)
    calls: list[str] = []
    results = write(job, tmp_path / "count", "iter_0000042_tmp_a")
    with at_call(-1, refused, calls):
        job.publish(tmp_path / "count", "iter_0000042_tmp_a", results, 42, blobs=BLOBS, keys=keys)
    seen = set()
    for number in range(len(calls)):
        directory = tmp_path / str(number)
        save_signed(job.later(), directory, 41, keys)
        results = write(job, directory, "iter_0000042_tmp_a")
        with at_call(number, killed_after, []), suppress(Killed):
            job.publish(directory, "iter_0000042_tmp_a", results, 42, blobs=BLOBS, keys=keys)
        found = find.find_newest_valid([directory], key=keys.verify)
        assert found is not None and not found.skipped, f"call {number}"
        seen.add(found.manifest.step)
        path = job.publish(directory, "iter_0000042_tmp_a", results, 42, blobs=BLOBS, keys=keys, rank=1)
        assert verify(path, key=keys.verify).step == 42
    assert seen == {41, 42}


@pytest.mark.parametrize("act", [killed_before, killed_after])
def test_a_death_while_writing_a_share_leaves_the_older_checkpoint(
    job: Job, tmp_path: Path, act: Callable[[Callable[[], Any]], Any]
) -> None:
    """Whatever it left is not taken for a checkpoint, and goes at the next attempt."""
    job.save(tmp_path / "count", 41, 1)
    calls: list[str] = []
    with at_call(-1, refused, calls):
        job.write(tmp_path / "count", "iter_0000042_tmp_a", 2)
    for number in range(len(calls)):
        directory = tmp_path / str(number)
        job.save(directory, 41, 1)
        with at_call(number, act, []), pytest.raises(Killed):
            job.write(directory, "iter_0000042_tmp_a", 2)
        found = find.find_newest_valid([directory])
        assert found is not None and found.manifest.step == 41 and not found.skipped
        clean_stale(directory)
        assert sorted(os.listdir(directory)) == ["iter_0000041", durable.TRACKER_NAME]


def test_all_is_durable_before_the_name_appears(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file's bytes, then the directory's names, then the rename, then the parent's names, then the tracker."""
    calls: list[tuple[str, str]] = []
    inode_names: dict[int, str] = {}

    def note_fsync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        inode_names[os.fstat(descriptor).st_ino] = "synced"
        original(descriptor)

    def noted(name: str, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(source: Any, target: Any) -> None:
            calls.append((name, str(target)))
            if str(target).endswith("iter_0000042"):
                assert all(os.stat(file).st_ino in inode_names for file in Path(source).iterdir()), (
                    "a file is not synced"
                )
                assert os.stat(source).st_ino in inode_names and calls[-2] == ("fsync", str(source))
            original(source, target)

        return call

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", noted("rename", os.rename))
    monkeypatch.setattr(os, "replace", noted("replace", os.replace))
    path = job.save(tmp_path, 42, blobs=BLOBS)
    after = calls[calls.index(("rename", str(path))) + 1 :]
    assert after[0] == ("fsync", str(tmp_path))
    assert [name for name, _ in after[1:]] == ["fsync", "replace", "fsync"]
    assert after[2] == ("replace", str(tmp_path / durable.TRACKER_NAME))


def test_a_valid_checkpoint_is_never_overwritten(job: Job, tmp_path: Path) -> None:
    """A second write of the same step keeps the first one's bytes, and leaves nothing behind."""
    path = job.save(tmp_path, 42)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert job.later().save(tmp_path, 42, attempt="b") == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["iter_0000042", durable.TRACKER_NAME]


def test_a_step_taken_by_another_model_is_refused(job: Job, tmp_path: Path) -> None:
    """To keep it would lose this job's step, to replace it another's."""
    job.save(tmp_path, 42)
    other = type(job)({"model.other": torch.zeros(3)})
    with pytest.raises(CheckpointMismatch, match=r"iter_0000042 is already there and belongs to another model"):
        other.save(tmp_path, 42, attempt="b")
    job.assert_equal(job.read(tmp_path / "iter_0000042"))


def test_a_broken_checkpoint_of_the_step_is_moved_aside_loudly(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that fell back to an older step comes by again; even a single flipped bit counts as broken."""
    for number in (1, 2):
        path = job.save(tmp_path, 42, attempt=str(number))
        file = path / "__1_0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        caplog.clear()
        assert job.save(tmp_path, 42, attempt=f"{number}b") == path
        assert f"iter_0000042_broken_{number}" in caplog.text and "altered" in caplog.text
        assert (tmp_path / f"iter_0000042_broken_{number}" / "__1_0_0.distcp").exists()
        job.assert_equal(job.read(path))
    assert [p.name for p in find.list_checkpoints([tmp_path])] == ["iter_0000042"]


def test_the_tracker_never_goes_back(job: Job, tmp_path: Path) -> None:
    """An older step, published late, does not take it back; a senseless tracker is replaced."""
    job.save(tmp_path, 50)
    job.save(tmp_path, 42)
    assert durable.read_tracker(tmp_path) == 50
    (tmp_path / durable.TRACKER_NAME).write_text("release")
    job.save(tmp_path, 43)
    assert durable.read_tracker(tmp_path) == 50


def test_the_tracker_ends_at_the_newest_of_racing_publishers(job: Job, tmp_path: Path) -> None:
    """Four at once, in any order."""
    steps = [44, 42, 45, 43]
    written = {step: job.write(tmp_path, f"iter_{step:07d}_tmp_a", 1) for step in steps}
    start = threading.Barrier(len(steps))

    def run(step: int) -> None:
        start.wait()
        job.publish(tmp_path, f"iter_{step:07d}_tmp_a", written[step], step)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.name[-2:] for p in find.list_checkpoints([tmp_path])] == ["45", "44", "43", "42"]
    assert durable.read_tracker(tmp_path) == 45


def test_a_slow_publisher_overtaken_by_its_successor_changes_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its steps the first one stops, a second publishes the staging directory, the first goes on: same path, valid."""
    monkeypatch.setattr(durable, "_LOCK_PATIENCE_S", 0.0)  # the overtaken one may hold the lock
    for number in range(count_of_calls(job, tmp_path / "count")):
        directory = tmp_path / str(number)
        results = job.write(directory, "iter_0000042_tmp_a", 2)

        def overtake(call: Callable[[], Any], d: Path = directory, r: list[ShareResult] = results) -> Any:
            job.publish(d, "iter_0000042_tmp_a", r, 42, blobs=BLOBS, rank=1)
            return call()

        with at_call(number, overtake, []):
            assert job.publish(directory, "iter_0000042_tmp_a", results, 42, blobs=BLOBS) == directory / "iter_0000042"
        assert verify(directory / "iter_0000042").step == 42
        job.assert_equal(job.read(directory / "iter_0000042"))
        assert not [name for name in os.listdir(directory) if "broken" in name]


class Runner:
    """A publisher in a thread of its own that stops before its n-th call to the system until it is let go."""

    def __init__(self, stop_before: int, work: Callable[[], Path]) -> None:
        self._left = stop_before
        self._work = work
        self._stopped, self._go = threading.Event(), threading.Event()
        self.outcome: Path | BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.ident: int | None = None

    def start(self) -> None:
        """Run to the stop, or to the end."""
        self._thread.start()
        assert self._stopped.wait(60)

    def finish(self) -> None:
        self._go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def called(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._stopped.set()
            assert self._go.wait(60)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            self.outcome = self._work()
        except (CheckpointError, AssertionError) as error:
            self.outcome = error
        self._stopped.set()


@contextmanager
def stoppable(runners: list[Runner]) -> Iterator[None]:
    """Let the runners learn of every call that their own threads make."""

    def received(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for runner in runners:
                if runner.ident == threading.get_ident():
                    runner.called()
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in SYSTEM_CALLS:
            patch.setattr(module, name, received(getattr(module, name)))
        yield


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_publishers_of_one_staging_directory_in_any_interleaving_leave_one_whole_checkpoint(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The first stops anywhere, its successor works and stops anywhere, the first goes on to its end, then the second.

    Both write `.metadata` and a manifest, and the two differ: a mixture would be broken.
    """
    monkeypatch.setattr(durable, "_LOCK_PATIENCE_S", 0.0)
    total = count_of_calls(job, tmp_path / "count")
    rng = random.Random(seed)
    for number in range(40):
        directory = tmp_path / str(number)
        results = job.write(directory, "iter_0000042_tmp_a", 2)

        def work(rank: int, d: Path = directory, r: list[ShareResult] = results) -> Path:
            blobs = {f"optim.param_groups.{rank}.lr": rank}
            return job.publish(d, "iter_0000042_tmp_a", r, 42, blobs=blobs, rank=rank)

        stops = rng.randrange(total), rng.randrange(total)
        first = Runner(stops[0], partial(work, 0))
        second = Runner(stops[1], partial(work, 1))
        with stoppable([first, second]):
            first.start()
            second.start()
            first.finish()
            second.finish()
        reported = f"seed {seed}, trial {number}, stops {stops}: {first.outcome!r}, {second.outcome!r}"
        assert first.outcome == second.outcome == directory / "iter_0000042", reported
        assert verify(directory / "iter_0000042").step == 42, reported
        assert not [name for name in os.listdir(directory) if "broken" in name], reported
        job.assert_equal(job.read(directory / "iter_0000042"))


def test_a_publisher_that_lost_the_staging_directory_says_so(job: Job, tmp_path: Path) -> None:
    """Neither the staging directory nor the checkpoint is there."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 2)
    (tmp_path / "iter_0000042_tmp_a").rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=r"iter_0000042_tmp_a is gone or was taken over by .*: nothing to publish"
    ):
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)


def test_a_file_that_is_not_there_is_named_with_its_writer(job: Job, tmp_path: Path) -> None:
    """Directories that are not shared by all nodes show up here."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 3)
    (tmp_path / "iter_0000042_tmp_a" / "__1_0_0.distcp").unlink()
    with pytest.raises(
        CorruptCheckpoint, match=r"__1_0_0\.distcp, written by rank 1, is missing; is .* the same directory"
    ):
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    assert find.list_checkpoints([tmp_path]) == []


def test_what_dead_writers_left_is_not_published(job: Job, tmp_path: Path) -> None:
    """Half a file of a writer that never reported goes."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 2)
    (tmp_path / "iter_0000042_tmp_a" / "__9_0_0.distcp").write_bytes(b"half")
    path = job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    assert not (path / "__9_0_0.distcp").exists()


def test_a_checkpoint_is_read_again_in_full_only_where_there_is_a_doubt(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A huge one takes longer than a publisher may be silent. Its own staging directory's, and what this run wrote, are not doubted."""
    summed: list[str] = []

    def noted(path: Path, entry: FileEntry, advance: Any = None) -> None:
        summed.append(path.name)
        checksum.check_file(path, entry, advance)

    monkeypatch.setattr(checks, "check_file", noted)
    results = job.write(tmp_path, "iter_0000042_tmp_a", 2)
    path = job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    assert job.publish(tmp_path, "iter_0000042_tmp_a", results, 42, rank=1) == path and summed == []
    assert job.save(tmp_path, 42, attempt="b", trusted={str(path)}) == path and summed == []
    assert job.save(tmp_path, 42, attempt="c") == path and len(summed) == len(verify(path).files)


def test_a_state_that_json_cannot_carry_is_named_and_nothing_is_touched(job: Job, tmp_path: Path) -> None:
    """The staging directory stays as it was, for a better call."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 1)
    with pytest.raises(CheckpointError, match=r"state\.trainer\.rng is a Tensor"):
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42, state={"trainer": {"rng": torch.zeros(1)}})
    assert os.listdir(tmp_path) == ["iter_0000042_tmp_a"]


def test_only_leftovers_of_staging_directories_are_cleaned(job: Job, tmp_path: Path) -> None:
    """Published, broken and foreign things stay."""
    job.save(tmp_path, 42)
    stale = ["iter_0000043_tmp_a", "iter_0000043_tmp_a_claim_0", ".ttp_probe_1", f".{durable.TRACKER_NAME}.9.9"]
    kept = ["iter_0000041_broken_1", "notes", "iter_0000044", "my_iter_0000043_tmp_a"]
    for name in [*stale[:3], *kept]:
        (tmp_path / name).mkdir()
    (tmp_path / stale[3]).write_text("x")
    assert sorted(clean_stale(tmp_path)) == sorted(stale)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "iter_0000042", durable.TRACKER_NAME])
    assert clean_stale(tmp_path / "nowhere") == []


def test_an_unwritable_directory_is_found_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place, and a disk that refuses any one of the acts; a good one remains empty."""
    probe_writable(tmp_path / "new" / "deep")
    assert os.listdir(tmp_path / "new" / "deep") == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotWritable, match=r"checkpoint directory .*/file/below cannot be written: Not a directory"):
        probe_writable(tmp_path / "file" / "below")
    for name in ("mkdir", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *args, **kwargs: refused(lambda: None))
            with pytest.raises(NotWritable, match=r"Input/output error .*choose another directory"):
                probe_writable(tmp_path / "new")
        assert os.listdir(tmp_path / "new") == ["deep"]


def test_a_held_lock_delays_the_tracker_but_never_stops_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A publisher stopped for good while it holds the lock hangs no rank."""
    import fcntl

    monkeypatch.setattr(durable, "_LOCK_PATIENCE_S", 0.0)
    holder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING):
            job.save(tmp_path, 42)
    finally:
        os.close(holder)
    assert durable.read_tracker(tmp_path) == 42 and "holds its lock" in caplog.text


def test_a_checkpoint_put_in_place_while_the_broken_one_was_judged_is_put_back(job: Job, tmp_path: Path) -> None:
    """Two publishers judge the same broken directory; the slower must not move the faster one's away."""
    final = job.save(tmp_path, 42)
    judged = os.lstat(tmp_path)  # another directory than the one that is there now
    assert publish._move_aside(final, judged, "_broken_") is None
    job.assert_equal(job.read(final))


def test_a_checkpoint_that_appears_while_one_is_published_is_judged(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's takes the name between look and rename: that is not this publisher's success."""
    results, real = job.write(tmp_path, "iter_0000042_tmp_a", 2), write_manifest

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr("ttp.checkpoint.publish.write_manifest", real)
        type(job)({"model.other": torch.zeros(3)}).save(tmp_path, 42, attempt="b")
        real(*arguments)

    monkeypatch.setattr("ttp.checkpoint.publish.write_manifest", interrupted)
    with pytest.raises(CheckpointMismatch, match="belongs to another model"):
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
