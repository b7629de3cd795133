"""The parts of examples/huggingface/main_hf.py: overrides of a configuration, models and tokenizers from folders, text from every
form of local files, masks, and one line for what must be corrected. docs/from/musa_huggingface.md names these tests."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers

from tests.shown import ROOT
from tests.unit.examples.loading import EXAMPLES, module_of
from ttp.errors import ConfigError
from ttp.trainer.devices.binding import choose_device
from ttp.trainer.world import World, joined

DOCUMENT = (ROOT / "docs" / "from" / "musa_huggingface.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a cache of its own and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES / "huggingface"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def pretrained() -> ModuleType:
    return module_of("huggingface/pretrained.py")


@pytest.fixture
def texts() -> ModuleType:
    return module_of("huggingface/texts.py")


TINY = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 0, "pad_token_id": 1}


def configure(kind: str, **values: Any) -> None:
    Path("config.json").write_text(json.dumps({"model_type": kind, **SPECIAL, **TINY, **values}))


def override(values: Any) -> None:
    Path("override_config.json").write_text(values if isinstance(values, str) else json.dumps(values))


def test_overrides_are_printed_and_unknown_keys_and_none_are_skipped(pretrained: ModuleType) -> None:
    """In the original's words: `modify key: old -> new`."""
    configure("gpt2", sep_token_id=None)
    override({"n_layer": 2, "resid_pdrop": 0.5, "num_layers": 2, "sep_token_id": 4})
    said: list[str] = []
    config = pretrained.load_config(".", said.append)
    assert (config.n_layer, config.resid_pdrop, config.sep_token_id) == (2, 0.5, None)
    assert said == [
        "modify n_layer: 1 -> 2",
        "modify resid_pdrop: 0.1 -> 0.5",
        "WARNING: override_config.json: num_layers is not in the model's configuration; skipped",
        "WARNING: override_config.json: sep_token_id is None in the model's configuration; skipped",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_layer": "2"}, "n_layer: got '2', expected type int, as 1."),
        ({"resid_pdrop": 0}, "resid_pdrop: got 0, expected type float, as 0.1."),
        ({"torch_dtype": "bf16"}, "torch_dtype: got 'bf16', expected the name of a type, as bfloat16"),
        ("[1]", "expected a JSON object"),
        ("{n_layer: 2}", "expected a JSON object"),
        ("", "expected a JSON object"),
    ],
)
def test_a_wrong_override_is_one_line(pretrained: ModuleType, values: Any, message: str) -> None:
    """With the file, the key and both values."""
    configure("gpt2", dtype="float32")
    override(values)
    with pytest.raises(ConfigError, match=rf"^override_config\.json.*{re.escape(message)}.*$"):
        pretrained.load_config(".", print)


def test_torch_dtype_is_given_by_name(pretrained: ModuleType) -> None:
    """And the weights have it."""
    configure("gpt2", dtype="float32")
    override({"torch_dtype": "bfloat16"})
    said: list[str] = []
    model = pretrained.build_model(".", pretrained.load_config(".", said.append), None)
    assert said == ["modify torch_dtype: torch.float32 -> torch.bfloat16"]
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_the_documents_override_files_are_taken_word_by_word(pretrained: ModuleType) -> None:
    """The three of its table of results, as the page shows them: no key is skipped."""
    files = dict(re.findall(r"`override_config.json` of (\S+):\n\n```json\n(.*?)```", DOCUMENT, re.DOTALL))
    assert set(files) == {"bert-base-uncased", "gpt2", "mixtral-8x7B-v0.1"}
    for name, text in files.items():
        configure(name.partition("-")[0], num_hidden_layers=2)
        override(text)
        said: list[str] = []
        config = pretrained.load_config(".", said.append)
        assert len(said) == len(json.loads(text)) and all(line.startswith("modify ") for line in said)
        assert all(getattr(config, key) == value for key, value in json.loads(text).items())


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
    pretrained: ModuleType, kind: str, positions: int, padding: int, longest: int
) -> None:
    """RoBERTa and its like begin to count behind the padding's position: 514 of them are for 512 tokens."""
    configure(kind, max_position_embeddings=positions, pad_token_id=padding)
    config = pretrained.load_config(".", print)
    model = pretrained.build_model(".", config, None, masked=kind not in ("gpt2", "mixtral")).eval()
    block = pretrained.tokens_of_a_sequence(model, config, None, 1024)
    assert block == longest
    batch = torch.full((2, block), 7)
    assert model(input_ids=batch, labels=batch).loss.isfinite()
    assert pretrained.tokens_of_a_sequence(model, config, None, 20) == 20
    if longest < positions:
        longer = torch.full((2, block + 1), 7)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            model(input_ids=longer, labels=longer)


