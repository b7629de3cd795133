"""A manifest that is well sealed and holds what it must not: named by the key's path, and the next older checkpoint is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.test_manifest import a_manifest, resealed
from ttp.checkpoint import find
from ttp.checkpoint.cli.main import main
from ttp.checkpoint.format import manifest as manifests
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import CommitRecord

VIOLATIONS: list[tuple[str, Any, str]] = [
    ("step", -1, "step: got -1, expected an integer >= 0"),
    ("step", 2**63, f"step: got {2**63}, expected an integer >= 0"),
    ("step", True, "step: got True, expected an integer >= 0"),
    ("cause.kind", "bored", "cause.kind: got 'bored', expected one of periodic"),
    ("cause.kind", ["exited"], "cause.kind: got ['exited'], expected one of"),
    ("cause.ranks", [1, -3], "cause.ranks[1]: got -3, expected an integer >= 0"),
    ("cause.text", "a\0b", "cause.text: got 'a\\x00b', expected a string without NUL and lone surrogates"),
    ("files.0.name", "a\0b", "files[0].name: got 'a\\x00b', expected a string without NUL"),
    ("files.0.name", "\ud800", "files[0].name: got '\\ud800', expected a string without NUL and lone surrogates"),
    ("files.0.name", "../x", "files[0].name: got '../x', expected a file name"),
    ("files.0.name", "..", "files[0].name: got '..', expected a file name"),
    ("files.0.name", "", "files[0].name: got '', expected a file name"),
    ("files.0.name", "x" * 256, "expected a file name of 1 to 255 bytes"),
    ("files.0.nbytes", 1.5, "files[0].nbytes: got 1.5, expected an integer >= 0"),
    ("files.0.checksum", "xxh3_128:" + "AB" * 16, "expected xxh3_128: and 32 hexadecimal digits"),
    ("files.0.checksum", "sha256:" + "ab" * 16, "expected sha256: and 64 hexadecimal digits"),
    ("files.0.checksum", "md5:" + "ab" * 16, "expected a checksum by xxh3_128 or sha256; read it with the ttp that wrote it"),
    ("files.0.checksum", "ab" * 32, "expected a checksum by xxh3_128 or sha256"),
    ("files.0.rank", None, "files[0].rank: got None, expected an integer >= 0"),
    ("files", {}, "files: got {}, expected a list"),
    ("tensors.model.w.shape", [2**40, 2**40], "tensors.model.w.shape: got"),
    ("tensors.model.w.shape", [-1], "tensors.model.w.shape[0]: got -1, expected an integer >= 0"),
    ("tensors.model.w.dtype", 3, "tensors.model.w.dtype: got 3, expected a string"),
    ("created_unix_s", 1e300, "created_unix_s: got 1e+300, expected a finite number"),
    ("created_unix_s", -1.0, "created_unix_s: got -1.0, expected a finite number"),
    ("record.grad_norm", "0x1p99999", "record.grad_norm: got '0x1p99999', expected a float in hexadecimal"),
    ("record.sums", [0.5], "record.sums[0]: got 0.5, expected a float in hexadecimal"),
    ("record.skipped", 1, "record.skipped: got 1, expected true or false"),
    ("hosts", ["a", 7], "hosts[1]: got 7, expected a string"),
    ("launch", 7, "launch: got 7, expected a string"),
    ("versions", [], "versions: got [], expected a mapping"),
    ("versions", {"\ud800": [1]}, "versions: got '\\ud800', expected a string without NUL and lone surrogates"),
    ("layout", {"\ud800\n": {"__float__": 1}}, "layout.\\ud800\\n: got {'__float__': 1}, expected __float__ of"),
    ("layout", {"k" * 5000: {"__float__": 1}}, "kkk...kkk"),
    ("layout", 3, "layout: got 3, expected a mapping"),
    ("layout", {"a": {"__float__": "1"}}, "layout.a: got {'__float__': '1'}, expected __float__ of nan, inf or -inf"),
    ("layout", {"a": {"__float__": "nan", "b": 1}}, "layout.a: got {'__float__': 'nan', 'b': 1}, expected __float__ of nan, inf or -inf alone"),
    ("state", {"optimizer": {"param_groups": []}}, "state.trainer: is missing, expected a value"),
    ("state.trainer", "x", "state.trainer: got 'x', expected a mapping"),
    ("state.optimizer", [1], "state.optimizer: got [1], expected a mapping"),
    ("state.optimizer", {}, "state.optimizer.param_groups: is missing"),
    ("state.optimizer.param_groups", {"0": {}}, "state.optimizer.param_groups: got {'0': {}}, expected a list"),
    ("state.optimizer.param_groups", [3], "state.optimizer.param_groups[0]: got 3, expected a mapping"),
    ("state.optimizer.param_groups", [{"lr": "fast"}], "state.optimizer.param_groups[0].lr: got 'fast', expected a number"),
    ("state.optimizer.param_groups", [{"betas": [0.9, "x"]}], "state.optimizer.param_groups[0].betas: got [0.9, 'x']"),
    ("state.optimizer.loss_scale", 3, "state.optimizer.loss_scale: got 3, expected a mapping"),
    ("state.optimizer.loss_scale", {"scale": -1.0, "good_steps": 0}, "state.optimizer.loss_scale.scale: got -1.0"),
    ("state.optimizer.loss_scale", {"scale": 10**400, "good_steps": 0}, "state.optimizer.loss_scale.scale: got 1000"),
    ("state.trainer", {"a": [[[]]] * 3, "b": json.loads("[" * 70 + "]" * 70)}, "expected at most 64 levels"),
]  # fmt: skip


def altered(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path; a key may contain a dot."""
    body = json.loads(json.dumps(body))
    place: Any = body
    left = path
    while True:
        key = max((key for key in place if left == key or left.startswith(f"{key}.")), key=len, default="") \
            if isinstance(place, dict) else left.partition(".")[0]  # fmt: skip
        key = key or left
        rest = left[len(key) + 1 :]
        if not rest:
            place[int(key) if isinstance(place, list) else key] = value
            return body
        place, left = place[int(key) if isinstance(place, list) else key], rest


