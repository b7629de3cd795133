"""Claims about MindIO's interface where the model is split: names, the norm, shared gradients, each model part's own state."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.optim.material import Net, everyone, job, make_net
from ttp.errors import ConfigError
from ttp.mindio.job import current_job, forget_job
from ttp.mindio.modellink import (
    TTPReplicaOptimizer,
    build_optimizer_replica_group,
    get_dp_rank_list,
    get_os_shard_group,
    set_parallel_state,
)
from ttp.optim.comparison import Divergence


def _declared(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> SimpleNamespace:
    """Make the groups of the axes as Megatron orders ranks, declare the data-parallel ones, and return the `parallel_state`."""
    found: dict[str, Any] = {}

    def groups(key: str, lists: list[list[int]]) -> None:
        for ranks in lists:
            group = dist.new_group(ranks)
            if job.rank in ranks:
                found[key] = group

    stage = job.world // pipeline
    data = [list(range(i * stage + j, (i + 1) * stage, tensor)) for i in range(pipeline) for j in range(tensor)]
    for ranks in data:
        build_optimizer_replica_group(ranks)
    groups("data", data)
    groups("tensor", [list(range(first, first + tensor)) for first in range(0, job.world, tensor)])
    groups("pipeline", [list(range(first, job.world, stage)) for first in range(stage)])
    if expert > 1:
        groups("expert_data", [ranks[first::expert] for ranks in data for first in range(expert)])
    rank_in = {key: dist.get_rank(group) for key, group in found.items()}
    state = SimpleNamespace(
        get_data_parallel_group=lambda: found["data"],
        get_tensor_model_parallel_group=lambda: found["tensor"],
        get_tensor_model_parallel_rank=lambda: rank_in["tensor"],
        get_tensor_model_parallel_world_size=lambda: tensor,
        get_pipeline_model_parallel_rank=lambda: rank_in["pipeline"],
        get_pipeline_model_parallel_world_size=lambda: pipeline,
        get_embedding_group=lambda: found["pipeline"],
        get_expert_model_parallel_world_size=lambda: expert,
        get_expert_model_parallel_rank=lambda: rank_in["data"] % expert,
        get_data_modulo_expert_parallel_group=lambda: found["expert_data"],
        data_rank=rank_in["data"],
    )
    set_parallel_state(state)
    return state


def _facade(models: list[nn.Module]) -> TTPReplicaOptimizer:
    params = [param for model in models for param in model.parameters()]
    adam = torch.optim.AdamW(params, lr=0.01)
    return TTPReplicaOptimizer(adam, 1.0, False, False, False, False, False, torch.float32, None, models)


def _tokens(step: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed + 100 * step + data_rank)
    return torch.randint(37, (2, 5), generator=generator)


def _train(models: list[Any], optimizer: TTPReplicaOptimizer, steps: range, data_rank: int) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for model in models:
            model(_tokens(step, data_rank)).backward()
        optimizer.reduce_model_grads(None, None)
        updated, norm, _ = optimizer.step(None, None)
        assert updated and norm is not None
        norms.append(norm)
    optimizer.zero_grad()
    return norms


def _mean_squares(params: list[torch.Tensor], group: Any) -> float:
    """Return the sum of squares of gradients that are averaged over the data-parallel ranks."""
    total = 0.0
    for param in params:
        grad = torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
        dist.all_reduce(grad, group=group)
        total += (grad.double() / dist.get_world_size(group)).square().sum().item()
    return total


def _goes_on_from_its_parts(
    models: list[Any], optimizer: TTPReplicaOptimizer, again: list[Any], build: Any, data_rank: int
) -> None:
    """Each part's state is gathered on one rank, has the trainer's own names, and goes on to the same bits on all ranks of the part."""
    part = optimizer.place.part
    boxes = everyone((part, optimizer.state_dict()) if optimizer.need_write_file() else None)
    states = [box for box in boxes if box is not None]
    assert sorted(name for name, _ in states) == sorted(set(everyone(part))), "one file a part"
    mine = dict(states)[part]
    several = len(models) > 1
    own = {f"model{n}.{k}" if several else k for n, model in enumerate(models) for k, _ in model.named_parameters()}
    assert set(mine["masters"]) == own
    weights = [{k: v.detach().clone() for k, v in model.state_dict().items()} for model in models]
    expected = _train(models, optimizer, range(4, 7), data_rank)
    declared, state = current_job().groups, current_job().parallel_state
    forget_job()
    set_parallel_state(state)
    current_job().groups = declared
    resumed = build(again)
    for model, values in zip(again, weights, strict=True):
        model.load_state_dict(values)
    resumed.load_state_dict(mine)
    assert resumed.current_step == 3
    assert _train(again, resumed, range(4, 7), data_rank) == expected
    for ours, theirs in zip(models, again, strict=True):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)
    forget_job()


def _names_of_shards(optimizer: TTPReplicaOptimizer) -> set[str]:
    """Return what the table of holders calls this rank's shards."""
    return {group.label.partition(": ")[0] for group in optimizer.core.shard_groups()}


