"""A wrong configuration is refused by a sentence that names the key, what it got and what was expected."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ttp.chaos.faults.scenario import load_scenario
from ttp.errors import ConfigError
from ttp.trainer.__main__ import help_text, main
from ttp.trainer.config.loader import describe, load_config, parse_overrides, presets, read_yaml
from ttp.trainer.config.schema import Config, ParallelConfig, plain
from ttp.trainer.model.gpt import count_parameters

MODEL = "model_config: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"


def load(tmp_path: Path, text: str, *args: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(str(path), parse_overrides(args))


def refusal(tmp_path: Path, text: str, *args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *args)
    return str(caught.value)


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_says_what_it_is(name: str) -> None:
    """A preset is complete, and fits a node of eight devices by its axes."""
    parallel = load_config(name).parallel_config
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    assert parallel.data_parallel_size(8) * split == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training_config: {training_iter: 5}",
            "training_config.training_iter: no such key; did you mean training_iters?",
        ),
        (
            "training_config: {lerning_rate: 1}",
            "training_config.lerning_rate: no such key; did you mean optimizer_config.learning_rate?",
        ),
        ("trainin_config: {}", "trainin_config: no such key; did you mean training_config?"),
        (
            "training_config: {num_layers: 5}",
            "training_config.num_layers: no such key; did you mean model_config.num_layers?",
        ),
        (
            "training_config: {grad_clip_kwargs: {clip_valu: 1}}",
            "training_config.grad_clip_kwargs.clip_valu: no such key; did you mean clip_value?",
        ),
        ("training_config: {xyz: 5}", "training_config.xyz: no such key; there are seed"),
        ("training_config: {seed: x}", "training_config.seed: got 'x' (str), expected an integer"),
        ("training_config: {seed: 1.5}", "training_config.seed: got 1.5 (float), expected an integer"),
        ("training_config: {seed: true}", "training_config.seed: got True (bool), expected an integer"),
        ("training_config: {deterministic: 1}", "training_config.deterministic: got 1 (int), expected true or false"),
        (
            "training_config: {loss_scale: true}",
            "training_config.loss_scale: got True (bool), expected a number or null",
        ),
        ("training_config: {seed: null}", "training_config.seed: got null, expected an integer"),
        ("training_config: 5", "training_config: got 5 (int), expected keys (seed, "),
        (
            "model_config: {hidden_size: 32, num_attention_heads: 4}",
            "model_config.num_layers is missing, expected an integer",
        ),
        ("optimizer_config: {betas: [0.9]}", "optimizer_config.betas: got [0.9] (list), expected [a number, a number]"),
        ("optimizer_config: {betas: [0.9, x]}", "optimizer_config.betas[1]: got 'x' (str), expected a number"),
        (
            "optimizer_config: {optimizer_type: adamw}",
            "optimizer_config.optimizer_type: got 'adamw' (str), expected AdamW or Adam or SGD or mint.AdamW or SpeedAdamW;"
            " did you mean AdamW?",
        ),
        (
            "optimizer_config: {optimizer_type: Came}",
            "optimizer_config.optimizer_type is 'Came': its update of an element depends on the element's row, column and whole"
            " matrix, so its state cannot be cut into the shards that two ranks hold; use AdamW, Adam or SGD",
        ),
        (
            "optimizer_config: {momentum: 0.9}",
            "momentum with optimizer_config.optimizer_type AdamW: got 0.9, expected 0",
        ),
        (
            "optimizer_config: {optimizer_type: SGD, nesterov: true}",
            "optimizer_config.nesterov: got true with momentum 0, expected a momentum above 0",
        ),
        ("optimizer_config: {momentum: 1.0}", "optimizer_config.momentum: got 1.0, expected 0 <= momentum < 1"),
        (
            "training_config: {loss_func_kwargs: {loss_func_type: CrossEntropy}}",
            "loss_func_type: got 'CrossEntropy' (str), expected VocabParallelCrossEntropy or CrossEntropyLoss",
        ),
        ("gpt_config: {num_layers: 2}", "gpt_config: got a section of this name and model_config, expected one of"),
        (
            "parallel_config: {on_divergence: fix}",
            "parallel_config.on_divergence: got 'fix' (str), expected report or stop or repair",
        ),
        ("training_config: {training_iters: 0}", "training_config.training_iters: got 0, expected 1 or more"),
        ("training_config: {save_interval: 0}", "training_config.save_interval: got 0, expected 1 or more, or null"),
        (
            "training_config: {loss_scale: .nan}",
            "training_config.loss_scale: got nan, expected a finite number above 0",
        ),
        (
            "training_config: {grad_clip_kwargs: {clip_value: 0}}",
            "grad_clip_kwargs.clip_value: got 0.0, expected a finite",
        ),
        (
            "optimizer_config: {learning_rate: -1}",
            "optimizer_config.learning_rate: got -1.0, expected a finite number, 0 or more",
        ),
        (
            "optimizer_config: {betas: [0.9, 1.0]}",
            "optimizer_config.betas: got [0.9, 1.0], expected two numbers, 0 <= beta < 1",
        ),
        ("dataset_config: {batch_size: 0}", "dataset_config.batch_size: got 0, expected 1 or more"),
        (
            "optimizer_config: {learning_rate_scheduler_kwargs: {warmup_steps: 10, decay_steps: 10}}",
            "learning_rate_scheduler_kwargs.decay_steps: got 10, expected more than the 10 warmup_steps",
        ),
        (
            "optimizer_config: {learning_rate: 1e-4, learning_rate_scheduler_kwargs: {end_learning_rate: 2e-4}}",
            "end_learning_rate: got 0.0002, expected at most optimizer_config.learning_rate, 0.0001",
        ),
        ("training_config: {seed: 1, seed: 2}", "key 'seed' is given twice"),
        ("training_config: [1", "invalid YAML: line 2"),
        ("- 1", "expected sections (model_config, training_config"),
    ],
)
def test_wrong_value_is_named(tmp_path: Path, text: str, expected: str) -> None:
    """The message names section.key, the value, its type, and what was expected."""
    text = text if text.startswith(("model_config", "-")) else MODEL + text
    assert expected in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("hidden_size: 30", "model_config.hidden_size: got 30, expected a multiple of num_attention_heads, 4"),
        ("hidden_size: 12", "hidden_size / num_attention_heads: got 3, expected an even size, rope rotates pairs"),
        ("group_query_attention: true", "num_query_groups: got None, expected a divisor of num_attention_heads, 4"),
        (
            "group_query_attention: true, num_query_groups: 3",
            "num_query_groups: got 3, expected a divisor of num_attention_heads, 4",
        ),
        ("num_query_groups: 2", "num_query_groups is 2, but group_query_attention is off"),
        ("params_dtype: bfloat16", "params_dtype: got 'bfloat16' and compute_dtype 'float32'"),
        (
            "compute_dtype: float16",
            "compute_dtype is 'float16': its gradients vanish without training_config.loss_scale",
        ),
        ("vocab_size: 255", "model_config.vocab_size: got 255, expected 256 or more"),
        (
            "encoder_attn_mask_type: padding",
            "model_config.encoder_attn_mask_type is 'padding': training sequences have no padding",
        ),
        (
            "fp16_lm_cross_entropy: true",
            "fp16_lm_cross_entropy is true: got model_config.compute_dtype float32, expected float16",
        ),
        ("hidden_dropout: 1.0", "model_config.hidden_dropout: got 1.0, expected 0 <= p < 1"),
    ],
)
def test_model_that_cannot_be_is_refused(tmp_path: Path, model: str, expected: str) -> None:
    """Checks across keys."""
    base = {"num_layers": "2", "hidden_size": "32", "num_attention_heads": "4"}
    base.update((key, value) for key, _, value in (pair.partition(": ") for pair in model.split(", ")))
    text = "model_config: {" + ", ".join(f"{k}: {v}" for k, v in base.items()) + "}"
    assert expected in refusal(tmp_path, text)


DOCUMENT = Path(__file__).with_name("mindformers_gpt.yaml")
"""All sections of MindFormers' page, as it prints them."""


