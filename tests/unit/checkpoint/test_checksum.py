"""Files get xxh3-128 by name; what was written with SHA-256, before the manifest named an algorithm, is used like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

import ttp
from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.test_manifest import a_manifest, resealed
from ttp.checkpoint import find
from ttp.checkpoint.cli.main import main
from ttp.checkpoint.format import checksum, manifest
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry

BEFORE = Path(__file__).parent / "before_xxh3"
"""`shared`: step 42 of OLD, by two ranks; `nodes`: the parts of step 7 of two nodes. Written by the last version that knew SHA-256 only."""
OLD = Job({"model.w": torch.arange(12.0).view(3, 4), "optim.state.w.step": torch.tensor(42.0)})


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a copy of the shared directory."""
    return Path(shutil.copytree(BEFORE / "shared", tmp_path / "shared"))


def test_the_manifest_names_the_algorithm_of_every_file(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 42, blobs={"optim.param_groups.0.lr": 0.5})
    body = json.loads((path / "manifest.json").read_text())
    assert {file["name"] for file in body["files"]} == {each.name for each in path.iterdir()} - {"manifest.json"}
    for file in body["files"]:
        digits = xxhash.xxh3_128_hexdigest((path / file["name"]).read_bytes())
        assert file["checksum"] == f"xxh3_128:{digits}" and "sha256" not in file


def test_a_file_is_summed_as_it_was_recorded(tmp_path: Path) -> None:
    """SHA-256 of nothing, and of `abc`, as its standard has them."""
    (tmp_path / "f").write_bytes(b"abc")
    digits = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    checksum.check_file(tmp_path / "f", FileEntry("f", 3, f"sha256:{digits}", 0))
    with pytest.raises(
        CorruptCheckpoint, match=r"f was altered since rank 4 wrote it: checksum sha256:ba78\w+, expected sha256:e3b0"
    ):
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        checksum.check_file(tmp_path / "f", FileEntry("f", 3, f"sha256:{empty}", 4))


def test_an_older_checkpoint_is_found_verified_and_read(old: Path) -> None:
    """By a resume, and by a program."""
    found = find.find_newest_valid([old])
    assert found is not None and found.manifest.step == 42 and verify(found.path) == found.manifest
    OLD.assert_equal(OLD.read(found.path, 2))
    assert torch.equal(ttp.open_checkpoint(old).weights()["w"], OLD.tensors["model.w"])


def test_damage_of_an_older_checkpoint_is_found(old: Path) -> None:
    flip_a_bit(old / "iter_0000042")
    with pytest.raises(CorruptCheckpoint, match=r"__1_0_0\.distcp was altered since rank 1 wrote it: checksum sha256:"):
        verify(old / "iter_0000042")


def test_every_command_takes_an_older_checkpoint(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diff` with the same state as it is written now; `prune` counts it as one that stays."""
    now = OLD.save(tmp_path / "now", 42, holders=3, blobs={"optim.param_groups.0.lr": 0.5})
    for words in (
        ["list", old],
        ["inspect", old],
        ["verify", old],
        ["export", old, tmp_path / "w.pt", "--to", "torch"],
    ):
        assert main([str(word) for word in words]) == 0, capsys.readouterr()
    assert main(["diff", str(old), str(now)]) == 0
    assert torch.equal(torch.load(tmp_path / "w.pt")["model"]["w"], OLD.tensors["model.w"])
    OLD.later().save(old, 41)
    assert main(["prune", str(old), "--keep", "1", "--yes"]) == 0
    assert [path.name for path in find.list_checkpoints([old])] == ["iter_0000042"]


def test_a_publisher_keeps_an_older_checkpoint_of_its_step(old: Path) -> None:
    """The step came again after an update of the software: its bytes are compared, it is neither replaced nor moved."""
    before = (old / "iter_0000042" / "manifest.json").read_bytes()
    assert OLD.save(old, 42, attempt="b") == old / "iter_0000042"
    assert (old / "iter_0000042" / "manifest.json").read_bytes() == before and not list(old.glob("*_broken_*"))


def test_older_parts_of_nodes_are_found_and_moved(tmp_path: Path) -> None:
    """The ranks change places, so that every file crosses; what a node takes in names the old algorithm in the new form."""
    shutil.copytree(BEFORE / "nodes", tmp_path, dirs_exist_ok=True)
    cluster = Cluster(tmp_path, hosts=("b", "a", "c"))
    found = cluster.gather(OLD)
    OLD.assert_equal(cluster.read(OLD, found))
    assert cluster.said and cluster.skipped == []
    taken = read_manifest(tmp_path / "c" / "iter_0000007")
    assert {file.checksum.partition(":")[0] for file in taken.files} == {"sha256"}
    assert verify(tmp_path / "c" / "iter_0000007").step == 7
    assert main(["prune", *(str(tmp_path / host) for host in "abc"), "--keep", "1"]) == 0


def test_an_older_file_that_changes_on_its_way_is_not_taken(tmp_path: Path) -> None:
    shutil.copytree(BEFORE / "nodes", tmp_path, dirs_exist_ok=True)
    cluster = Cluster(tmp_path, hosts=("b", "a"), spoil=lambda chunk: bytes([chunk[0] ^ 1]) + chunk[1:])
    with pytest.raises(CheckpointError, match="it arrived with checksum sha256:"):
        cluster.gather(OLD)


def written_by_a_later_version(path: Path) -> None:
    body = json.loads((path / "manifest.json").read_text())
    body["files"][1]["checksum"] = f"blake9:{'0' * 32}"
    (path / "manifest.json").write_bytes(resealed(body))


@pytest.mark.parametrize(
    "read", [verify, read_manifest, lambda path: main(["verify", str(path)])], ids=["verify", "manifest", "command"]
)
def test_an_unknown_algorithm_is_refused_by_name(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], read: Callable[[Path], object]
) -> None:
    """In one line, with those that are known here."""
    older, path = job.save(tmp_path, 41), job.save(tmp_path, 42)
    written_by_a_later_version(path)
    expected = (
        "files[1].checksum: got 'blake9:00000000000000000000000000000000', expected a checksum by xxh3_128 or sha256"
    )
    try:
        assert read(path) == 1
        output = capsys.readouterr().out
    except CorruptCheckpoint as error:
        output = str(error)
    assert expected in output and "\n" not in output.strip()
    found = find.find_newest_valid([tmp_path])
    assert found is not None and found.path == older and expected in found.skipped[0]


def test_a_file_of_an_unknown_algorithm_is_refused_on_its_way(tmp_path: Path) -> None:
    """A share comes over the wire: its writer may be of another version."""
    with pytest.raises(
        CorruptCheckpoint, match=r"f, written by rank 3: checksum: got 'x', expected a checksum by xxh3_128 or sha256"
    ):
        checksum.for_file(FileEntry("f", 1, "x", 3))


def test_an_old_manifest_comes_back_in_the_new_form() -> None:
    """A node that takes in another's files writes the manifest anew."""
    body = json.loads(manifest.to_bytes(a_manifest()))
    body["files"] = [{"name": "f", "nbytes": 3, "sha256": "ab" * 32, "rank": 0}]
    found = manifest.from_bytes(resealed(body | {"format_version": 1}), "here")
    assert found.files == (FileEntry("f", 3, f"sha256:{'ab' * 32}", 0),)
    assert manifest.from_bytes(manifest.to_bytes(found), "here") == found