def _tensor_parallel_net(seed: int = 0, sequence: bool = False) -> Net:
    """All parameters but the norm's are split: here each tensor-parallel rank has others of the same shape. sequence: the norm's weight
    is in a sequence-parallel region, whose gradients Megatron's optimizer sums."""
    place = current_job().place()
    net = make_net(seed=seed + 7 * place.tensor_rank)
    nn.init.constant_(net.norm.weight, 0.5)
    nn.init.zeros_(net.norm.bias)
    for name, param in net.named_parameters():
        param.tensor_model_parallel = not name.startswith("norm")  # type: ignore[attr-defined]
        if sequence and name == "norm.weight":
            param.sequence_parallel = True  # type: ignore[attr-defined]
        elif name.startswith("norm"):
            param.register_hook(_summed_over(place.tensor_group))  # type: ignore[no-untyped-call]
    return net


def _summed_over(group: Any) -> Any:
    """A norm before a column-parallel layer gets its whole gradient from all tensor-parallel ranks."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    return hook


def tensor_parallel_duplicates_are_counted_and_saved_once() -> None:
    """TP 2 x DP 2: the clipped norm has every split parameter of both ranks and each duplicate once; each part goes on from its own state."""
    state = _declared(tensor=2)
    net = _tensor_parallel_net(sequence=True)
    optimizer = _facade([net])
    assert (
        get_dp_rank_list() == [job.rank % 2, job.rank % 2 + 2]
        and optimizer.place.part == f"mp_rank_0{job.rank % 2}_000"
    )
    assert _names_of_shards(optimizer) == {f"tp {job.rank % 2} shard 0 of 1"}
    assert dist.get_world_size(get_os_shard_group()) == 1
    reference = _tensor_parallel_net()
    group = state.get_data_parallel_group()
    reference(_tokens(1, state.data_rank)).backward()
    params = dict(reference.named_parameters())
    split = _mean_squares([p for n, p in params.items() if not n.startswith("norm")], group)
    alike = _mean_squares([p for n, p in params.items() if n.startswith("norm")], group)
    both = everyone(split)
    (norm,) = _train([net], optimizer, range(1, 2), state.data_rank)
    assert norm == pytest.approx(math.sqrt(both[0] + both[1] + alike), rel=1e-6)
    _train([net], optimizer, range(2, 4), state.data_rank)
    assert len({tuple(reported) for reported in everyone(net.norm.weight.tolist())}) == 1
    assert len(optimizer.core.expected_tensors()) == 4 * (2 * (len(params) - 2) + 2), "duplicates have one name"
    assert optimizer.core.compare_replicas() == tuple[Divergence, ...]()
    _goes_on_from_its_parts([net], optimizer, [_tensor_parallel_net(seed=3, sequence=True)], _facade, state.data_rank)


def zeros_of_a_split_model_are_counted_once() -> None:
    """TP 2 x DP 2: embeddings of words that no rank had are zeros; a duplicate's zeros count once."""
    state = _declared(tensor=2)
    net = _tensor_parallel_net()
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer = TTPReplicaOptimizer(adam, 1.0, True, False, False, False, False, torch.float32, None, [net])
    net(_tokens(1, state.data_rank)).backward()
    assert net.norm.bias.grad is not None
    net.norm.bias.grad[:2] = 0.0
    zeros = 0
    for name, param in net.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
        dist.all_reduce(grad, group=state.get_data_parallel_group())
        if not (name.startswith("norm") and job.rank % 2):
            zeros += int((grad == 0).sum())
    reported = everyone(zeros)
    optimizer.reduce_model_grads(None, None)
    assert optimizer.step(None, None)[2] == reported[0] + reported[1] > 0
    forget_job()