def test_the_yaml_of_mindformers_page_is_taken_as_it_stands(tmp_path: Path) -> None:
    """Every key has the value that is written there; each other choice that its comments name, and its three sizes, is taken too."""
    text = DOCUMENT.read_text()
    written = yaml.safe_load(text)
    config = plain(load_config(str(DOCUMENT)))

    def assert_taken(tree: dict[str, Any], taken: dict[str, Any], at: str = "") -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                assert_taken(value, taken[key], f"{at}{key}.")
            else:
                expected = tuple(value) if isinstance(value, list) else value
                assert taken[key] == (float(value) if at + key in NUMBERS else expected), at + key

    assert_taken(written, config)
    others = [
        ("ClipGlobalNorm", "GradClipByValue"), ("mean", "sum"), ("VocabParallelCrossEntropy", "CrossEntropyLoss"),
        ("'rope'", "'absolute'"), *(('"AdamW"', f'"{name}"') for name in ("Adam", "SGD", "mint.AdamW", "SpeedAdamW")),
    ]  # fmt: skip
    for old, new in others:
        assert old in text
        load(tmp_path, text.replace(old, new))
    sizes = re.compile(r"    num_layers: 6.*?num_attention_heads: 32[^\n]*\n", re.S)
    for parameters, size in SIZES.items():
        model = load(tmp_path, sizes.sub(size, text)).model_config
        assert abs(count_parameters(replace(model, vocab_size=32000)) / parameters - 1) < 0.06


