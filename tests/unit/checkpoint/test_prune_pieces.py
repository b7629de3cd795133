"""`ttp ckpt prune` over the folders of nodes with directories of their own: the newest whole step never goes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.test_prune import Cut, cut_at, prune, steps
from ttp.checkpoint.node_local.parts import list_parts
from ttp.checkpoint.staging import clean_stale

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "disks")


def disks(cluster: Cluster) -> tuple[Path, Path]:
    return cluster.root / "a", cluster.root / "b"


def newest(cluster: Cluster, job: Job) -> int | None:
    """Return the step that a start of the job finds."""
    found = cluster.gather(job)
    return None if found[0] is None else found[0].manifest.step


def test_older_whole_steps_go_from_all_nodes(cluster: Cluster, job: Job) -> None:
    """Shown first, removed with --yes; what stays is what a start of the job loads."""
    for step in (10, 20, 30):
        cluster.save(job, step)
    status, text = prune(*disks(cluster), "--keep", 1)
    assert status == 0 and "would remove 4 directories" in text and "nothing was changed" in text
    told = json.loads(prune(*disks(cluster), "--keep", 2, "--json")[1])
    assert sorted(told["would_remove"]) == [str(disk / "iter_0000010") for disk in disks(cluster)]
    assert prune(*disks(cluster), "--keep", 1, "--yes")[0] == 0
    assert [steps(disk) for disk in disks(cluster)] == [[30], [30]]
    assert newest(cluster, job) == 30


def test_a_folder_under_two_names_is_one(cluster: Cluster, job: Job, tmp_path: Path) -> None:
    """A link beside its folder: every piece goes once, and is counted once."""
    for step in (10, 20):
        cluster.save(job, step)
    first, second = disks(cluster)
    (tmp_path / "link").symlink_to(first)
    told = json.loads(prune(first, tmp_path / "link", second, "--keep", 1, "--json")[1])
    assert sorted(told["would_remove"]) == [str(disk / "iter_0000010") for disk in (first, second)]
    assert prune(first, tmp_path / "link", second, "--keep", 1, "--yes")[0] == 0
    assert [steps(disk) for disk in (first, second)] == [[20], [20]]


@pytest.mark.parametrize("partial", [(), ("--partial",)])
def test_a_linked_piece_is_left_with_its_step_and_keeps_no_other_step_from_going(
    cluster: Cluster, job: Job, tmp_path: Path, partial: tuple[str, ...]
) -> None:
    for step in (10, 20, 30):
        cluster.save(job, step)
    piece = disks(cluster)[0] / "iter_0000010"
    shutil.move(piece, tmp_path / "elsewhere")
    piece.symlink_to(tmp_path / "elsewhere")
    status, text = prune(*disks(cluster), "--keep", 1, "--yes", *partial)
    assert status == 0 and "a symbolic link, which is removed by hand" in " ".join(text.split())
    assert [steps(disk) for disk in disks(cluster)] == [[10, 30], [10, 30]]


def test_one_nodes_folder_alone_says_what_it_lacks(cluster: Cluster, job: Job) -> None:
    """Nothing is whole there, so nothing goes, whatever is asked for."""
    for step in (10, 20):
        cluster.save(job, step)
    status, text = prune(disks(cluster)[0], "--keep", 1, "--partial", "--yes")
    assert status == 3 and "wrote on node b, is in none of the folders" in text and "all nodes" in text
    assert steps(disks(cluster)[0]) == [10, 20]


def test_a_step_that_is_not_whole_here_is_kept_unless_asked_for(cluster: Cluster, job: Job) -> None:
    """A third node may have the rest. One that is newer than all that stay is never removed."""
    for step in (10, 20, 30, 40):
        cluster.save(job, step)
    for step in (10, 40):
        shutil.rmtree(disks(cluster)[1] / f"iter_{step:07d}")
    status, text = prune(*disks(cluster), "--keep", 1, "--yes")
    assert status == 0 and "__2_0_0.distcp, which rank 2 wrote on node b, is in none of the folders" in text
    assert steps(disks(cluster)[0]) == [10, 30, 40]
    assert prune(*disks(cluster), "--keep", 2, "--partial", "--yes")[0] == 0
    assert steps(disks(cluster)[0]) == [10, 30, 40], "two whole ones were to stay, there is one"
    assert prune(*disks(cluster), "--keep", 1, "--partial", "--yes")[0] == 0
    assert steps(disks(cluster)[0]) == [30, 40] and newest(cluster, job) == 30


def test_damage_that_only_checksums_show_makes_a_step_not_whole(cluster: Cluster, job: Job) -> None:
    """It is left alone, and the newest sound one stays."""
    for step in (10, 20, 30):
        cluster.save(job, step)
    flip_a_bit(disks(cluster)[1] / "iter_0000030", "__3_0_0.distcp")
    assert prune(*disks(cluster), "--keep", 1, "--yes")[0] == 0
    assert [steps(disk) for disk in disks(cluster)] == [[20, 30], [20, 30]]
    assert newest(cluster, job) == 20


def test_pieces_of_two_attempts_are_not_mixed(cluster: Cluster, job: Job) -> None:
    """Node a has the later attempt's piece alone, and behind it the earlier one's: the step is whole by the earlier, and stays with both."""
    cluster.save(job, 10)
    cluster.save(job, 20, "x", start=1)
    cluster.save(job.later(), 20, "y", start=2, publishers=(0,))
    assert any("superseded" in name for name in os.listdir(disks(cluster)[0]))
    before = sorted(os.listdir(disks(cluster)[0]))
    assert prune(*disks(cluster), "--keep", 1, "--yes")[0] == 0
    left = sorted(os.listdir(disks(cluster)[0]))
    assert left == [name for name in before if name != "iter_0000010"]
    assert newest(cluster, job) == 20
    cluster.save(job, 30)
    assert prune(*disks(cluster), "--keep", 1, "--yes")[0] == 0
    assert [path.name for path in list_parts(disks(cluster))] == ["iter_0000030"] * 2


def test_an_unreadable_piece_and_a_strangers_files_are_left_alone(cluster: Cluster, job: Job) -> None:
    """With the reason in the table."""
    for step in (10, 20, 30):
        cluster.save(job, step)
    (disks(cluster)[0] / "iter_0000010" / "manifest.json").write_text("{")
    (disks(cluster)[0] / "mine").mkdir()
    status, text = prune(*disks(cluster), "--keep", 1, "--yes")
    assert status == 0 and "manifest" in text and "left alone" in text
    assert steps(disks(cluster)[0]) == [10, 30] and (disks(cluster)[0] / "mine").is_dir()


def test_whole_checkpoints_among_pieces_are_refused(cluster: Cluster, job: Job) -> None:
    """Which of the two kinds a start would load, the command cannot know."""
    cluster.save(job, 10)
    job.save(disks(cluster)[0], 20)
    status, text = prune(*disks(cluster), "--keep", 1, "--yes")
    assert status == 3 and "was TTP_SHARED_DIRS changed" in text and steps(disks(cluster)[0]) == [10, 20]


def test_an_interruption_anywhere_leaves_the_newest_whole_step(
    cluster: Cluster, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before each single act: the next prune, with --partial for a step of which one node's piece has gone, ends the work."""
    for step in (10, 20):
        cluster.save(job, step)
    with monkeypatch.context() as patch:
        acts = cut_at(patch, 0)
        shutil.copytree(cluster.root, tmp_path / "counted")
        prune(tmp_path / "counted" / "a", tmp_path / "counted" / "b", "--keep", 1, "--yes")
    assert acts[0] >= 8
    for count in range(1, acts[0] + 1):
        root = shutil.copytree(cluster.root, tmp_path / f"cut_{count}")
        with monkeypatch.context() as patch, pytest.raises(Cut):
            cut_at(patch, count)
            prune(root / "a", root / "b", "--keep", 1, "--yes")
        assert all(20 in steps(root / name) for name in "ab")
        again = shutil.copytree(root, tmp_path / f"again_{count}")
        assert prune(again / "a", again / "b", "--keep", 1, "--partial", "--yes")[0] == 0
        for name in "ab":
            assert [entry for entry in os.listdir(again / name) if entry.startswith("iter_")] == ["iter_0000020"]
            clean_stale(root / name)
            assert [entry for entry in os.listdir(root / name) if "pruned" in entry] == []
