"""FSDP2 on a 2-D mesh, protected: `replicate` copies of a model that is split over `shard` ranks.

    ttprun --nproc-per-node 4 examples/hsdp/train.py --replicate 2

With `--replicate 1 --copies` every shard is on one rank, and copied into the memory of its node's agent and of the next node's. Else each shard is stored on as many ranks as there are replicas; which, ttp finds out from the DTensors. Lines that end with `# TTP` are
all that differs from the trainer without TTP.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ttp  # TTP

VOCABULARY, WIDTH, LENGTH = 61, 32, 16


class Block(torch.nn.Module):
    """Attention and a feed-forward net, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.feed_forward = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
            torch.nn.Dropout(0.1),
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        mask_TT = torch.nn.Transformer.generate_square_subsequent_mask(x_BTD.shape[1])
        y_BTD = self.norm(x_BTD)
        x_BTD = x_BTD + self.attention(y_BTD, y_BTD, y_BTD, attn_mask=mask_TT, need_weights=False)[0]
        return x_BTD + self.feed_forward(x_BTD)


class Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def batch_of(step: int, rank: int, size: int) -> torch.Tensor:
    """Return tokens_BT that count up by a stride of their own, as a function of (step, rank)."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    begin_B1 = torch.randint(VOCABULARY, (size, 1), generator=generator)
    stride_B1 = torch.randint(1, 4, (size, 1), generator=generator)
    return (begin_B1 + stride_B1 * torch.arange(LENGTH + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--replicate", type=int, default=2, help="ranks that hold the same shard; 1: plain FSDP")
    parser.add_argument(
        "--copies", action="store_true", help="copies in memory, for shards that are stored on one rank"
    )
    parser.add_argument("--save-dir", default="output/hsdp")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % args.replicate:
        raise SystemExit(f"--replicate {args.replicate} does not divide the world of {world_size} ranks")
    mesh = init_device_mesh(
        "cpu", (args.replicate, world_size // args.replicate), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    model = Model(args.layers)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=args.steps + 1)
    guard = ttp.protect(  # TTP
        model,
        optimizer,
        schedulers=[scheduler],
        clip=ttp.ClipNorm(1.0),
        save_dirs=[args.save_dir],
        copies="memory" if args.copies else None,
    )

    @ttp.ttp_to_persist  # TTP
    def train() -> None:
        for step in range(guard.step + 1, args.steps + 1):  # TTP: in place of range(1, args.steps + 1)
            tokens_BT = batch_of(step, rank, 8)
            logits_BTV = model(tokens_BT[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step}: loss {loss.item().hex()} norm {guard.grad_norm.hex()}", flush=True)
        guard.save()  # TTP: the last step is on disk before anybody leaves

    train()
    guard.close()  # TTP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
