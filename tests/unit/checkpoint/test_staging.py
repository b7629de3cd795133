"""Whatever name is given, nothing is filled, renamed or removed but the staging directory of that name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.cluster import FIRST_LAUNCH
from tests.unit.checkpoint.conftest import Job, make_job
from ttp.checkpoint import prune, staging, write
from ttp.checkpoint.format.durable import TRACKER_NAME, inodes_in
from ttp.checkpoint.node_local.publish_part import publish_part
from ttp.checkpoint.prune import remove_tree, take_away
from ttp.checkpoint.publish import claim_staging, publish
from ttp.checkpoint.staging import clean_stale
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError, TTPError
from ttp.proto.messages import Cause, CauseKind, FileEntry, Part, ShareResult

OWN = "iter_0000042_tmp_a"
OTHERS = (
    "iter_0000042", "iter_0000041", "iter_0000042_broken_1", "iter_0000042_superseded_1", "iter_0000042_tmp_published",
    "iter_0000042_tmp_pruned_0f", "iter_0000042_tmp_superseded_0f", "iter_0000042_tmp_gather_0f", "iter_0000041_tmp_a", "iter_0000042_tmp_b",
    "iter_0000042_tmp_ab", "iter_0000042_tmp_link", "my_iter_0000042_tmp_a", "iter_0000042_tmp_a_claim_",
)  # fmt: skip
CLAIM = f"{OWN}_claim_0f"
CAUSE = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
STATE: dict[str, Any] = {"optimizer": {"param_groups": []}, "trainer": {}}
NOTHING = f"xxh3_128:{'0' * 32}"
MISSING = (ShareResult((FileEntry("__0_0_0.distcp", 1, NOTHING, 0),)),)
NAMES = st.one_of(
    st.sampled_from((OWN, CLAIM, *OTHERS)),
    st.builds("".join, st.lists(st.sampled_from((OWN, *OTHERS, "..", ".", "/", "\0", "_claim_", "_tmp_", "٤٢", "é", "")), max_size=4)),
    st.text(max_size=40),
)  # fmt: skip


def make_tree(root: Path, checkpoint: Path) -> Path:
    """Return a folder of checkpoints with everything that ever lies in one, beside a directory that is not ours."""
    folder = root / "checkpoints"
    shutil.copytree(checkpoint, folder / "iter_0000042")
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "file").write_text("not ours")
    for name in (OWN, CLAIM, *OTHERS[1:]):
        if name == "iter_0000042_tmp_link":
            (folder / name).symlink_to(root / "elsewhere")
        else:
            (folder / name).mkdir()
            (folder / name / "file").write_text(name)
    return folder


def contents(root: Path) -> dict[str, bytes]:
    """Return every file and link below a directory, and what it holds."""
    found = {}
    for folder, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = os.readlink(path).encode()
            elif path.is_file():
                found[key] = path.read_bytes()
    return found


def publishes(folder: Path, name: str, results: Sequence[ShareResult] = MISSING) -> None:
    publish(folder, name, step=42, results=results, cause=CAUSE, record=None, state=STATE, layout={})


def publishes_a_piece(folder: Path, name: str, results: Sequence[ShareResult] = MISSING) -> None:
    publish_part(
        folder, name, step=42, results=results, hosts=("a",), cause=CAUSE, record=None, state=STATE, layout={}, blobs={},
        rank=0, start=1, launch=FIRST_LAUNCH, term=1,
    )  # fmt: skip


def reuses(folder: Path, name: str) -> None:
    kept = write.WrittenShares()
    part = Part("g", 0, 1)
    file = ShareResult((FileEntry("file", len("iter_0000042_tmp_b"), "00", 0),))
    kept.add(42, write.WrittenShare(str(folder), "iter_0000042_tmp_b", frozenset([part]), file))
    kept.take(42, str(folder), name, [part])


ACTS: tuple[Callable[[Path, str], object], ...] = (
    staging.discard_staging,
    publishes,
    publishes_a_piece,
    reuses,
    lambda folder, name: claim_staging(folder, name, (), lambda: False, "?"),
    lambda folder, name: write_share(folder, name, 0, (), {"a": 1}),
    lambda folder, name: write_share(folder, name, 0, (), {"a": 1}, make=False),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid checkpoint of step 42."""
    return make_job().save(tmp_path_factory.mktemp("valid"), 42)


