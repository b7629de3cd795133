"""The YAML of MindFormers' GPT2-13B page: every key becomes one of the trainer's, has no effect that is noted, or is refused."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ttp.errors import ConfigError
from ttp.trainer.__main__ import main
from ttp.trainer.config.loader import load_config, presets
from ttp.trainer.config.memory_size import memory_bytes
from ttp.trainer.config.static_graph import is_static, translate
from ttp.trainer.plan.estimate import make_plan

DOCUMENT = Path(__file__).parent / "static_graph" / "document.yaml"
"""The page's own text, comments included."""
SHIPPED = Path(__file__).resolve().parents[3] / "examples" / "gpt2_13b" / "configs" / "gpt2"


def document() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text(encoding="utf-8"))
    return tree | {"preset": "gpt2_13b"}


def changed(key: str, value: object) -> dict[str, Any]:
    """Return the document's file with one key changed; "" stands for the top."""
    section, _, name = key.rpartition(".")
    tree = document()
    (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def test_the_documents_file_is_the_layout_that_it_describes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Word by word behind a line that names the model; the notes name the four keys without effect."""
    path = tmp_path / "run_gpt2_13b.yaml"
    path.write_text("preset: gpt2_13b\n" + DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "ttp.trainer.config"):
        config = load_config(str(path))
    training, parallel = config.training_config, config.parallel_config
    assert (training.device, training.max_device_memory, training.recompute) == ("npu", "31GB", "full")
    assert training.use_distributed_optimizer and parallel.sequence_parallel
    axes = parallel.data_parallel, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    assert axes == (4, 2, 4) and config.dataset_config.micro_batch_num == 24
    noted = [re.sub(r"^--config \S+: ([\w.]+): .*", r"\1", record.getMessage()) for record in caplog.records]
    assert noted == [
        "context.mode",
        "parallel_config.vocab_emb_dp",
        "parallel_config.gradient_aggregation_group",
        "parallel.full_batch",
    ]
    assert parallel.data_parallel_size(32) == 4
    with pytest.raises(ConfigError, match=r"data_parallel: got 4, expected 2 for 16 ranks .* Start 32 ranks"):
        parallel.data_parallel_size(16)


def test_a_file_changes_single_keys_of_its_preset_at_every_depth(tmp_path: Path) -> None:
    """What it does not name stays the preset's."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: gpt2_13b\nmodel_config: {num_layers: 2}\noptimizer_config: {learning_rate_scheduler_kwargs: {warmup_steps: 7}}\n"
    )
    preset, mine = load_config("gpt2_13b"), load_config(str(path))
    assert mine.model_config == dataclasses.replace(preset.model_config, num_layers=2)
    before = preset.optimizer_config.learning_rate_scheduler_kwargs
    assert before is not None
    schedule = dataclasses.replace(before, warmup_steps=7)
    assert mine.optimizer_config == dataclasses.replace(
        preset.optimizer_config, learning_rate_scheduler_kwargs=schedule
    )


