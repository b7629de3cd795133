"""`ttp ckpt export`: other people's libraries read what it writes, bit for bit; it is there whole or not at all."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ttp.checkpoint.cli import main
from ttp.checkpoint.cli.export import nested
from ttp.checkpoint.format import keys
from ttp.trainer.config.schema import ModelConfig, plain
from ttp.trainer.data.tokenizer import BYTES
from ttp.trainer.model.gpt import build_model

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

BLOBS = {
    "optim.param_groups.0.lr": 0.1,
    "optim.param_groups.0.betas": (0.9, 0.95),
    "optim.param_groups.0.params": ["embed", "scale"],
    "optim.param_groups.1.lr": 0.2,
    "optim.param_groups.1.params": ["norm"],
    "optim.param_groups.embed.lr": 0.1,
}


def export(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    status = main.main(["export", *map(str, words)], Console(file=out, width=10_000))
    return status, out.getvalue()


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    return {key.removeprefix("model."): t for key, t in job.tensors.items() if key.startswith("model.")}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_safetensors_has_the_parameters_by_their_own_names(job: Job, tmp_path: Path) -> None:
    """Of the newest valid checkpoint, at the stored types; the file names its step."""
    job.later().save(tmp_path / "c", 41)
    job.save(tmp_path / "c", 42)
    status, text = export(tmp_path / "c", tmp_path / "w.safetensors", "--to", "safetensors")
    assert status == 0 and "w.safetensors: step 42, 8 tensors" in text
    assert_same(load_file(tmp_path / "w.safetensors"), weights_of(job))
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "42"}


def test_safetensors_with_all_has_every_tensor_under_its_name_in_the_checkpoint(job: Job, tmp_path: Path) -> None:
    """Optimizer state, too."""
    job.save(tmp_path / "c", 42)
    assert export(tmp_path / "c", tmp_path / "w", "--to", "safetensors", "--all")[0] == 0
    assert_same(load_file(tmp_path / "w"), dict(job.tensors))


def test_dtype_changes_the_models_numbers_with_a_point_only(job: Job, tmp_path: Path) -> None:
    """Flags stay flags, and moments stay what they are."""
    job.save(tmp_path / "c", 42)
    assert export(tmp_path / "c", tmp_path / "w", "--to", "safetensors", "--all", "--dtype", "bfloat16")[0] == 0
    found = load_file(tmp_path / "w")
    assert found["model.embed"].dtype == torch.bfloat16 and found["model.flags"].dtype == torch.bool
    assert torch.equal(found["model.embed"], job.tensors["model.embed"].bfloat16())
    assert found["optim.state.embed.exp_avg"].dtype == torch.float64


def test_torch_with_all_is_what_torchs_own_tool_makes(job: Job, tmp_path: Path) -> None:
    """Nested alike, hyperparameters included, and loadable without running code; with step, host state and layout beside."""
    path = job.save(tmp_path / "c", 42, blobs=BLOBS)
    assert export(path, tmp_path / "all.pt", "--to", "torch", "--all")[0] == 0
    dcp_to_torch_save(path, tmp_path / "theirs.pt")
    found: dict[str, Any] = torch.load(tmp_path / "all.pt", weights_only=True)
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert found.pop("ttp") == {
        "step": 42,
        "state": {"optimizer": {"param_groups": []}, "trainer": {"samples": 336}},
        "layout": {"dp": 3},
    }
    assert found.keys() == theirs.keys() == {"model", "optim"}
    assert_same(found["model"], theirs["model"])
    assert found["optim"]["state"].keys() == theirs["optim"]["state"].keys()
    for name, state in theirs["optim"]["state"].items():
        assert_same(found["optim"]["state"][name], state)
    assert (
        found["optim"]["param_groups"] == theirs["optim"]["param_groups"] and len(theirs["optim"]["param_groups"]) == 2
    )


def test_torch_without_all_is_the_model(job: Job, tmp_path: Path) -> None:
    """`model.load_state_dict(torch.load(file)["model"])`."""
    job.save(tmp_path / "c", 42, blobs=BLOBS)
    assert export(tmp_path / "c", tmp_path / "m.pt", "--to", "torch")[0] == 0
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found.keys() == {"model"}
    assert_same(found["model"], weights_of(job))


def save_model(job: Job, directory: Path) -> dict[str, torch.Tensor]:
    """Save a model of the bundled trainer as step 42; return its tensors."""
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16)
    model = build_model(config, 0, torch.device("cpu"))
    tensors = {keys.model_key(name): parameter.detach() for name, parameter in model.named_parameters()}
    type(job)(tensors).save(directory, 42, layout={"model_config": plain(config), "tokenizer": BYTES})
    return tensors


def test_hf_makes_a_folder_for_transformers_of_the_bundled_trainers_model(job: Job, tmp_path: Path) -> None:
    """Their configuration, weights and tokenizer; --dtype is that of the weights."""
    tensors = save_model(job, tmp_path / "out" / "checkpoints")
    status, text = export(tmp_path / "out", tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--json")
    assert status == 0 and json.loads(text)["step"] == 42
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in tensors.values())
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_hf_of_another_trainers_model_is_refused(job: Job, tmp_path: Path) -> None:
    """No rank knows what its names are in transformers."""
    job.save(tmp_path / "c", 42)
    status, text = export(tmp_path / "c", tmp_path / "hf", "--to", "hf")
    assert status == 3 and "no model_config that this trainer knows: it was written by another trainer" in text
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_meant_is_wrong_usage(job: Job, tmp_path: Path) -> None:
    """2, before any work: nothing is overwritten, and options that mean nothing together are named."""
    job.save(tmp_path / "c", 42)
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for words, reported in (
        ((taken, "--to", "torch"), "taken is there already: expected a new name"),
        ((tmp_path / "no" / "w", "--to", "torch"), "no is not there: expected an output in a folder that exists"),
        ((tmp_path / "w", "--to", "hf", "--all"), "transformers has no optimizer state"),
        ((tmp_path / "w", "--to", "torch", "--tokenizer", "bytes"), "--tokenizer with --to torch: expected --to hf"),
    ):
        status, text = export(tmp_path / "c", *words)
        assert status == 2 and reported in text, text
    assert taken.read_text() == "mine" and not (tmp_path / "w").exists()


def test_a_checkpoint_without_a_model_needs_all(job: Job, tmp_path: Path) -> None:
    """There is nothing to export by default, and the message says what there is to say."""
    type(job)({"other": torch.ones(3)}).save(tmp_path / "c", 42)
    status, text = export(tmp_path / "c", tmp_path / "w", "--to", "safetensors")
    assert status == 3 and "has no tensor named model.*" in text and "--all exports" in text
    assert export(tmp_path / "c", tmp_path / "w", "--to", "safetensors", "--all")[0] == 0


def test_a_full_disk_leaves_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the output nor a part of it."""
    job.save(tmp_path / "c", 42)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "w"))

    with monkeypatch.context() as patch:
        patch.setattr("ttp.checkpoint.cli.export.os.replace", full)
        status, text = export(tmp_path / "c", tmp_path / "w", "--to", "torch")
    assert status == 3 and "No space left on device" in text
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("to", ["safetensors", "torch", "hf"])
def test_an_export_is_on_disk_before_it_has_its_name(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Each file and its folder, then the name."""
    save_model(job, tmp_path / "c")
    acts: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        acts.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def named(source: Path, target: Path) -> None:
        acts.append("named")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    assert export(tmp_path / "c", tmp_path / "w", "--to", to)[0] == 0
    before, after = acts[: acts.index("named")], acts[acts.index("named") + 1 :]
    written = os.listdir(tmp_path / "w") if to == "hf" else []
    assert set(before) > set(written) and any(name.lstrip(".").startswith("w") for name in set(before) - set(written))
    assert after == [tmp_path.name]


@pytest.mark.parametrize("to", ["safetensors", "torch", "hf"])
def test_a_write_that_the_kernel_refuses_is_exit_status_3(job: Job, tmp_path: Path, to: str) -> None:
    """The libraries raise errors of their own there; here a file may have 100 bytes."""
    save_model(job, tmp_path / "c")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        status, text = export(tmp_path / "c", tmp_path / "w", "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 3 and "could not be written" in text and "make room" in text
    assert os.listdir(tmp_path) == ["c"]


def test_ctrl_c_leaves_nothing_and_is_130(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file is written; no traceback."""
    job.save(tmp_path / "c", 42)

    def interrupt(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("ttp.checkpoint.cli.export.torch.save", interrupt)
    assert export(tmp_path / "c", tmp_path / "w", "--to", "torch")[0] == 130
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_a_broken_newer_checkpoint_is_skipped_aloud(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """The older valid one is exported, stderr says why."""
    save_model(job, tmp_path / "c")
    torn = job.later().save(tmp_path / "c", 43)
    (torn / "__1_0_0.distcp").unlink()
    assert "step 42" in export(tmp_path / "c", tmp_path / "w", "--to", to)[1]
    assert "skipped: " in (said := capsys.readouterr().err) and "__1_0_0.distcp is missing" in said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_sighup_leave_nothing_either(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    """A second one does not cut the removal short. One that is ignored (nohup) ends nothing, and what was before is so again."""
    job.save(tmp_path / "c", 42)
    unlink, before = Path.unlink, signal.getsignal(number)

    def interrupt(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), number)

    def slow(path: Path, missing_ok: bool = False) -> None:
        os.kill(os.getpid(), number)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr("ttp.checkpoint.cli.export.torch.save", interrupt)
    monkeypatch.setattr(Path, "unlink", slow)
    try:
        signal.signal(number, signal.SIG_DFL)
        assert export(tmp_path / "c", tmp_path / "w", "--to", "torch")[0] == status
        assert os.listdir(tmp_path) == ["c"] and signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert export(tmp_path / "c", tmp_path / "w", "--to", "torch")[0] == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_command_on_another_thread_takes_no_signals(job: Job, tmp_path: Path) -> None:
    job.save(tmp_path / "c", 42)
    with ThreadPoolExecutor() as threads:
        assert threads.submit(export, tmp_path / "c", tmp_path / "w", "--to", "torch").result()[0] == 0


def test_nested_makes_lists_of_numbers() -> None:
    """Whatever the order of the names, with ten items and more."""
    values = {("a", i, "x"): i for i in reversed(range(12))} | {("a", 3, "w"): "w", ("b", "0"): "text", ("c",): 1}
    found = nested(values)
    assert [item["x"] for item in found["a"]] == list(range(12)) and found["a"][3]["w"] == "w"
    assert found["b"] == {"0": "text"} and found["c"] == 1
