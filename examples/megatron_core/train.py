"""Megatron-Core's DistributedDataParallel and distributed optimizer, as they are, protected by copies in memory: a small network in BF16.

    ttprun --nproc-per-node 2 examples/megatron_core/train.py

Lines that end with `# TTP` are all that differs from the program without TTP.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

import ttp  # TTP

WIDTH = 32


class Net(MegatronModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--instances", type=int, default=1, help="of the distributed optimizer: replicas of its shards")
    parser.add_argument("--save-dir", default="output/megatron_core")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        import on_cpu

        on_cpu.begin()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=args.instances)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=args.instances,
    )
    model = DistributedDataParallel(config, ddp, Float16Module(config, Net(config)))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(settings, [model])
    copies = {"copies": "memory", "copy_every": 1} if args.instances == 1 else {}  # TTP
    guard = ttp.protect(model, optimizer, save_dirs=[args.save_dir], **copies)  # TTP
    for step in range(guard.step + 1, args.steps + 1):  # TTP: in place of range(1, args.steps + 1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / (args.steps + 1))
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).float(), (x.norm(dim=1) > 2.7).long())
        loss.backward()
        model.finish_grad_sync()
        _, norm, _ = optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item().hex()} norm {float(norm).hex()}", flush=True)
    guard.save()  # TTP
    if dist.get_rank() == 0:
        weights = torch.cat([value.double().view(-1) for value in model.parameters()])
        print(f"final weights: {weights.norm().item().hex()}", flush=True)
    guard.close()  # TTP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
