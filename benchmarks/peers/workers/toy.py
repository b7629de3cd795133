"""The trainer that every system runs: a small net, batches that are a function of the step, and a record of each finished step.

Owns nothing of any system. A process appends to a file of its own, `steps_PID.jsonl` in the folder that PEERS_FOLDER names; a line is written
by one `write`, so that SIGKILL leaves whole lines.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ["PEERS_FOLDER"])
SAVE_EVERY = int(os.environ["PEERS_SAVE_EVERY"])
LAST_STEP = int(os.environ["PEERS_LAST_STEP"])
WIDTH, BATCH = 256, 16

torch.set_num_threads(1)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(64 * step + rank)
    x_BF = torch.randn(BATCH, WIDTH, generator=generator)
    return torch.nn.functional.mse_loss(model(x_BF), x_BF.sum(1, keepdim=True).sin())


def train_step(model: torch.nn.Module, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


class Record:
    """Where a process reports its finished steps."""

    def __init__(self) -> None:
        path = FOLDER / f"steps_{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def finished(self, step: int, rank: int, ranks: int, attempt: object) -> None:
        """Report a step in which `ranks` ranks took part; `attempt` is the same on all of them, and another after each restart."""
        line = {"step": step, "rank": rank, "ranks": ranks, "attempt": str(attempt), "pid": os.getpid()}
        os.write(self._file, (json.dumps({**line, "unix_s": time.time()}) + "\n").encode())
