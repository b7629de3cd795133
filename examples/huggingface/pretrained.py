"""The model that main_hf.py trains: its configuration with the overrides of the working directory, its tokenizer, its weights.

Raises `ttp.errors.ConfigError`, one line, for whatever must be corrected first. Never runs code from a model's folder unless
`--trust_remote_code` was given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from ttp.errors import ConfigError

OVERRIDES = Path("override_config.json")

Say = Callable[[str], None]


def load_config(path: str, say: Say, *, trust_remote_code: bool = False) -> Any:
    """Return the model's configuration with the overrides of the working directory: keys that it lacks or has as None are skipped
    with a warning, each other change is printed. Raises ConfigError, also for a value of another type than the old one."""
    with from_hub("--model_name_or_path", path, "a folder that transformers has saved"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for key, value in read_overrides().items():
        old = getattr(config, key, None)
        if old is None:
            state = "None in" if hasattr(config, key) else "not in"
            say(f"WARNING: {OVERRIDES}: {key} is {state} the model's configuration; skipped")
            continue
        if isinstance(old, torch.dtype):
            value = _dtype(key, value)
        if type(value) is not type(old):
            kind = type(old).__name__
            raise ConfigError(f"{OVERRIDES}: {key}: got {value!r}, expected type {kind}, as {old!r}. Correct the file")
        say(f"modify {key}: {old} -> {value}")
        setattr(config, key, value)
    return config


def read_overrides() -> dict[str, Any]:
    """Return the overrides of the working directory; none without the file. Raises ConfigError when it is not a JSON object."""
    if not OVERRIDES.exists():
        return {}
    text = OVERRIDES.read_text(encoding="utf-8")
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{OVERRIDES}: {error}; expected a JSON object. Correct the file") from None
    if not isinstance(overrides, dict):
        raise ConfigError(
            f'{OVERRIDES}: got {text.strip()[:60]}, expected a JSON object, as {{"num_hidden_layers": 2}}'
        )
    return overrides


def load_tokenizer(path: str, say: Say, *, trust_remote_code: bool = False) -> Any:
    """Return the model's tokenizer, or None where a folder has none: then text is bytes. Raises ConfigError."""
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")) and not any(Path(path).glob("vocab*")):
        say(f"{path} has no tokenizer: text is read as bytes")
        return None
    with from_hub("--model_name_or_path", path, "a folder with the model's tokenizer"):
        return AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=trust_remote_code)


def build_model(
    path: str, config: Any, tokenizer: Any, *, masked: bool = False, trust_remote_code: bool = False
) -> torch.nn.Module:
    """Return the model with its weights, or with random ones where a folder has none. Raises ConfigError."""
    home = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    has_weights = not Path(path).is_dir() or any(Path(path).glob("*.safetensors")) or any(Path(path).glob("*.bin"))
    with from_hub("--model_name_or_path", path, "a model for " + ("masked tokens" if masked else "the next token")):
        model: torch.nn.Module = (
            home.from_pretrained(path, config=config, trust_remote_code=trust_remote_code)
            if has_weights
            else home.from_config(config, trust_remote_code=trust_remote_code)
        )
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if tokenizer is not None and len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    if tokenizer is None and rows < 257:
        raise ConfigError(
            f"vocab_size: got {rows}, expected at least 257 (bytes and a mask). Change it in the model's config.json"
        )
    return model


def mask_token_of(config: Any, tokenizer: Any) -> int:
    """Return the token that stands for a masked one. Raises ConfigError where the tokenizer has none."""
    mask: int | None = config.vocab_size - 1 if tokenizer is None else tokenizer.mask_token_id
    if mask is None:
        name = type(tokenizer).__name__
        raise ConfigError(
            f"--masked: {name} has no mask token. Use the tokenizer of a masked model, or leave --masked out"
        )
    return mask


def tokens_of_a_sequence(model: torch.nn.Module, config: Any, tokenizer: Any, asked: int) -> int:
    """Return `asked`, or as many tokens as the tokenizer allows or the model has positions for. Raises ConfigError for less than one."""
    limits = {"--block_size": asked}
    if tokenizer is not None:
        limits["the tokenizer's model_max_length"] = tokenizer.model_max_length
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        places = getattr(config, name, None)
        if isinstance(places, int) and places > 0:  # some say -1, or None: as many as you like
            limits[name] = places
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and "position" in name.rpartition(".")[2]
        if is_table and module.padding_idx is not None:  # as RoBERTa's: positions begin behind that of the padding
            limits[name] = module.num_embeddings - module.padding_idx - 1
    name = min(limits, key=lambda each: limits[each])
    if limits[name] < 1:
        raise ConfigError(f"{name}: got {limits[name]} tokens a sequence, expected at least 1")
    return limits[name]


@contextmanager
def from_hub(option: str, name: str, expected: str) -> Iterator[None]:
    """Raise ConfigError, one line with what to do, for what a library of the hub raises while it reads `name` of `option`."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{option}: got {name}, a model with Python code of its own, expected one of transformers."
                " Read that code, then give --trust_remote_code to run it"
            ) from error
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"{option}: got {name}, expected {expected}, or a name that the hub has ({reason[:300].rstrip('.')})."
            f" Without a network, download it elsewhere and give the path of its folder"
        ) from error


def _dtype(key: str, name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"{OVERRIDES}: {key}: got {name!r}, expected the name of a type, as bfloat16. Correct the file"
        )
    return found
