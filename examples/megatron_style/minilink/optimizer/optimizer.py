"""The trainer's own optimizer, and the loss scale's rule."""

from __future__ import annotations

from typing import Any

import torch

from minilink import get_ttp_switch
from minilink.core import parallel_state
from minilink.optimizer.clip_grads import clip_grad_norm_fp32

enable_ttp = get_ttp_switch()  # TTP
if enable_ttp:  # TTP
    import ttp.mindio as ttp  # noqa: F401


class DynamicGradScaler:
    """The loss scale's rule, in Megatron's fields."""

    def __init__(self, initial_scale: float, growth_interval: int) -> None:
        self.scale, self.min_scale = torch.tensor([initial_scale]), torch.tensor([1.0])
        self.growth_factor, self.backoff_factor = torch.tensor([2.0]), torch.tensor([0.5])
        self.growth_interval, self.hysteresis = growth_interval, 2


class MegatronOptimizer:
    """The trainer's own: every rank has all of the state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grad: float,
        log_num_zeros_in_grad: bool,
        params_have_main_grad: bool,
        use_contiguous_buffers_in_local_ddp: bool,
        fp16: bool,
        bf16: bool,
        params_dtype: torch.dtype,
        grad_scaler: Any,
        models: list[Any],
    ) -> None:
        assert not (fp16 or log_num_zeros_in_grad or len(models) > 1), "only with ttp.mindio"
        assert parallel_state.get_expert_model_parallel_world_size() == 1, "only with ttp.mindio"
        self.optimizer, self.clip_grad, self.models = optimizer, clip_grad, models
        self.params = [param for group in optimizer.param_groups for param in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        model = self.models[0].module
        if parallel_state.get_pipeline_model_parallel_world_size() > 1 and (model.pre_process or model.post_process):
            grad = model.word_embeddings_weight().main_grad
            torch.distributed.all_reduce(grad, group=parallel_state.get_embedding_group())
        for param in self.params:
            torch.distributed.all_reduce(param.main_grad, group=parallel_state.get_data_parallel_group())
            param.grad = (param.main_grad / parallel_state.get_data_parallel_world_size()).to(param.dtype)

    @torch.no_grad()
    def step(self, args: Any, timers: Any) -> tuple[bool, float | None, int | None]:
        grad_norm = self.clip_grad_norm(self.clip_grad)
        if enable_ttp and hasattr(self, "begin_to_update"):  # TTP
            self.begin_to_update(args.iteration)
        self.optimizer.step()
        if enable_ttp and hasattr(self, "end_to_update"):  # TTP
            self.end_to_update()
        return True, grad_norm, None

    def clip_grad_norm(self, clip_grad: float) -> float:
        return clip_grad_norm_fp32(self.params, clip_grad)

    def gather_model_params(self, args: Any, timers: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
