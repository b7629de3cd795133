"""What main_hf.py trains, and on what: a model with its configuration and tokenizer, and text cut into sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

OVERRIDES = Path("override_config.json")
MASKED = ("bert", "roberta", "distilbert", "albert", "electra", "camembert", "xlm-roberta", "modernbert")
"""Model types that are trained to fill in masked tokens."""
MASKED_SHARE = 0.15
HELD_OUT_SHARE = 0.05
IGNORED = -100
"""A label that does not count."""

Say = Callable[[str], None]


def load_config(path: str, say: Say) -> Any:
    """Return the model's configuration with the overrides of the working directory. Raises TypeError for a value of another
    type than the configuration's own, and what `read_overrides` raises."""
    config = AutoConfig.from_pretrained(path)
    for key, value in read_overrides().items():
        old = getattr(config, key, None)
        if old is None:
            say(f"warning: {OVERRIDES}: {key} is {'None' if hasattr(config, key) else 'not there'} in the model's"
                " configuration, and left as it is")  # fmt: skip
            continue
        if isinstance(old, torch.dtype):
            value = getattr(torch, value, value)
        if type(value) is not type(old):
            raise TypeError(f"{OVERRIDES}: {key} is {value!r}: wanted a {type(old).__name__}, as {old!r} is")
        say(f"{OVERRIDES}: {key}: {old} -> {value}")
        setattr(config, key, value)
    return config


def read_overrides() -> dict[str, Any]:
    """Return what the working directory's file says, if there is one. Raises ValueError when it is no JSON object."""
    if not OVERRIDES.exists():
        return {}
    text = OVERRIDES.read_text(encoding="utf-8")
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{OVERRIDES}: {error}; wanted a JSON object") from None
    if not isinstance(overrides, dict):
        raise ValueError(f'{OVERRIDES}: got {text.strip()[:60]}: wanted a JSON object, as {{"num_hidden_layers": 2}}')
    return overrides


def load_tokenizer(path: str, say: Say) -> Any:
    """Return the model's tokenizer, or None where a folder has none: then text is bytes."""
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")) and not any(Path(path).glob("vocab*")):
        say(f"{path} has no tokenizer: text is read as bytes")
        return None
    return AutoTokenizer.from_pretrained(path)


def is_masked(config: Any) -> bool:
    return config.model_type in MASKED


def build_model(path: str, config: Any, tokenizer: Any) -> torch.nn.Module:
    """Return the model with its weights, or with random ones where a folder has none. Raises SystemExit for too few tokens."""
    home = AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM
    has_weights = not Path(path).is_dir() or any(Path(path).glob("*.safetensors")) or any(Path(path).glob("*.bin"))
    model: torch.nn.Module = home.from_pretrained(path, config=config) if has_weights else home.from_config(config)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    if tokenizer is None and config.vocab_size < 257:
        raise SystemExit(
            f"vocab_size is {config.vocab_size}: wanted at least 257 for bytes and a mask; see {OVERRIDES}"
        )
    return model


def mask_token_of(config: Any, tokenizer: Any) -> int:
    """Return the token that stands for a masked one; a model that is not masked needs none. Raises SystemExit where it is missing."""
    mask: int | None = config.vocab_size - 1 if tokenizer is None else tokenizer.mask_token_id
    if mask is None and is_masked(config):
        raise SystemExit(
            f"{type(tokenizer).__name__} has no mask token: wanted one for a {config.model_type}; use the model's own tokenizer"
        )
    return -1 if mask is None else mask


def tokens_of_a_sequence(model: torch.nn.Module, config: Any, wanted: int) -> int:
    """Return `wanted`, or as many tokens as the model has positions for. Raises SystemExit for less than one."""
    limits = {"--block_size": wanted}
    places = getattr(config, "max_position_embeddings", None)
    if isinstance(places, int) and places > 0:  # some say -1, or None: as many as you like
        limits["max_position_embeddings"] = places
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and "position" in name.rpartition(".")[2]
        if is_table and module.padding_idx is not None:  # as RoBERTa's: positions begin behind that of the padding
            limits[name] = module.num_embeddings - module.padding_idx - 1
    name = min(limits, key=lambda each: limits[each])
    if limits[name] < 1:
        raise SystemExit(f"{name} allows {limits[name]} tokens of a sequence: wanted at least 1")
    return limits[name]


def build_sequences(path: str, config_name: str | None, tokenizer: Any, block: int) -> dict[str, torch.Tensor]:
    """Return tokens_NT to train on (`train`) and to evaluate on (`test`). Raises SystemExit when there is too little text."""
    texts = local_texts(Path(path)) if Path(path).exists() else None
    if texts is None:
        texts = data_set_texts(path, config_name)
    found = {}
    for name, text in texts.items():
        tokens = list(text.encode()) if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = len(tokens) // block
        if not whole:
            raise SystemExit(f"{path}: {len(tokens)} tokens for {name}: wanted at least one sequence of {block}")
        found[name] = torch.tensor(tokens[: whole * block]).view(whole, block)
    return found


def local_texts(path: Path) -> dict[str, str] | None:
    """Return the text of a file or of a folder's files, its end held out; None for what `datasets` has saved."""
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return None
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    return {"train": text[:cut], "test": text[cut:]}


def data_set_texts(path: str, config_name: str | None) -> dict[str, str]:
    """Return the texts of a data set that `datasets` has saved, or loads by its name."""
    from datasets import Dataset, load_dataset, load_from_disk

    found = load_from_disk(path) if Path(path).exists() else load_dataset(path, config_name)
    if isinstance(found, Dataset):
        found = found.train_test_split(HELD_OUT_SHARE, shuffle=False)
    if "test" not in found and "validation" not in found:
        found = found["train"].train_test_split(HELD_OUT_SHARE, shuffle=False)
    parts = {"train": found["train"], "test": found["test" if "test" in found else "validation"]}
    columns = found["train"].column_names
    column = "text" if "text" in columns else columns[0]
    return {name: "\n".join(part[column]) for name, part in parts.items()}


def collate(
    sequences: list[torch.Tensor], *, masked: bool, mask_token: int, vocab_size: int
) -> dict[str, torch.Tensor]:
    """Return input_ids and labels. For a masked model 15 % of the tokens are to be found: of them 80 % are masked, 10 % are
    another token, 10 % are left (BERT, section 3.1)."""
    labels_BT = torch.stack(sequences)
    if not masked:
        return {"input_ids": labels_BT, "labels": labels_BT}
    drawn_BT = torch.rand(labels_BT.shape) / MASKED_SHARE
    others_BT = torch.randint(vocab_size, labels_BT.shape)
    tokens_BT = torch.where(drawn_BT < 0.8, mask_token, labels_BT)
    tokens_BT = torch.where((drawn_BT >= 0.8) & (drawn_BT < 0.9), others_BT, tokens_BT)
    return {"input_ids": tokens_BT, "labels": torch.where(drawn_BT < 1.0, labels_BT, IGNORED)}