def test_a_sequence_of_no_token_is_refused(pretrained: ModuleType) -> None:
    """Whatever allows no more is named, the tokenizer too."""
    tokens_of_a_sequence = pretrained.tokens_of_a_sequence
    model = torch.nn.Module()
    for unlimited in (None, -1):
        assert tokens_of_a_sequence(model, SimpleNamespace(max_position_embeddings=unlimited), None, 7) == 7
    assert tokens_of_a_sequence(model, SimpleNamespace(n_positions=5), None, 7) == 5
    assert tokens_of_a_sequence(model, SimpleNamespace(seq_length=4), None, 7) == 4
    assert tokens_of_a_sequence(model, SimpleNamespace(), SimpleNamespace(model_max_length=6), 7) == 6
    with pytest.raises(ConfigError, match="--block_size: got 0 tokens"):
        tokens_of_a_sequence(model, SimpleNamespace(), None, 0)
    model.position_embeddings = torch.nn.Embedding(2, 4, padding_idx=1)
    with pytest.raises(ConfigError, match="position_embeddings: got 0 tokens"):
        tokens_of_a_sequence(model, SimpleNamespace(), None, 7)


def test_a_tokenizer_without_a_mask_is_refused_where_tokens_are_masked(pretrained: ModuleType) -> None:
    """Bytes have the last token of the vocabulary for it."""
    config = SimpleNamespace(vocab_size=300)
    assert pretrained.mask_token_of(config, None) == 299
    assert pretrained.mask_token_of(config, SimpleNamespace(mask_token_id=4)) == 4
    with pytest.raises(ConfigError, match="SimpleNamespace has no mask token"):
        pretrained.mask_token_of(config, SimpleNamespace(mask_token_id=None))


@pytest.mark.parametrize("kind", ["gpt2", "bert", "mixtral"])
def test_a_model_that_was_saved_keeps_its_weights(pretrained: ModuleType, kind: str) -> None:
    """A folder with nothing but a configuration has random ones. All three predict the next token, BERT too."""
    configure(kind, max_position_embeddings=16)
    config = pretrained.load_config(".", print)
    random, saved = (pretrained.build_model(".", config, None) for _ in range(2))
    assert type(saved).__name__ in ("GPT2LMHeadModel", "BertLMHeadModel", "MixtralForCausalLM")
    saved.save_pretrained("saved")
    loaded = pretrained.build_model("saved", config, None)
    names = [name for name, value in saved.named_parameters() if value.dim() > 1]
    assert all(torch.equal(loaded.get_parameter(name), saved.get_parameter(name)) for name in names)
    assert not any(torch.equal(random.get_parameter(name), saved.get_parameter(name)) for name in names)


