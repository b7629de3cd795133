"""A DDP loop with a sampler and a schedule.

    ttprun --nproc-per-node 2 examples/your_trainer/ddp_sampler.py

Lines with `# TTP` are all that differs from the script without TTP. docs/your_trainer.md shows it.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttp  # TTP

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save-dir", default="output/ddp_sampler")
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
samples = TensorDataset(x, (x.norm(dim=1) > 2.7).long())
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(samples, shuffle=True)
loader = DataLoader(samples, batch_size=16, sampler=sampler)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=args.epochs * len(loader))
guard = ttp.protect(model, optimizer, schedulers=[scheduler], save_dirs=[args.save_dir])  # TTP


@ttp.ttp_to_persist  # TTP
def train() -> None:
    for epoch in guard.epochs(args.epochs):  # TTP: in place of range(args.epochs)
        sampler.set_epoch(epoch)
        for inputs, targets in guard.batches(loader):  # TTP: in place of loader
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if dist.get_rank() == 0:
                rate = scheduler.get_last_lr()[0]
                print(f"step {guard.step}: loss {loss.item().hex()} next rate {rate.hex()}", flush=True)
    guard.save()  # TTP: the last step is on disk before any rank exits


train()
if dist.get_rank() == 0:
    print(f"final weights: {sum(p.double().norm() for p in model.parameters()).item().hex()}", flush=True)
guard.close()  # TTP
dist.destroy_process_group()
