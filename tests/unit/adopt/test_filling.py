"""Where `ttp.protect` has a lost rank replaced in place, and where it says why not; what of a re-entered training becomes a restart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel

import ttp
from ttp.adopt.filling import why_not_filled
from ttp.adopt.megatron import MegatronState
from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.adopt.trainer_state.loader_states import LoaderStates
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.config import Settings
from ttp.errors import NotAsBefore
from ttp.regroup.wrappers import leave_pass, why_not_replaced


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(2, 2), **options)


def with_hook() -> DistributedDataParallel:
    model = ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def with_torchs_own_hook() -> DistributedDataParallel:
    model = ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined, no-untyped-call]
    return model


def with_all_reduce_hook() -> Any:
    model: Any = fully_shard(torch.nn.Linear(2, 2))
    model.set_all_reduce_hook(lambda gradients: None)
    return model


def without_sync() -> DistributedDataParallel:
    model = ddp()
    model.require_backward_grad_sync = False
    return model


def sharded_without_sync() -> Any:
    model: Any = fully_shard(torch.nn.Linear(2, 2))
    model.set_requires_gradient_sync(False)
    return model


def split_by_hand() -> Any:
    model = torch.nn.Linear(2, 2)
    split: Any = distribute_tensor(model.weight, init_device_mesh("cpu", (1,)), [Shard(0)])
    model.weight = torch.nn.Parameter(split)
    return model


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (ddp, ""),
        (lambda: torch.nn.Linear(2, 2), ""),
        (lambda: torch.nn.Sequential(ddp(gradient_as_bucket_view=True, find_unused_parameters=True)), ""),
        (lambda: ddp(static_graph=True), "static_graph=True"),
        (with_hook, "a communication hook"),
        (with_torchs_own_hook, "a communication hook"),
        (lambda: DistributedDataParallel(torch.nn.EmbeddingBag(3, 2, sparse=True)), "sparse gradients"),
        (lambda: fully_shard(torch.nn.Linear(2, 2)), ""),
        (with_all_reduce_hook, "a hook of its all-reduces"),
        (without_sync, "require_backward_grad_sync=False behind a step"),
        (sharded_without_sync, "gradients that are not reduced behind a step"),
        (split_by_hand, "weight is split over ranks by other means"),
    ],
)
def test_models_that_a_new_process_could_not_join_are_named(make: Any, why: str) -> None:
    said = why_not_replaced(make())
    assert (why in said) if why else said == ""


@pytest.mark.usefixtures("lone_group")
def test_a_pass_that_was_left_has_ddp_synchronize_again() -> None:
    """As one in a new process does: in no_sync(), and behind passes that synchronize nothing."""
    model = torch.nn.Sequential(ddp())
    wrapper: Any = model[0]
    with torch.no_grad():
        wrapper(torch.ones(1, 2))
    with wrapper.no_sync():
        wrapper(torch.ones(1, 2))
        assert not wrapper.require_backward_grad_sync and not wrapper.require_forward_param_sync
        leave_pass(model)
        assert wrapper.require_backward_grad_sync and wrapper.require_forward_param_sync
    sharded = sharded_without_sync()
    leave_pass(sharded)
    assert why_not_replaced(sharded) == ""


@pytest.mark.usefixtures("lone_group")
def test_a_torch_that_cannot_leave_a_pass_of_fsdp2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is rehearsed as before: a rehearsal leaves no pass half way."""
    layer: Any = fully_shard(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(layer)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    assert "no reset_iter_state" in why_not_replaced(model)
    assert why_not_replaced(ddp()) == why_not_replaced(torch.nn.Linear(2, 2)) == ""
    leave_pass(model)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.usefixtures("lone_group")
def test_the_model_within_ddp_ends_in_place_and_its_wrapper_can_be_rehearsed(tmp_path: Path) -> None:
    """A wrapper that ttp.protect was not given is known in the first forward pass: too late for a new process, not for this one."""
    wrapper: Any = ddp()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    guard = ttp.protect(wrapper.module, optimizer, save_dirs=[tmp_path], settings=Settings(enable=False))
    reasons: list[str] = []
    reentry: Any = SimpleNamespace(closed=False, close=reasons.append, begin=lambda: None)
    guard.session.reentry = reentry
    torch.autograd.backward(wrapper(torch.ones(1, 2)).sum())
    assert reasons == ["ttp.protect was given the model within DistributedDataParallel"]
    wrapper.require_forward_param_sync = False
    guard._step_back()
    assert wrapper.require_forward_param_sync
    renewed: list[Any] = []

    def successor(group: Any) -> Any:
        renewed.append(group)
        return group

    guard._renew(successor)
    assert renewed.count(wrapper.process_group) >= 1
    guard.close()


@pytest.fixture(autouse=True)
def _no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have used it."""
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)


def test_accelerate_is_named_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it is only imported."""
    state: Any = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={}))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert why_not_replaced(torch.nn.Linear(2, 2)) == ""
    state.PartialState._shared_state["backend"] = "gloo"
    assert "accelerate counts batches by itself" in why_not_replaced(torch.nn.Linear(2, 2))


