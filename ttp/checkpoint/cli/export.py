"""`ttp ckpt export`: a checkpoint as one file for other people's tools, or as a model of `transformers`.

    safetensors    parameters by their own names; --all: every tensor under its name in the checkpoint (`model.w`, `optim.state.w.exp_avg`)
    torch          `torch.load(OUTPUT, weights_only=True)`: {"model": {...}}; --all: {"model", "optim", "ttp"}, as dcp_to_torch_save nests them
    hf             a folder for `AutoModelForCausalLM.from_pretrained`, of a model of the bundled trainer

Owns the two files' content and that OUTPUT appears whole or not at all; the trainer owns its models' names in `transformers`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ttp import files
from ttp.checkpoint.cli.output import Answer, Status, UsageError
from ttp.checkpoint.cli.verify import key_given, open_given
from ttp.checkpoint.find import all_at
from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.durable import written_by_library
from ttp.checkpoint.format.keys import model_key, nested_path
from ttp.checkpoint.reader import Reader
from ttp.errors import CheckpointError
from ttp.text.wording import counted, size_text

_MODEL = model_key("")
_CONVERTER = "ttp.trainer.convert"
"""A command's plug-in: named here, imported when somebody asks for `hf`. The library itself needs no trainer."""


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Write OUTPUT. YES: it is there, whole."""
    _check(given)
    key = key_given(given)
    if given.to == "hf":
        return _to_hugging_face(given)
    stored = open_given(given.path, console, key=key)
    with _appearing(given.output) as unfinished:
        count = (
            _write_safetensors(unfinished, stored, given)
            if given.to == "safetensors"
            else _write_torch(unfinished, stored, given)
        )
    return _written(given, stored.manifest.step, str(stored.path), f"{counted(count, 'tensor')}")


def _check(given: argparse.Namespace) -> None:
    """Raise UsageError for what cannot be meant, before the work; CheckpointError where there is nothing to export."""
    all_at(given.path)
    if os.path.lexists(given.output):
        raise UsageError(f"{given.output} is there already: expected a new name; an export never overwrites")
    if given.to == "hf" and given.all:
        raise UsageError("--all with --to hf: transformers has no optimizer state; expected --to safetensors or torch")
    if given.to != "hf" and given.tokenizer is not None:
        raise UsageError(f"--tokenizer with --to {given.to}: expected --to hf; a file of tensors has no tokenizer")
    if not given.output.absolute().parent.is_dir():
        raise UsageError(
            f"{given.output.absolute().parent} is not there: expected an output in a folder that exists; make it"
        )


def _to_hugging_face(given: argparse.Namespace) -> Answer:
    converter = importlib.import_module(_CONVERTER)
    step = converter.to_hugging_face(
        str(given.path), given.output, given.dtype or "float32", given.tokenizer, given.key
    )
    return _written(given, step, str(given.path), "for AutoModelForCausalLM.from_pretrained")


def _written(given: argparse.Namespace, step: int, source: str, what: str) -> Answer:
    files = [given.output] if given.output.is_file() else sorted(given.output.iterdir())
    nbytes = sum(file.stat().st_size for file in files)
    fields = {"output": str(given.output), "format": given.to, "step": step, "source": source, "bytes": nbytes}
    return Answer(Status.YES, fields, [f"{escape(str(given.output))}: step {step}, {what}, {size_text(nbytes)}"])


def _keys(stored: Reader, everything: bool) -> dict[str, str]:
    """Return the names that tensors get, by their names in the checkpoint. Raises CheckpointError when there are none."""
    names = {key: key if everything else key.removeprefix(_MODEL) for key in stored.manifest.tensors
             if everything or key.startswith(_MODEL)}  # fmt: skip
    if not names:
        raise CheckpointError(
            f"{stored.path} has no tensor named {_MODEL}*: expected a model's; --all exports what there is"
        )
    return names


def _tensor(stored: Reader, key: str, dtype: str | None) -> torch.Tensor:
    """Return a tensor whole; `dtype` is for the model's numbers with a point."""
    tensor = stored.whole(key)
    return tensor.to(dcp.dtype_of(dtype)) if dtype and key.startswith(_MODEL) and tensor.is_floating_point() else tensor


def _write_safetensors(path: Path, stored: Reader, given: argparse.Namespace) -> int:
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(f"the package safetensors is not here ({error}): pip install safetensors") from None
    tensors = {name: _tensor(stored, key, given.dtype) for key, name in _keys(stored, given.all).items()}
    with written_by_library(path):
        library.save_file(tensors, str(path), metadata={"format": "pt", "step": str(stored.manifest.step)})
    return len(tensors)


def _write_torch(path: Path, stored: Reader, given: argparse.Namespace) -> int:
    keys = _keys(stored, given.all)
    values: dict[str, object] = {key: _tensor(stored, key, given.dtype) for key in keys}
    if given.all:
        values |= stored.blobs()
    content = nested({nested_path(key): value for key, value in values.items()})
    if given.all:
        content["ttp"] = {
            "step": stored.manifest.step,
            "state": stored.manifest.state,
            "layout": stored.manifest.layout,
        }
    with written_by_library(path):
        torch.save(content, path)
    return len(keys)


def nested(values: Mapping[tuple[str | int, ...], object]) -> dict[str, Any]:
    """Return dictionaries, and lists where a path has a number, with each value at its path."""
    root: dict[str, Any] = {}
    for path, value in sorted(values.items(), key=lambda item: [(isinstance(p, str), p) for p in item[0]]):
        place: Any = root
        for part, following in zip(path, (*path[1:], None), strict=True):
            fresh: Any = value if following is None else [] if isinstance(following, int) else {}
            if isinstance(place, list):
                assert isinstance(part, int)
                if part == len(place):  # sorted: a list's items come in order
                    place.append(fresh)
            elif following is None or part not in place:
                place[part] = fresh
            place = place[part]
    return root


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Give a name to write to, which becomes `output`, durable, when the block ends well."""
    unfinished = output.with_name(f".{output.name}.{uuid.uuid4().hex[:12]}")
    try:
        yield unfinished
        files.name_durably(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)
