"""What the examples of other people's trainers bring along: sentence pairs, overrides of a configuration, masks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def module_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
