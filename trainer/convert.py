"""`python -m ttp.trainer.convert {to-hf,from-hf} INPUT OUTPUT`: models to and from Hugging Face `transformers`.

Owns the files of both sides: their config.json, *.safetensors and tokenizer; our checkpoint of step 0 with the configuration to go
on with. OUTPUT appears whole or not at all. The package safetensors is optional; transformers itself is not needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import ttp
from ttp import files
from ttp.errors import CheckpointError, ConfigError, TTPError
from ttp.inputs.input_file import read_json

from .config.schema import Config, DatasetConfig, ModelConfig, ParallelConfig, TrainingConfig, plain
from .data.prepare import unfinished_beside
from .data.tokenizer import BYTES, byte_level_files, files_of_tokenizer, holds_tokenizer, open_tokenizer
from .devices.binding import choose_device
from .devices.device_table import HOST
from .model.gpt import DTYPES, build_model
from .model.hf_layout import from_hf, from_hf_config, to_hf, to_hf_config
from .model.weights import open_trained, put_weights
from .parallel.mesh import Mesh
from .parallel.optimizer import build_optimizer
from .world import World, joined

MOST_INDEX_BYTES = 256 << 20


def to_hugging_face(
    source: str, output: Path, dtype: str = "float32", tokenizer: str | None = None, key: str | None = None
) -> int:
    """Write the newest valid checkpoint of `source` as a model of transformers, with its tokenizer; return its step. `key`: as
    `ttp.open_checkpoint` takes it. Newer ones that are not valid are named on stderr.

    Raises ConfigError for an architecture that they have not, CheckpointError.
    """
    _check_free(output)
    trained = open_trained(source, key)
    for reason in trained.checkpoint.skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    named = tokenizer or trained.tokenizer
    end = None if named is None else open_tokenizer(named).end_of_text
    config = to_hf_config(trained.config, dtype, end)
    weights = to_hf(trained.checkpoint.weights(), trained.config)
    with _appearing(output) as folder:
        found = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
        _write_safetensors(folder / "model.safetensors", found)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if named == BYTES:
            for name, content in byte_level_files().items():
                (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
        elif named is not None:
            for file in files_of_tokenizer(Path(named)):
                shutil.copyfile(file, folder / (file.name if Path(named).is_dir() else "tokenizer.json"))
    return trained.checkpoint.step


def from_hugging_face(source: Path, output: Path, tokenizer: str | None = None) -> ModelConfig:
    """Write a model of transformers as an output folder that training continues from: `config.yaml`, and a checkpoint of step 0
    with fresh optimizer state. `tokenizer`: a path or BYTES; None: that of `source`. Returns its configuration. Raises
    ConfigError, CheckpointError."""
    _check_free(output)
    model_config = read_config(source)
    named = _tokenizer_of(source, tokenizer)
    weights = from_hf(_read_safetensors(source), model_config)
    with _appearing(output) as folder:
        config = Config(
            model_config=model_config,
            training_config=TrainingConfig(output_dir=str(folder)),
            parallel_config=ParallelConfig(optimizer_replicas=1),
            # Nothing is read: any folder will do where the vocabulary is smaller than that of bytes.
            dataset_config=DatasetConfig(dataset_dir=str(source), tokenizer=named),
        )
        _write_step_0(config, weights, folder / "checkpoints", named or BYTES)
        sections = {
            "training_config": {"output_dir": str(output.resolve())},
            "model_config": plain(model_config),
            "dataset_config": {"tokenizer": named, "dataset_dir": None},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    return model_config


def read_config(source: Path) -> ModelConfig:
    """Return the configuration of a folder of save_pretrained. Raises ConfigError."""
    try:
        theirs = read_json(source / "config.json")
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{source}/config.json cannot be read ({exc}), expected a folder of save_pretrained"
        ) from None
    if not isinstance(theirs, dict):
        raise ConfigError(f"{source}/config.json holds no mapping, expected a folder of save_pretrained")
    return from_hf_config(theirs)


def _tokenizer_of(source: Path, given: str | None) -> str | None:
    """Return the tokenizer to train on with; None: bytes, which someone has to ask for. Raises ConfigError."""
    if given is not None:
        open_tokenizer(given)  # refuses what is none
        return None if given == BYTES else str(Path(given).resolve())
    if not holds_tokenizer(source):
        raise ConfigError(
            f"{source} has no file of a tokenizer: a model that learned other tokens would go on in bytes; name one with"
            f" --tokenizer PATH, or {BYTES} where bytes are what it learned"
        )
    return str(source.resolve())


def _write_step_0(config: Config, weights: dict[str, torch.Tensor], folder: Path, tokenizer: str) -> None:
    model_config = dataclasses.replace(config.model_config, params_dtype="float32")  # masters have all bits
    host = torch.device(HOST)
    with joined(World(0, 1, 0, launched=False), choose_device(HOST), host):
        model = build_model(model_config, 0, host)
        put_weights(model, weights, "their model")
        optimizer = build_optimizer(config, [model], Mesh(), replicas=1)
        layout = {**Mesh().sizes, "model_config": plain(config.model_config), "tokenizer": tokenizer}
        session = ttp.start(optimizer, save_dirs=[folder], layout=layout, settings=ttp.Settings(enable=False))
        try:
            session.set_step_state(0, {"consumed_samples": 0, "epoch": 0, "loss_divisor": 1, "order": {}})
            session.save(0)
        finally:
            session.close()


def _write_safetensors(path: Path, weights: dict[str, torch.Tensor]) -> None:
    library, error = _safetensors(), importlib.import_module("safetensors").SafetensorError
    try:
        library.save_file(weights, str(path), metadata={"format": "pt"})
    except error as exc:
        free_mib = shutil.disk_usage(path.parent).free >> 20
        raise CheckpointError(
            f"{path} could not be written ({exc}; {free_mib} MiB are free there): make room, or choose another place"
        ) from None


def _read_safetensors(source: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a folder of save_pretrained, from one file or several."""
    library, error = _safetensors(), importlib.import_module("safetensors").SafetensorError
    weights: dict[str, torch.Tensor] = {}
    for name in _names_of_weights(source):
        if not (source / name).is_file():
            raise CheckpointError(
                f"{source / name} is missing, expected the weights as safetensors (model.save_pretrained writes them)"
            )
        try:
            weights |= library.load_file(str(source / name))
        except (error, OSError) as exc:
            raise CheckpointError(f"{source / name} cannot be read ({exc}): copy it again from where it came") from None
    return weights


