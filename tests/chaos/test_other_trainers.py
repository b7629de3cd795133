"""Trainers that were not written for ttp, in real processes: a rank is killed, and what the resumed run prints is what an
baseline run prints, to the last bit."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.chaos.conftest import JOB_S, run_script
from tests.chaos.test_commands import ROOT

EXAMPLES = ROOT / "examples"


def train(
    folder: Path,
    ranks: int,
    example: str,
    *arguments: str,
    faults: str = "",
    launcher: str = "ttp.launch",
    more_restarts: int = 0,
) -> str:
    """Run an example to its end under ttprun and return what it printed. `more_restarts`: for faults of its own."""
    script = (str(EXAMPLES / example), *arguments, "--save-dir", str(folder))
    text = run_script(ranks, *script, faults=faults, launcher=launcher)
    assert "took no batch from guard" not in text and "wrote no checkpoint" not in text, text
    assert re.findall(r"restarting \((\d) of 3 restarts\)", text) == [
        str(1 + n) for n in range(len(faults.split(";") if faults else ()) + more_restarts)
    ]
    assert not faults or re.search(r"lost +0 steps;", text), text
    return text


def steps_of(text: str) -> dict[int, set[str]]:
    """Return what was printed of each step, once or, where a rank was killed between update and print, twice."""
    reported: dict[int, set[str]] = {}
    for step, rest in re.findall(r"step (\d+): (loss.*)", text):
        reported.setdefault(int(step), set()).add(rest)
    return reported


def compare(whole: str, faulted: str) -> None:
    """Every step that a killed run prints is that of the baseline one; the step in flight may have no line."""
    expected, got = steps_of(whole), steps_of(faulted)
    faults = len(re.findall(r"restarting \(", faulted))
    assert expected and max(expected) == max(got) and len(expected) - len(got) <= faults
    for step, lines in got.items():
        assert lines == expected[step], f"step {step}: {lines}, the baseline run has {expected[step]}"
    finals = [re.findall(r"final .*", text) for text in (whole, faulted)]
    assert finals[0] == finals[1]


SHORTEST = (EXAMPLES / "ddp" / "shortest.py").read_text()


def marked(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if "  # TTP" in line]


def without_ttp(text: str) -> str:
    """Return a trainer without its marked lines; one that stands in place of a range gives way to it."""
    plain = re.sub(r"range\(.*\):  # TTP: in place of (range\(.*\))", r"\1:", text)
    return "".join(line for line in plain.splitlines(keepends=True) if "  # TTP" not in line)


def test_the_shortest_form_is_an_import_and_three_lines() -> None:
    """What remains without them knows nothing of ttp; the document shows the same lines."""
    lines = marked(SHORTEST)
    assert len(lines) == 4 and lines[0] == "import ttp  # TTP"
    tree = ast.parse(without_ttp(SHORTEST))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not (names | modules) & {"ttp", "guard"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your_trainer.md").read_text(), re.DOTALL)
    assert lines in [marked(block) for block in blocks]


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("your_trainer/nanogpt.py", "kill:rank=1,step=9,point=backward;kill:rank=0,step=15,point=updating,round=1"),
        (
            "your_trainer/accelerate_loop.py",
            "kill:rank=1,step=3,point=updating;kill:rank=0,step=19,point=backward,round=1",
        ),
        ("your_trainer/ddp_sampler.py", "kill:rank=0,step=5,point=record;kill:rank=1,step=13,point=done,round=1"),
    ],
)
@pytest.mark.long
def test_the_documents_loops_killed_twice_have_the_baseline_run_s_bits(tmp_path: Path, name: str, faults: str) -> None:
    """docs/your_trainer.md begins with them. Losses, learning rates, validation and final weights; the second fault comes in another epoch."""
    steps = ("--steps", "24") if "nanogpt" in name else ("--epochs", "3")
    whole = train(tmp_path / "whole", 2, name, *steps)
    assert len(steps_of(whole)) == 24
    faulted = train(tmp_path / "faulted", 2, name, *steps, faults=faults)
    compare(whole, faulted)
    validations = [set(re.findall(r"after step \d+: .*", text)) for text in (whole, faulted)]
    assert validations[0] == validations[1] and bool(validations[0]) == ("nanogpt" in name)


@pytest.mark.long
def test_the_shortest_form_has_the_bits_of_the_trainer_without_ttp(tmp_path: Path) -> None:
    """Rank 1 is killed in the middle, rank 0 in the next attempt when it is about to save the weights: every loss, and those weights, are
    what the plain form has under torchrun."""
    plain, faulted = tmp_path / "plain.py", tmp_path / "faulted.py"
    plain.write_text(without_ttp(SHORTEST))
    dies = 'os.kill(os.getpid(), 9 * (os.environ["TTP_ATTEMPT"] == "1"))'
    faulted.write_text(SHORTEST.replace("torch.save(", f"import os; {dies}; torch.save("))
    reported = [
        train(tmp_path / "whole", 2, str(plain), "--steps", "40", launcher="torch.distributed.run"),
        train(
            tmp_path / "saved",
            2,
            str(faulted),
            "--steps",
            "40",
            faults="kill:rank=1,step=21,point=updating",
            more_restarts=1,
        ),
    ]
    assert sorted(steps_of(reported[0])) == list(range(1, 41))
    assert "restarting (2 of 3 restarts)" in reported[1]
    compare(*reported)
    weights = [torch.load(tmp_path / name / "model.pt") for name in ("whole", "saved")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.long
def test_plain_ddp_survives_the_death_of_rank_0(tmp_path: Path) -> None:
    """With dropout, batch norm, a shuffling sampler and a schedule, killed in the middle of an epoch's step."""
    whole = train(tmp_path / "whole", 2, "ddp/train.py", "--epochs", "3")
    assert "barrier mode" in whole
    compare(
        whole,
        train(tmp_path / "faulted", 2, "ddp/train.py", "--epochs", "3", faults="kill:rank=0,step=21,point=updating"),
    )


