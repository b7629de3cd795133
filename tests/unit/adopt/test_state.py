"""Looks into a model and its optimizer: buffers that are bound anew, state that exists in part, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

from ttp.adopt import adopted_state
from ttp.adopt.adopted_state import AdoptedState, unwrapped
from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.errors import ConfigError
from ttp.optim.base_state import restore_hyper_parameters
from ttp.optim.shard_layout.split import block_of


class Running(torch.nn.Module):
    """Binds a new tensor to its buffer in every pass, with the graph that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.mean = (self.mean * 0.9 + y.mean(0)).detach()
        return y - self.mean


def kept(state: AdoptedState, key: str) -> torch.Tensor:
    return next(held.values for tensors in state.holdings().values() for held in tensors if held.key == key)


def test_a_buffer_that_the_model_binds_anew_is_saved_and_loaded() -> None:
    """What stands under the name counts, not the tensor that was there at the start."""
    model = Running()
    optimizer = SGD(model.parameters(), lr=0.1)
    adopted = AdoptedOptimizer(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert bool(model.mean.any()) and torch.equal(kept(adopted._state, "model.mean"), model.mean)
    before = model.mean.clone()
    model(torch.ones(2, 3))
    for held in adopted.load_begin():
        if held.key == "model.mean":
            held.values.fill_(5.0)
    adopted.load_end(1, {"param_groups": [{}]})
    assert model.mean.tolist() == [5.0, 5.0, 5.0] and not torch.equal(before, model.mean)


def test_a_buffer_need_not_lie_row_by_row() -> None:
    """A transposed tensor under the name is copied as what it is."""
    model = Running()
    model.mean = torch.zeros(2, 3)
    state = AdoptedState(model, SGD(model.parameters(), lr=0.1))
    model.mean = torch.arange(6.0).view(3, 2).t()
    state.share_buffers()
    state.updated(skipped=False)
    assert kept(state, "model.mean").tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "buffer mean is not there"),
        (torch.zeros(4), r"buffer mean has shape \(4,\) and torch.float32, expected shape \(3,\)"),
        (torch.zeros(3, dtype=torch.float64), "torch.float64, expected shape .* and torch.float32"),
    ],
)
def test_a_buffer_that_is_no_more_what_it_was_is_refused(value: Any, words: str) -> None:
    """By name, before anything is sent to other ranks; scratch ones may do what they like."""
    model = Running()
    optimizer = SGD(model.parameters(), lr=0.1)
    adopted = AdoptedOptimizer(model, optimizer)
    del model.scratch
    optimizer.step()
    model.mean = value
    with pytest.raises(ConfigError, match=words):
        optimizer.step()
    assert adopted.current_step == 1


class Strange(Optimizer):
    """Not torch's own: makes its state in its first step, and counts steps in its param groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                    param -= group["lr"] / group["count"] * state["sum"]


@pytest.mark.parametrize(
    "base", [lambda p: AdamW(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Strange(p)]
)
def test_only_the_state_that_lacks_is_created(base: Callable[[Any], Optimizer]) -> None:
    """Of a group that was added later, and of a parameter that had no gradient yet; all else keeps its bits and its gradients."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(first, second)
    optimizer = base([first.weight, first.bias])
    for _ in range(2):
        first.weight.grad = torch.ones(2, 2)
        optimizer.step()
    optimizer.add_param_group({"params": list(second.parameters())})
    groups = optimizer.param_groups
    old = {key: value.clone() for key, value in optimizer.state[first.weight].items()}
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    weights = [param.detach().clone() for param in model.parameters()]
    AdoptedState(model, optimizer)
    assert optimizer.param_groups is groups
    assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == settings
    assert all(torch.equal(param, weight) for param, weight in zip(model.parameters(), weights, strict=True))
    assert [param.grad is None for param in model.parameters()] == [False, True, True, True]
    assert all(torch.equal(optimizer.state[first.weight][key], value) for key, value in old.items())
    for param in list(model.parameters())[1:]:
        assert optimizer.state[param].keys() == old.keys()
        assert not any(bool(value.any()) for value in optimizer.state[param].values())


def test_what_an_optimizer_writes_into_its_groups_comes_back() -> None:
    """As it was after the update, and though a fresh optimizer has no such key."""
    model = torch.nn.Linear(2, 2)
    optimizer = Strange(model.parameters())
    adopted = AdoptedOptimizer(model, optimizer)
    for _ in range(3):
        model.weight.grad = torch.ones(2, 2)
        optimizer.step()
    saved = adopted.host_state()
    assert saved["param_groups"] == [{"lr": 0.1, "count": 3}]
    fresh = Strange(model.parameters(), lr=7.0)
    again = AdoptedOptimizer(model, fresh)
    assert "count" not in fresh.param_groups[0]
    again.load_begin()
    again.load_end(3, saved)
    assert fresh.param_groups[0]["count"] == 3 and fresh.param_groups[0]["lr"] == 0.1


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    """A number in its place would be computed with in another precision, and not be seen by what was compiled with it."""
    rate = torch.tensor(0.5)
    groups = [{"lr": rate, "betas": (0.9, 0.95)}]
    restore_hyper_parameters(groups, [{"lr": torch.tensor(0.1).item(), "betas": [0.8, 0.9]}], 3)
    assert groups[0]["lr"] is rate and torch.equal(rate, torch.tensor(0.1)) and groups[0]["betas"] == (0.8, 0.9)


class FullyShardedDataParallel(torch.nn.Linear):
    """Known by its name, as torch's is."""


def test_a_model_with_a_flattened_part_is_refused() -> None:
    """Not only the outermost wrapper counts; DataParallel is looked into."""
    model = torch.nn.Sequential(FullyShardedDataParallel(2, 2))
    with pytest.raises(ConfigError, match="or a part of it, is wrapped in FullyShardedDataParallel"):
        unwrapped(torch.nn.DataParallel(model))
    plain = torch.nn.Linear(2, 2)
    assert unwrapped(torch.nn.DataParallel(plain)) is plain


class Wrapper(Optimizer):
    """As accelerate's: an Optimizer by its class, without hooks of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapper_of_an_optimizer_is_refused() -> None:
    """Its hooks would never be called."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="wraps another optimizer"):
        AdoptedOptimizer(model, Wrapper(SGD(model.parameters(), lr=0.1)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_blocks_are_looked_up_once_and_values_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor computes a block anew each time, and training waits for it; an optimizer may replace a tensor of its state."""
    looked_at: list[Any] = []

    def look(param: Any) -> Any:
        looked_at.append(param)
        return block_of(param)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        monkeypatch.setattr(adopted_state, "block_of", look)
        model = torch.nn.Linear(4, 4)
        distribute_module(model, init_device_mesh("cpu", (1,)), lambda _, module, mesh: split(module, mesh))
        optimizer = AdamW(model.parameters())
        state = AdoptedState(model, optimizer)
        known = len(looked_at)
        assert known >= 6, "two parameters, and two tensors of the state of each"
        optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"] + 7.0
        assert kept(state, "optim.state.weight.exp_avg").tolist() == [7.0] * 16
        assert len(looked_at) == known
    finally:
        dist.destroy_process_group()


def split(module: torch.nn.Module, mesh: Any) -> None:
    for name, param in list(module.named_parameters()):
        module.register_parameter(name, torch.nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))
