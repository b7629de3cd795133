"""`ttp ckpt prune`: what stays, what goes, and what a removal that is cut short anywhere leaves."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tests.unit.checkpoint.damage import flip_a_bit
from ttp.checkpoint import find
from ttp.checkpoint.cli import main
from ttp.checkpoint.format.durable import step_of_directory
from ttp.checkpoint.staging import clean_stale
from ttp.checkpoint.verify import verify
from ttp.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


def prune(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    status = main.main(["prune", *map(str, words)], Console(file=out, width=10_000))
    return status, out.getvalue()


def steps(folder: Path) -> list[int]:
    return sorted(step for path in folder.iterdir() if (step := step_of_directory(path)) is not None)


def size(*paths: Path) -> int:
    return sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())


def test_nothing_is_removed_before_one_says_yes(job: Job, tmp_path: Path) -> None:
    """Shown: what stays, what would go, and how much room that is; then the same with --yes happens."""
    paths = [job.save(tmp_path, step) for step in (10, 20, 30)]
    status, text = prune(tmp_path, "--keep", 1)
    assert status == 0 and "would remove 2 directories" in text and "nothing was changed: --yes removes" in text
    assert [line.split()[0] for line in text.splitlines() if " goes " in line] == ["20", "10"]
    told = json.loads(prune(tmp_path, "--keep", 1, "--json")[1])
    assert told["would_remove"] == [str(paths[1]), str(paths[0])] and told["bytes"] == size(*paths[:2])
    assert steps(tmp_path) == [10, 20, 30]
    status, text = prune(tmp_path, "--keep", 1, "--yes")
    assert status == 0 and "removed 2 directories" in text and steps(tmp_path) == [30]
    assert verify(paths[2]).step == 30
    assert prune(tmp_path, "--keep", 1, "--yes") == (0, prune(tmp_path, "--keep", 1)[1])


def test_the_newest_valid_one_stays_though_newer_ones_are_there(job: Job, tmp_path: Path) -> None:
    """Damage that only checksums show counts, too; what is broken is named and left alone."""
    paths = {step: job.save(tmp_path, step) for step in (10, 20, 30, 40)}
    flip_a_bit(paths[40], "__0_0_0.distcp")
    (paths[30] / ".metadata").unlink()
    status, text = prune(tmp_path, "--keep", 1, "--yes")
    assert status == 0 and steps(tmp_path) == [20, 30, 40]
    assert "was altered since rank 0 wrote it" in text and ".metadata is missing" in text and "left alone" in text
    found = find.find_newest_valid([tmp_path])
    assert found is not None and found.path == paths[20]


def test_broken_ones_do_not_count_as_kept(job: Job, tmp_path: Path) -> None:
    """--keep 2 means two that a restart could load."""
    paths = {step: job.save(tmp_path, step) for step in (10, 20, 30, 40)}
    flip_a_bit(paths[30], "__0_0_0.distcp")
    assert prune(tmp_path, "--keep", 2, "--yes")[0] == 0
    assert steps(tmp_path) == [20, 30, 40]
    assert json.loads(prune(tmp_path, "--keep", 2, "--json")[1])["kept"] == [str(paths[40]), str(paths[20])]


def test_where_none_is_valid_nothing_goes(job: Job, tmp_path: Path) -> None:
    """Status 3, with what is wrong with each."""
    for step in (10, 20):
        flip_a_bit(job.save(tmp_path, step), "__0_0_0.distcp")
    status, text = prune(tmp_path, "--keep", 1, "--yes")
    assert status == 3 and "holds no valid checkpoint, so nothing is removed" in text
    assert steps(tmp_path) == [10, 20]


def test_what_is_no_checkpoint_is_never_touched(job: Job, tmp_path: Path) -> None:
    """The tracker, an attempt that is being written, one moved aside, a stranger's files."""
    for step in (10, 20):
        job.save(tmp_path, step)
    for name in ("iter_0000030_tmp_x", "iter_0000005_broken_1", "iter_0000006_superseded_1", "mine", "iter_7"):
        shutil.copytree(tmp_path / "iter_0000020", tmp_path / name)
    others = sorted(name for name in os.listdir(tmp_path) if name != "iter_0000010")
    assert prune(tmp_path, "--keep", 1, "--yes")[0] == 0
    assert sorted(os.listdir(tmp_path)) == others