def test_a_tokenizer_larger_than_the_model_gives_it_more_rows(pretrained: ModuleType, texts: ModuleType) -> None:
    """And it is loaded from the model's folder; its own limit of length counts."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(310)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=8).save_pretrained("gpt2")
    configure("gpt2")
    Path("config.json").rename("gpt2/config.json")
    tokenizer = pretrained.load_tokenizer("gpt2", print)
    config = pretrained.load_config("gpt2", print)
    model = pretrained.build_model("gpt2", config, tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == 310
    assert pretrained.tokens_of_a_sequence(model, config, tokenizer, 1024) == 8
    Path("text.txt").write_text("w1 w2 w3 w4 w5\n" * 40)
    train = texts.build_sequences("text.txt", None, tokenizer, 8)["train"]
    assert train[0]["input_ids"] == [1, 2, 3, 4, 5, 1, 2, 3] == train[0]["labels"]
    assert train[0]["attention_mask"] == [1] * 8
    again = texts.build_sequences("text.txt", None, pretrained.load_tokenizer("gpt2", print), 8)["train"]
    assert again.cache_files == train.cache_files != [], "a restart finds the tokens in the cache"


def test_a_model_that_is_not_there_is_one_line(pretrained: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given, the reason, and what to do without a network."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub to load the files.\nCheck your internet connection.")

    expected = (
        r"^--model_name_or_path: got gpt2, expected a folder .*, or a name that the hub has \(We couldn't connect"
        r" .*\)\. Without a network, download it elsewhere and give the path of its folder$"
    )
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(ConfigError, match=expected):
        pretrained.load_config("gpt2", print)


OWN_CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel

Path("has_run").touch()


class OwnConfig(GPT2Config):
    model_type = "own"


class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_where_it_is_trusted(
    pretrained: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ChatGLM's and its like: their classes come with the weights."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    classes = {"AutoConfig": "code_of_own.OwnConfig", "AutoModelForCausalLM": "code_of_own.OwnModel"}
    configure("own", auto_map=classes)
    Path("code_of_own.py").write_text(OWN_CODE)
    with pytest.raises(
        ConfigError, match=r"^--model_name_or_path: got \., a model with .* give --trust_remote_code .*$"
    ):
        pretrained.load_config(".", print)
    assert not Path("has_run").exists()
    config = pretrained.load_config(".", print, trust_remote_code=True)
    model = pretrained.build_model(".", config, None, trust_remote_code=True)
    assert Path("has_run").exists() and type(model).__name__ == "OwnModel"


def test_a_data_set_that_is_not_there_is_one_line(texts: ModuleType) -> None:
    """`datasets` itself is asked, without a network."""
    with pytest.raises(ConfigError, match=r"^--dataset_name_or_path: got wikitext, expected .*Without a network, .*$"):
        texts.load_parts("wikitext", "wikitext-103-raw-v1")


LINES = [f"line {n}" for n in range(100)]


def rows_of(parts: dict[str, Any]) -> list[list[str]]:
    return [[row.rstrip("\n") for row in parts[name]["text"]] for name in ("train", "test")]


def test_text_comes_from_what_datasets_has_saved(texts: ModuleType) -> None:
    """One data set, whose end is held out, or several parts."""
    whole = datasets.Dataset.from_dict({"number": list(range(100)), "text": LINES})
    parts = datasets.DatasetDict(train=whole.select(range(60)), validation=whole.select(range(60, 100)))
    whole.save_to_disk("whole")
    parts.save_to_disk("parts")
    for name, end in (("whole", 95), ("parts", 60)):
        assert rows_of(texts.load_parts(name, None)) == [LINES[:end], LINES[end:]]


def test_text_comes_from_files_of_any_form(texts: ModuleType) -> None:
    """A file of lines, and a folder with one folder for a configuration: parquet as the hub has it, or the archive's raw files."""
    Path("text.txt").write_text("\n".join(LINES))
    assert rows_of(texts.load_parts("text.txt", "wikitext-103-raw-v1")) == [LINES[:95], LINES[95:]]
    parquet, raw = Path("hub/wikitext-103-raw-v1"), Path("archive")
    parquet.mkdir(parents=True)
    raw.mkdir()
    Path("hub/README.md").write_text("# not text to train on")
    for name, of_archive, lines in (("train", "train", LINES[:80]), ("test", "test", LINES[80:])):
        datasets.Dataset.from_dict({"text": lines}).to_parquet(parquet / f"{name}-00000-of-00001.parquet")
        (raw / f"wiki.{of_archive}.raw").write_text("\n".join(lines))
    assert rows_of(texts.load_parts("hub", "wikitext-103-raw-v1")) == [LINES[:80], LINES[80:]]
    assert rows_of(texts.load_parts("archive", "wikitext-103-raw-v1")) == [LINES[:80], LINES[80:]]


