"""`ttp ckpt prune`: what stays, what goes, and what a removal that is cut short anywhere leaves: in a directory that all ranks share, and
over the directories of nodes with their own."""

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

from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.test_manifest import resealed
from ttp.checkpoint import find
from ttp.checkpoint.cli import main
from ttp.checkpoint.format.durable import inodes_in, step_of_directory
from ttp.checkpoint.node_local.parts import list_parts
from ttp.checkpoint.passed_over import write_notes
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


class Shared:
    """A directory that all ranks share."""

    def __init__(self, root: Path, job: Job) -> None:
        self.job, self.root = job, root
        self.folders = [root / "shared"]

    def save(self, step: int) -> None:
        self.job.save(self.folders[0], step)

    def newest(self) -> int | None:
        """Return the step that an attempt of the job finds."""
        found = find.find_newest_valid(self.folders)
        return None if found is None else found.manifest.step

    def prune(self, *words: object) -> tuple[int, str]:
        return prune(*self.folders, *words)

    def steps(self) -> list[int]:
        """Return the steps, which are the same in all folders."""
        first, *others = [steps(folder) for folder in self.folders]
        assert all(other == first for other in others)
        return first

    def paths(self, step: int) -> list[str]:
        return [str(folder / f"iter_{step:07d}") for folder in self.folders]

    def copy(self, name: str) -> Shared:
        """Return the same in another place."""
        twin = type(self)(self.root / name, self.job)
        for folder, other in zip(self.folders, twin.folders, strict=True):
            shutil.copytree(folder, other)
        return twin


class NodeLocal(Shared):
    """Two nodes, each with a directory of its own."""

    def __init__(self, root: Path, job: Job) -> None:
        self.job, self.root, self.cluster = job, root, Cluster(root)
        self.folders = [root / "a", root / "b"]

    def save(self, step: int) -> None:
        self.cluster.save(self.job, step)

    def newest(self) -> int | None:
        found = self.cluster.gather(self.job)
        return None if found[0] is None else found[0].manifest.step


@pytest.fixture(params=[Shared, NodeLocal])
def disks(request: pytest.FixtureRequest, job: Job, tmp_path: Path) -> Shared:
    made: Shared = request.param(tmp_path, job)
    return made


def test_nothing_is_removed_before_one_says_yes(disks: Shared) -> None:
    """Shown: what stays, what would go, and how much room that is; then the same with --yes happens."""
    for step in (10, 20, 30):
        disks.save(step)
    count = 2 * len(disks.folders)
    status, text = disks.prune("--keep", 1)
    assert status == 0 and f"would remove {count} directories" in text and "nothing was changed: --yes removes" in text
    assert [line.split()[0] for line in text.splitlines() if " goes " in line] == ["20", "10"]
    answer = json.loads(disks.prune("--keep", 1, "--json")[1])
    assert answer["would_remove"] == [*disks.paths(20), *disks.paths(10)]
    assert answer["bytes"] == size(*map(Path, answer["would_remove"])) and answer["kept"] == disks.paths(30)
    assert disks.steps() == [10, 20, 30]
    status, text = disks.prune("--keep", 1, "--yes")
    assert status == 0 and f"removed {count} directories" in text and disks.steps() == [30] and disks.newest() == 30
    assert disks.prune("--keep", 1, "--yes") == (0, disks.prune("--keep", 1)[1])


def test_damaged_ones_do_not_count_as_kept_and_are_left_alone(disks: Shared) -> None:
    """--keep 1 means one that a restart could load; damage that only checksums show counts, and so does an unreadable manifest."""
    for step in (10, 20, 30, 40):
        disks.save(step)
    flip_a_bit(Path(disks.paths(40)[-1]), f"__{len(disks.folders)}_0_0.distcp")
    (Path(disks.paths(30)[0]) / "manifest.json").write_text("{")
    status, text = disks.prune("--keep", 1, "--yes")
    assert status == 0 and "was altered since rank" in text and "manifest" in text and "left alone" in text
    assert disks.steps() == [20, 30, 40] and disks.newest() == 20
    assert json.loads(disks.prune("--keep", 2, "--json")[1])["kept"] == disks.paths(20)


