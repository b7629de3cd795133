"""Jobs of the Megatron-style example, and what two of them have to have alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.chaos.conftest import JOB_S
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TRAINER = str(ROOT / "examples" / "megatron_style" / "pretrain_gpt.py")
SCRIPT = ROOT / "examples" / "megatron_style" / "ttprun_gpt.sh"
STEPS = 20
LINE = re.compile(
    r" iteration +(\d+)/ +\d+ \| consumed samples: +(\d+) \| learning rate: (\S+) \|"
    r" loss: \S+ \((\S+)\) \| grad norm: \S+ \((\S+)\) \| params norm: \S+ \((\S+)\)"
)

Lines = dict[int, tuple[str, ...]]


class Run:
    """One finished job of the example."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *arguments: str,
        faults: str = "",
        launcher: str = "ttp.launch",
        enable: bool = True,
        script: bool = False,
        trainer: str = TRAINER,
    ) -> None:
        """script: by the example's launch script, which says the rest by its variables."""
        if enable and not script:
            arguments = ("--use-distributed-optimizer", *arguments)
        self.save, self._mindio = folder / "save", folder / "mindio"
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TTP_FAULTS": faults,
            "TTP_MINDIO_DIR": str(self._mindio),
            "TTP_CONTROLLER_PORT": str(free_port()),
            "ENABLE_TTP": str(enable),
        }
        command = [sys.executable, "-m", launcher, "--nproc-per-node", str(ranks), trainer, "--save", str(self.save)]
        if script:
            command = ["bash", str(SCRIPT)]
            environ |= {"NPUS_PER_NODE": str(ranks), "CHECKPOINT_PATH": str(self.save), "MASTER_PORT": str(free_port())}
            environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [*command, "--train-iters", str(STEPS), *arguments],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=JOB_S,
            check=False,
        )
        self.text = done.stdout + done.stderr
        assert done.returncode == 0, self.text
        self.lines: Lines = {int(found[1]): found.groups()[1:] for found in LINE.finditer(self.text)}

    def events(self, start: int = 0) -> dict[str, dict[str, object]]:
        """Return the last line of each event in the journal of the job's N-th attempt."""
        (path,) = self._mindio.glob(f"ttp_log/journal_{start}.jsonl")
        answer = [json.loads(line) for line in path.read_text().splitlines()]
        return {line["event"]: line["fields"] for line in answer}

    def published(self, start: int = 0) -> int:
        """Return the step that the handlers published at the fault of the job's N-th attempt."""
        step = self.events(start)["published"]["step"]
        assert isinstance(step, int)
        return step

    def final_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of all model parts."""
        found: dict[str, torch.Tensor] = {}
        for path in sorted((self.save / f"iter_{STEPS:07d}").glob("mp_rank_*/model_optim_rng.pt")):
            for key, model in torch.load(path, weights_only=False).items():
                if key.startswith("model"):  # several where a stage has several chunks
                    found.update({f"{path.parent.name} {key} {name}": value for name, value in model.items()})
        return found


def odd_trainer(folder: Path) -> str:
    """Return a copy of the example with the patch for odd sizes in place of the one for even sizes."""
    copy = folder / "odd"
    shutil.copytree(Path(TRAINER).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    patch = (copy / "odd_sizes.patch").read_text()
    subprocess.run(["patch", "-p1"], cwd=copy, input=patch, text=True, check=True, capture_output=True)
    return str(copy / "pretrain_gpt.py")


def assert_same_training(faulted: Run, whole: Run, resumed_from: int) -> None:
    """Every line that both printed is the same, so are the last weights, and from the checkpoint on none is missing."""
    assert sorted(whole.lines) == list(range(1, STEPS + 1)), whole.text
    for step, line in faulted.lines.items():
        assert line == whole.lines[step], f"step {step}\n{faulted.text}"
    missing = sorted(set(whole.lines) - set(faulted.lines))
    assert missing in ([], [resumed_from]), (
        f"{missing}\n{faulted.text}"
    )  # rank 0 may have died before it printed that step
    weights = faulted.final_weights()
    assert all(torch.equal(weights[name], value) for name, value in whole.final_weights().items())
    assert f"successfully loaded checkpoint from {faulted.save} at iteration {resumed_from}" in faulted.text