@pytest.mark.parametrize(
    ("path", "value", "message"), VIOLATIONS, ids=[f"{p}-{n}" for n, (p, *_) in enumerate(VIOLATIONS)]
)
def test_every_violation_names_its_path(path: str, value: Any, message: str) -> None:
    """The checksum is right: another program, or another version, wrote it."""
    body = json.loads(manifests.to_bytes(a_manifest(record=CommitRecord(42, 1.5, 0.7, False, 1.0, (3e-4,), (0.1,)))))
    with pytest.raises(CorruptCheckpoint) as caught:
        manifests.from_bytes(resealed(altered(body, path, value)), "manifest.json")
    assert (
        str(caught.value).startswith("manifest.json") and message in str(caught.value) and "\n" not in str(caught.value)
    )


def test_a_file_of_a_rank_that_has_no_host_is_refused() -> None:
    """Who looks for it would name that rank's node."""
    part = a_manifest(hosts=("node0", "node1"))
    body = json.loads(manifests.to_bytes(part))
    manifests.from_bytes(resealed(altered(body, "files.0.rank", 1)), "here")
    with pytest.raises(
        CorruptCheckpoint, match=r"here: files\[0\]\.rank: got 2, expected a rank below 2, as many as `hosts` has"
    ):
        manifests.from_bytes(resealed(altered(body, "files.0.rank", 2)), "here")


def test_a_part_that_lists_no_file_is_refused() -> None:
    """Each lists the files of all nodes: by those it is known who wrote."""
    body = json.loads(manifests.to_bytes(a_manifest(hosts=("node0", "node1"))))
    with pytest.raises(CorruptCheckpoint, match=r"here: files: got \[\], expected the files of all nodes"):
        manifests.from_bytes(resealed({**body, "files": []}), "here")


@pytest.mark.parametrize("content", [b"[" * 100_000, b"1" * 5000, b"\xff\xfe", b'{"a": NaN}', b"{}", b"null", b""])
def test_what_is_not_a_manifest_is_corrupt(content: bytes) -> None:
    """Deep nesting and long numbers raise errors of their own in the parser."""
    with pytest.raises(CorruptCheckpoint):
        manifests.from_bytes(content, "manifest.json")


def test_two_files_of_one_name_are_refused() -> None:
    """Which of the two checksums counts would be left open."""
    body = json.loads(manifests.to_bytes(a_manifest()))
    with pytest.raises(
        CorruptCheckpoint, match=r"files\[1\]\.name: got '__0_0_0.distcp', expected a name that no other"
    ):
        manifests.from_bytes(resealed(altered(body, "files", body["files"] * 2)), "here")


@pytest.mark.parametrize(("state", "message"), [
    (10**5000, r"state.trainer is an integer of \d+ bits"),
    (json.loads("[" * 63 + "]" * 63), "is nested too deep"),
], ids=["long", "deep"])  # fmt: skip
def test_what_could_not_be_read_again_is_not_written(state: Any, message: str) -> None:
    """A checkpoint that is published can be read."""
    with pytest.raises(CheckpointError, match=message):
        manifests.to_bytes(a_manifest(state={"trainer": state, "optimizer": {"param_groups": []}}))


def test_a_violation_is_skipped_for_the_next_older_checkpoint(job: Job, tmp_path: Path) -> None:
    """By a resume, and by the command that lists."""
    older, path = job.save(tmp_path, 41), job.save(tmp_path, 42)
    body = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_bytes(resealed(altered(body, "files.0.name", "a\0b")))
    found = find.find_newest_valid([tmp_path])
    assert found is not None and found.path == older and "files[0].name: got 'a\\x00b'" in found.skipped[0]
    assert main(["list", str(tmp_path)]) == 1


def test_a_checkpoint_whose_index_is_not_listed_is_corrupt(job: Job, tmp_path: Path) -> None:
    """Nothing vouches for it."""
    path = job.save(tmp_path, 42)
    body = json.loads((path / "manifest.json").read_text())
    files = [file for file in body["files"] if file["name"] != ".metadata"]
    (path / "manifest.json").write_bytes(resealed(altered(body, "files", files)))
    for read in (lambda: verify(path, share=(1, 2)), lambda: job.read(path)):
        with pytest.raises(CorruptCheckpoint, match=r"does not list \.metadata"):
            read()


def test_the_index_is_not_unpickled_before_its_checksum_is_right(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cheap checks too, and by a rank that only reads."""
    path = job.save(tmp_path, 42)
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(content.replace(b"__1_0_0", b"__0_0_0"))
    monkeypatch.setattr("ttp.checkpoint.format.dcp._MetadataUnpickler", lambda stream: pytest.fail("it was unpickled"))
    for read in (lambda: verify(path, deep=False), lambda: job.read(path)):
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata was altered since rank \d+ wrote it: checksum"):
            read()
