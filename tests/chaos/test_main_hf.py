"""examples/huggingface/main_hf.py as its document says, typed in a folder with the program, tiny models and local text: two ranks
train each kind of model; killed, they print the losses of a baseline run, to the last bit."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.chaos.conftest import JOB_S
from tests.chaos.test_commands import ROOT

pytestmark = pytest.mark.long

LAUNCHERS = {"ttprun": "ttp.launch", "torchrun": "torch.distributed.run"}
DOCUMENT = (ROOT / "docs" / "from" / "musa_huggingface.md").read_text(encoding="utf-8")
OVERRIDES = dict(re.findall(r"`override_config.json` of (\S+):\n\n```json\n(.*?)```", DOCUMENT, re.DOTALL))
WIDTH = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {**WIDTH, "intermediate_size": 64, "max_position_embeddings": 32}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "gpt2": {"model_type": "gpt2", **WIDTH, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0},
    "bert-base-uncased": {"model_type": "bert", **ENCODER},
    "roberta-base": {"model_type": "roberta", **ENCODER, "pad_token_id": 1},
    "mixtral-8x7B-v0.1": {
        "model_type": "mixtral",
        **ENCODER,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
    },
}
KILLED_IN_AN_EVALUATION = """
import os, runpy, signal
from pathlib import Path

import torch

seed = torch.manual_seed


def fatal_seed(number):  # every batch of an evaluation has a seed: the number of the batch
    if number == 2 and os.environ["RANK"] == "0" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return seed(number)


torch.manual_seed = fatal_seed
runpy.run_path("main_hf.py", run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The program, the models as folders of their names, and WikiText's layout with other text."""
    for program in (ROOT / "examples" / "huggingface").glob("*.py"):
        shutil.copy(program, tmp_path)
    (tmp_path / "killed_in_an_evaluation.py").write_text(KILLED_IN_AN_EVALUATION)
    for name, values in CONFIGURATIONS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    text = tmp_path / "wikitext" / "wikitext-103-raw-v1"
    text.mkdir(parents=True)
    words = "\n".join(topics.values())
    for part, begin, end in (("train", 0, 800), ("valid", 1000, 1400), ("test", 2000, 2300)):
        (text / f"wiki.{part}.raw").write_text(words[begin:end])
    return tmp_path


def train(folder: Path, command: str, *more: str, faults: str = "", status: int = 0) -> str:
    """Run a command of the document in the folder and return what was printed."""
    name, *words = command.split()
    done = subprocess.run(
        [sys.executable, "-m", LAUNCHERS[name], *words, *more],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TTP_FAULTS": faults,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == status, text
    return text


def losses(text: str) -> dict[tuple[str, str], str]:
    found = re.findall(
        r"epoch\[(\d+)/\d+\], step\[(\d+)/\d+\]: train_loss: (\S+), train_tokens_throughput: \S+ tokens/s", text
    )
    return {(epoch, step): loss for epoch, step, loss in found}


def validations(text: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r"validation in train epoch (\d+): eval_loss: (\S+), val_perplexity: (\S+)", text)
    return {epoch: (loss, perplexity) for epoch, loss, perplexity in found}


def test_the_articles_first_command_trains_with_all_its_defaults(folder: Path) -> None:
    """A hundred epochs on `wikitext`: a line every 10 steps, an evaluation after each epoch, and a loss that falls."""
    text = train(folder, "ttprun --nproc_per_node=2 main_hf.py --model_name_or_path gpt2 --batch_size 1")
    found, judged = losses(text), validations(text)
    assert set(found) == {(str(epoch), step) for epoch in range(100) for step in ("0", "10")}
    assert "seq_len = 32; 25 sequences to train on" in text
    assert "epoch[99/99], step[10/12]: " in text, "25 sequences are 13 steps of two"
    assert set(judged) == {str(epoch) for epoch in range(100)}
    assert all(math.exp(float(loss)) == float(perplexity) for loss, perplexity in judged.values())
    assert float(found["99", "10"]) < 0.8 * float(found["0", "10"])


@pytest.mark.parametrize(
    ("name", "batch", "launcher"),
    [("bert-base-uncased", 56, "ttprun"), ("gpt2", 16, "torchrun"), ("mixtral-8x7B-v0.1", 1, "ttprun")],
)
def test_the_articles_command_lines_train(folder: Path, name: str, batch: int, launcher: str) -> None:
    """Each row of its results: with its file of overrides and its batch. One by torchrun, as the article has it."""
    (folder / "override_config.json").write_text(OVERRIDES[name])
    command = f"{launcher} --nproc_per_node=2 main_hf.py --model_name_or_path {name} --batch_size {batch}"
    text = train(folder, command, "--epochs", "2")
    keys = list(json.loads(OVERRIDES[name]))
    assert re.findall(r"^modify (\w+): \S+ -> \S+$", text, re.MULTILINE) == keys
    assert ("0", "0") in losses(text) and set(validations(text)) == {"0", "1"}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kills_within_an_update_and_an_evaluation_change_no_bit(folder: Path, name: str) -> None:
    """A decoder, encoders with and without masks (drawn while batches are fetched), and experts."""
    more = ["--epochs", "3", "--log_every", "1", *(["--masked"] if name == "roberta-base" else [])]
    arguments = f"--model_name_or_path {name} --batch_size 1"
    whole = train(folder, f"ttprun --nproc_per_node=2 main_hf.py {arguments}", *more, "--save_dir", "whole")
    faulted = train(
        folder,
        f"ttprun --nproc_per_node=2 killed_in_an_evaluation.py {arguments}",
        *more,
        *("--save_dir", "faulted"),
        faults="kill:rank=1,step=29,point=updating,round=1",
    )
    assert (folder / "killed").exists() and len(re.findall(r"restarting \(", faulted)) == 2
    assert re.search(r"lost +0 steps;", faulted), faulted
    expected, found = losses(whole), losses(faulted)
    assert len(expected) == 39 and len(found) >= 37  # the line of the step in flight may be missing
    assert all(expected[place] == loss for place, loss in found.items())
    assert validations(faulted) == validations(whole) and set(validations(whole)) == {"0", "1", "2"}


def test_what_must_be_corrected_is_one_line_and_no_restart(folder: Path) -> None:
    """A data set that neither the folder nor, without a network, the hub has."""
    command = "ttprun --nproc-per-node 2 main_hf.py --dataset_name_or_path nowhere --batch_size 4"
    text = train(folder, command, status=1)
    assert "main_hf.py: --dataset_name_or_path: got nowhere, expected " in text
    assert "Traceback" not in text and "restarting (" not in text
