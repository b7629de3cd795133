"""The smallest trainer that is protected: everything TTP needs is marked with `# TTP`.

    ttprun --nproc-per-node 4 examples/own_trainer/train.py --steps 200 --save-dir /tmp/own_trainer
    python examples/own_trainer/train.py     alone, as one rank

One rank alone has no copy of its state: only checkpoints survive its death.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import ttp

BATCH = 16


def batch_of(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x_BF, y_B1): inputs and targets as a function of (step, rank), so that a restart sees the same."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    x_BF = torch.randn(BATCH, 32, generator=generator)
    return x_BF, x_BF.sum(1, keepdim=True).sin()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-dir", default="output/own_trainer")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    optimizer_class = ttp.TTPOddReplicaOptimizer if world_size % 2 else ttp.TTPReplicaOptimizer  # TTP
    optimizer = optimizer_class(model.named_parameters(), torch.optim.AdamW, lr=1e-3, clip=ttp.ClipNorm(1.0))  # TTP
    session = ttp.start(optimizer, save_dirs=[args.save_dir])  # TTP
    point = session.resume()  # TTP
    if rank == 0:
        print("starting" if point is None else f"resumed at step {point.step}", flush=True)

    @ttp.ttp_to_persist  # TTP
    def train() -> None:
        for step in range(optimizer.current_step + 1, args.steps + 1):
            optimizer.zero_grad()
            x_BF, y_B1 = batch_of(step, rank, world_size)
            loss = torch.nn.functional.mse_loss(model(x_BF), y_B1)
            loss.backward()  # type: ignore[no-untyped-call]
            session.set_step_state(step, {"samples": step * BATCH * world_size})  # TTP
            result = optimizer.step(sums=[loss.item()])  # TTP: the loss rides along
            if rank == 0 and step % 20 == 0:
                print(f"step {step}: loss {result.sums[0] / world_size:.6f}", flush=True)
        session.save()  # TTP: the last step is on disk before anybody leaves

    train()
    session.close()  # TTP
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
