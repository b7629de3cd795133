"""A loop of accelerate, with its own shuffling, its scheduler and accumulated gradients.

    ttprun --nproc-per-node 2 examples/your_trainer/accelerate_loop.py

Lines with `# TTP` are all that differs from the script without TTP. docs/your_trainer.md shows it.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ttp  # TTP

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save-dir", default="output/accelerate")
args = parser.parse_args()
torch.set_num_threads(1)
set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
samples = TensorDataset(x, (x.norm(dim=1) > 2.7).long())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(samples, batch_size=8, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader) // 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
guard = ttp.protect(model, optimizer.optimizer, schedulers=[scheduler], save_dirs=[args.save_dir])  # TTP


@ttp.ttp_to_persist  # TTP
def train() -> None:
    for _ in guard.epochs(args.epochs):  # TTP: in place of range(args.epochs)
        for inputs, targets in guard.batches(loader):  # TTP: in place of loader
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.is_main_process:
                rate = scheduler.get_last_lr()[0]
                print(f"step {guard.step}: loss {loss.item().hex()} next rate {rate.hex()}", flush=True)
    guard.save()  # TTP: the last step is on disk before any rank exits


train()
if accelerator.is_main_process:
    print(f"final weights: {sum(p.double().norm() for p in model.parameters()).item().hex()}", flush=True)
guard.close()  # TTP
accelerator.end_training()
