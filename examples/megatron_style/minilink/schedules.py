"""The micro-batches of a step through the pipeline's stages, and through each stage's chunks in turn: all forward, then all backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minilink import get_args
from minilink.core import parallel_state


def forward_backward(model: Any, optimizer: Any, get_batch: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Leave the step's gradients in the model; return the sum of the micro-batches' losses (zero but on the last stage)."""
    args = get_args()
    ranks, stage = parallel_state.get_pipeline_global_ranks(), parallel_state.get_pipeline_model_parallel_rank()
    before, behind = ranks[stage - 1], ranks[(stage + 1) % len(ranks)]
    shape = (args.micro_batch_size, args.seq_length, args.hidden_size)
    losses = torch.zeros(())
    passes: list[tuple[Any, torch.Tensor | None, torch.Tensor]] = []
    for number in range(args.num_micro_batches):
        for chunk in model:
            received = None
            if not chunk.module.pre_process:
                received = torch.empty(shape, dtype=args.params_dtype)
                torch.distributed.recv(received, src=before)
                received.requires_grad_()
            output = chunk(get_batch(number), received)
            if chunk.module.post_process:
                output = output / args.num_micro_batches
                losses += output.detach()
                output = optimizer.scale_loss(output)
            else:
                torch.distributed.send(output.detach().contiguous(), dst=behind)
            passes.append((chunk, received, output))
        if len(ranks) == 1:  # no rank waits for the others
            output.backward()
    for number in range(args.num_micro_batches) if len(ranks) > 1 else ():
        for chunk, received, output in reversed(passes[number * len(model) : (number + 1) * len(model)]):
            if chunk.module.post_process:
                output.backward()
            else:
                grad = torch.empty_like(output)
                torch.distributed.recv(grad, src=behind)
                output.backward(grad)
            if received is not None:
                assert received.grad is not None
                torch.distributed.send(received.grad.contiguous(), dst=before)
    return losses
