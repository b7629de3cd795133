"""Ranks whose gradients are measured: what they take, counted in tensors, and a world of processes in a network namespace of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import ttp
from benchmarks.step_time import alone, free_port, in_namespace

RANKS = 4
_INSIDE = "TTP_BENCH_NAMESPACE"
Measure = Callable[[argparse.Namespace], Any]
"""On every rank, in its process group; what rank 0 returns counts."""
Report = Callable[[Any, argparse.Namespace, bool], list[str]]
"""(what was measured, the options, whether bytes were counted) -> the limits that were missed."""


def run(benchmark: str, measure: Measure, report: Report, options: argparse.Namespace) -> int:
    """Measure on RANKS processes and report; return the exit status."""
    counted = alone()
    if not counted:
        print("bytes are not counted: a network namespace needs `unshare` and `ip`, and the right to make one")
    if counted and _INSIDE not in os.environ:
        command = in_namespace([sys.executable, "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])
        return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        torch.multiprocessing.spawn(_work, (measure, options, free_port(), result), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]
        with open(result, encoding="utf-8") as file:
            missed = report(json.load(file), options, counted)
    for line in missed:
        print(f"{benchmark}.py: {line}", file=sys.stderr)
    return 1 if missed else 0


def _work(rank: int, measure: Measure, options: argparse.Namespace, port: int, result: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(RANKS))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(options)
    if rank == 0:
        with open(result, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def held(optimizer: ttp.TTPReplicaOptimizer, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the bytes of gradients that this rank keeps now: in buckets, in shards of their own, and outside both."""
    kept = {}
    tensors = [
        tensor for part in optimizer._parts for memory in part.memory for tensor in (memory.grads, *memory.reduced)
    ]
    for tensor in [*tensors, *(param.grad for param in parameters if param.grad is not None)]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
    return sum(kept.values())
