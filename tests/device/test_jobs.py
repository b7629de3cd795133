"""Jobs of ttprun on the device: kills at every point of a step, under a device as hostile as it can be. The bits are those without a fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import SMALL
from tests.device.autoload import autoloading
from tests.device.build import extension

HOSTILE = {
    "delay_us": 300,
    "poison": 1,
    "late_release": 1,
    "alloc_syncs": 1,
    "lazy_load": 1,
    "remote_hangs": 1,
    "garbage": 2,
}
JOB_S = 280.0


def train(folder: Path, fault: str = "", *overrides: str, ranks: int = 2, **traits: int) -> str:
    """Run the trainer on the device to its end; return what the job reported."""
    extension()
    folder.mkdir()
    environ = autoloading(folder / "plugin", os.environ, **traits) | {"OMP_NUM_THREADS": "1"}
    if fault:
        environ["TTP_FAULTS"] = fault
    command = [
        sys.executable, "-m", "ttp.launch", "--nproc-per-node", str(ranks), "-m", "ttp.trainer", *SMALL,
        "--training_config.training_iters=8", "--training_config.device=plugin", f"--training_config.output_dir={folder / 'out'}",
        *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=JOB_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def weights(text: str) -> str:
    """Return the hash of the last step's weights."""
    found = re.search(r"done: 8 steps, weights (\w+)", text)
    assert found is not None, text
    return found.group(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a job without a fault, on the mildest device."""
    return weights(train(tmp_path_factory.mktemp("whole") / "job"))


def test_job_on_a_hostile_device_survives_a_kill(tmp_path: Path, whole: str) -> None:
    """The survivor, whose update may still be under way, saves it; nothing is lost."""
    text = train(tmp_path / "job", "kill:rank=1,step=5,point=updating", **HOSTILE)
    assert "data parallel on sim" in text and re.search(r"saved +step 5", text) and "0 steps" in text, text
    assert weights(text) == whole


@pytest.mark.long
@pytest.mark.parametrize("point", ["backward", "ready", "record", "done", "gathering"])
@pytest.mark.parametrize("rank", [0, 1])
def test_kill_at_every_point_of_a_step(point: str, rank: int, tmp_path: Path, whole: str) -> None:
    """Of either rank: the step of the record, or the one before."""
    text = train(tmp_path / "job", f"kill:rank={rank},step=5,point={point}", **HOSTILE)
    saved = 4 if point in ("backward", "ready") else 5
    assert re.search(rf"saved +step {saved}", text), text
    assert weights(text) == whole


@pytest.mark.long
@pytest.mark.parametrize("axes", [("--model_config.params_dtype=bfloat16",), ("--dataset_config.micro_batch_num=2",
    "--training_config.gradient_accumulation_shard=True")])  # fmt: skip
def test_kill_with_other_memory(axes: tuple[str, ...], tmp_path: Path) -> None:
    """Masters apart from the parameters; gradients that are given back while they travel. Four ranks."""
    before = train(tmp_path / "whole", "", *axes, ranks=4)
    text = train(tmp_path / "job", "kill:rank=3,step=5,point=record", *axes, ranks=4, **HOSTILE)
    assert re.search(r"saved +step 5", text), text
    assert weights(text) == weights(before)


@pytest.mark.long
def test_hung_rank_is_saved_by_the_other(tmp_path: Path, whole: str) -> None:
    """A training thread that stands still in its update, beside kernels that wait for it."""
    text = train(tmp_path / "job", "hang:rank=1,step=5,point=record", **HOSTILE)
    assert re.search(r"saved +step 5", text), text
    assert weights(text) == whole
