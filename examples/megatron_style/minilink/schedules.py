"""The micro-batches of a step through the pipeline's stages: all forward, then all backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minilink import get_args, parallel_state


def forward_backward(model: Any, optimizer: Any, get_batch: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Leave the step's gradients in the model; return the sum of the micro-batches' losses (zero but on the last stage)."""
    args = get_args()
    ranks, stage = parallel_state.get_pipeline_global_ranks(), parallel_state.get_pipeline_model_parallel_rank()
    shape = (args.micro_batch_size, args.seq_length, args.hidden_size)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    losses = torch.zeros(())
    passes: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    for number in range(args.num_micro_batches):
        received = None
        if not parallel_state.is_pipeline_first_stage():
            received = torch.empty(shape, dtype=dtype)
            torch.distributed.recv(received, src=ranks[stage - 1])
            received.requires_grad_()
        output = model[0](get_batch(number), received)
        if parallel_state.is_pipeline_last_stage():
            output = output / args.num_micro_batches
            losses += output.detach()
            output = optimizer.scale_loss(output)
        else:
            torch.distributed.send(output.detach().contiguous(), dst=ranks[stage + 1])
        passes.append((received, output))
        if len(ranks) == 1:  # nobody waits for the others
            output.backward()
    for received, output in passes if len(ranks) > 1 else []:
        if parallel_state.is_pipeline_last_stage():
            output.backward()
        else:
            grad = torch.empty_like(output)
            torch.distributed.recv(grad, src=ranks[stage + 1])
            output.backward(grad)
        if received is not None:
            assert received.grad is not None
            torch.distributed.send(received.grad.contiguous(), dst=ranks[stage - 1])
    return losses
