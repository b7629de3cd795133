"""The text that main_hf.py trains on: a data set that `datasets` loads from local files or from the hub, as sequences of tokens.

Tokens are kept in the cache of `datasets` (`HF_HOME`), so a restart does not make them again. Raises `ttp.errors.ConfigError`, one
line, for whatever must be corrected first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
from filelock import FileLock
from pretrained import from_hub
from transformers import default_data_collator

from ttp.errors import ConfigError

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""What `datasets` calls the reader of a file's form; any other file is text, a row a line."""
SAVED = ("state.json", "dataset_dict.json")
"""A folder with one of these was written by `save_to_disk`."""
HELD_OUT_SHARE = 0.05
ROWS_TOGETHER = 1000
"""So many rows of text are made one text, and cut; what is left of it is dropped."""
MASKED_SHARE = 0.15
IGNORED = -100
"""A label that does not count."""

Parts = dict[str, datasets.Dataset]


def build_sequences(path: str, config_name: str | None, tokenizer: Any, block: int) -> Parts:
    """Return sequences of `block` tokens to train on (`train`) and to evaluate on (`test`), with their labels. Ranks of a host take turns,
    so that the others find what the first has made. Raises ConfigError, also when there is too little text."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "main_hf.lock"):
        parts = load_parts(path, config_name)
        return {name: cut(part, tokenizer, block, f"{path}, {name}") for name, part in parts.items()}


def load_parts(path: str, config_name: str | None) -> Parts:
    """Return the rows to train on and to evaluate on: the test part, else the validation part, else the last rows. Raises ConfigError."""
    with from_hub("--dataset_name_or_path", path, "a file, a folder of files, a data set saved by `datasets`"):
        found = load_local(Path(path), config_name) if Path(path).exists() else datasets.load_dataset(path, config_name)
        if isinstance(found, datasets.Dataset):
            found = datasets.DatasetDict(train=found)
        if "train" not in found:
            raise ValueError(f"its parts are {', '.join(found)}; there is no train")
        if "test" not in found and "validation" not in found:
            found = found["train"].train_test_split(HELD_OUT_SHARE, shuffle=False)
    return {"train": found["train"], "test": found["test" if "test" in found else "validation"]}


def load_local(path: Path, config_name: str | None) -> Any:
    """Return what a file or a folder holds. A folder may have one folder for each configuration; its files' names tell the part
    (`train`, `valid`, `test`)."""
    if path.is_dir() and config_name and (path / config_name).is_dir():
        path = path / config_name
    if any((path / name).exists() for name in SAVED):
        return datasets.load_from_disk(str(path))
    suffixes = {file.suffix for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()}
    builder = next((BUILDERS[suffix] for suffix in sorted(suffixes) if suffix in BUILDERS), "text")
    options = {"keep_linebreaks": True} if builder == "text" else {}
    where = {"data_dir": str(path.resolve())} if path.is_dir() else {"data_files": str(path.resolve())}
    return datasets.load_dataset(builder, **where, **options)


def cut(part: datasets.Dataset, tokenizer: Any, block: int, name: str) -> datasets.Dataset:
    """Return the sequences of a part. Raises ConfigError where it has not one."""
    columns = part.column_names
    column = "text" if "text" in columns else columns[0]
    tokens = part.map(
        tokenize,
        batched=True,
        remove_columns=columns,
        fn_kwargs={"tokenizer": tokenizer, "column": column},
        desc="Running tokenizer on dataset",
    )
    sequences = tokens.map(
        group,
        batched=True,
        batch_size=ROWS_TOGETHER,
        fn_kwargs={"block": block},
        desc=f"Grouping texts in chunks of {block}",
    )
    if not len(sequences):
        raise ConfigError(f"{name}: got {part.num_rows} rows of text, expected at least one sequence of {block} tokens")
    return sequences


def tokenize(rows: dict[str, list[str]], tokenizer: Any, column: str) -> dict[str, list[list[int]]]:
    """Return what the tokenizer makes of each row; without one its bytes."""
    if tokenizer is None:
        return {"input_ids": [list(text.encode()) for text in rows[column]]}
    return dict(tokenizer(rows[column]))


def group(rows: dict[str, list[list[int]]], block: int) -> dict[str, list[list[int]]]:
    """Return the rows as one, cut into pieces of `block` tokens; a shorter rest is dropped. Labels are the tokens."""
    whole = {name: [token for row in each for token in row] for name, each in rows.items()}
    length = len(whole["input_ids"]) // block * block
    pieces = {name: [each[i : i + block] for i in range(0, length, block)] for name, each in whole.items()}
    return {**pieces, "labels": [list(piece) for piece in pieces["input_ids"]]}


def collate(sequences: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch, tensors (B, T). Every token is a label: the model shifts them."""
    batch: dict[str, torch.Tensor] = default_data_collator(sequences)
    return batch


def collate_masked(sequences: list[dict[str, Any]], *, mask_token: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return a batch, tensors (B, T), in which 15 % of the tokens are to be found: of them 80 % are masked, 10 % are another token, 10 %
    stay (BERT, section 3.1)."""
    batch = collate(sequences)
    labels_BT = batch["labels"]
    drawn_BT = torch.rand(labels_BT.shape) / MASKED_SHARE
    others_BT = torch.randint(vocab_size, labels_BT.shape)
    tokens_BT = torch.where(drawn_BT < 0.8, mask_token, labels_BT)
    tokens_BT = torch.where((drawn_BT >= 0.8) & (drawn_BT < 0.9), others_BT, tokens_BT)
    return {**batch, "input_ids": tokens_BT, "labels": torch.where(drawn_BT < 1.0, labels_BT, IGNORED)}
