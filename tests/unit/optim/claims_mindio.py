"""Claims about MindIO's interface on real ranks: the whole state, the groups, and that a step is the core's step."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.shown import ROOT
from tests.unit.optim.material import Net, job, make_net
from ttp.mindio.job import forget_job
from ttp.mindio.modellink import (
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
    build_optimizer_replica_group,
    get_dp_rank_list,
    get_os_shard_group,
)
from ttp.optim.replica_optimizer import ClipNorm
from ttp.optim.replica_optimizer import TTPOddReplicaOptimizer as OddCore
from ttp.optim.replica_optimizer import TTPReplicaOptimizer as Core


def _facade(net: Net, main_grad: bool = False) -> TTPReplicaOptimizer:
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    dtype = next(net.parameters()).dtype
    kind = TTPOddReplicaOptimizer if job.world % 2 else TTPReplicaOptimizer
    return kind(adam, 1.0, False, main_grad, main_grad, False, dtype == torch.bfloat16, dtype, None, [net])


def _tokens(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed + 100 * step + 10 * part + job.rank)
    return torch.randint(37, (2, 5), generator=generator)


def _train(net: Net, optimizer: Any, steps: range, main_grad: bool) -> list[float]:
    """Two backward passes a step, as Megatron's loop calls them; return the gradients' norms."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(2):
            net(_tokens(step, part)).backward()
            for param in net.parameters() if main_grad else ():
                if param.grad is not None:
                    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
                    param.grad = None
        optimizer.reduce_model_grads(None, None)
        updated, norm, zeros = optimizer.step(None, None)
        optimizer.gather_model_params(None, None)
        assert updated and zeros is None
        norms.append(norm)
        for param in net.parameters() if main_grad else ():
            param.main_grad.zero_()  # type: ignore[attr-defined]
    optimizer.zero_grad()  # the parameters are whole from here
    return norms


def _core_norms(net: Net, steps: range) -> tuple[list[float], Any]:
    optimizer = (OddCore if job.world % 2 else Core)(net.named_parameters(), lr=0.01, clip=ClipNorm(1.0))
    norms = []
    for step in steps:
        optimizer.zero_grad()
        with optimizer.no_sync():
            net(_tokens(step, 0)).backward()
        net(_tokens(step, 1)).backward()
        norms.append(optimizer.step().grad_norm)
    return norms, optimizer


def the_facades_step_is_the_cores() -> None:
    """Gradients of `grad` and of `main_grad` train to the bits of the core with its own hooks."""
    expected_net = make_net()
    expected, core = _core_norms(expected_net, range(1, 5))
    for main_grad in (False, True):
        net = make_net()
        for param in net.parameters() if main_grad else ():
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
        optimizer = _facade(net, main_grad)
        assert _train(net, optimizer, range(1, 5), main_grad) == expected
        for ours, theirs in zip(net.parameters(), expected_net.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert optimizer.current_step == 4
    core.close()
    forget_job()


def the_whole_state_is_gathered_on_one_rank_and_goes_on_anywhere() -> None:
    """`need_write_file` is true on rank 0 alone, whose `state_dict` is whole; after loading it the training is the same."""
    net = make_net()
    optimizer = _facade(net)
    _train(net, optimizer, range(1, 4), False)
    writes = optimizer.need_write_file()
    assert writes == (job.rank == 0) and not optimizer.error_dump
    box: list[Any] = [optimizer.state_dict() if writes else None]
    dist.broadcast_object_list(box)
    weights = {name: param.detach().clone() for name, param in net.state_dict().items()}
    norms = _train(net, optimizer, range(4, 7), False)
    other = make_net(seed=5)
    resumed = _facade(other)
    other.load_state_dict(weights)
    resumed.load_state_dict(box[0])
    assert resumed.current_step == 3
    assert _train(other, resumed, range(4, 7), False) == norms
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    for name, value in box[0]["masters"].items():
        assert torch.equal(value, weights[name]), name
    forget_job()


def the_shard_group_counts_every_shard_once() -> None:
    """This rank's half of the data-parallel ranks, or all of an odd number; the list is what was declared."""
    build_optimizer_replica_group(list(range(job.world)))
    assert get_dp_rank_list() == list(range(job.world))
    size = job.world if job.world % 2 else job.world // 2
    ranks = dist.get_process_group_ranks(get_os_shard_group())
    assert len(ranks) == size and job.rank in ranks
    forget_job()


def the_shards_of_the_group_have_the_unsharded_norm() -> None:
    """The sum of squares of what each rank of the group holds first, over the group: nothing is missing, nothing counted twice."""
    _shards_have_the_unsharded_norm()


def on_nodes_in_turn_they_have_it_too() -> None:
    """Ranks 0 and 2 on one node, 1 and 3 on another: replicas are on different ones, so that halves are no longer rows of ranks."""
    with mock.patch.dict(os.environ, TTP_HOST="ab"[job.rank % 2]):
        _shards_have_the_unsharded_norm()


def _shards_have_the_unsharded_norm() -> None:
    build_optimizer_replica_group(list(range(job.world)))
    net = make_net()
    core = _facade(net).core
    own = core.layout.group_id(core.layout.held(job.rank)[0])
    masters = [held.values for held in core.holdings()[own] if held.key.startswith("model.")]
    squares = torch.stack([values.double().square().sum() for values in masters]).sum()
    dist.all_reduce(squares, group=get_os_shard_group())
    unsharded = torch.cat([param.detach().double().flatten() for param in net.parameters()]).norm().item()
    assert squares.sqrt().item() == pytest.approx(unsharded, rel=1e-12)
    forget_job()


def the_examples_clipping_over_the_shard_group_is_torchs() -> None:
    """`clip_grads.py` of the Megatron-style example sums over the optimizer's shard group; norm and clipped gradients are torch's."""
    sys.path.insert(0, str(ROOT / "examples" / "megatron_style"))
    clip_grads: Any = importlib.import_module("minilink.optimizer.clip_grads")
    build_optimizer_replica_group(list(range(job.world)))
    parallel_state: Any = importlib.import_module("minilink.core.parallel_state")
    parallel_state.initialize_model_parallel()
    ours, theirs = make_net(), make_net()
    for step in (1, 100):  # a norm above the limit, and one below
        for net in (ours, theirs):
            for place, param in enumerate(net.parameters()):
                generator = torch.Generator().manual_seed(job.seed + 100 * step + place)
                param.grad = torch.randn(param.shape, generator=generator) / step**2
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            norm = clip_grads.clip_grad_norm_fp32(list(ours.parameters()), 1.0)
        assert [call.kwargs["group"] for call in reduced.call_args_list] == [
            get_os_shard_group(),
            parallel_state.get_model_parallel_group(),
        ]
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).item(), rel=1e-5)
        assert (norm > 1.0) == (step == 1)
        for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, expected.grad)
    forget_job()
