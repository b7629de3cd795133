"""The trainer's own distributed optimizer: each data-parallel rank updates a range of the gradient buffer.

The buffer has the last parameter first and is padded to a multiple of the ranks. The tensors of all ranks are saved in one file for each
part of the model, `distrib_optim.pt`, as Megatron-LM 23.06 does.
"""

from __future__ import annotations

from typing import Any

import torch

from minilink.core import parallel_state
from minilink.optimizer.clip_grads import clip_grad_norm_fp32
from minilink.optimizer.optimizer import MegatronOptimizer

KEYS = ("param", "exp_avg", "exp_avg_sq")


class DistributedOptimizer(MegatronOptimizer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ranks = parallel_state.get_data_parallel_world_size()
        self.local = -(-sum(param.numel() for param in self.params) // self.ranks)
        here = range(
            parallel_state.get_data_parallel_rank() * self.local,
            (parallel_state.get_data_parallel_rank() + 1) * self.local,
        )
        group_of = {id(param): group for group in self.optimizer.param_groups for param in group["params"]}
        for group in self.optimizer.param_groups:
            group["params"], group["step"] = [], 0
        self.shards: list[tuple[torch.nn.Parameter, slice, slice, torch.nn.Parameter]] = []
        """Parameter, its elements here, their place in this rank's range, and their FP32 values."""
        stop = sum(param.numel() for param in self.params)
        for param in self.models[0].parameters():
            start = stop - param.numel()
            first, last = max(start, here.start), min(stop, here.stop)
            if first < last:
                part = slice(first - start, last - start)
                master = torch.nn.Parameter(param.detach().reshape(-1)[part].float().clone())
                self.shards.append((param, part, slice(first - here.start, last - here.start), master))
                group_of[id(param)]["params"].append(master)
            stop = start

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self, args: Any, timers: Any) -> tuple[bool, float | None, int | None]:
        grad_norm = clip_grad_norm_fp32(self.params, self.clip_grad)
        for param, part, _, master in self.shards:
            assert param.grad is not None
            master.grad = param.grad.reshape(-1)[part].float()
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["step"] += 1
        return True, grad_norm, None

    @torch.no_grad()
    def gather_model_params(self, args: Any, timers: Any) -> None:
        mine, every = torch.zeros(self.local), torch.zeros(self.local * self.ranks)
        for _, _, place, master in self.shards:
            mine[place] = master
        torch.distributed.all_gather_into_tensor(every, mine, group=parallel_state.get_data_parallel_group())
        stop = sum(param.numel() for param in self.params)
        for param in self.models[0].parameters():
            param.copy_(every[stop - param.numel() : stop].view(param.shape))
            stop -= param.numel()

    def state_dict(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {"optimizer": {"param_groups": groups}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, found in zip(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"], strict=True):
            group.update({key: value for key, value in found.items() if key != "params"})

    def save_parameter_state(self, filename: str) -> None:
        """Gather the ranges on the first data-parallel rank, which writes the file (all ranks call)."""
        group, world_tensors = parallel_state.get_data_parallel_group(), {}
        for key in KEYS:
            mine = torch.zeros(self.local)
            for _, _, place, master in self.shards:
                mine[place] = master.detach() if key == "param" else self.optimizer.state[master][key]
            every = torch.zeros(self.local * self.ranks)
            torch.distributed.all_gather_into_tensor(every, mine, group=group)
            world_tensors[key] = every
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save({0: {torch.float32: world_tensors}}, filename)

    def load_parameter_state(self, filename: str) -> None:
        """Take this rank's range from the file (all ranks call, after `load_state_dict`)."""
        found = torch.load(filename, map_location="cpu")[0][torch.float32]
        first = parallel_state.get_data_parallel_rank() * self.local
        for _, _, place, master in self.shards:
            here = {key: found[key][first + place.start : first + place.stop] for key in KEYS}
            master.data.copy_(here["param"])
            group = next(
                group for group in self.optimizer.param_groups if any(one is master for one in group["params"])
            )
            self.optimizer.state[master] = {
                "step": torch.tensor(float(group["step"])),
                "exp_avg": here["exp_avg"].clone(),
                "exp_avg_sq": here["exp_avg_sq"].clone(),
            }
