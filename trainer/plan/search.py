"""Layouts for a model and a number of ranks, the fastest first by a simple model of a step's time (PURE but for torch's meta device).

Owns which layouts there are and their order; every number of a layout is `estimate.py`'s. A layout is data x tensor x pipeline x expert ranks,
virtual stages, sequence parallelism, recomputation, and whether the optimizer state is sharded. Each does the same step: the same sequences,
in micro-batches of the same size. Never proposes what a start would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from ttp.errors import ConfigError

from ..config.schema import Config
from .estimate import RunPlan, gib, make_plan, survived

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a step's time is computed with. Rates are sustained ones."""

    devices_per_node: int = 8
    flops: float = 100e12
    """Operations that a device does in a second."""
    node: float = 100e9
    """Bytes that a rank sends in a second to ranks of its node."""
    network: float = 10e9
    """The same to ranks of other nodes."""


@dataclass(frozen=True, slots=True)
class Proposal:
    config: Config
    plan: RunPlan
    seconds: float
    """Of a step, by `step_seconds`."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    proposals: tuple[Proposal, ...]
    """Best first."""
    sequences: int
    """Of a step, in every layout."""
    too_large: int
    """Layouts that need more memory than there is."""


def step_seconds(plan: RunPlan, machine: Hardware) -> float:
    """Return the time of a step: what a rank computes, the bubble of its pipeline, and what it sends. Nothing overlaps.

    An axis is within a node where all ranks of one group of it fit into a node; ranks are laid out tensor, pipeline, expert, data.
    """
    axes = plan.axes
    sent = (
        (plan.tensor_wire, axes["tensor"]),
        (plan.pipeline_wire, axes["tensor"] * axes["pipeline"]),
        (plan.expert_wire, axes["tensor"] * axes["pipeline"] * axes["expert"]),
        (plan.data_parallel_wire, axes["tensor"] * axes["pipeline"] * axes["data"]),
    )
    wires = sum(
        nbytes / (machine.node if span <= machine.devices_per_node else machine.network) for nbytes, span in sent
    )
    return plan.flops / machine.flops * (1 + plan.bubble) + wires


def search(
    config: Config, world_size: int, machine: Hardware, memory: int | None = None, sequences: int | None = None
) -> SearchResult:
    """Return every layout that a start of `world_size` ranks would take and that needs at most `memory` bytes a rank.

    `sequences`: of a step; None: as many as the configuration's own layout has. Raises ConfigError when there is no layout.
    """
    parallel, data = config.parallel_config, config.dataset_config
    if sequences is None:
        try:
            sequences = config.batch_size(parallel.data_parallel or parallel.data_parallel_size(world_size))
        except ConfigError as error:
            raise ConfigError(f"{error}; or give the sequences of a step with --global-batch") from None
    found, too_large = [], []
    for layout in _layouts(config, world_size, sequences):
        try:
            plan = make_plan(layout, world_size, machine.devices_per_node)
        except ConfigError:
            continue  # what a start would refuse
        if memory is not None and plan.memory > memory:
            too_large.append(plan.memory)
        else:
            found.append(Proposal(layout, plan, step_seconds(plan, machine)))
    if not found:
        reason = (
            f"the smallest of {len(too_large)} layouts needs {gib(min(too_large))} a rank, the limit is {gib(memory or 0)}. Take more ranks"
            if too_large
            else f"none shares {sequences} sequences of a step, in micro-batches of {data.batch_size}. Change --global-batch"
        )
        raise ConfigError(f"--search: found no layout of {world_size} ranks: {reason}")
    return SearchResult(tuple(sorted(found, key=order)), sequences, len(too_large))


def order(proposal: Proposal) -> tuple[object, ...]:
    """Return what proposals are sorted by: time, then memory, then bytes, then fewer parts."""
    plan, parallel, training = proposal.plan, proposal.config.parallel_config, proposal.config.training_config
    parts = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size, plan.axes["expert"]
    rest = parallel.virtual_pipeline_model_parallel_size or 1, parallel.sequence_parallel, training.recompute
    return proposal.seconds, plan.memory, plan.sent, *parts, *rest, not training.use_distributed_optimizer


def _layouts(config: Config, world_size: int, sequences: int) -> Iterator[Config]:
    """Yield every layout of the ranks in which each data-parallel rank has whole micro-batches."""
    model, training, data = config.model_config, config.training_config, config.dataset_config
    for tp, pp in product(_divisors(world_size), repeat=2):
        dp = world_size // (tp * pp)
        if dp * tp * pp != world_size or sequences % (dp * data.batch_size) or pp > model.num_layers:
            continue
        micro = replace(data, micro_batch_num=sequences // (dp * data.batch_size))
        for ep, chunks, sequence, recompute, sharded in product(
            [ep for ep in _divisors(dp) if ep == 1 or (model.num_experts and model.num_experts % ep == 0)],
            range(1, model.num_layers // pp + 1) if pp > 1 else (1,),
            (False, True) if tp > 1 else (False,),
            get_args(Recompute),
            (True, False) if dp > 1 else (training.use_distributed_optimizer,),
        ):
            yield replace(
                config,
                dataset_config=micro,
                training_config=replace(training, recompute=recompute, use_distributed_optimizer=sharded),
                parallel_config=replace(
                    config.parallel_config,
                    data_parallel=None if config.parallel_config.data_parallel is None else dp,
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    expert_model_parallel_size=ep,
                    virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
                    sequence_parallel=sequence,
                ),
            )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def best_of_each(proposals: tuple[Proposal, ...]) -> list[Proposal]:
    """Return, in order, the best of those with the same data x tensor x pipeline x expert."""
    best: dict[tuple[int, ...], Proposal] = {}
    for proposal in proposals:
        best.setdefault(tuple(proposal.plan.axes.values()), proposal)
    return list(best.values())


def table(found: SearchResult, world_size: int, machine: Hardware, limit: str | None, top: int) -> list[str]:
    """Return the proposals for people: of each data x tensor x pipeline x expert the best, at most `top`."""
    best = best_of_each(found.proposals)
    names = ("#", "data", "tensor", "pipe", "expert", "virtual", "sequence", "recompute", "optimizer", "micro", "memory", "sent", "bubble",
             "s a step", "survives")  # fmt: skip
    rows = [names, *(_row(number, each, world_size) for number, each in enumerate(best[:top], 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    first = best[0].config
    over = f"; {found.too_large} need more than {limit}" if limit is not None else ""
    keys = {
        f"parallel_config.{name}": getattr(first.parallel_config, name)
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
            "virtual_pipeline_model_parallel_size", "sequence_parallel",
        )
    }  # fmt: skip
    keys |= {
        f"training_config.{name}": getattr(first.training_config, name)
        for name in ("recompute", "use_distributed_optimizer")
    }
    keys["dataset_config.micro_batch_num"] = first.dataset_config.micro_batch_num
    if first.parallel_config.data_parallel is not None:  # the configuration has another, which a start would not take
        keys["parallel_config.data_parallel"] = first.parallel_config.data_parallel
    return [
        f"{world_size} ranks, {found.sequences} sequences a step: {len(found.proposals)} layouts{over}; the best of each data x tensor x"
        " pipeline x expert, fastest first",
        f"computed with {machine.flops / 1e12:g} TFLOP/s a device, {machine.node / 1e9:g} GB/s in a node of"
        f" {machine.devices_per_node}, {machine.network / 1e9:g} GB/s between nodes",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        "",
        "number 1: " + " ".join(f"--{key} {_yaml(value)}" for key, value in keys.items()),
    ]


def _row(number: int, proposal: Proposal, world_size: int) -> tuple[str, ...]:
    plan, parallel, training = proposal.plan, proposal.config.parallel_config, proposal.config.training_config
    return (
        str(number),
        *(str(size) for size in plan.axes.values()),
        str(parallel.virtual_pipeline_model_parallel_size or 1),
        "yes" if parallel.sequence_parallel else "no",
        training.recompute,
        "sharded" if training.use_distributed_optimizer else "whole",
        str(proposal.config.dataset_config.micro_batch_num),
        gib(plan.memory),
        gib(plan.sent),
        f"{plan.bubble:.1%}",
        f"{proposal.seconds:.3g}",
        survived(plan, world_size),
    )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
