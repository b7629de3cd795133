"""One job at a time writes into a directory, and a run goes on from its own checkpoints only."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttp.checkpoint import find
from ttp.checkpoint.node_local.parts import next_start
from ttp.checkpoint.node_local.store import NodeLocalStore
from ttp.checkpoint.staging import clean_stale
from ttp.checkpoint.store import SharedStore, Store
from ttp.errors import CheckpointError, NotWritable
from ttp.runtime import directory_lock
from ttp.runtime.directory_lock import RunDirectories, why_unusable


def publish(folder: Path, *steps: int) -> list[str]:
    """Make directories that look published, newest first."""
    for step in steps:
        (folder / f"iter_{step:07d}").mkdir(parents=True)
    return [str(folder / f"iter_{step:07d}") for step in sorted(steps, reverse=True)]


def first_start(folder: Path) -> RunDirectories:
    return RunDirectories([str(folder)], "job", first_start=True)


def restart(folder: Path) -> RunDirectories:
    return RunDirectories([str(folder)], "job", first_start=False)


def test_auto_takes_whatever_is_there(tmp_path: Path) -> None:
    """Newest first."""
    paths = publish(tmp_path, 4, 12, 8)
    assert first_start(tmp_path).candidates("auto") == paths


def test_a_restart_goes_on_without_a_directory_that_fails(tmp_path: Path) -> None:
    """It may have filled up, which the fault was; at the job's first start it is refused, for somebody is there to correct it."""
    (tmp_path / "a file").touch()
    save_dirs = [str(tmp_path / "a file"), str(tmp_path / "good")]
    with pytest.raises(NotWritable, match=r"a file cannot be used: File exists"):
        RunDirectories(save_dirs, "job", first_start=True).claim()
    run = RunDirectories(save_dirs, "job", first_start=False)
    run.claim()
    assert list(run.failing) == save_dirs[:1] and (tmp_path / "good" / run.mark).exists()
    run.remove_mark()
    assert not (tmp_path / "good" / run.mark).exists()


