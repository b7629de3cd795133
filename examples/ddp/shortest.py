"""The shortest form: a plain DDP trainer that survives the death of a rank by an import and three lines, marked `# TTP`.

    ttprun --nproc-per-node 2 examples/ddp/shortest.py

Without those lines it is the same trainer, to the last bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ttp  # TTP


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x_BF, y_B1): this rank's inputs and targets as a function of the step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x_BF = torch.randn(16, 32, generator=generator)
    return x_BF, x_BF.sum(1, keepdim=True).sin()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-dir", type=Path, default=Path("output/shortest"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = ttp.protect(model, optimizer, save_dirs=[args.save_dir])  # TTP
    for step in range(guard.step + 1, args.steps + 1):  # TTP: in place of range(1, args.steps + 1)
        x_BF, y_B1 = batch_of(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x_BF), y_B1)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item().hex()}", flush=True)
    if dist.get_rank() == 0:
        args.save_dir.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), args.save_dir / "model.pt")
    guard.close()  # TTP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