class Cut(BaseException):
    """The process ends here."""


ACTS = ("rename", "unlink", "rmdir", "fsync")


def cut_at(patch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Let the process end at its `count`-th act on the file system; return how many acts there were."""
    acts = [0]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            acts[0] += 1
            if acts[0] == count:
                raise Cut
            return real(*args, **kwargs)

        return act

    for name in ACTS:
        patch.setattr(os, name, watched(getattr(os, name)))
    return acts


def test_an_interruption_anywhere_leaves_nothing_that_looks_whole_and_is_not(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before each single act: every published name is valid, the newest is there, and the next prune ends the work."""
    first = tmp_path / "original"
    for step in (10, 20, 30):
        job.save(first, step, holders=1)
    with monkeypatch.context() as patch:
        acts = cut_at(patch, 0)
        shutil.copytree(first, tmp_path / "counted")
        prune(tmp_path / "counted", "--keep", 1, "--yes")
    assert acts[0] >= 12
    for count in range(1, acts[0] + 1):
        folder = tmp_path / f"cut_{count}"
        shutil.copytree(first, folder)
        with monkeypatch.context() as patch, pytest.raises(Cut):
            cut_at(patch, count)
            prune(folder, "--keep", 1, "--yes")
        assert 30 in steps(folder)
        for step in steps(folder):
            assert verify(folder / f"iter_{step:07d}").step == step
        again = shutil.copytree(folder, tmp_path / f"again_{count}")
        assert prune(again, "--keep", 1, "--yes")[0] == 0
        assert [name for name in os.listdir(again) if name.startswith("iter_")] == ["iter_0000030"]
        clean_stale(folder)  # what a start of the job does
        assert [name for name in os.listdir(folder) if "pruned" in name] == []


def test_what_is_about_pieces_is_refused_without_any(job: Job, tmp_path: Path) -> None:
    """Several folders, or --partial, of whole checkpoints: status 2, and nothing is changed."""
    for name in "ab":
        job.save(tmp_path / name, 10)
    for words in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "a", "--partial")):
        assert prune(*words, "--keep", 1, "--yes")[0] == 2
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == [10]
    assert prune(tmp_path / "a", tmp_path / "a", "--keep", 1)[0] == 0  # one folder, named twice


def test_half_removed_ones_are_shown_and_go_with_the_next_prune(job: Job, tmp_path: Path) -> None:
    """A dry run names them as well."""
    job.save(tmp_path, 10)
    half = shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000005_tmp_pruned_x")
    status, text = prune(tmp_path, "--keep", 3)
    assert status == 0 and "would remove 1 directory" in text and half.name in text
    prune(tmp_path, "--keep", 3, "--yes")
    assert not half.exists() and steps(tmp_path) == [10]


def test_a_folder_that_cannot_be_changed_is_told(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 3, the name and the reason; what could not be renamed is whole."""
    for step in (10, 20):
        job.save(tmp_path, step)

    def refuse(source: object, target: object) -> None:
        raise OSError(30, "Read-only file system", str(source))

    monkeypatch.setattr(os, "rename", refuse)
    status, text = prune(tmp_path, "--keep", 1, "--yes")
    assert status == 3 and "iter_0000010: Read-only file system" in text
    assert verify(tmp_path / "iter_0000010").step == 10


def test_a_start_that_cleans_at_the_same_time_does_no_harm(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half removed directory is taken away under prune's hands."""
    for step in (10, 20):
        job.save(tmp_path, step)
    real = shutil.rmtree

    def beaten(path: Path, *args: Any, **kwargs: Any) -> None:
        real(path)
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr("ttp.checkpoint.prune.shutil.rmtree", beaten)
    assert prune(tmp_path, "--keep", 1, "--yes")[0] == 0 and steps(tmp_path) == [20]
    with pytest.raises(CorruptCheckpoint):
        verify(tmp_path / "iter_0000010")