def test_a_process_in_a_lost_ones_place_has_the_locks_and_removes_nothing(tmp_path: Path) -> None:
    """Other ranks may be writing: a staging directory is as old as it looks only where no attempt runs."""
    staging = tmp_path / "iter_0000009_tmp_exited_0_1_1"
    staging.mkdir()
    (tmp_path / ".ttp_run.json").write_text("{}")
    first = restart(tmp_path)
    first.take_over([str(tmp_path)])
    assert staging.is_dir() and (tmp_path / ".ttp_run.json").exists() and not first.mark and not first.failing
    assert list(tmp_path.glob(".ttp_probe*")) == []
    code = f"from ttp.runtime.directory_lock import RunDirectories; RunDirectories([{str(tmp_path)!r}], 'other', True).claim()"
    refused = subprocess.run(
        [sys.executable, "-c", f"import ttp.runtime.directory_lock as d; d.LOCK_WAIT_S = 0.0; {code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode and "NotWritable" in refused.stderr, refused.stderr[-500:]
    first.release()


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories whose names cannot be read from now on: a disk that fails."""
    named: list[str] = []
    listdir = os.listdir

    def failing(path: str | os.PathLike[str] = ".") -> list[str]:
        if os.fspath(path) in named:
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", failing)
    return named


def two_directories(tmp_path: Path) -> tuple[list[str], str, str]:
    """The names, and a checkpoint in each: the newer one in the first."""
    a, b = publish(tmp_path / "a", 8), publish(tmp_path / "b", 4)
    return [str(tmp_path / "a"), str(tmp_path / "b")], a[0], b[0]


def test_a_directory_whose_lock_could_not_be_taken_is_not_resumed_from(tmp_path: Path) -> None:
    """What is there may be another job's by now."""
    save_dirs, _, older = two_directories(tmp_path)
    (tmp_path / "a" / directory_lock.LOCK_NAME).mkdir()
    run = RunDirectories(save_dirs, "job", first_start=False)
    run.claim()
    assert list(run.failing) == save_dirs[:1] and run.candidates("auto") == [older]
    run.release()


def test_a_directory_that_fails_behind_its_lock_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be made there any more, but no other rank writes there, and it has the newest checkpoint."""
    save_dirs, newer, older = two_directories(tmp_path)
    clean = clean_stale

    def failing(directory: str) -> list[str]:
        if directory == save_dirs[0]:
            raise OSError(errno.EIO, "Input/output error", directory)
        return clean(directory)

    monkeypatch.setattr("ttp.runtime.directory_lock.clean_stale", failing)
    run = RunDirectories(save_dirs, "job", first_start=False)
    run.claim()
    assert list(run.failing) == save_dirs[:1] and run.candidates("auto") == [newer, older]
    run.release()


def test_the_lock_of_a_full_disk_is_held_without_its_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the lock that keeps others out."""
    monkeypatch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    run = restart(tmp_path)
    run.claim()
    assert not run.failing
    monkeypatch.setattr(directory_lock, "LOCK_WAIT_S", 0.0)
    with pytest.raises(NotWritable, match="in use by another job"):
        restart(tmp_path).claim()
    run.release()


@pytest.mark.parametrize("store", [SharedStore(), NodeLocalStore(("a",), 1, 0)], ids=["shared", "node-local"])
def test_a_directory_that_cannot_be_read_is_passed_over_at_a_restart(
    tmp_path: Path, dead: list[str], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one has a checkpoint; at the job's first start somebody is there to correct it."""
    save_dirs, _, older = two_directories(tmp_path)
    dead.append(save_dirs[0])
    run = RunDirectories(save_dirs, "job", first_start=False, store=store)
    assert run.candidates("auto") == [older]
    assert f"checkpoints in {save_dirs[0]} are passed over" in caplog.text
    run.forget_superseded(99)
    with pytest.raises(OSError, match="Input/output error"):
        RunDirectories(save_dirs, "job", first_start=True, store=store).candidates("auto")
    assert next_start(save_dirs) == 1


def test_a_restart_of_which_no_directory_can_be_read_is_not_a_fresh_start(tmp_path: Path, dead: list[str]) -> None:
    """An empty answer would throw the work away."""
    save_dirs, _, _ = two_directories(tmp_path)
    dead += save_dirs
    with pytest.raises(OSError, match="Input/output error"):
        RunDirectories(save_dirs, "job", first_start=False).candidates("auto")


def test_the_newest_checkpoint_is_looked_for_where_directories_can_be_read(tmp_path: Path, dead: list[str]) -> None:
    """A trainer that looks for itself, before `ttp.start`: it learns of the one that is passed over."""
    save_dirs, _, older = two_directories(tmp_path)
    dead.append(save_dirs[0])
    received: list[tuple[str, str]] = []
    found = find.find_newest_valid(save_dirs, on_skip=lambda path, reason: received.append((str(path), reason)))
    assert found is None and [path for path, _ in received] == [save_dirs[0], older]


@pytest.mark.parametrize("note", [None, "", "{}", "[1]", "[" * 100_000, "pipe", '{"job_id": "other", "found": []}'])
def test_the_note_of_any_directory_distinguishes_a_restart_from_a_first_start(tmp_path: Path, note: str | None) -> None:
    """The first one's may be lost, cut off, or another job's: a run that began with `never` goes on all the same."""
    save_dirs = [str(tmp_path / "a"), str(tmp_path / "b")]
    run = RunDirectories(save_dirs, "job", first_start=True)
    run.claim()
    assert run.candidates("never") == []
    run.release()
    written = Path(save_dirs[0]) / directory_lock.NOTE_NAME
    assert written.exists()
    if note in (None, "pipe"):
        written.unlink()
    if note == "pipe":
        os.mkfifo(written)
    elif note is not None:
        written.write_text(note)
    published = publish(tmp_path / "b", 7)
    assert RunDirectories(save_dirs, "job", first_start=False).candidates("never") == published


def test_a_restart_leaves_its_note_where_it_can_and_a_first_start_everywhere(tmp_path: Path) -> None:
    """A first start that was refused has left none."""
    save_dirs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for folder in map(Path, save_dirs):
        folder.mkdir()
    (tmp_path / "a" / directory_lock.NOTE_NAME).mkdir()  # nothing can take its place
    with pytest.raises(OSError, match="directory"):
        RunDirectories(save_dirs, "job", first_start=True).candidates("never")
    (tmp_path / "b" / directory_lock.NOTE_NAME).unlink(missing_ok=True)
    assert RunDirectories(save_dirs, "job", first_start=False).candidates("never") == []
    assert (tmp_path / "b" / directory_lock.NOTE_NAME).is_file()


def test_one_directory_is_enough_at_a_restart_and_none_is_not() -> None:
    assert not why_unusable(["/a", "/b"], {"/a": "full"}, first_start=False)
    assert why_unusable(["/a", "/b"], {"/a": "full", "/b": "gone"}, first_start=False) == "full"
    assert why_unusable(["/a", "/b"], {"/b": "gone"}, first_start=True) == "gone"
    assert not why_unusable(["/a", "/b"], {}, first_start=True)


def test_never_in_a_used_folder_is_refused_at_the_first_start_and_at_its_restart(tmp_path: Path) -> None:
    """The launcher restarts the refused attempt: it must not slip through then."""
    publish(tmp_path, 4)
    for run in (first_start(tmp_path), restart(tmp_path)):
        with pytest.raises(CheckpointError, match=r"resume is 'never'.*iter_0000004"):
            run.candidates("never")


def test_never_goes_on_from_its_own_checkpoints_after_a_fault(tmp_path: Path) -> None:
    """What was published after the first start is this run's."""
    assert first_start(tmp_path).candidates("never") == []
    paths = publish(tmp_path, 3, 7)
    assert restart(tmp_path).candidates("never") == paths


def test_a_named_checkpoint_is_the_last_resort_of_a_restart(tmp_path: Path) -> None:
    """Before the first publish there is nothing newer; older checkpoints of the folder are not this run's."""
    named = publish(tmp_path, 2, 6)[0]
    assert first_start(tmp_path).candidates(named) == [named]
    assert restart(tmp_path).candidates(named) == [named]
    newer = publish(tmp_path, 9)
    assert restart(tmp_path).candidates(named) == [*newer, named]


def test_a_named_checkpoint_older_than_others_is_refused(tmp_path: Path) -> None:
    """The run would publish steps that are there already, from another past."""
    named = publish(tmp_path, 2, 6)[1]
    with pytest.raises(CheckpointError, match=r"newer checkpoints.*iter_0000006"):
        first_start(tmp_path).candidates(named)


def test_a_named_checkpoint_elsewhere_is_refused_where_nodes_have_their_own_directories(tmp_path: Path) -> None:
    """It would be renamed into the run's directory, on another file system perhaps: it is the user's, and stays."""
    named = publish(tmp_path / "elsewhere", 6)[0]
    own = RunDirectories([str(tmp_path / "own")], "job", first_start=True, store=NodeLocalStore(("a",), 1, 0))
    with pytest.raises(
        CheckpointError, match=r"TTP_SHARED_DIRS=False: expected .*own\), got one in .*elsewhere; copy it"
    ):
        own.candidates(named)
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    named = publish(tmp_path / "own", 6)[0]
    linked = RunDirectories([str(tmp_path / "link")], "job", first_start=True, store=NodeLocalStore(("a",), 1, 0))
    assert linked.candidates(named) == [named]


def test_an_earlier_jobs_note_does_not_count(tmp_path: Path) -> None:
    """A first start that never came to resume leaves no note of another job behind."""
    assert first_start(tmp_path).candidates("never") == []
    publish(tmp_path, 5)
    again = first_start(tmp_path)
    again.claim()
    again.release()
    with pytest.raises(CheckpointError, match="never"):
        restart(tmp_path).candidates("never")


def test_a_second_job_is_kept_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first one ends, however it ends: the kernel gives the lock back."""
    monkeypatch.setattr(directory_lock, "LOCK_WAIT_S", 0.0)
    code = (
        "import sys; from ttp.runtime.directory_lock import RunDirectories\n"
        "r = RunDirectories([sys.argv[1]], 'other', True); r.claim(); print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(NotWritable, match=f"in use by another job.*pid {other.pid}"):
            first_start(tmp_path).claim()
        with pytest.raises(NotWritable, match=r"a rank of this job, its nodes share .* TTP_SHARED_DIRS=True"):
            RunDirectories([str(tmp_path)], "job", first_start=True, store=NodeLocalStore(("a",), 1, 0)).claim()
        other.kill()
    run = first_start(tmp_path)
    run.claim()
    run.release()


def test_ranks_find_out_whether_they_have_the_same_directory(tmp_path: Path) -> None:
    """At the start, not when a publisher misses the other nodes' files; the mark is gone afterwards."""
    run = first_start(tmp_path / "here")
    run.claim()
    directory_lock.check_same(str(tmp_path / "here"), run.mark, 0)
    with pytest.raises(NotWritable, match=r"there: got another one than on rank 0.*TTP_SHARED_DIRS=False"):
        directory_lock.check_same(str(tmp_path / "there"), run.mark, 0)
    with pytest.raises(NotWritable, match=r"whose node is named 'n' as well.*TTP_HOST"):
        directory_lock.check_same(str(tmp_path / "there"), run.mark, 0, own_host="n")
    run.remove_mark()
    run.release()
    assert [path.name for path in (tmp_path / "here").iterdir()] == [".ttp_lock"]


def test_a_directory_below_a_file_is_refused_by_name(tmp_path: Path) -> None:
    """Found by rank 0 before anybody writes."""
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable, match="file/checkpoints"):
        first_start(tmp_path / "file" / "checkpoints").claim()
