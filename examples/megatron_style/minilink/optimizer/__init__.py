"""The choice between the trainer's own optimizers and the one that keeps replicas."""

from __future__ import annotations

from typing import Any

import torch

from minilink import get_args, get_ttp_switch
from minilink.optimizer.distrib_optimizer import DistributedOptimizer
from minilink.optimizer.optimizer import DynamicGradScaler, MegatronOptimizer

enable_ttp = get_ttp_switch()  # TTP
if enable_ttp:  # TTP
    from ttp.mindio.modellink import TTPReplicaOptimizer

if enable_ttp:  # TTP: what --release-fp32-grad asks for; a trainer that has no such class of its own takes this one
    from ttp.mindio.modellink import DistributedOptimizerWithoutFP32Grad


def get_megatron_optimizer(model: list[Any]) -> Any:
    args = get_args()
    params = [param for module in model for param in module.parameters()]
    decayed = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    groups = [{"params": decayed, "wd_mult": 1.0}, {"params": others, "wd_mult": 0.0, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=args.weight_decay)
    params_have_main_grad = True
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    grad_scaler = DynamicGradScaler(args.initial_loss_scale, args.loss_scale_window) if args.fp16 else None
    opt_ty: Any = MegatronOptimizer
    if args.use_distributed_optimizer:
        if args.release_fp32_grad:
            opt_ty = DistributedOptimizerWithoutFP32Grad
        else:
            opt_ty = TTPReplicaOptimizer if enable_ttp else DistributedOptimizer  # TTP
    if enable_ttp:  # TTP
        return opt_ty(
            optimizer,
            args.clip_grad,
            args.log_num_zeros_in_grad,
            params_have_main_grad,
            args.use_contiguous_buffers_in_local_ddp,
            args.fp16,
            args.bf16,
            args.params_dtype,
            grad_scaler,
            model,
            args.local_copy_os,
        )
    else:
        return opt_ty(
            optimizer,
            args.clip_grad,
            args.log_num_zeros_in_grad,
            params_have_main_grad,
            args.use_contiguous_buffers_in_local_ddp,
            args.fp16,
            args.bf16,
            args.params_dtype,
            grad_scaler,
            model,
        )
