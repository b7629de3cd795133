"""The trainer's own checkpoints: a file for each part of the model, a tracker, and the handlers that the patch adds."""

from __future__ import annotations

import argparse
import os
import random
import traceback
from typing import Any

import torch

from minilink import get_args, get_ttp_switch, print_rank_0
from minilink.core import parallel_state

enable_ttp = get_ttp_switch()  # TTP
torch.serialization.add_safe_globals([argparse.Namespace])


def model_keys(model: list[Any]) -> list[str]:
    """Return where each chunk of the model is in a file."""
    return ["model"] if len(model) == 1 else [f"model{number}" for number in range(len(model))]


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def get_checkpoint_name(
    checkpoints_path: str,
    iteration: int,
    release: bool = False,
    model_name: str = "model_optim_rng.pt",
    tmp: bool = False,
) -> str:
    directory = "release" if release else f"iter_{iteration:07d}"
    if tmp:  # TTP
        directory = directory + "_tmp"
    part = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        part += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        part += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return os.path.join(checkpoints_path, directory, part, model_name)


def get_distributed_optimizer_checkpoint_name(model_checkpoint_name: str) -> str:
    return os.path.join(os.path.dirname(model_checkpoint_name), "distrib_optim.pt")


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def ttp_save_checkpoint(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:  # TTP
    iteration, model, optimizer, opt_param_scheduler = args
    if hasattr(optimizer, "set_dump_args"):
        optimizer.set_dump_args(save_rank, step, rank_list)
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)


def save_checkpoint(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    args = get_args()
    print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {args.save}")
    if (  # TTP
        enable_ttp
        and args.local_copy_os
        and optimizer.error_dump
        and hasattr(optimizer, "save_args")
        and optimizer.current_step > optimizer.save_args["step"]
    ):
        iteration = optimizer.save_args["step"]
    if enable_ttp:  # TTP
        tmp = True if optimizer.error_dump else False  # noqa: SIM210
        checkpoint_name = get_checkpoint_name(args.save, iteration, tmp=tmp)
    else:
        checkpoint_name = get_checkpoint_name(args.save, iteration)
    cur_rank = torch.distributed.get_rank()
    if args.use_distributed_optimizer:
        optim_checkpoint_name = get_distributed_optimizer_checkpoint_name(checkpoint_name)
        ensure_directory_exists(optim_checkpoint_name)
        optimizer.save_parameter_state(optim_checkpoint_name)
    save_flag = optimizer.need_write_file() if enable_ttp else parallel_state.get_data_parallel_rank() == 0  # TTP
    state_dict: dict[str, Any] = {}
    if save_flag:  # TTP
        state_dict = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": opt_param_scheduler.state_dict(),
            "random_rng_state": random.getstate(),
            "torch_rng_state": torch.get_rng_state(),
        }
        for key, chunk in zip(model_keys(model), model, strict=True):
            state_dict[key] = chunk.state_dict_for_save_checkpoint()
    if not torch.distributed.is_initialized() or save_flag or args.deepspeed:  # TTP
        ensure_directory_exists(checkpoint_name)
        torch.save(state_dict, checkpoint_name)
    if enable_ttp and optimizer.error_dump:  # TTP
        print(
            "rank {} successfully saved checkpoint at iteration {:7d} to {}".format(  # noqa: UP032
                cur_rank, iteration, args.save
            )
        )
    else:
        save_checkpoint_post_process(iteration)


def save_checkpoint_post_process(iteration: int) -> None:
    args = get_args()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        with open(get_checkpoint_tracker_filename(args.save), "w") as f:
            f.write(str(iteration))
    torch.distributed.barrier()


def rename_save_result(args: Any) -> int:  # TTP
    iteration = args[0]
    optimizer = args[2]
    args = get_args()
    src_path = None
    dst_path = None
    if args.local_copy_os and hasattr(optimizer, "save_args") and optimizer.current_step > optimizer.save_args["step"]:
        iteration = optimizer.save_args["step"]
    try:
        tmp_dir = "iter_{:07d}_tmp".format(iteration)  # noqa: UP032
        fin_dir = "iter_{:07d}".format(iteration)  # noqa: UP032
        src_path = os.path.join(args.save, tmp_dir)
        dst_path = os.path.join(args.save, fin_dir)
        os.rename(src_path, dst_path)
    except Exception:
        print(f"rename from {src_path} to {dst_path} failed.")
        traceback.print_exc()
        return 1

    # And update the latest iteration
    tracker_filename = get_checkpoint_tracker_filename(args.save)
    with open(tracker_filename, "w") as f:
        f.write(str(iteration))
    return 0


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any) -> int:
    args = get_args()
    tracker = get_checkpoint_tracker_filename(args.save)
    if not os.path.isfile(tracker):
        return 0
    with open(tracker) as f:
        iteration = int(f.read().strip())
    checkpoint_name = get_checkpoint_name(args.save, iteration)
    state_dict = torch.load(checkpoint_name, map_location="cpu")
    args.consumed_train_samples = state_dict["args"].consumed_train_samples
    for key, chunk in zip(model_keys(model), model, strict=True):
        chunk.module.load_state_dict(state_dict[key])
    optimizer.load_state_dict(state_dict["optimizer"])
    if args.use_distributed_optimizer:
        optimizer.load_parameter_state(get_distributed_optimizer_checkpoint_name(checkpoint_name))
    opt_param_scheduler.load_state_dict(state_dict["opt_param_scheduler"])
    random.setstate(state_dict["random_rng_state"])
    torch.set_rng_state(state_dict["torch_rng_state"])
    print_rank_0(f"successfully loaded checkpoint from {args.save} at iteration {iteration}")
    return int(state_dict["iteration"])