def _names_of_weights(source: Path) -> list[str]:
    index = source / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(read_json(index, MOST_INDEX_BYTES)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{index} does not say which file has which weight ({type(exc).__name__}: {exc}), expected a weight_map; copy it again"
            " from where it came"
        ) from None


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as exc:
        raise ConfigError(f"the package safetensors is not here ({exc}): pip install safetensors") from None


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes `output`, durable, when the block ends well."""
    unfinished = unfinished_beside(output)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        files.name_durably(unfinished, output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_free(output: Path) -> None:
    """Raise ConfigError when `output` has something in it: before the work, which may take long."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there and not empty: name a new folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert as the command line says; return the exit status: 0 done, 2 refused. argparse itself exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m ttp.trainer.convert", description="To and from transformers.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    there = verbs.add_parser("to-hf", help="a checkpoint to a folder for AutoModelForCausalLM.from_pretrained")
    there.add_argument("input", help="an output folder, a folder of checkpoints (the newest valid one), or one of them")
    there.add_argument("output", type=Path, help="a new folder")
    there.add_argument("--dtype", default="float32", choices=list(DTYPES), help="of the weights (default: float32)")
    there.add_argument("--tokenizer", help="a tokenizer to put beside; default: the one that the checkpoint names")
    back = verbs.add_parser(
        "from-hf", help="a folder of save_pretrained to an output folder that training continues from"
    )
    back.add_argument("input", type=Path, help="a folder with config.json and model.safetensors")
    back.add_argument("output", type=Path, help="a new folder")
    back.add_argument("--tokenizer", help="a tokenizer to train on with, or bytes; default: the one in the folder")
    given = parser.parse_args(argv)
    try:
        if given.verb == "to-hf":
            step = to_hugging_face(given.input, given.output, given.dtype, given.tokenizer)
            print(f"{given.output}: step {step}, for AutoModelForCausalLM.from_pretrained")
        else:
            from_hugging_face(given.input, given.output, given.tokenizer)
            print(f"{given.output}: go on with ttprun ... -m ttp.trainer --config {given.output / 'config.yaml'}")
    except (TTPError, OSError) as exc:
        print(f"ttp.trainer.convert: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as any filter
    sys.exit(main())