NUMBERS = ("optimizer_config.eps", "optimizer_config.weight_decay")
"""`1.e-8` is a number in YAML 1.2 and a string to PyYAML by itself."""
SIZES = {
    7e9: "    num_layers: 32\n    hidden_size: 4096\n    ffn_hidden_size: 11008\n    num_attention_heads: 32\n",
    13e9: "    num_layers: 40\n    hidden_size: 5120\n    ffn_hidden_size: 13824\n    num_attention_heads: 40\n",
    70e9: "    num_layers: 80\n    hidden_size: 8192\n    ffn_hidden_size: 28672\n    num_attention_heads: 64\n"
    "    group_query_attention: True\n    num_query_groups: 8\n",
}


def test_the_models_section_may_have_another_name(tmp_path: Path) -> None:
    """gpt_config, as MindFormers' page heads it, without a word; any other by --model_type, and none that is not there."""
    path = tmp_path / "run.yaml"
    path.write_text(MODEL.replace("model_config", "gpt_config"))
    assert load_config(str(path)).model_config.num_layers == 2
    assert load_config(str(path), parse_overrides(["--model_config.num_layers=3"])).model_config.num_layers == 3
    path.write_text(MODEL.replace("model_config", "small") + MODEL.replace("num_layers: 2", "num_layers: 5"))
    for given, reported in (
        ("smal", "expected a section of the configuration file (small, model_config)"),
        ("small", "small: got"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reported)):
            load_config(str(path), model_type=given)
    assert main(["--config", str(path), "--model_type=nosuch"]) == 2


def test_overrides_reach_every_depth_and_the_last_one_wins(tmp_path: Path) -> None:
    """`--k v` and `--k=v`; values are YAML; 1e-4 is a number; text keys take any text."""
    config = load(
        tmp_path,
        MODEL,
        "--training_config.training_iters",
        "7",
        "--training_config.training_iters=9",
        "--optimizer_config.learning_rate",
        "1e-4",
        "--optimizer_config.betas=[0.5, 0.6]",
        "--training_config.grad_clip_kwargs.clip_value=2",
        "--optimizer_config.learning_rate_scheduler_kwargs.warmup_steps=3",
        "--training_config.output_dir=2024",
        "--training_config.save_dirs=[/a, /b]",
        "--dataset_config.dataset_dir",
        "null",
    )
    assert config.training_config.training_iters == 9
    assert config.optimizer_config.learning_rate == 1e-4
    assert config.optimizer_config.betas == (0.5, 0.6)
    assert config.training_config.grad_clip_kwargs is not None
    assert config.training_config.grad_clip_kwargs.clip_value == 2.0
    assert config.optimizer_config.learning_rate_scheduler_kwargs is not None
    assert config.optimizer_config.learning_rate_scheduler_kwargs.warmup_steps == 3
    assert config.training_config.output_dir == "2024"
    assert config.training_config.save_dirs == ("/a", "/b")
    assert config.dataset_config.dataset_dir is None
    assert load(tmp_path, MODEL, "--training_config.grad_clip_kwargs=null").training_config.grad_clip_kwargs is None


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--training_config.training_iter", "5"],
            "training_config.training_iter: no such key; did you mean training_iters?",
        ),
        (["--training_config.seed.x", "5"], "training_config.seed is a value: it has no key 'x'"),
        (["--training_config.seed"], "expected a value after it"),
        (["--training_config.seed", "--training_config.resume"], "expected a value after it"),
        (["--training_config.seed=abc"], "training_config.seed: got 'abc' (str), expected an integer"),
        (["--training_config.seed=[1"], "value '[1': invalid YAML"),
        (["training_config.seed", "5"], "expected --section.key value"),
        (["--confg", "x"], "did you mean config?"),
    ],
)
def test_wrong_override_is_named(tmp_path: Path, args: list[str], expected: str) -> None:
    """The command line is as strict as the file."""
    assert expected in refusal(tmp_path, MODEL, *args)


