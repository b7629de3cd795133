"""Scripts that people start by `accelerate launch`, started by ttprun with accelerate's own variables, as docs/accelerate.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S
from tests.chaos.test_commands import ROOT
from tests.chaos.test_other_trainers import EXAMPLES, compare, steps_of, train

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_machines: 3
machine_rank: 2
main_process_ip: nowhere.invalid
main_process_port: 29500
num_processes: 6
use_cpu: true
{more}"""
FSDP = """\
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block, Head *
"""


def documented() -> tuple[str, str]:
    """Return the lines that the document shows: those before the last, and the last."""
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "accelerate.md").read_text(), re.DOTALL)
    *first, last = block.splitlines()
    assert last == "ttprun --nproc-per-node 2 train.py"
    return "\n".join(first), last


def shell(lines: list[str], folder: Path, faults: str = "", status: int = 0) -> str:
    """Run these lines where `config.yaml` is, with accelerate and ttprun of this Python; return what they print."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TTP_FAULTS": faults}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def variables(folder: Path, kind: str, more: str = "") -> set[str]:
    (folder / "config.yaml").write_text(CONFIG.format(kind=kind, more=more))
    printed = shell([documented()[0], "env"], folder)
    return {line for line in printed.splitlines() if line.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.mark.long
def test_accelerate_prints_the_variables_of_its_file(tmp_path: Path) -> None:
    """Of a file for three machines, without waiting for them; for one process, for several, and for FSDP."""
    assert {"ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_USE_CPU=True"} <= variables(tmp_path, "'NO'")
    assert "ACCELERATE_MIXED_PRECISION=bf16" in variables(tmp_path, "MULTI_GPU")
    assert {
        "ACCELERATE_MIXED_PRECISION=bf16",
        "ACCELERATE_USE_FSDP=true",
        "FSDP_VERSION=2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP=Block, Head *",
    } <= variables(tmp_path, "FSDP", FSDP)


@pytest.mark.long
def test_without_accelerates_file_nothing_is_started_and_no_variable_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUD_KEY", "a secret")
    printed = shell([documented()[0], "echo started"], tmp_path, status=1)
    assert "started" not in printed and "a secret" not in printed and "config.yaml" in printed


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "arguments", "faults"),
    [
        (
            "your_trainer/accelerate_loop.py",
            ("--epochs", "3"),
            "kill:rank=1,step=3,point=updating;kill:rank=0,step=19,point=backward,round=1",
        ),
        (
            "huggingface/trainer.py",
            ("--steps", "24"),
            "kill:rank=0,step=7,point=updating;kill:rank=1,step=15,point=record,round=1",
        ),
    ],
)
def test_a_script_of_accelerate_killed_twice_has_the_baseline_run_s_bits(
    tmp_path: Path, example: str, arguments: tuple[str, ...], faults: str
) -> None:
    """In the precision that accelerate's file says, which is not the script's own."""
    (tmp_path / "config.yaml").write_text(CONFIG.format(kind="'NO'", more=""))
    first, second = documented()

    def lines(name: str) -> list[str]:
        script = " ".join([str(EXAMPLES / example), *arguments, "--save-dir", str(tmp_path / name)])
        return [first, second.replace("train.py", script)]

    whole = shell(lines("whole"), tmp_path)
    faulted = shell(lines("faulted"), tmp_path, faults)
    assert len(re.findall(r"restarting \(", faulted)) == 2
    compare(whole, faulted)
    assert steps_of(whole) != steps_of(train(tmp_path / "plain", 2, example, *arguments))
