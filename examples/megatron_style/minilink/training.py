"""The training loop, in Megatron's shape."""

from __future__ import annotations

import random
from typing import Any

import torch

from minilink import get_args, get_ttp_switch, print_rank_0, print_rank_last
from minilink.checkpointing import load_checkpoint, save_checkpoint
from minilink.core import parallel_state
from minilink.lr_scheduler import OptimizerParamScheduler
from minilink.model import GPTModel, LocalDDP
from minilink.optimizer import get_megatron_optimizer
from minilink.optimizer.clip_grads import params_norm_fp32
from minilink.schedules import forward_backward

enable_ttp = get_ttp_switch()  # TTP
if enable_ttp:  # TTP
    import ttp.mindio as ttp
    from minilink.checkpointing import rename_save_result, ttp_save_checkpoint
    from ttp.mindio.modellink import get_dp_rank_list


def pretrain() -> None:
    args = get_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size
    )
    random.seed(args.seed)
    model, optimizer, scheduler = setup_model_and_optimizer()
    iteration = train(model, optimizer, scheduler)
    save_checkpoint(iteration, model, optimizer, scheduler)
    torch.distributed.destroy_process_group()


def setup_model_and_optimizer() -> tuple[Any, Any, Any]:
    args = get_args()
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    chunks = args.virtual_pipeline_model_parallel_size or 1
    model = [LocalDDP(GPTModel(chunk, chunks).to(dtype)) for chunk in range(chunks)]
    torch.manual_seed(args.seed)  # dropout
    optimizer = get_megatron_optimizer(model)
    scheduler = OptimizerParamScheduler(optimizer, args.lr, args.lr_warmup_samples)
    args.iteration = load_checkpoint(model, optimizer, scheduler)
    if enable_ttp and hasattr(optimizer, "current_step"):  # TTP
        optimizer.current_step = args.iteration
        print(f"optimizer current step has been set to {optimizer.current_step}")
    return model, optimizer, scheduler


def get_batch(first_sample: int) -> torch.Tensor:
    """Return tokens_BT: sequences that count up, from places and with strides that follow from the samples' numbers."""
    args = get_args()
    generator = torch.Generator().manual_seed(args.seed + first_sample)
    start_B1 = torch.randint(args.vocab_size, (args.micro_batch_size, 1), generator=generator)
    stride_B1 = torch.randint(1, 4, (args.micro_batch_size, 1), generator=generator)
    return (start_B1 + stride_B1 * torch.arange(args.seq_length + 1)) % args.vocab_size


def train_step(model: Any, optimizer: Any, scheduler: Any) -> tuple[float, float | None, float, int | None]:
    args = get_args()
    for partition in model:
        partition.zero_grad_buffer()
    optimizer.zero_grad()
    params_norm = params_norm_fp32(param for partition in model for param in partition.parameters())
    place = parallel_state.get_data_parallel_rank() * args.num_micro_batches
    losses = forward_backward(
        model,
        optimizer,
        lambda number: get_batch(args.consumed_train_samples + (place + number) * args.micro_batch_size),
    )
    torch.distributed.all_reduce(losses, group=parallel_state.get_data_parallel_group())
    optimizer.reduce_model_grads(args, None)
    if enable_ttp and (not args.local_copy_os):  # TTP
        torch.distributed.barrier()
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step(args, None)
    if update_successful:
        optimizer.gather_model_params(args, None)
        scheduler.step(increment=global_batch_size())
    return losses.item() / parallel_state.get_data_parallel_world_size(), grad_norm, params_norm, num_zeros_in_grad


def global_batch_size() -> int:
    args = get_args()
    return int(args.micro_batch_size * args.num_micro_batches * parallel_state.get_data_parallel_world_size())


def train(model: Any, optimizer: Any, lr_scheduler: Any) -> int:
    args = get_args()
    if enable_ttp:  # TTP
        # init processor and controller
        cur_rank = torch.distributed.get_rank()
        world_size: int = torch.distributed.get_world_size()
        dp_ranks = get_dp_rank_list()

        import os

        masterIp = os.getenv("MASTER_ADDR", "127.0.0.1")
        port = 8000
        if cur_rank == 0:
            ttp.ttp_init_controller(
                cur_rank, world_size, replica=len(dp_ranks) // 2, enable_local_copy=args.local_copy_os
            )
            ttp.ttp_start_controller(masterIp, port)
        ttp.ttp_init_processor(
            cur_rank,
            dp_ranks,
            len(dp_ranks),
            world_size,
            replica=len(dp_ranks) // 2,
            enable_local_copy=args.local_copy_os,
        )
        ttp.ttp_start_processor(masterIp, port)
        ttp.ttp_register_save_ckpt_handler(ttp_save_checkpoint)
        ttp.ttp_register_rename_handler(rename_save_result)
    iteration = args.iteration
    while iteration < args.train_iters:
        lr = optimizer.param_groups[0]["lr"]
        loss, grad_norm, params_norm, num_zeros = train_step(model, optimizer, lr_scheduler)
        iteration += 1
        if enable_ttp:  # TTP
            if hasattr(optimizer, "current_step") and iteration != optimizer.current_step:
                print_rank_0(f"refresh optimizer step {iteration}")
            ttp.ttp_set_ckpt_args((iteration, model, optimizer, lr_scheduler))
        args.iteration = iteration
        args.consumed_train_samples += global_batch_size()
        norm = float("nan") if grad_norm is None else grad_norm
        print_rank_last(
            f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: {args.consumed_train_samples:6d}"
            f" | learning rate: {lr:.3E} | loss: {loss:.6E} ({loss.hex()}) | grad norm: {norm:.3f} ({norm.hex()})"
            f" | params norm: {params_norm:.3f} ({params_norm.hex()}) |"
            + ("" if num_zeros is None else f" num zeros: {num_zeros} |")
        )
        if iteration % args.save_interval == 0:
            save_checkpoint(iteration, model, optimizer, lr_scheduler)
    return iteration


if enable_ttp:  # TTP
    train = ttp.ttp_to_persist(train)
