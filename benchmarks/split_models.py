"""GPT and encoder-decoder, split over four ranks: bytes sent beside the least, and memory of gradients, with gradients that accumulate whole
and in shards.

Layouts: model parallel 2 x data parallel 2, and two pipeline stages x data parallel 2; the trainer's own passes and optimizer, one replica of each
shard (with two, two data-parallel ranks hold all of them). Bytes are what crossed the loopback of a network namespace of the benchmark's own, of
all ranks. The least: a rank's part of each reduce-scatter and gather, of each all-reduce of activations twice (n - 1)/n, and what the next stage
has to know, there and back. Memory is that of the largest stage, between two micro-batches, in units of its whole gradient.

Exit status 1 when more than 5 % beyond the least is sent, or when shards hold more between micro-batches than replicas / ranks and a padding of 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._gradient_world import RANKS, held, run
from benchmarks._step_world import bytes_sent
from ttp.trainer.config.encoder_decoder_config import EncoderDecoderConfig
from ttp.trainer.config.schema import Config, DatasetConfig, ModelConfig, ParallelConfig, TrainingConfig, plain
from ttp.trainer.model.gpt import UNCOUNTED
from ttp.trainer.parallel.mesh import build_mesh
from ttp.trainer.parallel.micro_batches import Passes
from ttp.trainer.parallel.optimizer import build_optimizer
from ttp.trainer.parallel.pipeline_stages import build_chunks

DATA, STEPS = 2, 2
GPT, PAIRS = "GPT", "encoder-decoder"
LAYOUTS = (("mp 2 x dp 2", 2, 1), ("pp 2 x dp 2", 1, 2))
SLACK = 1.05


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a layout, with gradients in shards or whole."""

    model: str
    layout: str
    tensor: int
    stages: int
    shard: bool


CASES = [Case(model, *layout, shard) for model in (GPT, PAIRS) for layout in LAYOUTS for shard in (False, True)]


