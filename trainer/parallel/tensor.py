"""Tensor and sequence parallelism: which matrix of a model is split which way over the ranks of the tensor axis.

Owns the plan. torch's own styles do the splitting and the collectives: queries, keys, values and the feed-forward's first
matrices by columns, the matrices back into the residual stream by rows, embeddings and output by the vocabulary. With
sequence parallelism norms, dropout and residuals work on this rank's part of each sequence. Source: Shoeybi et al.,
Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ttp.errors import ConfigError

from ..config.encoder_decoder_config import EncoderDecoderConfig
from ..config.schema import Config
from ..model.encoder_decoder import EncoderDecoder
from ..model.experts import Experts
from ..model.gpt import Transformer


class Copied(ParallelStyle):
    """A module that every rank has whole, and that works on what every rank has whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, take, give)  # type: ignore[arg-type]  # as torch's own styles do


def check_divides(config: Config) -> None:
    """Raise ConfigError for a model whose parts the tensor-parallel ranks cannot share. Rows of embeddings need not divide."""
    model, ranks = config.model_config, config.parallel_config.tensor_model_parallel_size
    if ranks > 1 and model.num_experts and config.training_config.compile:
        # torch 2.13 ends in an assertion there, or, with another plan of the same block, in gradients that are too small.
        raise ConfigError(
            f"training_config.compile is true with model_config.num_experts {model.num_experts} and"
            f" parallel_config.tensor_model_parallel_size {ranks}: torch does not compile such blocks correctly, expected compile: false, or"
            " one tensor-parallel rank"
        )
    shared = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "ffn_hidden_size": model.ffn_size,
    }
    if config.parallel_config.sequence_parallel:
        shared["seq_length"] = model.seq_length
    for name, value in shared.items():
        if value % ranks:
            raise ConfigError(
                f"model_config.{name}: got {value}, expected a multiple of parallel_config.tensor_model_parallel_size, {ranks};"
                " change either"
            )
    rows = {"vocab_size": model.vocab_size}
    if model.position_embedding_type == "absolute" and not isinstance(model, EncoderDecoderConfig):
        rows["seq_length"] = model.seq_length
    for name, value in rows.items():
        if (ranks - 1) * -(-value // ranks) >= value:
            raise ConfigError(
                f"model_config.{name} is {value}: {ranks} tensor-parallel ranks cut it into rows of {-(-value // ranks)}, and the"
                " last rank has none; change parallel_config.tensor_model_parallel_size"
            )


def divides_logits(config: Config) -> bool:
    """Say whether tensor-parallel ranks keep some columns of the logits each; else each gathers all of them."""
    return config.training_config.loss_func_kwargs.loss_func_type == "VocabParallelCrossEntropy"


def split_over_tensor_ranks(
    model: Transformer, mesh: DeviceMesh, sequence_parallel: bool, parallel_output: bool = True
) -> None:
    """Make the parameters of a model (on any device, meta too) DTensors of `mesh`, and its modules parallel.

    parallel_output: the logits are a DTensor, some columns on each rank; else an ordinary tensor, whole on each.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence_parallel else Copied()
    # The matrices of a module share its input as a DTensor: their gradients of it are added first, and reduced once.
    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm,
        "attention": _replicated(stream, None, None, None),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=stream),
        "cross_attention_norm": norm,
        "cross_attention": _replicated(stream, None, Replicate(), None),
        "cross_attention.wq": ColwiseParallel(),
        "cross_attention.wk": ColwiseParallel(),
        "cross_attention.wv": ColwiseParallel(),
        "cross_attention.wo": RowwiseParallel(output_layouts=stream),
        "feed_forward_norm": norm,
        "feed_forward": _replicated(stream),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=stream),
    }
    for block in model.layers.values():
        here = {name: style for name, style in plan.items() if _has(block, name)}
        if isinstance(block.feed_forward, Experts):
            here |= _plan_of_experts(block.feed_forward, stream)
        parallelize_module(block, mesh, here)
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "positions": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0) if sequence_parallel else Replicate()
        ),
        "norm": norm,
        "output": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if parallel_output else Replicate(),
            use_local_output=not parallel_output,
        ),
    }
    if isinstance(model, EncoderDecoder):
        ends |= _plan_of_encoder_decoder(model)
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if _has(model, name)})
    model.tie()
    model.sequence_ranks = mesh.size() if sequence_parallel else 1


def _replicated(*layouts: Placement | None) -> PrepareModuleInput:
    """Give a module inputs of these layouts whole, and leave the others as they are."""
    whole = tuple(None if layout is None else Replicate() for layout in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=whole)


def _plan_of_encoder_decoder(model: EncoderDecoder) -> dict[str, ParallelStyle]:
    """Embeddings are whole on every rank with `vocab_emb_dp`, positions always: there are few. The layers share the memory as a DTensor:
    their gradients of it are added first, and reduced once."""
    whole = model.config.vocab_emb_dp
    embedding = Copied() if whole else RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return {
        "embedding": embedding,
        "target_embedding": embedding,
        "positions": Copied(),
        "target_positions": Copied(),
        "encoder_norm": Copied(),
        "memory": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        ),
    }


def _plan_of_experts(experts: Experts, stream: Placement) -> dict[str, ParallelStyle]:
    """Every rank routes all tokens, and has a slice of each expert."""
    plan: dict[str, ParallelStyle] = {
        "feed_forward": PrepareModuleInputOutput(
            input_layouts=(stream,),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Replicate(),),
            desired_output_layouts=(stream,),
            use_local_output=True,
        ),
        "feed_forward.router": Copied(),
    }
    for number, expert in experts.experts.items():
        names = {
            "gate": ColwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        plan |= {f"feed_forward.experts.{number}.{name}": style for name, style in names.items() if _has(expert, name)}
    return plan


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module is not None


def whole_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that every tensor-parallel rank has whole as an ordinary tensor."""
    return loss.to_local() if isinstance(loss, DTensor) else loss
