"""What the fork server imports is what the workers of every job need: next to nothing remains for each of them to import for itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ttp.fork_server import preload
from ttp.fork_server.preload import for_workers
from ttp.fork_server.servers import ForkServers

FIRST_STEP = """
import importlib, json, os, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
preloaded = set(sys.modules)
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(json.dumps(sorted(set(sys.modules) - preloaded)), flush=True)
os._exit(0)  # torch may abort where Python ends soon after a collective (docs/limits.md)
"""


def left_to_import(*preloaded: str) -> list[str]:
    """Return the modules of torch that a worker's first step imports beside these."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, *preloaded], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [name for name in json.loads(done.stdout) if name.partition(".")[0] == "torch"]


def test_the_first_step_of_a_ddp_trainer_imports_next_to_nothing() -> None:
    assert len(left_to_import(*for_workers())) <= 5
    assert len(left_to_import(*preload.WORKERS)) > 100, "without it each rank imports for a second"


@pytest.mark.parametrize("accelerator", [False, True])
def test_on_a_node_with_an_accelerator_what_may_touch_it_is_left_out(
    accelerator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "device"
    monkeypatch.setattr(preload, "ACCELERATORS", (str(device),))
    if accelerator:
        device.touch()
    assert (set(for_workers()) == set(preload.WORKERS)) is accelerator
    servers = ForkServers()
    try:
        assert tuple(servers.workers._modules) == for_workers()
    finally:
        servers.close()


@pytest.mark.parametrize(
    ("name", "read"), [("TORCH_COMPILE_DISABLE", True), ("TORCHDYNAMO_VERBOSE", True), ("TORCH_HOME", False)]
)
def test_variables_of_what_is_preloaded_are_known(name: str, read: bool) -> None:
    """A script that sets one is warned; workers that differ in one need another server."""
    assert preload.is_read_at_import(name) is read
