"""A loop of Lightning Fabric, with its own model, optimizer and loader, killed twice. In an environment of its own: the library is not a test dependency,
because it takes a web client along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.test_other_trainers import compare, steps_of, train

PACKAGES = ("lightning-fabric==2.6.6", "lightning-utilities==0.15.3")

SCRIPT = """
import argparse
import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
import ttp

parser = argparse.ArgumentParser()
parser.add_argument("--save-dir")
args = parser.parse_args()
torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
samples = TensorDataset(x, (x.norm(dim=1) > 2.7).long())
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=8, shuffle=True))
guard = ttp.protect(model, optimizer.optimizer, save_dirs=[args.save_dir])

@ttp.ttp_to_persist
def train():
    for _ in guard.epochs(3):
        for inputs, targets in guard.batches(loader):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if fabric.global_rank == 0:
                print(f"step {guard.step}: loss {loss.item().hex()}", flush=True)
    guard.save()

train()
if fabric.global_rank == 0:
    print(f"final weights: {sum(p.double().norm() for p in model.parameters()).item().hex()}", flush=True)
guard.close()
"""


@pytest.mark.long
def test_a_loop_of_fabric_killed_twice_has_the_bits_of_the_baseline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader counts the epochs of its process, and shuffles by that count: the second fault comes in the second epoch."""
    library = tmp_path / "library"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(library), *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PYTHONPATH", str(library))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    whole = train(tmp_path / "whole", 2, str(script))
    assert len(steps_of(whole)) == 24
    faults = "kill:rank=1,step=5,point=backward;kill:rank=0,step=13,point=updating,round=1"
    compare(whole, train(tmp_path / "faulted", 2, str(script), faults=faults))
