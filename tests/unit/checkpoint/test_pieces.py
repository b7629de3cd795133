"""Checkpoints over nodes with disks of their own: published in pieces, found again, and moved where they are needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.cluster import FIRST_LAUNCH, HOSTS, SECOND_LAUNCH, Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.signing import make_keys
from ttp.checkpoint import publish
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.node_local.exchange_files import Move, moved_texts, plan_moves
from ttp.checkpoint.node_local.parts import next_start, remove_superseded
from ttp.checkpoint.node_local.store import NodeLocalStore
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.staging import clean_stale
from ttp.checkpoint.verify import verify
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, TornShare
from ttp.proto.messages import FileEntry
from ttp.runtime.directory_lock import RunDirectories


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def steps(found: Sequence[Reader | None]) -> set[int | None]:
    return {None if one is None else one.manifest.step for one in found}


def test_a_step_comes_back_on_the_nodes_that_wrote_it(cluster: Cluster, job: Job) -> None:
    """Each rank's share is on its own node: nothing is moved, and all bits are there."""
    cluster.save(job, 7)
    found = cluster.gather(job)
    assert steps(found) == {7} and cluster.said == []
    job.assert_equal(cluster.read(job, found))


def test_a_publisher_reports_that_it_progresses(cluster: Cluster, job: Job) -> None:
    """With every table that it reads and every blob that it writes: a controller waits for who works."""
    cluster.save(job, 7, publishers=(0,))
    tables = sum(1 for _ in cluster.disk(0).glob("iter_0000007/*.distcp"))
    assert len(cluster.advanced) >= tables > 0


def test_what_a_node_lacks_is_moved_to_it_and_said(cluster: Cluster, job: Job) -> None:
    """The ranks have changed places, and a third node is new: each gets the files that its ranks will read."""
    cluster.save(job, 7)
    found = cluster.gather(job, hosts=("c", "b", "a", "a", "c"))
    assert steps(found) == {7}
    job.assert_equal(cluster.read(job, found))
    assert {text.partition("from ")[2] for text in cluster.said} >= {"node a to node c"}
    assert all("iB, from node" in text for text in cluster.said)
    again = cluster.gather(job)
    assert steps(again) == {7}, "what was moved is there the next time"


def test_a_node_whose_disk_fails_takes_what_it_lacks_into_another_directory(cluster: Cluster, job: Job) -> None:
    """And finds it there at the next restart, when that disk serves again."""
    cluster.save(job, 7)
    cluster.spare = ("c",)
    found = cluster.gather(job, hosts=("c", "b", "a", "a", "c"))
    assert steps(found) == {7} and not list(cluster.disk(0).glob("iter_*"))
    job.assert_equal(cluster.read(job, found))
    again = cluster.gather(job)
    job.assert_equal(cluster.read(job, again))


def test_a_step_with_a_file_that_no_node_has_is_skipped_by_name(cluster: Cluster, job: Job) -> None:
    """Node b is lost with its disk: the newest step of which everything is there is taken. It has copies of b's files,
    because they were moved at an earlier restart."""
    cluster.save(job, 7)
    cluster.gather(job, hosts=("b", "b", "a", "a"))
    cluster.hosts = HOSTS
    cluster.save(job.later(), 9)
    found = cluster.gather(job, hosts=("a", "a"))
    assert steps(found) == {7} and len(cluster.skipped) == 1
    assert "iter_0000009" in cluster.skipped[0] and "none of the 1 nodes" in cluster.skipped[0]
    job.assert_equal(cluster.read(job, found))


def test_an_altered_copy_is_replaced_by_a_sound_one_or_its_step_is_skipped(cluster: Cluster, job: Job) -> None:
    """Both nodes have rank 2's file; b's copy is damaged, then a's as well."""
    cluster.save(job, 5)
    cluster.gather(job, hosts=("b", "b", "a", "a"))
    name = next(file.name for file in read_manifest(cluster.root / "b" / "iter_0000005").files if file.rank == 2)
    copies = [cluster.root / host / "iter_0000005" / name for host in "ab"]
    assert all(copy.exists() for copy in copies)
    flip_a_bit(copies[1].parent, name)
    found = cluster.gather(job, hosts=HOSTS)
    assert steps(found) == {5}
    job.assert_equal(cluster.read(job, found))
    for copy in copies:
        flip_a_bit(copy.parent, name)
    assert steps(cluster.gather(job)) == {None}
    assert "was altered" in cluster.skipped[-1] and name in cluster.skipped[-1]


