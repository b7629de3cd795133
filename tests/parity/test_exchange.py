"""Models go to transformers and come from it as files, and mean the same there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lone_process import lone_process
from tests.parity.conftest import MakeTheirs
from ttp.errors import ConfigError
from ttp.trainer.__main__ import main as train
from ttp.trainer.convert import main as convert
from ttp.trainer.data.tokenizer import byte_level_files
from ttp.trainer.generate import Sampling, continue_tokens
from ttp.trainer.metrics import account, read_lines
from ttp.trainer.model.gpt import token_loss
from ttp.trainer.model.hf_layout import from_hf_config
from ttp.trainer.model.weights import model_of, open_trained
from ttp.trainer.parallel import micro_batches

CPU = torch.device("cpu")
BYTES = ("--tokenizer", "bytes")
"""These models have no tokenizer of their own."""
SMALL = {
    "model_config.num_layers": 2,
    "model_config.hidden_size": 36,
    "model_config.num_attention_heads": 3,
    "model_config.num_query_groups": 1,
    "model_config.seq_length": 32,
    "training_config.device": "cpu",
}
GPT2 = {
    "model_config.position_embedding_type": "absolute",
    "model_config.normalization": "LayerNorm",
    "model_config.activation": "gelu_tanh",
    "model_config.use_bias": "true",
    "model_config.untie_embeddings_and_output_weights": "false",
    "model_config.group_query_attention": "false",
    "model_config.num_query_groups": "null",
}
MIXTRAL = {"model_config.num_experts": 4}


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with lone_process(monkeypatch):
        yield


def run(output: Path, steps: int, changes: dict[str, Any], config: str = "gpt_tiny") -> None:
    keys = {**changes, "training_config.output_dir": output, "training_config.training_iters": steps}
    assert train(["--config", config, *(f"--{key}={value}" for key, value in keys.items())]) == 0


def their_logits(folder: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not theirs.training
    with torch.no_grad():
        logits: torch.Tensor = theirs(tokens_BT).logits
    return logits


def our_logits(output: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    trained = open_trained(str(output))
    model = model_of(trained.config, trained.checkpoint.weights(), CPU, "ours")
    with torch.no_grad():
        logits: torch.Tensor = model(tokens_BT)
    return logits


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", [{}, GPT2, MIXTRAL], ids=["llama", "gpt2", "mixtral"])
def test_a_dying_gasp_is_a_model_of_transformers_that_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: dict[str, Any]
) -> None:
    """The training raises in step 6; what it left of step 5 loads there, with the same logits and the same greedy text."""
    monkeypatch.setenv("ENABLE_TTP", "True")
    whole, left = token_loss, 5

    def dies(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("the trainer's own mistake")
        return whole(*args, **kwargs)

    monkeypatch.setattr(micro_batches, "token_loss", dies)
    with pytest.raises(ZeroDivisionError):
        run(
            tmp_path / "run",
            9,
            {**SMALL, **family, "dataset_config.batch_size": 1, "dataset_config.micro_batch_num": 1},
        )
    trained = open_trained(str(tmp_path / "run"))
    assert (trained.checkpoint.step, trained.checkpoint.cause) == (5, "exception")
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0

    tokens_BT = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    assert_same_logits(our_logits(tmp_path / "run", tokens_BT), their_logits(tmp_path / "hf", tokens_BT))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("The größte ", return_tensors="pt")
    assert prompt["input_ids"][0].tolist() == list("The größte ".encode())
    made = theirs.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)[0].tolist()
    model = model_of(trained.config, trained.checkpoint.weights(), CPU, "ours")
    ours = list(continue_tokens(model, "The größte ".encode(), 12, Sampling(), seed=0))
    assert made[len("The größte ".encode()) :] == ours
    assert tokenizer.decode(made).startswith("The größte ")


@pytest.mark.parametrize(
    "shape", ["gpt2-3-heads", "llama-gqa2", "llama-gqa4-tied", "llama-some-biases", "mixtral-1-of-3"]
)
def test_their_model_becomes_a_checkpoint_that_training_continues_from(
    tmp_path: Path, make_theirs: MakeTheirs, shape: str
) -> None:
    """Imported, the same logits; exported again, the same bits; and the first loss is theirs on the same text."""
    theirs = make_theirs(shape)
    theirs.save_pretrained(tmp_path / "theirs")
    assert convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), *BYTES]) == 0
    tokens_BT = torch.randint(307, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens_BT).logits
    assert_same_logits(our_logits(tmp_path / "ours", tokens_BT), expected)

    assert convert(["to-hf", str(tmp_path / "ours" / "checkpoints"), str(tmp_path / "again")]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    assert before.keys() <= after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(bool(after[name].any()) for name in after.keys() - before.keys())  # biases that they have not
    assert_same_logits(their_logits(tmp_path / "again", tokens_BT), expected)

    run(tmp_path / "ours", 2, {"training_config.device": "cpu"}, config=str(tmp_path / "ours" / "config.yaml"))
    lines = read_lines(tmp_path / "ours" / "metrics.jsonl")
    assert [line["from_step"] for line in lines if line.get("event") == "resume"] == [0]
    assert sorted(account(lines)) == [1, 2]
    assert "another" not in (tmp_path / "ours" / "log" / "rank_0" / "info.log").read_text()


def test_files_in_several_shards_are_read(tmp_path: Path, make_theirs: MakeTheirs) -> None:
    """As large models have them."""
    theirs = make_theirs("llama")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), *BYTES]) == 0
    tokens_BT = torch.arange(24).view(1, 24)
    with torch.no_grad():
        assert_same_logits(our_logits(tmp_path / "ours", tokens_BT), theirs(tokens_BT).logits)


def test_bfloat16_export_is_the_rounded_one(tmp_path: Path, make_theirs: MakeTheirs) -> None:
    """--dtype decides the type of every weight, and config.json says it."""
    make_theirs("llama").save_pretrained(tmp_path / "theirs")
    convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), *BYTES])
    assert convert(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    whole, short = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "hf"))
    assert all(torch.equal(whole[name].bfloat16(), short[name]) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16


Spoil = Callable[[Path], object]


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def spoil_config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_config(model_type="bloom"), "model_type: got 'bloom', expected one of gpt2, llama, mixtral"),
        (spoil_config(hidden_act="relu"), "hidden_act: got 'relu', expected 'silu'"),
        (
            spoil_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
            "rope_type: got 'llama3', expected default",
        ),
        (spoil_config(partial_rotary_factor=0.25), "partial_rotary_factor: got 0.25, expected 1"),
        (
            spoil_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor: got 0.5, expected 1",
        ),
        (spoil_config(num_hidden_layers=3), "no 'model.layers.2.input_layernorm.weight'"),
        (spoil_config(num_hidden_layers=1), "weights that this architecture has not: model.layers.1"),
        (spoil_config(intermediate_size=81), "feed_forward.down.weight' has shape (48, 80), expected (48, 81)"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: _put(folder / "config.json", b"[]"), "config.json holds no mapping"),
        (
            lambda folder: _put(folder / "model.safetensors", b"\xff" * 99),
            "CheckpointError: {folder}/model.safetensors cannot be read",
        ),
        (
            lambda folder: _put(folder / "model.safetensors.index.json", b"{}"),
            "model.safetensors.index.json does not say which file has which weight (KeyError: 'weight_map')",
        ),
        (
            lambda folder: _put(folder / "model.safetensors.index.json", b"{"),
            "model.safetensors.index.json does not say which file has which weight (JSONDecodeError",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_and_leaves_nothing(
    tmp_path: Path, make_theirs: MakeTheirs, capsys: pytest.CaptureFixture[str], spoil: Spoil, expected: str
) -> None:
    """With the name of the key or weight, and status 2."""
    make_theirs("llama").save_pretrained(tmp_path / "theirs")
    spoil(tmp_path / "theirs")
    assert convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), *BYTES]) == 2
    assert expected.replace("{folder}", str(tmp_path / "theirs")) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("shape", "change", "expected"),
    [
        ("gpt2", {"embd_pdrop": 0.1}, "embd_pdrop: got 0.1, expected 0.0"),
        ("gpt2", {"resid_pdrop": 0.2}, "embd_pdrop: got 0.0, expected 0.2"),
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise: got 0.01, expected 0"),
    ],
)
def test_noise_without_a_counterpart_is_refused_by_name(
    make_theirs: MakeTheirs, shape: str, change: dict[str, float], expected: str
) -> None:
    """A training that went on with less of it would be another one."""
    theirs = make_theirs(shape).config.to_dict()
    from_hf_config(theirs)
    with pytest.raises(ConfigError, match=expected):
        from_hf_config({**theirs, **change})


def test_a_model_goes_on_with_its_own_tokenizer_or_with_the_one_that_is_named(
    tmp_path: Path, make_theirs: MakeTheirs, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary with merges and a SentencePiece model are its own, too; without any nothing is written."""
    make_theirs("llama").save_pretrained(tmp_path / "theirs")

    def named(output: str, *more: str) -> object:
        assert convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / output), *more]) == 0
        return yaml.safe_load((tmp_path / output / "config.yaml").read_text())["dataset_config"]["tokenizer"]

    _put(tmp_path / "theirs" / "special_tokens_map.json", b"{}")
    assert convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "none")]) == 2
    assert "has no file of a tokenizer" in capsys.readouterr().err and not (tmp_path / "none").exists()
    assert convert(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "none"), "--tokenizer", "missing"]) == 2
    assert named("bytes", *BYTES) is None
    for name in ("vocab.json", "tokenizer.model"):
        _put(tmp_path / "theirs" / name, b"{}")
        assert named(name) == str(tmp_path / "theirs")
        (tmp_path / "theirs" / name).unlink()
    for name, content in byte_level_files().items():
        _put(tmp_path / name, json.dumps(content).encode())
    assert named("other", "--tokenizer", str(tmp_path / "tokenizer.json")) == str(tmp_path / "tokenizer.json")


def test_a_folder_that_is_not_empty_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways: a large model is not read in vain."""
    (tmp_path / "full").mkdir()
    _put(tmp_path / "full" / "notes", b"mine")
    for verb in ("to-hf", "from-hf"):
        assert convert([verb, str(tmp_path / "missing"), str(tmp_path / "full")]) == 2
        assert "is there and not empty" in capsys.readouterr().err


def test_an_architecture_that_they_have_not_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LayerNorm with rotations is not supported; a folder that is not empty is left alone; no checkpoint is not a model."""
    run(tmp_path / "run", 1, {**SMALL, "model_config.normalization": "LayerNorm", "training_config.save_interval": 1})
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 2
    assert "nearest is llama: normalization is 'LayerNorm', it has 'RMSNorm'" in capsys.readouterr().err
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "run")]) == 2
    (tmp_path / "empty").mkdir()
    assert convert(["to-hf", str(tmp_path / "empty"), str(tmp_path / "hf")]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
