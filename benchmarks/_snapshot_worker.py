"""One rank of `benchmarks.snapshot`'s jobs: trains a stack of layers, and prints what steps or saves took as JSON on rank 0.

steps FOLDER EVERY STEPS     steps with a copy behind every EVERY-th (0: none)
saves FOLDER TURNS           by turns: memcpy of the state, a save that is not waited for, DCP's async_save; then steps while a save is written, and alone
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import ttp

WIDTH = int(os.environ.get("SNAPSHOT_WIDTH", "1024"))
LAYERS = 8
BATCH = int(os.environ.get("SNAPSHOT_BATCH", "256"))
WARM_UP = 4
BESIDE = 20
"""Steps that are timed while one save is written, at most; then as many without one."""


class Trainer:
    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.guard = ttp.protect(self.model, self.optimizer, save_dirs=[str(folder)], compare_every=0, **options)
        self._data = torch.randn(BATCH, WIDTH)

    def step(self) -> float:
        begun = time.perf_counter()
        self.model(self._data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun

    def held(self) -> list[torch.Tensor]:
        """Return all that a copy of this rank's state copies."""
        groups = self.guard.session.optimizer.holdings()
        return [held.values for group in groups.values() for held in group]


def say(**found: Any) -> None:
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)


def writing(session: Any) -> bool:
    """Say on all ranks whether rank 0's save, which is published when all shares are written, has not ended."""
    under_way = torch.tensor([float(session._saves.under_way)])
    dist.broadcast(under_way, 0)
    return bool(under_way)


def steps(folder: Path, every: int, count: int) -> None:
    options = {"copies": "memory", "copy_every": every} if every else {}
    trainer = Trainer(folder, **options)
    for _ in range(WARM_UP):
        trainer.step()
    took = [trainer.step() for _ in range(count)]
    nbytes = sum(values.numel() * values.element_size() for values in trainer.held())
    say(steps_s=took, nbytes=nbytes)
    trainer.guard.close()


def saves(folder: Path, turns: int) -> None:
    trainer = Trainer(folder, save_wait=False)
    for _ in range(WARM_UP):
        trainer.step()
    held = trainer.held()
    room = [torch.empty_like(values) for values in held]
    found: dict[str, list[float]] = {"memcpy": [], "save(wait=False)": [], "async_save": []}
    session = trainer.guard.session
    gloo = dist.new_group(backend="gloo")
    for turn in range(turns + 1):  # the first one is warm-up for all
        trainer.step()
        dist.barrier()
        begun = time.perf_counter()
        for into, values in zip(room, held, strict=True):
            into.copy_(values)
        copied = time.perf_counter()
        session.save(wait=False)
        saved = time.perf_counter()
        session._saves.finish()
        dist.barrier()
        state = dict(zip(("model", "optimizer"), get_state_dict(trainer.model, trainer.optimizer), strict=True))
        began_async = time.perf_counter()
        waits = dcp.async_save(state, checkpoint_id=folder / f"dcp_{turn}", process_group=gloo)
        ended_async = time.perf_counter()
        waits.result()  # type: ignore[union-attr]
        dist.barrier()
        if turn:
            found["memcpy"].append(copied - begun)
            found["save(wait=False)"].append(saved - copied)
            found["async_save"].append(ended_async - began_async)
    alone: list[float] = []
    beside: list[float] = []
    written: list[float] = []
    for _ in range(turns):
        begun, steps = time.perf_counter(), 0
        session.save(wait=False)
        while steps < BESIDE and writing(session):
            beside.append(trainer.step())
            steps += 1
        session._saves.finish()
        dist.barrier()
        written.append(time.perf_counter() - begun)
        for _ in range(steps):
            dist.broadcast(torch.zeros(1), 0)  # as beside a save, where it says whether that is still written
            alone.append(trainer.step())
    nbytes = sum(v.numel() * v.element_size() for v in held)
    say(stalls=found, alone_s=alone, beside_s=beside, written_s=written, nbytes=nbytes)
    trainer.guard.save()
    trainer.guard.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, place, *numbers = sys.argv[1:]
    {"steps": steps, "saves": saves}[what](Path(place), *map(int, numbers))
    dist.destroy_process_group()
