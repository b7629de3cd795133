"""One rank of benchmarks.step_time: the same model, trained in turn by each contender, in the same processes.

Owns the contenders and the clock. Every contender starts from the same weights, sees the same tokens, clips the same norm and
steps AdamW with torch's fused kernel; what a rank prints is one JSON line, rank 0's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ttp
from ttp.trainer.config.schema import ModelConfig
from ttp.trainer.model.gpt import GPT

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
ON, OFF = "TTP", "TTP off"
IDLE_S = 4.0
"""For how long the training threads do nothing, so that what runs beside them can be seen."""

Step = Callable[[torch.Tensor, torch.Tensor], float]
"""(tokens_BT, targets_BT) -> this rank's loss."""


def build_model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(7)
    heads = options.width // 64
    config = ModelConfig(
        num_layers=options.layers, hidden_size=options.width, num_attention_heads=heads, seq_length=options.length
    )
    return GPT(config)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def torch_step(model: Any, parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """Return the usual step around a torch optimizer."""

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(model, tokens, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ddp(options: argparse.Namespace) -> Step:
    model = DistributedDataParallel(build_model(options))
    parameters = list(model.parameters())
    return torch_step(model, parameters, torch.optim.AdamW(parameters, fused=True, **ADAMW))


def ddp_zero(options: argparse.Namespace) -> Step:
    model = DistributedDataParallel(build_model(options))
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=False, fused=True, **ADAMW
    )
    return torch_step(model, parameters, optimizer)


def fsdp2(options: argparse.Namespace, copies: int = 1) -> Step:
    """`copies` > 1: HSDP, with that many replicas of each shard."""
    model = build_model(options)
    ranks = dist.get_world_size()
    shape, names = ((copies, ranks // copies), ("replicate", "shard")) if copies > 1 else ((ranks,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    return torch_step(model, parameters, torch.optim.AdamW(parameters, fused=True, **ADAMW))


def ours(options: argparse.Namespace, folder: str | None) -> Step:
    """The replica optimizer; with a `folder` to save in, protected by a session."""
    model = build_model(options)
    optimizer = ttp.TTPReplicaOptimizer(
        model.named_parameters(), replicas=options.replicas, clip=ttp.ClipNorm(CLIP), compare_every=0, **ADAMW
    )
    session = None
    if folder is not None:
        session = ttp.start(optimizer, save_dirs=[folder], log_dir=Path(folder) / "log")
        session.resume("never")

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        torch.autograd.backward(optimizer.scale_loss(loss))
        value = loss.item()
        if session is not None:
            session.set_step_state(optimizer.current_step + 1, {"consumed_samples": optimizer.current_step})
        optimizer.step(sums=[value])
        return value

    return step


def bytes_sent() -> int:
    """Return what went over this network namespace's loopback."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def mean_over_ranks(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def idle() -> float:
    """Return the processor time that a rank takes while its training thread does nothing, as a share of a core. Without gloo's threads:
    each process group has one, which looks up a hundred times a second, with and without TTP."""
    dist.barrier()
    before = _thread_times()
    time.sleep(IDLE_S)
    taken = sum(taken - before.get(thread, 0.0) for thread, taken in _thread_times().items())
    return mean_over_ranks(taken / IDLE_S)


def _thread_times() -> dict[str, float]:
    """Return the processor time in seconds of each thread of this process but gloo's."""
    threads = [task for task in Path("/proc/self/task").iterdir() if not (task / "comm").read_text().startswith("gloo")]
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in threads}


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(options.ranks))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders: dict[str, Step] = {OFF: ours(options, None)}
    if not options.alone:
        contenders |= {"DDP + AdamW": ddp(options), "DDP + ZeRO": ddp_zero(options), "FSDP2": fsdp2(options)}
    if not options.alone and options.ranks % 2 == 0 and options.ranks > 2:
        contenders["FSDP2 HSDP"] = fsdp2(options, copies=2)
    without = idle()
    contenders[ON] = ours(options, folder)
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, list[int]] = {name: [] for name in contenders}
    order = random.Random(options.seed)
    for turn in range(1 + options.rounds):
        for name in order.sample(sorted(contenders), len(contenders)):
            batches = [_batch(options, rank, turn * options.steps + step) for step in range(options.steps)]
            dist.barrier()
            before, began, began_processor = bytes_sent(), time.perf_counter(), time.thread_time()
            values = [contenders[name](tokens, targets) for tokens, targets in batches]
            taken = time.thread_time() - began_processor
            dist.barrier()
            elapsed = time.perf_counter() - began
            sent[name].append(bytes_sent() - before)
            seconds[name].append(elapsed / options.steps)
            processor[name].append(mean_over_ranks(taken / options.steps))
            losses[name].append(mean_over_ranks(statistics.fmean(values)))
    beside = idle()
    if rank == 0:
        result = {
            "parameters": sum(p.numel() for p in build_model(options).parameters()),
            "seconds": {name: values[1:] for name, values in seconds.items()},
            "processor": {name: values[1:] for name, values in processor.items()},
            "sent": {name: statistics.median(values[1:]) / options.steps / options.ranks for name, values in sent.items()},
            "losses": losses,
            "beside": beside,
            "without": without,
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    dist.barrier()
    ttp.current_session().close()
    dist.barrier()
    os._exit(0)  # FSDP2's and DDP's process groups end with the process


def _batch(options: argparse.Namespace, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    tokens = torch.randint(0, 64, (options.batch, options.length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("ranks", "replicas", "layers", "width", "length", "batch", "rounds", "steps", "seed", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--alone", action="store_true", help="TTP on and off only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, folder), nprocs=options.ranks)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