def test_where_none_is_valid_nothing_goes(disks: Shared) -> None:
    """Status 3, with what is wrong with each."""
    for step in (10, 20):
        disks.save(step)
        flip_a_bit(Path(disks.paths(step)[0]), "__0_0_0.distcp")
    status, text = disks.prune("--keep", 1, "--yes")
    assert status == 3 and "so nothing is removed" in text and "was altered" in text and disks.steps() == [10, 20]


def test_what_is_not_a_checkpoint_is_never_touched(disks: Shared) -> None:
    """The tracker, a staging directory, one renamed, a stranger's files."""
    for step in (10, 20):
        disks.save(step)
    for folder in disks.folders:
        for name in ("iter_0000030_tmp_x", "iter_0000005_broken_1", "mine", "iter_7"):
            shutil.copytree(folder / "iter_0000020", folder / name)
    others = [sorted(name for name in os.listdir(folder) if name != "iter_0000010") for folder in disks.folders]
    assert disks.prune("--keep", 1, "--yes")[0] == 0
    assert [sorted(os.listdir(folder)) for folder in disks.folders] == others


def test_what_the_job_has_passed_over_neither_counts_nor_goes(disks: Shared) -> None:
    """Another run's of higher steps: a restart would have nothing to load."""
    for step in (5, 80, 90):
        disks.save(step)
    write_notes(map(str, disks.folders), inodes_in(map(str, disks.folders)))
    status, text = disks.prune("--keep", "1", "--yes")
    assert status == 3 and "another run's, or refused when the job resumed" in text and disks.steps() == [5, 80, 90]
    for step in (10, 20):
        disks.save(step)
    status, text = disks.prune("--keep", "1", "--yes")
    assert (status, disks.steps()) == (0, [5, 20, 80, 90])
    assert text.count("another run's, or refused when the job resumed: move or remove it by hand") == 3 * len(
        disks.folders
    )
    for folder in disks.folders:
        (folder / "iter_0000090").rename(folder.with_name(f"{folder.name}_90"))
    disks.save(90)
    assert disks.prune("--keep", "1", "--yes")[0] == 0
    assert disks.steps() == [5, 80, 90], "one that has taken the name is the job's"