def test_a_name_of_the_hub_is_handed_on_with_its_configuration(
    texts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no such path exists."""
    asked: list[Any] = []

    def load_dataset(*words: Any) -> datasets.DatasetDict:
        asked.append(words)
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": LINES}))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert rows_of(texts.load_parts("wikitext", "wikitext-103-raw-v1"))[0] == LINES[:95]
    assert asked == [("wikitext", "wikitext-103-raw-v1")]


def test_rows_are_cut_into_whole_sequences(texts: ModuleType) -> None:
    """A thousand rows are one text; its rest, and a text that is too short for one, are dropped. None at all is refused."""
    assert texts.group({"input_ids": [[1, 2, 3], [4, 5], [6, 7]]}, 3) == {
        "input_ids": [[1, 2, 3], [4, 5, 6]],
        "labels": [[1, 2, 3], [4, 5, 6]],
    }
    assert texts.group({"input_ids": [[1, 2]]}, 3)["input_ids"] == []
    Path("text.txt").write_text("ab\n" * 1999)
    sequences = texts.build_sequences("text.txt", None, None, 7)
    assert len(sequences["train"]) == 1000 * 3 // 7 + (1899 - 1000) * 3 // 7
    assert sequences["train"][0]["input_ids"] == list(b"ab\nab\na")
    with pytest.raises(
        ConfigError, match=r"text\.txt, test: got 100 rows of text, expected at least one sequence of 999"
    ):
        texts.build_sequences("text.txt", None, None, 999)


def test_masked_tokens_are_the_labels_that_count(texts: ModuleType) -> None:
    """About 15 % of them; the others have no label, and tokens that are not drawn stay."""
    torch.manual_seed(1)
    rows = [{"input_ids": list(range(100)), "labels": list(range(100))} for _ in range(100)]
    batch = texts.collate_masked(rows, mask_token=299, vocab_size=300)
    counts = batch["labels"] != -100
    assert 0.13 < counts.float().mean() < 0.17
    assert torch.equal(batch["input_ids"][~counts], texts.collate(rows)["labels"][~counts])
    assert 0.7 < (batch["input_ids"][counts] == 299).float().mean() < 0.9


def test_the_loops_arguments_have_the_usual_names_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """With none given it is GPT-2 on WikiText-103, which `datasets` loads by both of its names; devices are those of the table."""
    main_hf = module_of("huggingface/main_hf.py")
    monkeypatch.setattr(sys, "argv", ["main_hf.py"])
    found = vars(main_hf.arguments())
    documented = {
        "model_name_or_path": "gpt2",
        "dataset_name_or_path": "wikitext",
        "dataset_config_name": "wikitext-103-raw-v1",
        "batch_size": 2,
        "epochs": 100,
    }
    assert {name: found[name] for name in documented} == documented
    monkeypatch.setattr(sys, "argv", ["main_hf.py", "--device", "nowhere"])
    with pytest.raises(SystemExit):
        main_hf.arguments()


def test_the_mean_loss_goes_on_where_it_was_saved() -> None:
    """Over the batches of one epoch, without their graphs; a new epoch begins at nothing, the interrupted one does not."""
    mean_of = module_of("huggingface/main_hf.py").MeanLoss
    host = torch.device("cpu")
    with joined(World(0, 1, 0, launched=False), choose_device("cpu"), host):
        mean = mean_of(host)
        mean.begin(4)
        for loss in (3.0, 5.0):
            mean.add(torch.tensor(loss, requires_grad=True) * 1)
        assert mean.value() == 4.0
        again = mean_of(host)
        again.load_state_dict(json.loads(json.dumps(mean.state_dict())))
        again.begin(4)
        again.add(torch.tensor(10.0))
        assert again.value() == 6.0
        again.begin(5)
        again.add(torch.tensor(1.0))
        assert again.value() == 1.0
