"""A plain DDP trainer, protected: every rank is a replica of the whole state.

    ttprun --nproc-per-node 2 examples/ddp/train.py --optimizer SGD

Lines that end with `# TTP` are all that differs from the trainer without TTP. It has what ordinary trainers have and what is
easily lost at a fault: dropout, batch norm, a shuffling sampler, a schedule, and any optimizer of torch.optim.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttp  # TTP

SETTINGS = {"SGD": {"momentum": 0.9}}
"""Arguments of optimizers that need more than a learning rate."""


def data_set(samples: int = 512) -> TensorDataset:
    """Return (x_NF, y_N): points, and in which of three shells around the origin each lies."""
    x_NF = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    radius_N = x_NF.norm(dim=1)
    return TensorDataset(x_NF, (radius_N > 2.4).long() + (radius_N > 3.0).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--optimizer", default="AdamW", help="any of torch.optim but LBFGS and SparseAdam")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=0.0, help="global gradient norm; 0: no clipping")
    parser.add_argument("--ema", type=float, default=0.0, help="decay of an average of the weights; 0: none")
    parser.add_argument("--save-dir", default="output/ddp")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 3),
    )
    model = DistributedDataParallel(net, find_unused_parameters=True)  # TTP: or the last bit may differ
    base = getattr(torch.optim, args.optimizer)
    optimizer = base(model.parameters(), lr=args.lr, **SETTINGS.get(args.optimizer, {}))
    samples = data_set()
    sampler = DistributedSampler(samples, shuffle=True, seed=3)
    loader = DataLoader(samples, batch_size=args.batch_size, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    clip = ttp.ClipNorm(args.clip) if args.clip else None  # TTP
    averages = {"ema": AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(args.ema))} if args.ema else {}
    guard = ttp.protect(  # TTP: and optimizer.step() updates the average
        model, optimizer, schedulers=[scheduler], averages=averages, clip=clip, save_dirs=[args.save_dir]
    )

    @ttp.ttp_to_persist  # TTP
    def train() -> None:
        for epoch in guard.epochs(args.epochs):  # TTP: in place of range(args.epochs)
            sampler.set_epoch(epoch)
            for x_BF, y_B in guard.batches(loader):  # TTP: in place of loader
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x_BF), y_B)
                loss.backward()
                optimizer.step()
                scheduler.step()
                if dist.get_rank() == 0:
                    rate = scheduler.get_last_lr()[0]
                    print(f"step {guard.step}: loss {loss.item().hex()} next rate {rate.hex()}", flush=True)
        guard.save()  # TTP: the last step is on disk before anybody leaves

    train()
    if dist.get_rank() == 0:
        final = [net, *averages.values()]
        weights = torch.cat([value.double().view(-1) for each in final for value in each.state_dict().values()])
        print(f"final weights: {weights.norm().item().hex()} after {guard.step} steps", flush=True)
    guard.close()  # TTP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