@pytest.mark.parametrize("partial", [(), ("--partial",)])
def test_a_linked_one_is_left_and_keeps_no_other_step_from_going(disks: Shared, partial: tuple[str, ...]) -> None:
    for step in (10, 20, 30):
        disks.save(step)
    linked = Path(disks.paths(10)[0])
    shutil.move(linked, disks.root / "elsewhere")
    linked.symlink_to(disks.root / "elsewhere")
    status, text = disks.prune("--keep", 1, "--yes", *(partial if len(disks.folders) > 1 else ()))
    assert status == 0 and "a symbolic link, which is removed by hand" in " ".join(text.split())
    assert disks.steps() == [10, 30]


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
    disks: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before each single act: the newest step is whole, and the next prune ends the work, with --partial for a step of which one node's
    part has gone."""
    for step in (10, 20):
        disks.save(step)
    with monkeypatch.context() as patch:
        acts = cut_at(patch, 0)
        disks.copy("counted").prune("--keep", 1, "--yes")
    assert acts[0] >= 8
    for count in range(1, acts[0] + 1):
        cut = disks.copy(f"cut_{count}")
        with monkeypatch.context() as patch, pytest.raises(Cut):
            cut_at(patch, count)
            cut.prune("--keep", 1, "--yes")
        for folder in cut.folders:
            assert 20 in steps(folder)
            for step in steps(folder):
                assert verify(folder / f"iter_{step:07d}").step == step
        again = cut.copy(f"again_{count}")
        assert again.prune("--keep", 1, "--yes", *(["--partial"] if len(disks.folders) > 1 else []))[0] == 0
        for folder in again.folders:
            assert [name for name in os.listdir(folder) if name.startswith("iter_")] == ["iter_0000020"]
        for folder in cut.folders:
            clean_stale(folder)  # what an attempt of the job does
            assert [name for name in os.listdir(folder) if "pruned" in name] == []


def test_what_is_about_parts_is_refused_without_any(job: Job, tmp_path: Path) -> None:
    """Several folders, or --partial, of whole checkpoints: status 2, and nothing is changed."""
    for name in "ab":
        job.save(tmp_path / name, 10)
    for words in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "a", "--partial")):
        assert prune(*words, "--keep", 1, "--yes")[0] == 2
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == [10]
    assert prune(tmp_path / "a", tmp_path / "a", "--keep", 1)[0] == 0  # one folder, named twice


def test_parts_of_one_write_that_name_other_hosts_are_not_whole(job: Job, tmp_path: Path) -> None:
    """The first names fewer ranks than the second, of whose files one is missing: named with its node, and the older step is kept."""
    disks = NodeLocal(tmp_path, job)
    for step in (10, 20):
        disks.save(step)
    first, second = (Path(path) for path in disks.paths(20))
    body = json.loads((first / "manifest.json").read_text())
    last = len(body["hosts"]) - 1
    missing = [file["name"] for file in body["files"] if file["rank"] == last]
    fewer = [file for file in body["files"] if file["rank"] < last]
    (first / "manifest.json").write_bytes(resealed({**body, "hosts": body["hosts"][:last], "files": fewer}))
    (second / missing[0]).unlink()
    status, text = disks.prune("--keep", 1)
    assert status == 0 and f"which rank {last} wrote on node b, is in none of the folders" in text
    assert json.loads(disks.prune("--keep", 1, "--json")[1])["kept"] == disks.paths(10)


def test_half_removed_ones_are_shown_and_go_with_the_next_prune(job: Job, tmp_path: Path) -> None:
    """A dry run names them as well."""
    job.save(tmp_path, 10)
    half = shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000005_tmp_pruned_x")
    status, text = prune(tmp_path, "--keep", 3)
    assert status == 0 and "would remove 1 directory" in text and half.name in text
    prune(tmp_path, "--keep", 3, "--yes")
    assert not half.exists() and steps(tmp_path) == [10]


def test_a_folder_that_cannot_be_changed_is_reported(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 3, the name and the reason; what could not be renamed is whole."""
    for step in (10, 20):
        job.save(tmp_path, step)

    def refuse(source: object, target: object) -> None:
        raise OSError(30, "Read-only file system", str(source))

    monkeypatch.setattr(os, "rename", refuse)
    status, text = prune(tmp_path, "--keep", 1, "--yes")
    assert status == 3 and "iter_0000010: Read-only file system" in text
    assert verify(tmp_path / "iter_0000010").step == 10


