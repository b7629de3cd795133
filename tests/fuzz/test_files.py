"""Files from outside: read, or refused with the error that their reader promises, in one line."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.conftest import CAUSE, Job
from tests.unit.checkpoint.test_manifest import a_manifest, resealed
from ttp.chaos.faults.scenario import load_scenario
from ttp.checkpoint.format import dcp, durable, file_index
from ttp.checkpoint.format import manifest as manifests
from ttp.checkpoint.reader import read_into
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint
from ttp.launch.hosts.rank_table import read_rank_table
from ttp.optim.replica_optimizer import LossScale, TTPReplicaOptimizer
from ttp.proto.messages import CommitRecord, FileEntry, ShareResult
from ttp.trainer.config.loader import load_config

settings.load_profile("fuzz")

YAML_PIECES = (
    "a: ", "- ", "[", "]", "{", "}", ",", "\n", "  ", "&x ", "*x", "<<: ", "!!int ", "!!timestamp ", "!!float ", "!!bool ", "!!binary ",
    "!!python/object:os.system ", "!!set ", "!!omap ", "!!str ", "2020-99-99", "1e999", ".nan", ".inf", "0x" + "f" * 40, "1:30",
    "99999999999999999999", "null", "~", "yes", "\"\\ud800\"", "\"\\0\"", "'x'", "x", "|", ">", "? ", ": ", "#", "---\n", "...\n", "\t", "%YAML 9.9\n",
    "fault: kill\n", "faults:\n", "repeat: ", "rank: ", "then: ", "step: ", "model_config: ", "num_layers: ", "training_config: ", "seed: ", "3",
)  # fmt: skip

BASE_SCENARIO: dict[str, Any] = {"name": "x", "seed": 7, "repeat": 2, "faults": [{"fault": "kill", "rank": 1, "after_steps": [2, 8]},
                 {"fault": "stop", "for_s": 1, "then": [{"fault": "kill", "event": "write_sent"}]}]}  # fmt: skip
BASE_CONFIG: dict[str, Any] = {"model_config": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
               "training_config": {"seed": 1, "save_dirs": ["a"]}, "optimizer_config": {"betas": [0.9, 0.95]}}  # fmt: skip
BASE_TABLE: dict[str, Any] = {"version": "1.0", "status": "completed", "server_count": "1", "server_list": [
    {"server_id": "10.0.0.1", "device": [{"device_id": "0", "device_ip": "192.1.0.1", "rank_id": "0"}]}]}  # fmt: skip

ODD: list[Any] = [
    None, True, -1, 0, 3, 10**30, -(10**30), 2**63, 2**63 - 1, 0.5, 1e300, float("nan"), float("inf"), "", "x", "\0", "\ud800", "../x", "1" * 5000,
    [], {}, [[]], {"": 0}, [{}], {"__float__": "nan"}, "random", "kill", [1, 2], "²", "nan", [0.1, "x"], {"fault": "kill"},
]  # fmt: skip


def text_of(rng: random.Random) -> str:
    """Something like YAML."""
    if rng.random() < 0.05:
        return rng.choice(("[", "{a: ", "- ", "? ")) * rng.choice((10, 1000, 3000, 20000))
    return "".join(rng.choice(YAML_PIECES) for _ in range(rng.randrange(1, 30)))


def changed(value: Any, rng: random.Random) -> Any:
    """A copy with one value somewhere replaced, removed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.75:
                place = place[key]
                continue
            if rng.random() < 0.15:
                del place[key]
            elif rng.random() < 0.1 and isinstance(place, dict):
                place[rng.choice(("x", "", "\ud800", "__float__"))] = copy.deepcopy(rng.choice(ODD))
            else:
                place[key] = copy.deepcopy(rng.choice(ODD))
            break
    return value


def one_line(error: BaseException) -> None:
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000, text[:3000]
    text.encode()


def a_file(content: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix="ttp_fuzz_")
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    return Path(name)


@pytest.mark.parametrize(
    ("base", "read"),
    [(BASE_CONFIG, lambda path: load_config(str(path))), (BASE_SCENARIO, load_scenario)],
    ids=["trainer", "chaos"],
)
@given(st.randoms(use_true_random=True))
def test_yaml_is_read_or_refused_in_one_line(base: Any, read: Callable[[Path], Any], rng: random.Random) -> None:
    if rng.random() < 0.5:
        content = text_of(rng).encode("utf-8", "surrogatepass")
    else:
        content = (
            json.dumps(changed(base, rng), ensure_ascii=True)
            .replace("NaN", ".nan")
            .replace("Infinity", ".inf")
            .encode()
        )
    if rng.random() < 0.1:
        content = rng.randbytes(rng.randrange(200))
    path = a_file(content)
    try:
        read(path)
    except ConfigError as error:
        one_line(error)
    finally:
        path.unlink()


@given(st.randoms(use_true_random=True))
def test_a_value_on_the_trainers_command_line_is_read_or_refused_in_one_line(rng: random.Random) -> None:
    key = rng.choice(
        (
            "training_config.seed",
            "model_config.num_layers",
            "optimizer_config.betas",
            "training_config.resume",
            "x.y",
            "training_config",
        )
    )
    text = text_of(rng) if rng.random() < 0.5 else str(rng.choice(ODD[:18]))
    try:
        load_config("gpt_tiny", [(key, text)])
    except ConfigError as error:
        one_line(error)


@given(st.randoms(use_true_random=True))
def test_a_rank_table_is_read_or_refused_in_one_line(rng: random.Random) -> None:
    content = json.dumps(changed(BASE_TABLE, rng)).encode()
    if rng.random() < 0.2:
        content = rng.choice((rng.randbytes(50), b"[" * 100_000, b"1" * 5000, content[: rng.randrange(len(content))]))
    path = a_file(content)
    try:
        read_rank_table(str(path))
    except ConfigError as error:
        one_line(error)
    finally:
        path.unlink()


