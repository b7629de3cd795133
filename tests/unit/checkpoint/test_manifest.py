"""The manifest comes back exactly, and nothing but a true manifest is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.checkpoint.format import manifest as manifests
from ttp.checkpoint.format.manifest import Manifest, TensorSpec
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import Cause, CauseKind, CommitRecord, FileEntry

floats = st.floats(allow_nan=False)
records = st.builds(
    CommitRecord,
    step=st.integers(0, 10**9),
    grad_norm=floats,
    clip_factor=floats,
    skipped=st.booleans(),
    loss_scale=floats,
    learning_rates=st.lists(floats, max_size=3).map(tuple),
    sums=st.lists(floats, max_size=3).map(tuple),
)
states = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def a_manifest(**fields: Any) -> Manifest:
    given: dict[str, Any] = {
        "step": 42,
        "cause": Cause(CauseKind.SILENT, (1, 3), "lease lost"),
        "layout": {"dp": 4, "replicas": 2},
        "files": (FileEntry("__0_0_0.distcp", 12, f"xxh3_128:{'ab' * 16}", 0),),
        "tensors": {"model.w": TensorSpec("float32", (3, 4)), "optim.state.w.step": TensorSpec("float32", ())},
        "state": {"optimizer": {"param_groups": []}, "trainer": {"samples": 7}},
        "record": None,
        "created_unix_s": 1.7e9 + 0.1,
        "attempt": "iter_0000042_tmp_1",
        "term": 3,
        "versions": {"torch": "2.13.0", "ttp": "0.1.0"},
    }
    return Manifest(**(given | fields))


@given(states, records | st.none())
def test_a_manifest_comes_back_exactly(state: Any, record: CommitRecord | None) -> None:
    """Every float to the last bit, infinities too."""
    written = a_manifest(state={"optimizer": {"param_groups": []}, "trainer": {"any": state}}, record=record)
    assert manifests.from_bytes(manifests.to_bytes(written), "here") == written


def test_a_manifest_that_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe of that name, or a directory."""
    os.mkfifo(tmp_path / manifests.MANIFEST_NAME)
    with pytest.raises(CorruptCheckpoint, match="expected a regular file"):
        manifests.read_manifest(tmp_path)


def test_nan_comes_back_and_tuples_come_back_as_lists() -> None:
    """A diverged job is saved like any other."""
    record = CommitRecord(1, math.nan, 1.0, True, math.inf, (math.nan,), ())
    trainer = {"loss": math.nan, "betas": (0.9, 0.95), "low": -math.inf}
    written = a_manifest(state={"optimizer": {"param_groups": []}, "trainer": trainer}, record=record)
    content = manifests.to_bytes(written)
    json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = manifests.from_bytes(content, "here")
    state = found.state["trainer"]
    assert math.isnan(state["loss"]) and state["low"] == -math.inf and state["betas"] == [0.9, 0.95]
    assert found.record is not None and math.isnan(found.record.grad_norm) and found.record.loss_scale == math.inf


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2: 3}]}, r"state\.a\[1\] has the key 2: expected strings"),
        ({"a": {"b": {1, 2}}}, r"state\.a\.b is a set"),
        ({"__float__": "nan"}, r"state has the key '__float__'"),
    ],
)
def test_a_state_that_json_cannot_carry_is_named_by_its_place(state: Any, message: str) -> None:
    """Found when it is written, not when it is needed."""
    with pytest.raises(CheckpointError, match=message):
        manifests.to_bytes(a_manifest(state=state))


def resealed(body: dict[str, Any]) -> bytes:
    """A manifest whose checksum is right, whatever it says."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sha256": hashlib.sha256(canonical.encode()).hexdigest(), **body}).encode()


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(Manifest) if f.name not in ("format_version", "finite", "launch")]
)
def test_every_field_is_checked(field: str) -> None:
    """Missing, or of another type: named, and never half read."""
    body = json.loads(manifests.to_bytes(a_manifest()))
    assert manifests.from_bytes(resealed(body), "here") == a_manifest()
    without = {key: value for key, value in body.items() if key != field}
    with pytest.raises(CorruptCheckpoint, match=f"here: {field}: is missing, expected a value"):
        manifests.from_bytes(resealed(without), "here")
    with pytest.raises(CorruptCheckpoint, match=f"here: {field}: got True, expected "):
        manifests.from_bytes(resealed(body | {field: True}), "here")


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    """Any byte, any other value: refused, unless only the layout of the text changed."""
    content = bytearray(manifests.to_bytes(a_manifest()))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
    try:
        found = manifests.from_bytes(bytes(content), "here")
    except CorruptCheckpoint:
        return
    assert found == a_manifest()


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    """The directory was never published."""
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is missing: .* was never published, or was damaged"):
        manifests.read_manifest(tmp_path)


def test_a_part_names_the_launch_that_wrote_it_and_an_older_one_names_none() -> None:
    body = json.loads(manifests.to_bytes(a_manifest(launch="a" * 32)))
    assert manifests.from_bytes(resealed(body), "here").launch == "a" * 32
    older = {key: value for key, value in body.items() if key != "launch"}
    assert manifests.from_bytes(resealed(older), "here").launch == ""


def test_a_manifest_says_whether_its_state_is_finite_and_an_older_one_that_it_is_not_known() -> None:
    body = json.loads(manifests.to_bytes(a_manifest(finite=False)))
    assert manifests.from_bytes(resealed(body), "here").finite is False
    older = {key: value for key, value in body.items() if key != "finite"}
    assert manifests.from_bytes(resealed(older), "here").finite is None
    with pytest.raises(CorruptCheckpoint, match="here: finite: got 1, expected true or false"):
        manifests.from_bytes(resealed(body | {"finite": 1}), "here")