def test_bytes_that_change_on_the_way_are_not_taken(cluster: Cluster, job: Job) -> None:
    """Every rank receives the reason, and no file remains half moved."""
    cluster.save(job, 7)
    cluster.spoil = lambda chunk: bytes([chunk[0] ^ 1]) + chunk[1:]
    with pytest.raises(CheckpointError, match="it arrived with checksum xxh3_128:"):
        cluster.gather(job, hosts=("b", "b", "a", "a"))
    assert not list(cluster.root.rglob(".*distcp*"))
    cluster.spoil = lambda chunk: chunk
    found = cluster.gather(job, hosts=("b", "b", "a", "a"))
    job.assert_equal(cluster.read(job, found))


def test_a_file_that_cannot_get_its_name_is_said_on_every_rank(
    cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for the rank that failed; what stays half moved is removed by the next attempt, and nothing else is."""
    cluster.save(job, 7)
    replace, unlink = os.replace, Path.unlink

    def full(source: Any, target: Any) -> None:
        if Path(target).suffix == ".distcp":
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: full(path, "x.distcp"))
        with pytest.raises(CheckpointError, match=r"cannot take the files .* No space left on device"):
            cluster.gather(job, hosts=("b", "b", "a", "a"))
    assert Path.unlink is unlink and list(cluster.root.rglob(".*distcp*"))
    found = cluster.gather(job, hosts=("b", "b", "a", "a"))
    job.assert_equal(cluster.read(job, found))
    assert not list(cluster.root.rglob(".*distcp*"))


def test_a_step_that_only_one_node_has_published_counts_when_all_files_are_there(cluster: Cluster, job: Job) -> None:
    """Node b was lost between writing and publishing: its files are in a staging directory that has no manifest."""
    cluster.save(job, 4)
    cluster.save(job.later(), 7, publishers=(0,))
    found = cluster.gather(job)
    assert steps(found) == {4} and "iter_0000007" in cluster.skipped[0]


def test_a_later_write_supersedes_an_earlier_one_which_is_found_all_the_same(cluster: Cluster, job: Job) -> None:
    """Both nodes publish the first write; of the second, b has none: the first one is whole and is taken."""
    cluster.save(job, 7, attempt="1_1_1", term=1)
    cluster.save(job, 7, attempt="2_1_1", term=2, publishers=(0,))
    assert read_manifest(cluster.root / "a" / "iter_0000007").term == 2
    assert read_manifest(cluster.root / "a" / "iter_0000007_superseded_1").term == 1
    found = cluster.gather(job)
    assert steps(found) == {7}
    job.assert_equal(cluster.read(job, found))
    assert read_manifest(cluster.root / "a" / "iter_0000007").term == 1


def test_superseded_pieces_go_when_a_newer_step_was_loaded_and_not_before(cluster: Cluster, job: Job) -> None:
    """Those of the loaded step stay, and so do those of newer ones, which may be whole one day; published names are not touched."""
    for step in (4, 7, 9):
        cluster.save(job, step, attempt="1_1_1", term=1)
        cluster.save(job, step, attempt="2_1_1", term=2, publishers=(0,) if step == 9 else (0, 2))
    own = {name: [str(cluster.root / name)] for name in ("a", "b")}
    assert [path.name for path in remove_superseded(own["a"], below=4)] == []
    assert steps(cluster.gather(job)) == {9}
    run = RunDirectories(own["a"], "job", True, NodeLocalStore(("a",), 1, 0))
    run.forget_superseded(7)
    left = sorted(path.name for path in (cluster.root / "a").glob("iter_*"))
    assert left == [
        "iter_0000004",
        "iter_0000007",
        "iter_0000007_superseded_1",
        "iter_0000009",
        "iter_0000009_superseded_2",  # the first write alone was whole, and has the name again
    ]
    assert read_manifest(cluster.root / "a" / "iter_0000004").term == 2
    assert (cluster.root / "b" / "iter_0000004_superseded_1").is_dir(), "another node's are its own keeper's"


def test_a_piece_that_is_the_only_one_of_its_step_is_kept(
    cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its superseder was killed between the two renames."""
    cluster.save(job, 7, attempt="1_1_1")
    with monkeypatch.context() as patch:
        kill_at_rename(patch, "iter_0000007")
        with pytest.raises(Killed):
            cluster.save(job, 7, attempt="2_1_1", term=2, publishers=(0,))
    cluster.save(job.later(), 9)
    assert remove_superseded([str(cluster.root / "a")], below=9) == []
    assert (cluster.root / "a" / "iter_0000007_superseded_1").is_dir()


def test_a_removal_that_is_cut_short_leaves_no_half_piece(
    cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What remains has the name of a staging directory, which the next attempt cleans away."""
    cluster.save(job, 7, attempt="1_1_1", term=1)
    cluster.save(job, 7, attempt="2_1_1", term=2)

    def killed(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ttp.checkpoint.prune.shutil.rmtree", killed)
        remove_superseded([str(cluster.root / "a")], below=9)
    names = {path.name for path in (cluster.root / "a").iterdir() if path.name.startswith("iter")}
    assert len(names) == 2 and "iter_0000007" in names and "iter_0000007_superseded_1" not in names
    assert clean_stale(cluster.root / "a") == sorted(names - {"iter_0000007"})


class Killed(BaseException):
    """Stands in for SIGKILL: nothing catches it."""


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """End whoever renames something to a path of this name."""
    rename = os.rename

    def watched(source: Any, to: Any) -> None:
        if Path(to).name == target and Path(to).with_name(f"{target}_superseded_1").exists():
            raise Killed
        rename(source, to)

    monkeypatch.setattr(os, "rename", watched)


def test_a_piece_is_found_when_its_superseder_was_killed_between_the_renames(
    cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the superseded name is left of the first write on node a; cleaning removes the other one's claim."""
    cluster.save(job, 7, attempt="1_1_1", start=5)
    with monkeypatch.context() as patch:
        kill_at_rename(patch, "iter_0000007")
        with pytest.raises(Killed):
            cluster.save(job, 7, attempt="2_1_1", start=5, term=2, publishers=(0,))
    clean_stale(cluster.root / "a")
    assert [path.name for path in (cluster.root / "a").glob("iter_*")] == ["iter_0000007_superseded_1"]
    assert next_start([str(cluster.root / "a")]) == 6
    run = RunDirectories([str(cluster.root / "a")], "job", True, NodeLocalStore(("a",), 1, 0))
    assert run.candidates("auto") == [str(cluster.root / "a" / "iter_0000007")]
    found = cluster.gather(job)
    assert steps(found) == {7}
    job.assert_equal(cluster.read(job, found))


def test_a_late_publisher_of_a_lower_term_changes_nothing(cluster: Cluster, job: Job) -> None:
    """The controller of term 1 was cut off and replaced: its order comes after the step of term 2 is published."""
    cluster.save(job, 7, attempt="2_1_1", term=2)
    before = sorted(path.name for path in (cluster.root / "a").iterdir())
    name = "iter_0000007_tmp_1_1_1"
    results = [write_share(cluster.disk(0), name, 0, job.held(), {})]
    with pytest.raises(CheckpointError, match="term 2 in attempt 1; this order is of term 1"):
        cluster.publish(0, name, 7, results, term=1)
    assert sorted(path.name for path in (cluster.root / "a").iterdir()) == sorted([*before, name])


def test_a_later_attempt_of_the_job_supersedes_whatever_its_terms_are(cluster: Cluster, job: Job) -> None:
    """A new job begins with low terms: its step takes the place of one that an earlier job left, and is the one loaded.
    A publisher of the earlier attempt that wakes up late changes nothing."""
    cluster.save(job, 7, attempt="501_1_1", start=3, term=501)
    assert next_start([str(cluster.root / "a")]) == 4
    cluster.save(job.later(), 7, attempt="1_1_1", start=4, term=1)
    found = cluster.gather(job.later())
    job.later().assert_equal(cluster.read(job.later(), found))
    name = "iter_0000007_tmp_501_1_2"
    results = [write_share(cluster.disk(0), name, 0, job.held(), {})]
    with pytest.raises(CheckpointError, match="it comes late"):
        cluster.publish(0, name, 7, results, start=3, term=501)


def test_two_launches_on_other_nodes_name_a_write_alike_and_are_kept_apart(cluster: Cluster, job: Job) -> None:
    """Both began in empty directories, so their attempts, terms and staging directories have equal names; a later job has nodes of both."""
    cluster.save(job, 7)
    cluster.hosts = ("c", "c", "d", "d")
    cluster.save(job.later(), 7, launch=SECOND_LAUNCH)
    found = cluster.gather(job, ("a", "a", "b", "c"))
    assert steps(found) == {7} and {one.manifest.launch for one in found if one is not None} == {FIRST_LAUNCH}
    job.assert_equal(cluster.read(job, found))
    assert len(cluster.skipped) == 1 and "is missing" in cluster.skipped[0], cluster.skipped


def test_a_restart_takes_no_later_step_of_another_launch(cluster: Cluster, job: Job) -> None:
    """Nothing of step 9 was whole as the launch began, after step 4: a node that came later has what was missing."""
    cluster.save(job, 4, launch=SECOND_LAUNCH)
    cluster.save(job.later(), 9, launch=SECOND_LAUNCH)
    cluster.save(job, 7)
    found = cluster.gather(job, began_after=4)
    assert steps(found) == {7}
    job.assert_equal(cluster.read(job, found))
    (why,) = cluster.skipped
    assert why == "iter_0000009: another launch wrote it, and this one began after step 4"
    for rank in (0, 2):
        shutil.rmtree(cluster.disk(rank) / "iter_0000007")
    assert steps(cluster.gather(job, began_after=4)) == {4}, "what it began from is its own history"
    assert steps(cluster.gather(job, began_after=3)) == {None}
    assert steps(cluster.gather(job)) == {9}, "the first attempt of a launch goes on from whatever is whole"


def test_a_node_that_comes_later_refuses_no_restart_for_what_it_has(cluster: Cluster, job: Job) -> None:
    """`resume='never'`, or a path: the launch's first attempt found no newer step on the nodes that it had, and went on."""
    cluster.save(job, 9, launch=SECOND_LAUNCH)
    own = [str(cluster.root / "a")]
    first = RunDirectories(own, "job", True, NodeLocalStore(("a",), 1, 0, FIRST_LAUNCH))
    with pytest.raises(CheckpointError, match="holds newer checkpoints"):
        first.candidates("never")
    unknown = RunDirectories(own, "job", False, NodeLocalStore(("a",), 1, 0, FIRST_LAUNCH))
    with pytest.raises(CheckpointError, match="holds newer checkpoints"):
        unknown.candidates("never")
    later = RunDirectories(own, "job", False, NodeLocalStore(("a",), 1, 0, FIRST_LAUNCH, 0))
    assert later.candidates("never") == [f"{own[0]}/iter_0000009"]
    assert steps(cluster.gather(job, began_after=0)) == {None}


def test_publishing_a_piece_again_is_harmless(cluster: Cluster, job: Job) -> None:
    """The first publisher was given up for dead; its successor finds the piece there."""
    name = "iter_0000007_tmp_x"
    results = [write_share(cluster.disk(r), name, r, s, {}) for r, s in enumerate(job.shares(4))]
    first = cluster.publish(0, name, 7, results)
    assert cluster.publish(1, name, 7, results) == first
    assert [path.name for path in sorted((cluster.root / "a").glob("iter_*"))] == ["iter_0000007"]


@pytest.mark.parametrize("act", ["write_manifest", "sign_manifest", "fsync_directory"])
def test_a_publisher_whose_claim_is_taken_by_one_that_had_stood_still_finds_its_piece(
    cluster: Cluster,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    act: str,
) -> None:
    """Another rank was asked in its place, and both go on at once: neither may say that the directory takes no step."""
    name = "iter_0000007_tmp_x"
    results = [write_share(cluster.disk(r), name, r, s, {}, digests=True) for r, s in enumerate(job.shares(4))]
    real, published = getattr(publish, act), list[Path]()
    if act == "sign_manifest":
        cluster.keys = make_keys(tmp_path)

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(publish, act, real)
        published.append(cluster.publish(0, name, 7, results))
        return real(*arguments)

    monkeypatch.setattr(publish, act, interrupted)
    assert [cluster.publish(1, name, 7, results)] == published and verify(published[0]).step == 7
    assert "signature" not in caplog.text


def test_a_staging_directory_that_is_gone_is_not_published(cluster: Cluster, job: Job) -> None:
    results = [write_share(cluster.disk(r), "iter_0000007_tmp_x", r, s, {}) for r, s in enumerate(job.shares(4))]
    with pytest.raises(CheckpointError, match="is gone or was taken over by other publishers"):
        cluster.publish(0, "iter_0000007_tmp_y", 7, results)


def test_a_piece_with_a_missing_file_is_not_published(cluster: Cluster, job: Job) -> None:
    """Nothing is visible then, and the error says what to do."""
    name = "iter_0000007_tmp_x"
    results = [write_share(cluster.disk(r), name, r, s, {}) for r, s in enumerate(job.shares(4))]
    (cluster.root / "a" / name / results[1].files[0].name).unlink()
    with pytest.raises(CorruptCheckpoint, match="TTP_SHARED_DIRS"):
        cluster.publish(0, name, 7, results)
    assert not (cluster.root / "a" / "iter_0000007").exists()


def test_a_piece_with_a_file_that_ended_short_is_not_published_and_its_writer_is_reported(
    cluster: Cluster, job: Job
) -> None:
    name = "iter_0000007_tmp_x"
    results = [write_share(cluster.disk(r), name, r, s, {}) for r, s in enumerate(job.shares(4))]
    os.truncate(cluster.root / "a" / name / results[1].files[0].name, 5)
    with pytest.raises(TornShare, match="written by rank 1, has 5 bytes") as caught:
        cluster.publish(0, name, 7, results)
    assert caught.value.ranks == (1,) and not (cluster.root / "a" / "iter_0000007").exists()


def test_a_claim_with_the_files_is_taken_before_a_staging_directory_made_anew(cluster: Cluster, job: Job) -> None:
    """A publisher died over its claim, and a writer that had been silent has begun in the staging directory once more."""
    name, disk = "iter_0000005_tmp_x", cluster.disk(0)
    results = [write_share(cluster.disk(r), name, r, s, {}) for r, s in enumerate(job.shares(4))]
    os.rename(disk / name, disk / f"{name}_claim_0")
    (disk / name).mkdir()
    (disk / name / "unfinished").write_bytes(b"x")
    for rank in (0, 2):
        assert verify(cluster.publish(rank, name, 5, results)).step == 5
    assert steps(cluster.gather(job)) == {5}


def test_a_tracker_that_cannot_be_replaced_spoils_no_piece(
    cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The piece has its name by then, and the tracker is a hint."""

    def full(root: Path, step: int) -> None:
        raise OSError(28, "No space left on device", str(root))

    monkeypatch.setattr("ttp.checkpoint.publish.advance_tracker", full)
    cluster.save(job, 5)
    assert steps(cluster.gather(job)) == {5}


def test_another_models_checkpoint_is_refused_by_all(cluster: Cluster, job: Job) -> None:
    """It is not skipped: training from an older step, or from nothing, would be a surprise."""
    cluster.save(job, 7)
    other = Job({**job.tensors, "model.norm": torch.zeros(4)})
    with pytest.raises(CheckpointMismatch, match=r"model\.norm"):
        cluster.gather(other)


def test_a_checkpoint_of_shared_directories_is_found_on_the_node_that_has_it(cluster: Cluster, job: Job) -> None:
    """A job that began on one node goes on over two, each with its own disk."""
    job.save(cluster.root / "a", 3)
    found = cluster.gather(job)
    assert steps(found) == {3} and any("from node a to node b" in text for text in cluster.said)
    job.assert_equal(cluster.read(job, found))


def test_a_piece_is_valid_by_what_it_has(cluster: Cluster, job: Job) -> None:
    """`verify` of one node's piece finds damage in its own files, and does not miss those of other nodes."""
    cluster.save(job, 7)
    piece = cluster.root / "a" / "iter_0000007"
    assert verify(piece).hosts == HOSTS
    flip_a_bit(piece, "__0_0_0.distcp")
    with pytest.raises(CorruptCheckpoint, match="altered"):
        verify(piece)


def test_moves_are_spread_over_those_who_have_the_file() -> None:
    files = [FileEntry(f"f{number}", 10, "", 0) for number in range(4)]
    owners = {file.name: [0, 2] for file in files}
    moves = plan_moves(files, owners, {0: {"f0"}, 2: set(), 4: {file.name for file in files}})
    assert moves == [Move(files[0], 0, 4), Move(files[1], 2, 4), Move(files[2], 0, 4), Move(files[3], 2, 4)]
    texts = moved_texts(
        [Move(FileEntry("f", 2_400_000, "", 0), 0, 4), Move(FileEntry("g", 10**7, "", 0), 0, 4)], "ab   "
    )
    assert texts == ["moved 2 files, 11.8 MiB, from node a to node  "]
