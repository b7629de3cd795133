"""Megatron-Core's distributed optimizer, unmodified, on CPUs. In an environment of its own: the library is not a test dependency."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, install_library, run_script
from tests.chaos.test_commands import ROOT
from tests.chaos.test_other_trainers import EXAMPLES, compare, marked, steps_of, without_ttp

PACKAGES = ("megatron-core==0.16.1", "einops==0.8.2")
EXAMPLE = EXAMPLES / "megatron_core" / "train.py"

REFUSED = """
import copy, os, sys
from types import SimpleNamespace
sys.path.insert(0, {examples!r})
import on_cpu, train, torch, ttp
import torch.distributed as dist
from megatron.core import parallel_state
on_cpu.begin()
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()

def made(distributed=True):
    config = train.TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16)
    ddp = train.DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = train.DistributedDataParallel(config, ddp, train.Float16Module(config, train.Net(config)))
    settings = train.OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed)
    return model, train.get_megatron_optimizer(settings, [model])

def refused(change=lambda model, optimizer: None, distributed=True, **options):
    model, optimizer = made(distributed)
    model, optimizer = change(model, optimizer) or (model, optimizer)
    try:
        ttp.protect(model, optimizer, save_dirs=["{folder}/save"], **options)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

def one_of_two_ranks(model, optimizer):
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    inner.data_parallel_group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)

def two_chunks(model, optimizer):
    getattr(optimizer, "chained_optimizers", [optimizer])[0].model_chunks *= 2

def without_main_weights(model, optimizer):
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    inner.shard_fp32_from_float16_groups[0][0] = None

def chained(model, optimizer):
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    return model, SimpleNamespace(chained_optimizers=[inner, inner])

refused(averages={{"ema": SimpleNamespace()}})
refused(distributed=False)
refused(one_of_two_ranks)
refused(two_chunks)
refused(without_main_weights)
refused(chained)
refused(lambda model, optimizer: (made()[0], optimizer))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_library(tmp_path_factory.mktemp("library"), PACKAGES)


@pytest.fixture(autouse=True)
def with_library(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{library}:{ROOT}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")


def run(script: Path, ranks: int, *arguments: str, faults: str = "", launcher: str = "ttp.launch") -> str:
    text = run_script(ranks, str(script), "--steps", "20", *arguments, faults=faults, launcher=launcher)
    assert len(re.findall(r"restarting \(", text)) == (len(faults.split(";")) if faults else 0)
    return text


@pytest.mark.long
def test_a_distributed_optimizer_killed_twice_has_the_bits_of_the_trainer_without_ttp(tmp_path: Path) -> None:
    """Each rank's shard has no replica: copies in memory lose the step in flight, which is trained again. An import and five lines were added."""
    assert len(marked(EXAMPLE.read_text())) == 6
    plain = tmp_path / "train.py"
    plain.write_text(without_ttp(EXAMPLE.read_text()))
    shutil.copy(EXAMPLE.with_name("on_cpu.py"), tmp_path)
    whole = run(plain, 2, launcher="torch.distributed.run")
    assert len(steps_of(whole)) == 20
    faults = "kill:rank=1,step=7,point=updating;kill:rank=0,step=14,point=record,round=1"
    faulted = run(EXAMPLE, 2, "--save-dir", str(tmp_path / "save"), faults=faults)
    compare(whole, faulted)
    assert re.findall(r"saved step (\d+) from copies in the memory", faulted) == ["6", "13"]
    other_size = run(EXAMPLE, 3, "--save-dir", str(tmp_path / "save"))
    assert "at step 20 (requested)" in other_size and not steps_of(other_size)
    assert re.findall("final .*", other_size) == re.findall("final .*", whole)


@pytest.mark.long
def test_shards_that_two_instances_of_the_optimizer_have_lose_no_step(tmp_path: Path) -> None:
    """The survivor writes its replica, and finishes the step in flight by the inner optimizer's own update."""
    whole = run(EXAMPLE, 4, "--instances", "2", "--save-dir", str(tmp_path / "whole"))
    assert "any 1 of 4 ranks; 4 of 6 pairs" in whole
    faults = "kill:rank=1,step=7,point=updating;kill:rank=2,step=14,point=record,round=1"
    faulted = run(EXAMPLE, 4, "--instances", "2", "--save-dir", str(tmp_path / "faulted"), faults=faults)
    compare(whole, faulted)
    assert re.findall(r"saved +step (\d+) in .*; no step lost", faulted) == ["7", "14"]


@pytest.mark.long
def test_what_megatron_core_does_that_cannot_be_protected_is_refused_at_the_start(tmp_path: Path) -> None:
    """One line each, with the nearest way that works."""
    script = tmp_path / "refused.py"
    script.write_text(REFUSED.format(examples=str(EXAMPLE.parent), folder=tmp_path))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    found = re.findall(r"^ConfigError (.*?), expected ", done.stdout, re.MULTILINE)
    name = "Megatron-Core's distributed optimizer"
    assert found == [
        f"averages: got some with {name}",
        "the optimizer: got Float16OptimizerWithFloat16Params of Megatron-Core",
        f"{name}: got 2 data-parallel ranks of 1",
        f"{name}: got 2 model chunks",
        f"{name}: got use_precision_aware_optimizer=True",
        "the optimizer: got DistributedOptimizer, DistributedOptimizer of Megatron-Core",
        f"the model: got another one than {name} updates",
    ], done.stdout + done.stderr
