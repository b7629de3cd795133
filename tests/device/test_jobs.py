"""Jobs of ttprun on the device: kills at every point of a step, under a device as hostile as it can be. The bits are those without a fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.chaos.conftest import SMALL
from tests.device.autoload import REGISTER, autoloading
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
NOTHING: Mapping[str, str] = MappingProxyType({})


def train(
    folder: Path,
    fault: str = "",
    *overrides: str,
    ranks: int = 2,
    environ: Any = NOTHING,
    entry: Any = REGISTER,
    **traits: int,
) -> str:
    """Run the trainer on the device to its end; return what the job reported."""
    extension()
    folder.mkdir()
    environ = autoloading(folder / "plugin", os.environ, entry, **traits) | {"OMP_NUM_THREADS": "1"} | dict(environ)
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
    """The survivor saves the step of the record if it has that, the one before if only the dead rank had it; nothing is lost."""
    text = train(tmp_path / "job", "kill:rank=1,step=5,point=updating", **HOSTILE)
    assert "data parallel on sim" in text and re.search(r"saved +step [45]\b", text) and "0 steps" in text, text
    assert weights(text) == whole


@pytest.mark.long
@pytest.mark.parametrize("point", ["backward", "ready", "record", "done", "gathering"])
@pytest.mark.parametrize("rank", [0, 1])
def test_kill_at_every_point_of_a_step(point: str, rank: int, tmp_path: Path, whole: str) -> None:
    """Of either rank: the step of the record, or the one before."""
    text = train(tmp_path / "job", f"kill:rank={rank},step=5,point={point}", **HOSTILE)
    assert re.search(rf"saved +step {'4' if point in ('backward', 'ready') else '[45]'}\b", text), text
    assert weights(text) == whole


@pytest.mark.long
@pytest.mark.parametrize("axes", [("--model_config.params_dtype=bfloat16", "--model_config.compute_dtype=bfloat16"), ("--dataset_config.micro_batch_num=2",
    "--training_config.gradient_accumulation_shard=True")])  # fmt: skip
def test_kill_with_other_memory(axes: tuple[str, ...], tmp_path: Path) -> None:
    """Masters apart from the parameters; gradients that are given back while they travel. Four ranks."""
    before = train(tmp_path / "whole", "", *axes, ranks=4)
    text = train(tmp_path / "job", "kill:rank=3,step=5,point=record", *axes, ranks=4, **HOSTILE)
    assert re.search(r"saved +step [45]\b", text), text
    assert weights(text) == weights(before)


DDP = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ttp
place = int(os.environ["LOCAL_RANK"])
torch.sim.set_device(place)
device = torch.device("sim", place)
dist.init_process_group("cpu:gloo,sim:simccl", device_id=device)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
model = DistributedDataParallel(net, device_ids=[place], find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
guard = ttp.protect(model, optimizer, clip=ttp.ClipNorm(0.5) if sys.argv[2] == "norm" else None, save_dirs=[sys.argv[1]])
while guard.step < 8:
    generator = torch.Generator().manual_seed(guard.step * 10 + dist.get_rank())
    x = torch.randn(16, 32, generator=generator).to(device)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True).sin()).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print("weights", float(sum(p.detach().double().cpu().sum() for p in net.parameters())).hex(), flush=True)
guard.close()
"""


def protect(folder: Path, mode: str, fault: str = "", **traits: int) -> str:
    """Train DDP on the device under `ttp.protect` to its end; return what the job reported."""
    extension()
    folder.mkdir()
    (folder / "ddp.py").write_text(DDP)
    environ = autoloading(folder / "plugin", os.environ, **traits) | {"OMP_NUM_THREADS": "1"}
    if fault:
        environ["TTP_FAULTS"] = fault
    command = [
        sys.executable,
        "-m",
        "ttp.launch",
        "--nproc-per-node",
        "2",
        str(folder / "ddp.py"),
        str(folder / "saved"),
        mode,
    ]
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=JOB_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("mode", ["barrier", "norm"])
@pytest.mark.parametrize("point", ["backward", "ready", "record", "updating", "done"])
def test_ddp_survives_a_kill_at_every_point_of_a_step(mode: str, point: str, tmp_path: Path) -> None:
    """Under `ttp.protect`; the bits are those without a fault."""
    whole = protect(tmp_path / "whole", mode)
    text = protect(tmp_path / "job", mode, f"kill:rank=1,step=5,point={point}", **HOSTILE)
    assert re.search(rf"saved +step {'4' if point in ('backward', 'ready') else '[45]'}\b", text), text
    assert re.findall(r"weights (\S+)", text) == re.findall(r"weights (\S+)", whole), text