@pytest.mark.parametrize("act", ACTS, ids=range(len(ACTS)))
@settings(max_examples=40, deadline=None)
@given(name=NAMES)
@example(name="iter_0000042")
@example(name=OWN)
@example(name="iter_0000042_tmp_link")
@example(name="../elsewhere")
@example(name="iter_0000042_tmp_a_claim_/../../elsewhere")
@example(name="")
def test_nothing_but_the_named_staging_directory_is_touched(
    checkpoint: Path, act: Callable[[Path, str], object], name: str
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = make_tree(Path(made), checkpoint)
        before = contents(Path(made))
        with contextlib.suppress(TTPError):
            act(folder, name)
        after = contents(Path(made))
    mine = {f"checkpoints/{own}/" for own in names_of(name)}
    foreign = {key: value for key, value in before.items() if not key.startswith(tuple(mine) or "\n")}
    assert {key: after.get(key) for key in foreign} == foreign, f"{name!r} is not its own"
    new = {
        key
        for key in after.keys() - before.keys()
        if not key.startswith(f"checkpoints/{name}") and TRACKER_NAME not in key
    }
    assert not new, f"{name!r} made {new}"
    assert all("/.." not in key for key in after)


def names_of(name: str) -> Iterator[str]:
    """Say, by a rule of its own, which directories of the tree belong to a staging directory of this name."""
    if name in (OWN, "iter_0000041_tmp_a", "iter_0000042_tmp_b", "iter_0000042_tmp_ab"):
        yield name
    if name in (OWN, CLAIM):  # a claim's publisher writes into the claim by its name
        yield CLAIM


REFUSED = (
    "", ".", "..", "/", "a", "iter_0000042", "iter_0000042_tmp_", "iter_42_tmp_a", "../iter_0000042_tmp_a", "iter_0000042_tmp_a/../b",
    "iter_0000042_tmp_a/", "iter_0000042_tmp_a\0", "iter_0000042_tmp_a\n", "iter_٠٠٠٠٠٤٢_tmp_a", "iter_0000042_tmp_é", "iter_0000042_tmp_.",
    "iter_0000042_tmp_" + "a" * 129, "iter_0000042_tmp_published", "iter_0000042_tmp_pruned_1", "iter_0000042_tmp_gather_1",
    "iter_0000042_tmp_superseded_1", "iter_0000042_tmp_a_claim_0f",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_not_a_staging_directorys_is_refused(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"invalid name of a staging directory: got .*, expected iter_0000042_tmp_NAME"
    ):
        staging.check_name(name, 42)


@pytest.mark.parametrize(
    "name", ["iter_0000042_tmp_1_1048577_2", "iter_0000042_tmp_periodic_0_1", "iter_0000042_tmp_requested_3_1"]
)
def test_the_names_of_controllers_and_of_periodic_checkpoints_are_taken(name: str) -> None:
    staging.check_name(name, 42)
    with pytest.raises(CheckpointError, match="expected iter_0000043_tmp_NAME"):
        staging.check_name(name, 43)


def test_a_valid_checkpoint_outlives_a_publish_that_names_it_as_its_staging_directory(job: Job, tmp_path: Path) -> None:
    """A missing file made the publisher take the checkpoint that is there for its own staging directory, and remove it."""
    path = job.save(tmp_path, 42)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="invalid name of a staging directory: got 'iter_0000042'"):
        publishes(tmp_path, path.name)
    assert contents(tmp_path) == before


def test_another_steps_staging_directory_is_neither_published_nor_claimed(job: Job, tmp_path: Path) -> None:
    results = job.write(tmp_path, "iter_0000041_tmp_a", 2)
    before = contents(tmp_path)
    for act in (publishes, publishes_a_piece):
        with pytest.raises(CheckpointError, match="expected iter_0000042_tmp_NAME"):
            act(tmp_path, "iter_0000041_tmp_a", results)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["../iter_0000041/file", "/etc/hostname", "..", "", "a\0b"])
