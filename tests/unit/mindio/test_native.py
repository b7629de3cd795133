"""Checkpoints of the trainer's own optimizer: read when TTP is switched on, and written such that switching it off goes on."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ttp.errors import CheckpointMismatch
from ttp.mindio.job import forget_job
from ttp.mindio.modellink import TTPReplicaOptimizer


@pytest.fixture(autouse=True)
def forgets_every_job() -> Iterator[None]:
    yield
    forget_job()


def build(dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)).to(dtype)
    weights = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0, "wd_mult": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05)


def protected(model: Any, adam: torch.optim.Optimizer) -> TTPReplicaOptimizer:
    dtype = next(model.parameters()).dtype
    bf16 = dtype == torch.bfloat16
    return TTPReplicaOptimizer(adam, 0.0, False, False, False, False, bf16, dtype, None, model)


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(torch.full((2, 8), number / 10, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def through_a_file(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def assert_alike(one: Any, other: Any) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrapped", [False, True])
def test_ttp_is_switched_on_and_goes_on_with_the_moments(wrapped: bool) -> None:
    """torch's form, and Megatron's around it; the schedule's rate is that of the file."""
    model, adam = build()
    steps(model, adam, range(1, 4))
    adam.param_groups[0]["lr"] = 0.025
    state = through_a_file({"optimizer": adam.state_dict()} if wrapped else adam.state_dict())
    other, base = build()
    other.load_state_dict(model.state_dict())
    optimizer = protected(other, base)
    optimizer.load_state_dict(state)
    optimizer.current_step = 3
    assert optimizer.param_groups[0]["lr"] == 0.025
    steps(model, adam, range(4, 7))
    steps(other, optimizer, range(4, 7))
    assert optimizer.current_step == 6
    assert_alike(other, model)


def test_ttp_is_switched_off_and_goes_on_with_the_moments() -> None:
    """torch's optimizer loads the same file, and so does Megatron's, which looks at its entry `optimizer`."""
    model, adam = build()
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 4))
    state = optimizer.state_dict()
    for entry in ("", "optimizer"):
        found = through_a_file(state)
        found = found[entry] if entry else found
        other, plain = build()
        other.load_state_dict(model.state_dict())
        plain.load_state_dict(found)
        steps(other, plain, range(4, 5))
        assert plain.state[next(other.parameters())]["step"] == 4
    steps(model, optimizer, range(4, 5))
    assert_alike(other, model)


def test_masters_of_16_bit_parameters_go_both_ways() -> None:
    """Megatron's `fp32_from_fp16_params`: what the 16 bits do not have is not lost."""
    model, adam = build(torch.bfloat16)
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 4))
    state = through_a_file(optimizer.state_dict())
    masters = [master for group in state["fp32_from_fp16_params"] for master in group]
    assert [master.dtype for master in masters] == [torch.float32] * 4
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)
    native = {key: state[key] for key in ("optimizer", "fp32_from_fp16_params", "grad_scaler")}
    other, base = build(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    resumed = protected(other, base)
    resumed.load_state_dict(native)
    steps(model, optimizer, range(4, 7))
    steps(other, resumed, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_file_takes_no_more_room_for_both_forms() -> None:
    model, adam = build()
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 2))
    state = optimizer.state_dict()
    stored = {tensor.data_ptr() for parts in state["moments"].values() for tensor in parts.values()}
    assert {t.data_ptr() for parts in state["state"].values() for t in parts.values()} == stored


def test_states_that_cannot_be_used_are_refused() -> None:
    """One rank's shards, and other param groups."""
    model, adam = build()
    steps(model, adam, range(1, 2))
    state = adam.state_dict()
    other, base = build()
    optimizer = protected(other, base)
    with pytest.raises(CheckpointMismatch, match="one data-parallel rank's shards"):
        optimizer.load_state_dict({"optimizer": state, "shard_fp32_from_float16_groups": []})
    with pytest.raises(CheckpointMismatch, match=r"got param groups of \[2\] parameters, expected \[2, 2\]"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})


def test_files_of_the_first_form_are_read() -> None:
    """It had the moments as `state`."""
    model, adam = build()
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 3))
    state = optimizer.state_dict()
    older = {"ttp_form": 1, "state": state["moments"], **{key: state[key] for key in ("step", "masters", "host")}}
    other, base = build()
    resumed = protected(other, base)
    resumed.load_state_dict(older)
    assert resumed.current_step == 2