def test_one_that_cannot_be_removed_keeps_no_other(disks: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files refuse, whatever its mode says. The next prune goes on past what is half removed of it."""
    for step in (10, 20, 30, 40):
        disks.save(step)
    remove = shutil.rmtree

    def refuse(path: Path) -> None:
        if path.name.startswith("iter_0000010_"):
            raise PermissionError(13, "Permission denied", "manifest.json")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    status, text = disks.prune("--keep", "2", "--yes")
    assert status == 3 and f"{disks.paths(10)[0]}: Permission denied" in text
    assert disks.steps() == [30, 40]
    status, text = disks.prune("--keep", "1", "--yes")
    assert status == 3 and f"{disks.folders[0]}/iter_0000010_tmp_pruned_" in text and disks.steps() == [40]


@pytest.mark.parametrize("partial", [(), ("--partial",)])
def test_one_that_this_user_may_not_remove_is_left_alone(
    nodes: NodeLocal, monkeypatch: pytest.MonkeyPatch, partial: tuple[str, ...]
) -> None:
    """Somebody keeps a step by `chmod -R a-w`, or it is another user's."""
    for step in (10, 20, 30):
        nodes.save(step)
    protected, needed = nodes.paths(10)[1], os.R_OK | os.W_OK | os.X_OK

    def access(path: Path, mode: int, *, effective_ids: bool) -> bool:
        return not (str(path) == protected and mode == needed and effective_ids)

    monkeypatch.setattr(os, "access", access)
    status, text = nodes.prune("--keep", "1", *partial, "--yes")
    assert status == 0 and "cannot be removed by this user" in text and nodes.steps() == [10, 30]


def test_an_attempt_that_cleans_at_the_same_time_does_no_harm(
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


# --- nodes with directories of their own ---


@pytest.fixture
def nodes(job: Job, tmp_path: Path) -> NodeLocal:
    return NodeLocal(tmp_path / "disks", job)


def test_a_folder_under_two_names_is_one(nodes: NodeLocal, tmp_path: Path) -> None:
    """A link beside its folder: every piece goes once, and is counted once."""
    for step in (10, 20):
        nodes.save(step)
    first, second = nodes.folders
    (tmp_path / "link").symlink_to(first)
    answer = json.loads(prune(first, tmp_path / "link", second, "--keep", 1, "--json")[1])
    assert sorted(answer["would_remove"]) == [str(disk / "iter_0000010") for disk in (first, second)]
    assert prune(first, tmp_path / "link", second, "--keep", 1, "--yes")[0] == 0
    assert [steps(disk) for disk in (first, second)] == [[20], [20]]


def test_one_nodes_folder_alone_says_what_it_lacks(nodes: NodeLocal) -> None:
    """Nothing is whole there, so nothing goes, whatever is asked for."""
    for step in (10, 20):
        nodes.save(step)
    status, text = prune(nodes.folders[0], "--keep", 1, "--partial", "--yes")
    assert status == 3 and "wrote on node b, is in none of the folders" in text and "all nodes" in text
    assert steps(nodes.folders[0]) == [10, 20]


def test_a_step_that_is_not_whole_here_is_kept_unless_asked_for(nodes: NodeLocal) -> None:
    """A third node may have the rest. One that is newer than all that stay is never removed."""
    for step in (10, 20, 30, 40):
        nodes.save(step)
    for step in (10, 40):
        shutil.rmtree(nodes.folders[1] / f"iter_{step:07d}")
    status, text = nodes.prune("--keep", 1, "--yes")
    assert status == 0 and "__2_0_0.distcp, which rank 2 wrote on node b, is in none of the folders" in text
    assert steps(nodes.folders[0]) == [10, 30, 40]
    assert nodes.prune("--keep", 2, "--partial", "--yes")[0] == 0
    assert steps(nodes.folders[0]) == [10, 30, 40], "two whole ones were to stay, there is one"
    assert nodes.prune("--keep", 1, "--partial", "--yes")[0] == 0
    assert steps(nodes.folders[0]) == [30, 40] and nodes.newest() == 30


def test_parts_of_two_writes_are_not_mixed(nodes: NodeLocal) -> None:
    """Node a has the later write's piece alone, and behind it the earlier one's: the step is whole by the earlier, and stays with both."""
    nodes.cluster.save(nodes.job, 10)
    nodes.cluster.save(nodes.job, 20, "x", start=1)
    nodes.cluster.save(nodes.job.later(), 20, "y", start=2, publishers=(0,))
    assert any("superseded" in name for name in os.listdir(nodes.folders[0]))
    before = sorted(os.listdir(nodes.folders[0]))
    assert nodes.prune("--keep", 1, "--yes")[0] == 0
    left = sorted(os.listdir(nodes.folders[0]))
    assert left == [name for name in before if name != "iter_0000010"]
    assert nodes.newest() == 20
    nodes.cluster.save(nodes.job, 30)
    assert nodes.prune("--keep", 1, "--yes")[0] == 0
    assert [path.name for path in list_parts(nodes.folders)] == ["iter_0000030"] * 2


def test_whole_checkpoints_among_parts_are_refused(nodes: NodeLocal) -> None:
    """Which of the two kinds an attempt would load, the command cannot know."""
    nodes.cluster.save(nodes.job, 10)
    nodes.job.save(nodes.folders[0], 20)
    status, text = nodes.prune("--keep", 1, "--yes")
    assert status == 3 and "was TTP_SHARED_DIRS changed" in text and steps(nodes.folders[0]) == [10, 20]