def test_a_share_that_lies_outside_the_staging_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / OWN).mkdir()
    results = (ShareResult((FileEntry(name, 1, NOTHING, 0),)),)
    for act in (publishes, publishes_a_piece):
        with pytest.raises(
            CheckpointError, match=r"invalid file of rank 0: got .*, expected a name without a directory"
        ):
            act(tmp_path, OWN, results)


@pytest.mark.parametrize("what", ["a symbolic link", "a file"])
def test_a_link_in_the_place_of_a_staging_directory_is_refused_by_everything(
    job: Job, tmp_path: Path, what: str
) -> None:
    folder, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("not ours")
    if what == "a file":
        (folder / OWN).write_text("a file")
    else:
        (folder / OWN).symlink_to(elsewhere)
    before = contents(tmp_path)
    acts: Sequence[Callable[[], object]] = (
        lambda: staging.discard_staging(folder, OWN),
        lambda: claim_staging(folder, OWN, (), lambda: False, "?"),
        lambda: publishes(folder, OWN),
        lambda: publishes_a_piece(folder, OWN),
        lambda: job.write(folder, OWN, 2),
    )
    for act in acts:
        with pytest.raises(CheckpointError, match=what if act is not acts[-1] or what != "a file" else OWN):
            act()
    assert contents(tmp_path) == before


def test_of_a_leftover_link_the_next_attempt_removes_the_link_alone(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("not ours")
    (folder / OWN).symlink_to(elsewhere)
    (folder / "iter_٠٠٠٠٠٤٢_tmp_a").mkdir()
    assert clean_stale(folder) == [OWN]
    assert (elsewhere / "file").read_text() == "not ours" and os.listdir(folder) == ["iter_٠٠٠٠٠٤٢_tmp_a"]


def test_prune_leaves_a_linked_checkpoint_and_what_it_points_to_alone(job: Job, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    folder.mkdir()
    path = job.save(elsewhere, 40)
    job.save(folder, 42)
    (folder / path.name).symlink_to(path)
    plan = prune.plan_prune(folder, 1, lambda path: None)
    assert [(entry.paths[0].name, entry.error) for entry in plan.left] == [
        (path.name, "a symbolic link, which is removed by hand")
    ]
    assert not plan.removed
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="is a symbolic link to"):
        take_away(folder / path.name, 40)
    assert contents(tmp_path) == before
    half = folder / f"iter_0000040{staging.PRUNED}0f"
    half.symlink_to(path)
    remove_tree(half)
    assert contents(tmp_path) == before, "the link alone is gone"


def test_a_publisher_whose_staging_directory_is_gone_leaves_an_earlier_runs_checkpoint_alone(
    job: Job, tmp_path: Path
) -> None:
    """Another publisher has it, and is about to put the step in that place: this one has nothing for it."""
    path = job.save(tmp_path, 42)
    results = job.write(tmp_path, "iter_0000042_tmp_b", 2)
    staging.discard_staging(tmp_path, "iter_0000042_tmp_b")
    passed_over = inodes_in([str(tmp_path)])
    with pytest.raises(CheckpointError, match=r"is gone .* not this run's: nothing to publish"):
        job.publish(tmp_path, "iter_0000042_tmp_b", results, 42, passed_over=passed_over)
    job.assert_equal(job.read(path))
    assert not list(tmp_path.glob("*_replaced_*"))
