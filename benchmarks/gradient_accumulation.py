"""Gradients that accumulate whole and in shards: bytes sent, memory of gradients, and time of a step, in the same processes.

One model, the same ranks, weights and tokens; both ways take turns, in a shuffled order. Bytes are what crossed the loopback of a
network namespace of the benchmark's own, beside the least that the way has to send: a reduce-scatter of a row for each reduction, one
exchange with the other holders, one gather of the parameters. Memory is counted in tensors: between two micro-batches, and the most at any
gradient's arrival. Bytes and memory are exact; times are those of this machine with whatever else runs on it.

Exit status 1 when shards hold more between micro-batches than replicas / ranks of the whole gradient and a padding of 2 %, or when more than
2 % beyond the least is sent.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import ttp
from benchmarks._gradient_world import RANKS, held, run
from benchmarks._step_world import ADAMW, CLIP, build_model, bytes_sent, loss_of, mean_over_ranks
from benchmarks.step_time import quartiles

WHOLE, SHARDS = "whole", "in shards"
WAYS = (WHOLE, SHARDS)
REPLICAS = 2
PADDING = 1.02


def least_sent(passes: int) -> float:
    """Return what a rank has to send in a step with so many reductions, in units of the model's size."""
    row = 1 - REPLICAS / RANKS
    return passes * row + 2 * (REPLICAS - 1) / REPLICAS * REPLICAS / RANKS + row


class Way:
    """One of the two: an optimizer with a model of its own, and what its gradients take."""

    def __init__(self, options: argparse.Namespace, shard: bool) -> None:
        self.model = build_model(options)
        self.optimizer = ttp.TTPReplicaOptimizer(
            self.model.named_parameters(), replicas=REPLICAS, clip=ttp.ClipNorm(CLIP), compare_every=0,
            micro_batches=options.micro_batches, bucket_bytes=options.bucket_kib * 1024,
            gradient_accumulation_shard=shard, **ADAMW,
        )  # fmt: skip
        self.passes = options.micro_batches if shard else 1
        self.between = self.most = 0
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: self._look())  # type: ignore[no-untyped-call]

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Train one step; return this rank's loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for tokens, targets in batches[:-1]:
            with self.optimizer.no_sync():
                total += self._backward(tokens, targets)
            self.between = max(self.between, held(self.optimizer, self.model.parameters()))
        total += self._backward(*batches[-1])
        self.optimizer.step(sums=[total])
        return total / len(batches)

    def _backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(self.model, tokens, targets)
        torch.autograd.backward(loss)
        return loss.item()

    def _look(self) -> None:
        self.most = max(self.most, held(self.optimizer, self.model.parameters()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways in turn (all ranks)."""
    ways = {WHOLE: Way(options, shard=False), SHARDS: Way(options, shard=True)}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "sent": [], "losses": []} for name in ways}
    order = random.Random(options.seed)
    for turn in range(1 + options.rounds):
        for name in order.sample(WAYS, len(WAYS)):
            batches = [_batch(options, dist.get_rank(), turn, number) for number in range(options.micro_batches)]
            dist.barrier()
            before, began = bytes_sent(), time.perf_counter()
            loss = ways[name].step(batches)
            dist.barrier()
            seconds, sent = time.perf_counter() - began, bytes_sent() - before
            measured = {"seconds": seconds, "sent": sent / RANKS, "losses": mean_over_ranks(loss)}
            for key, value in measured.items() if turn else ():  # the first turn allocates
                found[name][key].append(value)
    padded = sum(bucket.numel for bucket in ways[WHOLE].optimizer.layout.buckets)
    memory = {name: {"between": way.between, "most": way.most} for name, way in ways.items()}
    return {"found": found, "memory": memory, "size": 4 * padded}


def _batch(options: argparse.Namespace, rank: int, turn: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * turn + 1009 * number + rank)
    tokens = torch.randint(0, 64, (options.batch, options.length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def report(measured: dict[str, Any], options: argparse.Namespace, counted: bool) -> list[str]:
    """Print the table; return the limits that were missed."""
    size, found, memory = measured["size"], measured["found"], measured["memory"]
    print(
        f"{RANKS} ranks, {REPLICAS} replicas, {options.micro_batches} micro-batches, {size // 4:,} parameters in FP32, buckets of"
        f" {options.bucket_kib} KiB; bytes in units of the whole gradient"
    )
    print(f"  {'gradients':10} {'between':>8} {'most':>6} {'sent':>7} {'least':>7}  {'time against whole':>26}")
    missed = []
    for name in WAYS:
        between, most = memory[name]["between"] / size, memory[name]["most"] / size
        sent, least = min(found[name]["sent"]) / size, least_sent(options.micro_batches if name == SHARDS else 1)
        pairs = zip(found[name]["seconds"], found[WHOLE]["seconds"], strict=True)
        low, middle, high = quartiles([mine / theirs for mine, theirs in pairs])
        shown = f"{sent:7.3f}" if counted else f"{'?':>7}"
        print(
            f"  {name:10} {between:8.3f} {most:6.3f} {shown} {least:7.3f}  {f'{middle:.2f} ({low:.2f} to {high:.2f})':>26}"
        )
        if counted and options.width >= 256 and sent > PADDING * least:
            missed.append(f"{name}: sent {sent / least - 1:.1%} more than the least")
    if memory[SHARDS]["between"] > PADDING * REPLICAS / RANKS * size:
        missed.append(f"in shards: {memory[SHARDS]['between'] / size:.3f} of the gradient between micro-batches")
    losses = zip(found[WHOLE]["losses"], found[SHARDS]["losses"], strict=True)
    print(f"  losses differ by {max(abs(a - b) for a, b in losses):.1e} at most")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--bucket-kib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way")
    parser.add_argument("--seed", type=int, default=0)
    return run("gradient_accumulation", measure, report, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
