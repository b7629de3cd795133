"""What a process in a lost one's place is given by the ranks that hold the same, under `ttp.protect`: the model's parameters and buffers, the optimizer's state,
averages, and how DistributedDataParallel has its gradients in buckets.

Owns where that can be done, and the transfer. The trainer's host state comes with the session's (`ttp.regroup.reentry`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ttp.adopt.adopted_state import AdoptedState
from ttp.adopt.megatron import MegatronState
from ttp.errors import CheckpointError
from ttp.exchange.json_collectives import exchange_json, world
from ttp.groups.polled_wait import wait_for
from ttp.regroup.wrappers import buckets, take_buckets, why_not_replaced
from ttp.text.wording import ranks_text


def why_not_filled(model: torch.nn.Module, state: AdoptedState, unsaved: Collection[str]) -> str:
    """Return why this cannot be done, the same on all ranks; empty: it can. `unsaved`: settings of param groups that the host state lacks."""
    if isinstance(state, MegatronState):
        return "Megatron-Core keeps process groups of its own"
    if state.device.type != "cpu":
        return f"with ttp.protect it was never tried on {state.device.type}"
    if alone := [rank for rank, twins in enumerate(state.twins) if len(twins) == 1]:
        return f"no other rank holds the same as {ranks_text(alone)}"
    if unsaved:
        return f"settings of param groups that are not plain values: {', '.join(sorted(unsaved))}"
    return str(getattr(model, "why_not_in_place", "")) or why_not_replaced(model)


def fill(model: torch.nn.Module, state: AdoptedState, replaced: Collection[int]) -> None:
    """Give each rank in `replaced`, which holds nothing, what the first rank has that stays and holds the same (a collective over WORLD). Raises
    CheckpointError: there is none, or the two would not understand each other."""
    rank, _ = world()
    givers = {new: _giver(state, new, replaced) for new in sorted(replaced)}
    memory = state.memory()
    kinds = {key: [str(tensor.dtype), tensor.numel()] for key, tensor in memory.items()}
    laid = buckets(model) if rank in givers.values() else []
    known: list[Any] = exchange_json([kinds, laid], state.device)
    works = []
    for new, giver in givers.items():
        if known[new][0] != known[giver][0]:
            raise CheckpointError(
                f"rank {new}, which is new, has other tensors than rank {giver}, which holds the same"
            )
        if rank == new:
            take_buckets(model, known[giver][1])
        if rank in (new, giver):
            move, peer = (dist.irecv, giver) if rank == new else (dist.isend, new)
            works += [move(memory[key], peer) for key in sorted(memory)]
    wait_for(works)


def _giver(state: AdoptedState, new: int, replaced: Collection[int]) -> int:
    giver = next((twin for twin in state.twins[new] if twin not in replaced), None)
    if giver is None:
        raise CheckpointError(f"no rank that stays holds what rank {new} held")
    return giver