class Random:
    """Samples of random tokens; a quarter of the targets of pairs is padding."""

    count = 1000

    def __init__(self, config: ModelConfig) -> None:
        self.padded = isinstance(config, EncoderDecoderConfig)
        self._vocab, self._length = config.vocab_size, config.seq_length
        self._source = config.source_length if isinstance(config, EncoderDecoderConfig) else config.seq_length

    def epoch(self, position: int) -> int:
        return position // self.count

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(first)
        tokens = torch.randint(3, self._vocab, (size, self._source), generator=generator)
        targets = torch.randint(3, self._vocab, (size, self._length), generator=generator)
        if self.padded:
            targets[:, self._length * 3 // 4 :] = UNCOUNTED
        return tokens, targets

    def counted(self, first: int, size: int) -> int:
        return size * (self._length * 3 // 4 if self.padded else self._length)


def config_of(case: Case, options: argparse.Namespace) -> Config:
    """Return the trainer's configuration of a case: four layers, of which an encoder-decoder has two each."""
    model = ModelConfig(
        num_layers=4, hidden_size=options.width, num_attention_heads=4, seq_length=options.length, vocab_size=512,
        position_embedding_type="absolute", normalization="LayerNorm", activation="gelu", use_bias=True,
    )  # fmt: skip
    if case.model == PAIRS:
        model = EncoderDecoderConfig(**plain(model), encoder_layers=2, source_length=options.length)
    return Config(
        model_config=model,
        training_config=TrainingConfig(gradient_accumulation_shard=case.shard, grad_clip_kwargs=None),
        parallel_config=ParallelConfig(
            tensor_model_parallel_size=case.tensor, pipeline_model_parallel_size=case.stages, optimizer_replicas=1,
            compare_replicas_every=0, gradient_buckets=8,
        ),
        dataset_config=DatasetConfig(batch_size=options.batch, micro_batch_num=options.micro_batches, dataset_dir="random"),
    )  # fmt: skip


def least_sent(case: Case, options: argparse.Namespace, numel: int) -> float:
    """Return the least bytes that all ranks together send in a step. `numel`: parameters of all ranks of one data-parallel place."""
    passes = options.micro_batches if case.shard else 1
    reduced = DATA * 4 * numel * (1 - 1 / DATA) * (passes + 1)
    stream = 4 * options.batch * options.length * options.width
    # GPT: two in each layer, embedding and output; pairs: a third in the decoder's, the memory, and whole embeddings.
    each_way = (4 * 2 * 2 + 2) if case.model == GPT else (2 * 2 * 2 + 2 * 3 * 2 + 1 + 1)
    activations = each_way * 2 * (case.tensor - 1) if case.tensor > 1 else 0
    between = 2 * (case.stages - 1)  # the decoder begins where the second stage does: one stream either way
    return reduced + options.micro_batches * stream * DATA * (activations + between)


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure all cases in turn (all ranks)."""
    return [measure_case(case, options) for case in CASES]


def measure_case(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Train some steps of a case (all ranks); return bytes of a step over all ranks, what is least, and memory."""
    config = config_of(case, options)
    mesh = build_mesh(config.parallel_config, RANKS, dist.get_rank(), "cpu")
    chunks = build_chunks(config, mesh, torch.device("cpu"))
    optimizer = build_optimizer(config, chunks, mesh, 1)
    passes = Passes(config, mesh, chunks, optimizer, Random(config.model_config), torch.device("cpu"))
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    between = _watch(optimizer, parameters)
    sent: list[float] = []
    for step in range(1, 2 + STEPS):
        optimizer.zero_grad()
        dist.barrier()
        before = bytes_sent()
        loss = passes.run(step, step * config.batch_size(DATA))
        optimizer.step(sums=[loss])
        dist.barrier()
        if step > 1:  # the first one opens connections
            sent.append(bytes_sent() - before)
    local = sum(_local(parameter).numel() for parameter in parameters)
    numbers = torch.tensor([float(local), max(between) / (4 * local)])
    everyone = [torch.zeros_like(numbers) for _ in range(RANKS)]
    dist.all_gather(everyone, numbers)
    whole = sum(float(measured[0]) for measured in everyone) / DATA
    largest = max(everyone, key=lambda measured: float(measured[0]))
    return {"sent": min(sent), "least": least_sent(case, options, int(whole)), "between": float(largest[1])}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _watch(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[int]:
    """Note the bytes of gradients after each micro-batch but the last; return the list that they come in."""
    found: list[int] = []

    def watched(way: Any) -> Any:
        @contextlib.contextmanager
        def noting(*args: Iterable[torch.nn.Parameter]) -> Iterator[None]:
            with way(*args):
                yield
            found.append(held(optimizer, parameters))

        return noting

    optimizer.no_sync, optimizer.micro_batch = watched(optimizer.no_sync), watched(optimizer.micro_batch)
    return found


def report(found: list[dict[str, float]], options: argparse.Namespace, counted: bool) -> list[str]:
    """Print the table; return the limits that were missed."""
    print(
        f"{RANKS} ranks, {options.micro_batches} micro-batches of {options.batch} x {options.length} tokens, width {options.width}; MB of"
        " all ranks in a step"
    )
    print(f"  {'model':16} {'layout':12} {'gradients':10} {'sent':>8} {'least':>8} {'more':>6}  {'held between':>12}")
    missed = []
    for case, measured in zip(CASES, found, strict=True):
        more = measured["sent"] / measured["least"] - 1
        name = "in shards" if case.shard else "whole"
        shown = f"{measured['sent'] / 1e6:8.2f} {measured['least'] / 1e6:8.2f} {more:6.1%}" if counted else f"{'?':>24}"
        print(f"  {case.model:16} {case.layout:12} {name:10} {shown}  {measured['between']:12.3f}")
        if counted and options.width >= 256 and measured["sent"] > SLACK * measured["least"]:
            missed.append(f"{case.model}, {case.layout}, {name}: {more:.1%} more than the least is sent")
        if case.shard and measured["between"] > SLACK / DATA:
            missed.append(
                f"{case.model}, {case.layout}: {measured['between']:.3f} of the gradient is held between micro-batches"
            )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    return run("split_models", measure, report, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
