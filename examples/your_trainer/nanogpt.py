"""A script in nanoGPT's manner: random batches of a text, the next one drawn ahead; its learning rate is a function of the step.

    ttprun --nproc-per-node 2 examples/your_trainer/nanogpt.py

Lines with `# TTP` are all that differs from the script without TTP. docs/your_trainer.md shows it.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ttp  # TTP

CONTEXT, BATCH, MICRO_STEPS, EVAL_INTERVAL = 32, 4, 2, 10
TEXT = torch.frombuffer(bytearray("".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8).long()


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH,))
    return tuple(torch.stack([TEXT[i + k : i + k + CONTEXT] for i in starts]) for k in (0, 1))


def learning_rate(step: int, steps: int) -> float:
    return 3e-3 * min(step / 5, 0.5 + 0.5 * math.cos(math.pi * step / (steps + 1)))


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(256, 32), torch.nn.Embedding(CONTEXT, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = torch.nn.Linear(32, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.tokens(x) + self.places(torch.arange(CONTEXT))
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-dir", default="output/nanogpt")
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1337 + dist.get_rank())
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
guard = ttp.protect(model, optimizer, save_dirs=[args.save_dir])  # TTP: before the first batch is drawn
x, y = get_batch()
for step in range(guard.step + 1, args.steps + 1):  # TTP: in place of range(1, args.steps + 1)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args.steps)
    for micro_step in range(MICRO_STEPS):
        model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten()) / MICRO_STEPS
        x, y = get_batch()  # the next one, ahead of the backward pass
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item().hex()} lr {optimizer.param_groups[0]['lr']}", flush=True)
    if step % EVAL_INTERVAL == 0:
        with guard.pause(), torch.no_grad():  # TTP: not a hang, and its random numbers are its own
            losses = [cross_entropy(model.module(x).flatten(0, 1), y.flatten()) for x, y in (get_batch(), get_batch())]
        if dist.get_rank() == 0:
            print(f"after step {step}: validation {sum(losses).item().hex()}", flush=True)
guard.save()  # TTP
if dist.get_rank() == 0:
    print(f"final weights: {sum(p.double().norm() for p in model.parameters()).item().hex()}", flush=True)
guard.close()  # TTP
dist.destroy_process_group()