def a_split_parameter_without_its_mark_is_refused() -> None:
    """It would be saved from one rank alone."""
    _declared(tensor=2)
    net = make_net(seed=job.rank % 2)
    with pytest.raises(
        ConfigError, match=r"invalid parameter 'emb.weight': got other values on tensor-parallel ranks \[1\]"
    ):
        _facade([net])
    forget_job()


class _Stage(nn.Module):
    """A pipeline stage with a copy of the word embeddings."""

    share_word_embeddings = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        place = current_job().place()
        torch.manual_seed(job.seed + seed)
        self.word_embeddings = nn.Embedding(37, 5)
        torch.manual_seed(job.seed + seed + 10 * place.pipeline_rank)
        self.layer = nn.Linear(5, 5)

    def word_embeddings_weight(self) -> Any:
        return self.word_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return (self.layer(self.word_embeddings(tokens)).square().mean() * (1.0 + job.rank // 2)).sum()


class _Chunk(nn.Module):
    """A further chunk of virtual pipeline parallelism."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(job.seed + seed + 20 + 10 * current_job().place().pipeline_rank)
        self.layer = nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.layer(tokens.float()).square().mean() / 1000


def _chunks(seed: int = 0) -> list[Any]:
    """Two chunks a stage; the first stage's first one and the last stage's last one have the word embeddings."""
    stage, chunk = _Stage(seed), _Chunk(seed)
    return [chunk, stage] if current_job().place().pipeline_rank else [stage, chunk]


def tied_embeddings_are_summed_counted_and_saved_once() -> None:
    """PP 2 x DP 2 with two chunks a stage: layers of one name are different ones, the two stages' word embeddings are one."""
    state = _declared(pipeline=2)
    models, reference = _chunks(), _chunks()
    optimizer = _facade(models)
    assert optimizer.place.part == f"mp_rank_00_00{job.rank // 2}" and get_dp_rank_list() == [
        job.rank // 2 * 2,
        job.rank // 2 * 2 + 1,
    ]
    assert _names_of_shards(optimizer) == {f"pp {job.rank // 2} shard 0 of 1"}
    for model in reference:
        model(_tokens(1, state.data_rank)).backward()
    group = state.get_data_parallel_group()
    tied = next(model for model in reference if isinstance(model, _Stage)).word_embeddings.weight
    dist.all_reduce(tied.grad, group=state.get_embedding_group())
    own = everyone(_mean_squares([p for m in reference for p in m.parameters() if p is not tied], group))
    once = _mean_squares([tied], group)
    (norm,) = _train(models, optimizer, range(1, 2), state.data_rank)
    assert norm == pytest.approx(math.sqrt(own[0] + own[2] + once), rel=1e-6)
    _train(models, optimizer, range(2, 4), state.data_rank)
    copy = next(model for model in models if isinstance(model, _Stage)).word_embeddings.weight
    assert len({str(reported) for reported in everyone(copy.tolist())}) == 1, "both stages' copies are the same bits"
    _goes_on_from_its_parts(models, optimizer, _chunks(seed=3), _facade, state.data_rank)


def experts_have_a_replica_group_of_their_own() -> None:
    """EP 2 x DP 4: experts are held twice among the ranks that have them, everything else among all; each rank's part has both."""
    _declared(expert=2)

    def build(seed: int = 0) -> Net:
        net = make_net(seed=seed)
        place = current_job().place()
        torch.manual_seed(job.seed + seed + place.expert_rank)
        nn.init.normal_(net.detour.weight)
        for param in net.detour.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        return net

    net = build()
    optimizer = _facade([net])
    assert optimizer.place.part == f"mp_rank_00_000_00{job.rank % 2}" and get_dp_rank_list() == [0, 1, 2, 3]
    assert _names_of_shards(optimizer) == {f"shard {job.rank % 2} of 2", f"ep {job.rank % 2} shard 0 of 1"}
    holders: dict[str, int] = {}
    for reported in everyone([group.group_id for group in optimizer.core.shard_groups()]):
        for group in reported:
            holders[group] = holders.get(group, 0) + 1
    assert set(holders.values()) == {2}
    _train([net], optimizer, range(1, 4), job.rank)
    weights = everyone(net.detour.weight.tolist())
    assert weights[0] == weights[2] != weights[1] == weights[3]
    _goes_on_from_its_parts([net], optimizer, [build(seed=3)], _facade, job.rank)