def test_the_shipped_file_and_the_preset_are_the_documents_layout(tmp_path: Path) -> None:
    """The example's file translates to what the document's does; the preset differs by device and a fixed size only."""
    path = tmp_path / "document.yaml"
    path.write_text("preset: gpt2_13b\n" + DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    shipped = load_config(str(SHIPPED / "run_gpt2_13b.yaml"))
    assert shipped == load_config(str(path))
    preset = load_config("gpt2_13b_mp2_pp4")
    parallel = dataclasses.replace(shipped.parallel_config, data_parallel=None)
    training = dataclasses.replace(shipped.training_config, device="auto")
    assert preset == dataclasses.replace(shipped, parallel_config=parallel, training_config=training)


@pytest.mark.parametrize(
    ("size", "preset", "world_size"),
    [("gpt2", "gpt2_124m", 8), ("gpt2_13b", "gpt2_13b", 32), ("gpt2_52b", "gpt2_52b", 128)],
)
def test_each_shipped_file_has_a_layout_that_fits(size: str, preset: str, world_size: int) -> None:
    """The three of the page's folder: the size's own model, on the devices that it is for, by their memory."""
    config = load_config(str(SHIPPED / f"run_{size}.yaml"))
    assert config.model_config == load_config(preset).model_config
    limit = config.training_config.max_device_memory or "31GB"
    assert make_plan(config, world_size).memory <= memory_bytes(limit, "memory")


@pytest.mark.parametrize(
    ("key", "value", "place", "expected"),
    [
        ("context.device_target", "GPU", "training_config.device", "cuda"),
        ("context.device_target", "CPU", "training_config.device", "cpu"),
        ("recompute_config.recompute", False, "training_config.recompute", "none"),
        ("parallel_config.expert_parallel", 2, "parallel_config.expert_model_parallel_size", 2),
        ("parallel.parallel_mode", 3, "parallel_config.pipeline_model_parallel_size", 4),
        ("parallel_config.optimizer_replicas", 4, "parallel_config.optimizer_replicas", 4),
    ],
)
def test_a_key_becomes_ours(key: str, value: object, place: str, expected: object) -> None:
    """Other values than the document's; keys of ours beside those of MindFormers stay."""
    sections, _ = translate(changed(key, value))
    section, _, name = place.partition(".")
    assert sections[section][name] == expected


def test_selective_recomputation_and_an_unsharded_optimizer() -> None:
    """Keys that depend on each other."""
    tree = document()
    tree["recompute_config"] = {"select_recompute": True, "mp_comm_recompute": False}
    tree["parallel"]["enable_parallel_optimizer"] = tree["parallel_config"]["optimizer_shard"] = False
    sections, notes = translate(tree)
    assert sections["training_config"] == {
        "device": "npu",
        "max_device_memory": "31GB",
        "recompute": "selective",
        "use_distributed_optimizer": False,
    }
    assert any(note.startswith("recompute_config.mp_comm_recompute: False has no effect") for note in notes)
    assert "sequence_parallel" not in sections["parallel_config"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("recompute_config.parallel_optimizer_comm_recompute", True, "nothing to gather again"),
        ("context.device_id", 0, "ttprun gives each rank a device of its own"),
        ("parallel.gradients_mean", False, "training_config.loss_reduction changes it"),
        ("parallel_config.pipeline_stage", 1, "has no effect with pipeline_stage 1, as in MindSpore"),
        ("parallel_config.model_parallel", 1, "has no effect without recompute and model_parallel"),
    ],
)
def test_what_has_no_effect_is_noted(key: str, value: object, expected: str) -> None:
    """With the reason."""
    _, notes = translate(changed(key, value))
    assert any(expected in note for note in notes), notes


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("context.mode", 2, "context.mode: got 2, expected 0 (graph mode) or 1"),
        ("context.mode", True, "context.mode: got True, expected 0 (graph mode) or 1"),
        ("context.device_target", "TPU", "context.device_target: got 'TPU', expected Ascend or GPU or CPU"),
        ("context.max_device_memory", 31, "context.max_device_memory: got 31, expected a size, as in 31GB"),
        ("context.save_graphs", True, "There is no graph to save"),
        ("context.max_device_memry", "31GB", "context.max_device_memry: got an unknown key, expected mode,"),
        ("context", [1], "context: got [1], expected keys"),
        ("parallel.parallel_mode", 0, "parallel.parallel_mode: got 0, expected 1: parallel_config splits the model"),
        ("parallel.parallel_mode", 2, "--plan --search --world-size N"),
        ("parallel.parallel_mode", 4, "expected 0 to 3: data_parallel, semi_auto_parallel, auto_parallel, hybrid"),
        ("parallel.full_batch", "yes", "parallel.full_batch: got 'yes', expected true or false"),
        ("parallel.enable_parallel_optimizer", False, "expected True as parallel_config.optimizer_shard says"),
        ("recompute_config.recompute", [2, 1], "recompute_config.recompute: got [2, 1], expected true or false"),
        ("parallel_config.model_parallel", 0, "parallel_config.model_parallel: got 0, expected an integer >= 1"),
        ("parallel_config.context_parallel", 2, "use_seq_parallel: True divides the sequence"),
        ("parallel_config.tensor_model_parallel_size", 4, "expected 2 as parallel_config.model_parallel says"),
        ("dataset_config", 3, "dataset_config: got 3, expected keys"),
        ("runner_config", {"epochs": 1}, "expected training_config.training_iters and dataset_config.batch_size"),
        ("preset", None, "Add a line: preset: gpt2_13b"),
    ],
)
def test_what_cannot_be_is_refused_by_name(key: str, value: object, expected: str) -> None:
    """One line that says what is invalid, what it is, and what is expected."""
    with pytest.raises(ConfigError) as caught:
        translate(changed(key, value))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_keys_and_sizes_are_refused_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What translation leaves to the sections' own checks: exit status 2, one line."""
    for old, new, expected in (
        ("vocab_emb_dp", "vocab_emb_pd", "parallel_config.vocab_emb_pd: no such key"),
        ('"31GB"', '"31MB"', "training_config.max_device_memory: got '31MB', expected a size above 0 in GB"),
        ("preset: gpt2_13b", "preset: gpt2_13", "preset: got 'gpt2_13', expected one of"),
    ):
        path = tmp_path / "changed.yaml"
        path.write_text(("preset: gpt2_13b\n" + DOCUMENT.read_text(encoding="utf-8")).replace(old, new))
        assert main(["--config", str(path), "--plan", "--world-size", "32"]) == 2
        output = capsys.readouterr().err
        assert output.startswith("ttp.trainer: ") and expected in output and output.count("\n") == 1, output


def test_other_files_are_left_as_they_are() -> None:
    """No file of the trainer's own is taken for one of MindFormers."""
    tree = {"model_config": {"num_layers": 1}, "parallel_config": {"data_parallel": 2}}
    assert not is_static(tree) and translate(tree) == (tree, [])
    assert [name for name in presets() if name.endswith("mp2_pp4")] == ["gpt2_13b_mp2_pp4"]