@cache
def a_body() -> dict[str, Any]:
    record = CommitRecord(42, 1.5, 0.7, False, 1.0, (3e-4,), (0.1,))
    groups = [{"lr": 0.1, "betas": [0.9, 0.95]}]
    state = {
        "optimizer": {"param_groups": groups, "loss_scale": {"scale": 2.0, "good_steps": 1}},
        "trainer": {"samples": 7},
    }
    body: dict[str, Any] = json.loads(manifests.to_bytes(a_manifest(record=record, state=state, hosts=("a", "b"))))
    return body


@cache
def an_optimizer() -> TTPReplicaOptimizer:
    return TTPReplicaOptimizer(torch.nn.Linear(2, 2).named_parameters(), replicas=1, lr=0.1, loss_scale=LossScale())


@given(st.randoms(use_true_random=True))
def test_a_sealed_manifest_is_read_or_corrupt(rng: random.Random) -> None:
    """What was read can be written and read again, with the same content; an optimizer loads its state, or refuses it and keeps its own."""
    body = changed(a_body(), rng)
    if rng.random() < 0.4:
        body = copy.deepcopy(a_body())
        body["state"]["optimizer"] = changed(body["state"]["optimizer"], rng)
    try:
        found = manifests.from_bytes(resealed(body), "manifest.json")
    except CorruptCheckpoint as error:
        one_line(error)
        return
    assert manifests.to_bytes(found) == manifests.to_bytes(manifests.from_bytes(manifests.to_bytes(found), "again"))
    optimizer, saved = an_optimizer(), found.state["optimizer"]
    try:
        optimizer.check_host_state(saved)
    except ValueError as error:
        one_line(error)
        return
    optimizer.load_begin()
    try:
        optimizer.load_end(found.step, saved)
    except CheckpointMismatch as error:
        assert len(saved["param_groups"]) != 1
        one_line(error)
        return
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    assert [float(beta1), float(beta2), float(optimizer.param_groups[0]["lr"])] and optimizer.loss_scale > 0


@cache
def a_checkpoint() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    folder = tempfile.TemporaryDirectory(prefix="ttp_fuzz_")
    g = torch.Generator().manual_seed(7)
    tensors = {"model.w": torch.randn((5, 7), generator=g), "model.b": torch.randn((5,), generator=g)}
    job = Job(tensors)
    return folder, job.save(Path(folder.name), 42, 2, cause=CAUSE)


@given(st.randoms(use_true_random=True))
def test_the_index_of_torch_is_read_or_corrupt(rng: random.Random) -> None:
    """Bytes that were changed, and objects of the right classes with values of any type."""
    path = a_checkpoint()[1]
    content = bytearray((path / ".metadata").read_bytes())
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 2, 8))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        content = content[: rng.choice((len(content), len(content), rng.randrange(len(content))))]
    else:
        metadata = pickle.loads(bytes(content))
        odd: Any = rng.choice((None, -1, 2**70, 1.5, "../x", [], {}, [1], (1, 2), torch.float32, torch.Size([3]), b"x"))
        things = [
            metadata,
            *metadata.state_dict_metadata.values(),
            *metadata.storage_data.values(),
            *metadata.storage_data,
        ]
        things += [chunk for each in metadata.state_dict_metadata.values() for chunk in getattr(each, "chunks", [])]
        thing = rng.choice(things)
        if names := list(vars(thing)):
            object.__setattr__(thing, rng.choice(names), odd)
        try:
            content = bytearray(pickle.dumps(metadata))
        except Exception:
            return  # it cannot be written either
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        (Path(folder) / ".metadata").write_bytes(content)
        try:
            found = dcp.read_metadata(Path(folder), None)
        except CorruptCheckpoint:
            return
        body = json.loads((path / "manifest.json").read_text())
        for name in os.listdir(path):
            if name.endswith(".distcp"):
                os.link(path / name, Path(folder) / name)
        entry = {"name": ".metadata", "nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "rank": 0}
        body["files"] = [each if each["name"] != ".metadata" else entry for each in body["files"]]
        (Path(folder) / "manifest.json").write_bytes(resealed(body))
        try:
            verify(Path(folder))
            read_into(folder, Job({"model.w": torch.zeros((5, 7)), "model.b": torch.zeros(5)}).held(), found)
        except CheckpointError:
            return


@given(st.randoms(use_true_random=True))
def test_a_table_of_contents_is_read_or_corrupt(rng: random.Random) -> None:
    table = {"tensors": [["model.w", "float32", [5, 7], [[[0, 0], [5, 7], 0, 140]]]], "blobs": [["x", 140, 10]]}
    body = (
        json.dumps(changed(table, rng)).encode()
        if rng.random() < 0.9
        else rng.choice((b"[" * 90_000, b"1" * 5000, b"\xff"))
    )
    content = body + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + file_index.MAGIC
    if rng.random() < 0.2:
        content = content[: rng.randrange(len(content))] + rng.randbytes(5)
    path = a_file(content)
    try:
        found = file_index.read_contents(path.parent, [ShareResult((FileEntry(path.name, len(content), "", 0),))])
        from ttp.checkpoint.verify import check_complete

        check_complete(found)
    except CorruptCheckpoint as error:
        one_line(error)
    finally:
        path.unlink()


@given(st.binary(max_size=40))
def test_a_tracker_is_a_step_or_nothing(content: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        (Path(folder) / durable.TRACKER_NAME).write_bytes(content)
        step = durable.read_tracker(Path(folder))
        assert step is None or 0 <= step < 2**63
        assert durable.advance_tracker(Path(folder), 5) == max(5, step or 0)