def test_states_that_no_other_rank_has_are_named() -> None:
    model = torch.nn.Linear(2, 2)
    state: Any = SimpleNamespace(device=torch.device("cpu"), twins=[[0, 2], [1], [0, 2], [3]])
    assert why_not_filled(model, state, ()) == "no other rank holds the same as ranks 1, 3"
    state.twins = [[0, 1], [0, 1]]
    assert why_not_filled(model, state, ()) == ""
    assert "not plain values: foo, lr" in why_not_filled(model, state, {"lr", "foo"})
    state.device = torch.device("cuda")
    assert "never tried on cuda" in why_not_filled(model, state, ())
    assert "Megatron-Core" in why_not_filled(model, object.__new__(MegatronState), ())


def test_a_setting_that_no_checkpoint_has_is_named_and_a_tensor_is_none() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    adopted = AdoptedOptimizer(model, optimizer)
    adopted._state.twins = [[0, 1], [0, 1]]
    assert adopted.why_not_filled() == ""
    adopted.not_filled = "reseed=False"
    assert adopted.why_not_filled() == "reseed=False"
    adopted.not_filled, optimizer.param_groups[0]["decay"] = "", object()
    assert "not plain values: decay" in adopted.why_not_filled()
    adopted.close()


def test_another_batch_after_a_recovery_leads_to_a_restart_that_expects_the_right_one() -> None:
    first, wrong = torch.ones(2), torch.zeros(2)
    seen = SeenBatches(0, 2, "error")
    for step in (1, 2):
        seen.forward(step, first * step, [0.1], counted=False)
    seen.batch(0, 0, first)
    seen.batch(0, 1, first)
    seen.expect(record := seen.record())
    seen.recovered = True
    with pytest.raises(NotAsBefore, match="another batch in step 2 on rank 0"):
        seen.forward(2, wrong, [0.1], counted=False)
    with pytest.raises(NotAsBefore, match="batch 1 of epoch 0"):
        seen.batch(0, 1, wrong)
    assert seen.record() == record
    seen.expect(record)
    with pytest.raises(NotAsBefore, match="learning rate"):
        seen.forward(2, first * 2, [0.2], counted=False)


def test_another_batch_after_a_recovery_is_only_warned_of_where_that_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = SeenBatches(0, 2, "warn")
    seen.forward(2, torch.ones(2), [0.1], counted=False)
    seen.expect(seen.record())
    seen.recovered = True
    with caplog.at_level("WARNING"):
        seen.forward(2, torch.zeros(2), [0.2], counted=False)
    assert "another batch in step 2 on rank 0" in caplog.text and "learning rate" in caplog.text
    assert [entry[2] for entry in seen.record()["passes"]] == [[0.1], [0.2]]


def test_ranks_ask_each_other_again_for_their_loaders_after_a_recovery() -> None:
    """A new process asks in its first step: an exchange that the others would not answer."""
    asked: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        asked.append(value)
        return [value, value]

    states = LoaderStates(0, 2, exchange)
    for step in (1, 2):
        states.take(step, 0, step)
    assert asked == [False]
    states.ask_again()
    states.take(3, 0, 3)
    assert asked == [False, False]
