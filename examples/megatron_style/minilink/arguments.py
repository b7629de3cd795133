"""The command line, and the namespace that the trainer keeps its state in."""

from __future__ import annotations

import argparse

from minilink.utils import get_ttp_switch

_ARGS: argparse.Namespace | None = None


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    global _ARGS
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, default=2)
    group.add_argument("--hidden-size", type=int, default=32)
    group.add_argument("--vocab-size", type=int, default=64)
    group.add_argument("--seq-length", type=int, default=16)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--num-attention-heads", type=int, default=2)
    group.add_argument("--num-experts", type=int, default=None, help="experts in place of each layer's MLP")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp16", action="store_true")
    group.add_argument("--initial-loss-scale", type=float, default=2.0**12)
    group.add_argument("--loss-scale-window", type=int, default=1000)
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, default=None)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=4)
    group.add_argument("--num-micro-batches", type=int, default=2)
    group.add_argument("--train-iters", type=int, default=40)
    group.add_argument("--lr", type=float, default=3e-3)
    group.add_argument("--lr-warmup-samples", type=int, default=64)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--release-fp32-grad", action="store_true")
    group.add_argument("--log-num-zeros-in-grad", action="store_true")
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", required=True)
    group.add_argument("--save-interval", type=int, default=1000)
    group.add_argument(  # TTP
        "--local-copy-os",
        action="store_true",
        default=False,
        help="barrier or local copy os, suggest barrier on small cluster",
    )
    _ARGS = parser.parse_args(arguments)
    if not _ARGS.use_distributed_optimizer and get_ttp_switch():
        parser.error("TTP needs --use-distributed-optimizer")
    _ARGS.deepspeed, _ARGS.use_contiguous_buffers_in_local_ddp = False, True
    stages, layers = _ARGS.pipeline_model_parallel_size, _ARGS.num_layers_per_virtual_pipeline_stage
    _ARGS.virtual_pipeline_model_parallel_size = _ARGS.num_layers // stages // layers if layers else None
    _ARGS.iteration = 0
    _ARGS.consumed_train_samples = 0
    return _ARGS


def get_args() -> argparse.Namespace:
    assert _ARGS is not None, "parse_args has not been called"
    return _ARGS