def test_unknown_preset_is_named_with_the_nearest() -> None:
    """`--config` takes a preset or a path."""
    with pytest.raises(ConfigError, match=r"no such file, and no such preset; did you mean gpt_tiny?"):
        load_config("gpt_tny")


@pytest.mark.parametrize("name", ["1" * 5000, "x\n" * 2000, "/" + "long/" * 2000, "/"])
def test_a_name_of_any_length_is_refused_in_one_short_line(name: str) -> None:
    """Of a config, and of a scenario for `ttp chaos`."""
    for read in (read_yaml, lambda name: load_scenario(Path(name))):
        with pytest.raises(ConfigError) as caught:
            read(name)
        text = str(caught.value)
        assert ", expected a readable file in YAML" in text or "no such file" in text
        assert "\n" not in text and len(text) < 1000 and name[:20].encode("unicode_escape").decode() in text


def test_world_that_is_not_the_product_of_the_axes_is_refused_with_all_factors() -> None:
    """Every factor is printed."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    with pytest.raises(ConfigError, match=re.escape("4 ranks are not tensor 2 x pipeline 3 x data parallel")):
        parallel.data_parallel_size(4)
    with pytest.raises(ConfigError, match=r"expert parallel 3 does not divide the data-parallel size 4"):
        ParallelConfig(expert_model_parallel_size=3).data_parallel_size(4)


def test_sequence_parallelism_without_tensor_parallel_ranks_is_refused() -> None:
    """Nothing is silently ignored."""
    with pytest.raises(ConfigError, match=r"parallel_config.sequence_parallel is true .*expected"):
        ParallelConfig(sequence_parallel=True).data_parallel_size(4)


def test_replicas_follow_the_world() -> None:
    """A lone rank has one; without the distributed optimizer every rank is one; what cannot be is refused."""
    assert ParallelConfig().replicas(1, True) == 1
    assert ParallelConfig().replicas(5, True) == 2
    assert ParallelConfig(optimizer_replicas=4).replicas(8, True) == 4
    assert ParallelConfig().replicas(3, False) == 3
    for wrong, dp in ((3, 2), (3, 4)):
        with pytest.raises(
            ConfigError, match=rf"optimizer_replicas: got {wrong}, expected 2, or a divisor of .*, {dp}"
        ):
            ParallelConfig(optimizer_replicas=wrong).replicas(dp, True)
    for distributed in (True, False):
        with pytest.raises(
            ConfigError,
            match=r"2 ranks have the same experts \(data 4 / expert 2\): expected .*optimizer_replicas 2 or",
        ):
            ParallelConfig(optimizer_replicas=4, expert_model_parallel_size=2).replicas(4, distributed)
    assert ParallelConfig(expert_model_parallel_size=4).replicas(4, True) == 2


def test_help_lists_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` needs no run; each key stands there with its default, nearly each with a sentence."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == help_text().strip()
    keys = list(describe())
    assert len(keys) > 50
    for key, _, default, doc in keys:
        assert f"--{key} (" in shown
        assert default and doc.split(" ")[0] in shown
    assert "--training_config.save_interval (an integer or null; default null)" in shown


def test_wrong_command_line_ends_with_status_2_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for a typing mistake."""
    assert main(["--config", "gpt_tiny", "--training_config.sed", "1"]) == 2
    assert capsys.readouterr().err == "ttp.trainer: training_config.sed: no such key; did you mean seed?\n"
    assert main(["--config"]) == 2
    assert main(["--config=a", "--config=b"]) == 2


def test_tokenizer_is_short_for_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    """In both spellings."""
    for arguments in (["--tokenizer", "/nowhere"], ["--tokenizer=/nowhere"]):
        assert main([*arguments, "--model_config.vocab_size", "0"]) == 2
        assert "vocab_size: got 0" in capsys.readouterr().err
    assert main(["--tokenizer"]) == 2
    assert "--dataset_config.tokenizer': expected a value after it" in capsys.readouterr().err
