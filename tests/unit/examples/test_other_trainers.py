"""What the examples of other people's trainers bring along: sentence pairs, overrides of a configuration, masks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from tests.unit.examples.loading import EXAMPLES, module_of


def test_numerals_are_translated() -> None:
    """German says units before tens, in one word; every number has a translation of its own."""
    pairs = module_of("translation/pairs.py")
    assert [(pairs.english(n), pairs.german(n)) for n in (0, 1, 17, 21, 101, 342, 2100)] == [
        ("zero", "null"),
        ("one", "eins"),
        ("seventeen", "siebzehn"),
        ("twenty one", "einundzwanzig"),
        ("one hundred and one", "einhunderteins"),
        ("three hundred and forty two", "dreihundertzweiundvierzig"),
        ("two thousand one hundred", "zweitausendeinhundert"),
    ]
    assert len({side for pair in pairs.numerals(10_000) for side in pair}) == 20_000


def test_files_that_are_not_aligned_are_refused(tmp_path: Path) -> None:
    """With both numbers of lines; a pair with an empty side is left out."""
    pairs = module_of("translation/pairs.py")
    (tmp_path / "a").write_text("one\n\nthree\n")
    (tmp_path / "b").write_text("eins\nzwei\n")
    with pytest.raises(SystemExit, match=r"has 3 lines, .* has 2"):
        pairs.aligned(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_text("eins\nzwei\ndrei\n")
    assert pairs.aligned(tmp_path / "a", tmp_path / "b") == [("one", "eins"), ("three", "drei")]


def test_characters_come_back_from_their_tokens() -> None:
    """Begin and end are tokens of their own, unknown characters are left out."""
    pairs = module_of("translation/pairs.py")
    characters = pairs.Characters(["abc", "de"])
    tokens = characters.encode("bad!", 8).tolist()
    assert (tokens[0], tokens[-1]) == (pairs.BEGIN, pairs.END) and characters.decode(tokens[1:]) == "bad"


def test_overrides_keep_the_types_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of another type is an error, a key that is not there is told and left."""
    model_and_text = module_of("huggingface/model_and_text.py")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 6}))
    Path("override_config.json").write_text(json.dumps({"n_layer": 2, "resid_pdrop": 0.5, "nothing": 1}))
    said: list[str] = []
    config = model_and_text.load_config(str(tmp_path), said.append)
    assert (config.n_layer, config.resid_pdrop) == (2, 0.5)
    assert any("nothing is not there" in text for text in said)
    Path("override_config.json").write_text(json.dumps({"n_layer": "2"}))
    with pytest.raises(TypeError, match="n_layer is '2': wanted a int"):
        model_and_text.load_config(str(tmp_path), said.append)
    for text in ("[1]", "2", '"n_layer"', "{n_layer: 2}", ""):
        Path("override_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"override_config\.json: .*wanted a JSON object"):
            model_and_text.load_config(str(tmp_path), said.append)


TINY = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("kind", "positions", "padding", "longest"),
    [
        ("roberta", 34, 1, 32),
        ("xlm-roberta", 34, 3, 30),
        ("camembert", 34, 1, 32),
        ("bert", 34, 0, 34),
        ("modernbert", 34, 1, 34),
        ("gpt2", 34, 1, 34),
        ("mixtral", 34, 1, 34),
    ],
)
def test_a_sequence_is_as_long_as_the_model_has_positions_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, positions: int, padding: int, longest: int
) -> None:
    """RoBERTa and its like begin to count behind the padding's position: 514 of them are for 512 tokens."""
    model_and_text = module_of("huggingface/model_and_text.py")
    monkeypatch.chdir(tmp_path)
    special = {"bos_token_id": 0, "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 0, "pad_token_id": padding}
    text = {"model_type": kind, "max_position_embeddings": positions, **special, **TINY}
    Path("config.json").write_text(json.dumps(text))
    config = model_and_text.load_config(str(tmp_path), print)
    model = model_and_text.build_model(str(tmp_path), config, None).eval()
    block = model_and_text.tokens_of_a_sequence(model, config, 1024)
    assert block == longest
    batch = torch.full((2, block), 7)
    assert model(input_ids=batch, labels=batch).loss.isfinite()
    assert model_and_text.tokens_of_a_sequence(model, config, 20) == 20
    if longest < positions:
        longer = torch.full((2, block + 1), 7)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            model(input_ids=longer, labels=longer)


def test_a_sequence_of_no_token_is_refused() -> None:
    """Whatever allows no more is named."""
    tokens_of_a_sequence = module_of("huggingface/model_and_text.py").tokens_of_a_sequence
    model = torch.nn.Module()
    for unlimited in (None, -1):
        assert tokens_of_a_sequence(model, SimpleNamespace(max_position_embeddings=unlimited), 7) == 7
    assert tokens_of_a_sequence(model, SimpleNamespace(), 7) == 7
    with pytest.raises(SystemExit, match="--block_size allows 0 tokens"):
        tokens_of_a_sequence(model, SimpleNamespace(), 0)
    model.position_embeddings = torch.nn.Embedding(2, 4, padding_idx=1)
    with pytest.raises(SystemExit, match="position_embeddings allows 0 tokens"):
        tokens_of_a_sequence(model, SimpleNamespace(), 7)


def test_a_tokenizer_without_a_mask_is_refused_where_tokens_are_masked() -> None:
    """And nowhere else; bytes have the last token of the vocabulary for it."""
    mask_token_of = module_of("huggingface/model_and_text.py").mask_token_of
    masked, causal = (SimpleNamespace(model_type=kind, vocab_size=300) for kind in ("bert", "gpt2"))
    assert mask_token_of(masked, None) == mask_token_of(causal, None) == 299
    assert mask_token_of(masked, SimpleNamespace(mask_token_id=4)) == 4
    without = SimpleNamespace(mask_token_id=None)
    with pytest.raises(SystemExit, match="SimpleNamespace has no mask token: wanted one"):
        mask_token_of(masked, without)
    mask_token_of(causal, without)


def test_masked_tokens_are_the_labels_that_count() -> None:
    """About 15 % of them; the others have no label, and tokens that are not drawn stay."""
    collate = module_of("huggingface/model_and_text.py").collate
    torch.manual_seed(1)
    sequences = [torch.arange(100) for _ in range(100)]
    batch = collate(sequences, masked=True, mask_token=299, vocab_size=300)
    counts = batch["labels"] != -100
    assert 0.13 < counts.float().mean() < 0.17
    assert torch.equal(batch["input_ids"][~counts], torch.stack(sequences)[~counts])
    assert 0.7 < (batch["input_ids"][counts] == 299).float().mean() < 0.9


def test_the_loops_arguments_have_the_usual_names_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """With none given it is GPT-2 on WikiText-103, which `datasets` loads by both of its names."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "huggingface"))
    main_hf = module_of("huggingface/main_hf.py")
    monkeypatch.setattr(sys, "argv", ["main_hf.py"])
    found = vars(main_hf.arguments())
    wanted = {
        "model_name_or_path": "gpt2",
        "dataset_name_or_path": "wikitext",
        "dataset_config_name": "wikitext-103-raw-v1",
        "batch_size": 2,
        "epochs": 100,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_text_comes_from_what_datasets_has_saved_or_loads_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One data set, whose end is held out, or several parts; a name is handed on with its configuration's."""
    data_set_texts = module_of("huggingface/model_and_text.py").data_set_texts
    local_texts = module_of("huggingface/model_and_text.py").local_texts
    lines = [f"line {n}" for n in range(100)]
    whole = datasets.Dataset.from_dict({"number": list(range(100)), "text": lines})
    parts = datasets.DatasetDict(train=whole.select(range(60)), validation=whole.select(range(60, 100)))
    whole.save_to_disk(tmp_path / "whole")
    parts.save_to_disk(tmp_path / "parts")
    for name, cut in (("whole", 95), ("parts", 60)):
        assert local_texts(tmp_path / name) is None
        told = {"train": "\n".join(lines[:cut]), "test": "\n".join(lines[cut:])}
        assert data_set_texts(str(tmp_path / name), None) == told
    asked: list[Any] = []

    def load_dataset(*words: Any) -> datasets.DatasetDict:
        asked.append(words)
        return parts

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data_set_texts("wikitext", "wikitext-103-raw-v1")["train"] == "\n".join(lines[:60])
    assert asked == [("wikitext", "wikitext-103-raw-v1")]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "mixtral"])
def test_a_model_that_was_saved_keeps_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A folder with nothing but a configuration has random ones."""
    model_and_text = module_of("huggingface/model_and_text.py")
    monkeypatch.chdir(tmp_path)
    special = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    Path("config.json").write_text(json.dumps({"model_type": kind, "max_position_embeddings": 16, **special, **TINY}))
    config = model_and_text.load_config(str(tmp_path), print)
    random, saved = (model_and_text.build_model(str(tmp_path), config, None) for _ in range(2))
    saved.save_pretrained(tmp_path / "saved")
    loaded = model_and_text.build_model(str(tmp_path / "saved"), config, None)
    names = [name for name, value in saved.named_parameters() if value.dim() > 1]
    assert all(torch.equal(loaded.get_parameter(name), saved.get_parameter(name)) for name in names)
    assert not any(torch.equal(random.get_parameter(name), saved.get_parameter(name)) for name in names)
