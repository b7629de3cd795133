"""JSON that tools of this project wrote, or others did, with values of any kind in it: read, or refused as its reader promises, in one line."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.test_files import changed, one_line
from tests.unit.runtime.test_replay import EVENTS, record
from ttp.chaos.run.campaign import read_baseline
from ttp.controller.replay import main as replay_main
from ttp.errors import ConfigError
from ttp.exchange import controller_file, last_step, saved_alone, time_marks
from ttp.regroup import kept_result
from ttp.trainer.convert import read_config

settings.load_profile("fuzz")

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256, "n_inner": None, "resid_pdrop": 0.1,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
         "max_position_embeddings": 64, "vocab_size": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "hidden_act": "silu",
         "rms_norm_eps": 1e-5, "attention_dropout": 0.0, "sliding_window": None, "head_dim": 8}  # fmt: skip
BASELINE = {"world_size": 2, "steps": {"1": ["0x1p+0", ["0x1p-1"]], "2": ["0x1p+0", []]}, "final": None}


def read_model(path: Path) -> None:
    path.rename(path.with_name("config.json"))
    read_config(path.parent)


def read_controllers(path: Path) -> None:
    path.rename(path.with_name(controller_file.NAME))
    try:
        controller_file.read(path.parent)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def read_last_step(path: Path) -> None:
    path.rename(last_step.path_of(path.parent, 0))
    last_step.read(path.parent, 0, 0.0)


def read_saved_alone(path: Path) -> None:
    path.rename(saved_alone.path_of(path.parent, 0))
    saved_alone.read(path.parent, 0, 0.0)


def read_marks(path: Path) -> None:
    path.rename(time_marks.path_of(path.parent, 0))
    time_marks.read(path.parent, 0, 0.0)


def read_rehearsals(path: Path) -> None:
    path.rename(path.with_name(kept_result.NAME))
    try:
        kept_result.read(path.parent)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    finally:
        kept_result.KeptResults([str(path.parent)], kept_result.RehearsedProgram("s", "1", "2", "l"), 1).why_not()


READERS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "a model, GPT-2": (read_model, GPT2),
    "a model, Llama": (read_model, LLAMA),
    "a baseline run": (read_baseline, BASELINE),
    "controllers": (read_controllers, {"addresses": ["a:1", "b:2"], "pid": 7, "log_dir": "/log"}),
    "a last step": (read_last_step, {"unix_s": 5.0, "step": 3, "saved_step": 3}),
    "a mark of time": (read_marks, {"unix_s": 5.0, "event": "saved", "step": 3, "took_s": 0.5}),
    "a save without a controller": (read_saved_alone, {"began_unix_s": 1.0, "unix_s": 2.0, "step": 3, "world_size": 2, "path": "/a", "error": "",
                                    "newest": "", "noticed": [0, 1]}),
    "rehearsals": (read_rehearsals, {"format": 1, "results": [{"script": "s", "ttp": "1", "torch": "2", "layout": "l", "step": 3, "unequal": ""}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@given(st.randoms(use_true_random=True))
def test_a_json_file_is_read_or_refused_in_one_line(name: str, rng: random.Random) -> None:
    read, base = READERS[name]
    content = json.dumps(changed(base, rng)).encode()
    if rng.random() < 0.15:
        content = rng.choice((rng.randbytes(50), b"[" * 100_000, b"1" * 5000, content[: rng.randrange(len(content))]))
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        path = Path(folder) / "file.json"
        path.write_bytes(content)
        try:
            read(path)
        except ConfigError as error:
            one_line(error)


@cache
def a_journal() -> tuple[list[str], list[str]]:
    """Return the lines of a journal and of its inputs."""
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        path = Path(folder) / "journal_0.jsonl"
        record(path, EVENTS)
        return path.read_text().splitlines(), path.with_name(f"{path.name}.inputs").read_text().splitlines()


@given(st.randoms(use_true_random=True))
def test_a_journal_is_replayed_or_refused_in_one_line(rng: random.Random) -> None:
    """Its report and its inputs, a value of any kind in some line."""
    files = [list(lines) for lines in a_journal()]
    lines = rng.choice(files)
    place = rng.randrange(len(lines))
    lines[place] = json.dumps(changed(json.loads(lines[place]), rng))
    reported, error = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        path = Path(folder) / "journal_0.jsonl"
        for name, content in zip((path, path.with_name(f"{path.name}.inputs")), files, strict=True):
            name.write_text("\n".join([*content, ""]))
        with contextlib.redirect_stdout(reported), contextlib.redirect_stderr(error):
            status = replay_main([str(path)])
    assert status in (0, 1, 2) and error.getvalue().count("\n") == (status == 2)