@pytest.mark.long
@pytest.mark.parametrize("point", ["record", "updating", "done"])
def test_an_average_of_the_weights_survives_with_them(tmp_path: Path, point: str) -> None:
    """Rank 1 of 3 dies before, within and right behind an update: the average in the end has the baseline run's bits."""
    arguments = ("ddp/train.py", "--epochs", "3", "--ema", "0.9")
    whole = train(tmp_path / "whole", 3, *arguments)
    compare(whole, train(tmp_path / "faulted", 3, *arguments, faults=f"kill:rank=1,step=21,point={point}"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "clip", "rank", "point"),
    [
        ("SGD", "0", 1, "backward"),
        ("AdamW", "0.5", 1, "record"),
        ("Adafactor", "0", 0, "done"),
        ("NAdam", "0", 1, "ready"),
    ],
)
def test_ddp_survives_with_any_optimizer(tmp_path: Path, optimizer: str, clip: str, rank: int, point: str) -> None:
    """Killed at every place of a step; in norm mode survivors repeat the clipping too."""
    arguments = ("--epochs", "2", "--optimizer", optimizer, "--clip", clip)
    whole = train(tmp_path / "whole", 2, "ddp/train.py", *arguments)
    assert ("norm mode" if clip != "0" else "barrier mode") in whole
    faults = f"kill:rank={rank},step=16,point={point}"
    compare(whole, train(tmp_path / "faulted", 2, "ddp/train.py", *arguments, faults=faults))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.long
@pytest.mark.parametrize(("rank", "point"), [(0, "updating"), (3, "ready"), (2, "backward")])
def test_hsdp_survives_the_death_of_a_rank(tmp_path: Path, rank: int, point: str) -> None:
    """FSDP2 on 2 x 2 ranks: coverage is found from the DTensors, and each shard has one other holder. The dump is plain DCP."""
    arguments = ("--steps", "14", "--replicate", "2")
    whole = train(tmp_path / "whole", 4, "hsdp/train.py", *arguments)
    assert re.search(r"any 1 of 4 ranks; 4 of 6 pairs", whole), whole
    faults = f"kill:rank={rank},step=9,point={point}"
    compare(whole, train(tmp_path / "faulted", 4, "hsdp/train.py", *arguments, faults=faults))
    saved = read_by_torch_alone(next((tmp_path / "faulted").glob("iter_000000[89]")))  # the dying gasp, of three ranks
    last = [read_by_torch_alone(tmp_path / name / "iter_0000014") for name in ("whole", "faulted")]
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())
    assert all(
        value.shape == last[0][name].shape and not torch.equal(value, last[0][name]) for name, value in saved.items()
    )


def read_by_torch_alone(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the HSDP example in one process, by `torch.distributed.checkpoint` and nothing of ours."""
    spec = importlib.util.spec_from_file_location("hsdp_example", EXAMPLES / "hsdp" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weights: dict[str, torch.Tensor] = module.Model(layers=2).state_dict()
    for value in weights.values():
        value.fill_(torch.nan)
    dcp.load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)  # type: ignore[attr-defined]
    assert all(value.isfinite().all() for value in weights.values())
    return weights


UNEQUAL = """
import os, torch, torch.distributed as dist, ttp
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(2, 2)
ttp.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), save_dirs=[os.environ["SAVE_DIR"]])
"""


@pytest.mark.long
def test_replicas_that_differ_before_the_first_step_are_refused(tmp_path: Path) -> None:
    """Weights that every rank has drawn for itself: a checkpoint put together of them would be that of no rank."""
    script = tmp_path / "train.py"
    script.write_text(UNEQUAL)
    done = subprocess.run(
        [sys.executable, "-m", "ttp.launch", "--nproc-per-node", "2", str(script)],
        env={**os.environ, "SAVE_DIR": str(tmp_path / "save"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "has other bits on ranks [0] than on ranks [1]" in text, text


@pytest.mark.long
def test_the_trainer_of_transformers_survives_the_death_of_a_rank(tmp_path: Path) -> None:
    """Its callback is all that was added; gradients are accumulated over two passes, and the data goes on where it stood."""
    whole = train(tmp_path / "whole", 2, "huggingface/trainer.py", "--steps", "20")
    faulted = train(
        tmp_path / "faulted", 2, "huggingface/trainer.py", "--steps", "20", faults="kill:rank=0,step=15,point=updating"
    )
    compare(whole, faulted)
