"""The whole state of an optimizer in one process's memory: what a trainer's own checkpoint file holds.

Owns its form, its gathering from all ranks for a periodic checkpoint, and its reading from the shares that writers left at
a fault. Never changes the optimizer, except in `load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttp.checkpoint import dcp, load
from ttp.checkpoint.contents import Contents
from ttp.checkpoint.held import HeldTensor
from ttp.checkpoint.keys import model_key, nested_path, optim_state_key
from ttp.errors import CheckpointMismatch
from ttp.exchange import exchange_json, world
from ttp.optim.replica_optimizer import TTPReplicaOptimizer

FORM = 1
"""Version of the mapping that `WholeState.to_dict` returns."""


@dataclass(frozen=True, slots=True)
class WholeState:
    """Every tensor of the state of `step`, whole, on the CPU."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    """By the checkpoint's key: `model.<name>` (FP32 master), `optim.state.<name>.<key>`."""
    host: Mapping[str, Any]
    """Loss scale and hyper-parameters, as the optimizer's `host_state`."""

    def master(self, name: str) -> torch.Tensor:
        """Return the FP32 values of a parameter."""
        return self.tensors[model_key(name)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, numbers and tensors: `torch.load(weights_only=True)` reads them back."""
        masters: dict[str, torch.Tensor] = {}
        state: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in self.tensors.items():
            match nested_path(key):
                case ("model", str(name)):
                    masters[name] = tensor
                case (_, _, str(name), str(part)):
                    state.setdefault(name, {})[part] = tensor
        return {"ttp_form": FORM, "step": self.step, "masters": masters, "state": state, "host": dict(self.host)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> WholeState:
        """Take what `to_dict` returned. Raises CheckpointMismatch for anything else."""
        if found.get("ttp_form") != FORM:
            raise CheckpointMismatch(
                f"the optimizer's part of the checkpoint has the entries {sorted(map(str, found))[:8]}: wanted what"
                " ttp.mindio.modellink.TTPReplicaOptimizer.state_dict() returns; a checkpoint that another optimizer wrote"
                " gives the model's weights only (load without the optimizer's state, then optimizer.reload_model_params())"
            )
        tensors = {model_key(name): tensor for name, tensor in found["masters"].items()}
        for name, parts in found["state"].items():
            tensors.update({optim_state_key(name, part): tensor for part, tensor in parts.items()})
        return cls(int(found["step"]), tensors, found["host"])


def load_whole(state: WholeState, optimizer: TTPReplicaOptimizer) -> None:
    """Give every rank its shards of `state` (all ranks call). Raises CheckpointMismatch before anything is changed."""
    expected = optimizer.expected_tensors()
    where = f"the optimizer's part of the checkpoint of step {state.step}"
    for key, shape in sorted(expected.items()):
        got = state.tensors.get(key)
        if got is None or tuple(got.shape) != tuple(shape):
            told = "is not there" if got is None else f"has shape {tuple(got.shape)}"
            raise CheckpointMismatch(f"{where}: {key!r} {told}, wanted shape {tuple(shape)}; is it another model's?")
    for target in optimizer.load_begin():
        source = state.tensors[target.key].reshape(-1)
        target.values.copy_(source[target.start : target.start + target.values.numel()])
    optimizer.load_end(state.step, dict(state.host))


def read_whole(folder: Path, contents: Contents, step: int, host: Mapping[str, Any]) -> WholeState:
    """Read all that `contents` lists from `folder`, where those files lie. Raises CorruptCheckpoint."""
    tensors = {
        entry.key: torch.empty(entry.shape, dtype=dcp.dtype_of(entry.dtype)) for entry in reversed(contents.tensors)
    }
    targets = [HeldTensor(key, tuple(tensor.shape), 0, tensor.view(-1)) for key, tensor in tensors.items()]
    load.read_into(folder, targets, dcp.metadata_of(contents))
    return WholeState(step, tensors, host)


def gather_whole(optimizer: TTPReplicaOptimizer) -> WholeState | None:
    """Bring the state together on rank 0 (all ranks call, between two steps); None on the others."""
    rank, _ = world()
    optimizer.finish_gather()
    optimizer.drain()
    holdings = optimizer.holdings()
    told = exchange_json({group: _table(held) for group, held in holdings.items()}, optimizer.device)
    holders = {group: [r for r, groups in enumerate(told) if group in groups] for groups in told for group in groups}
    tensors: dict[str, torch.Tensor] = {}
    if rank == 0:
        for key, shape in optimizer.expected_tensors().items():
            tensors[key] = torch.empty(shape, dtype=torch.float32)
    for group, ranks in sorted(holders.items()):
        if rank == 0:
            held = holdings.get(group)
            for number, (key, start, numel, dtype) in enumerate(told[ranks[0]][group]):
                values = (
                    held[number].values if held is not None else _received(numel, dtype, ranks[0], optimizer.device)
                )
                tensors[key].view(-1)[start : start + numel].copy_(values)
        elif rank == ranks[0]:
            for tensor in holdings[group]:
                dist.send(tensor.values.contiguous(), dst=0)
    return WholeState(optimizer.current_step, tensors, optimizer.host_state()) if rank == 0 else None


def _table(held: Sequence[HeldTensor]) -> list[tuple[str, int, int, str]]:
    return [(each.key, each.start, each.values.numel(), dcp.dtype_name(each.values.dtype)) for each in held]


def _received(numel: int, dtype: str, rank: int, device: torch.device) -> torch.Tensor:
    values = torch.empty(numel, dtype=dcp.dtype_of(dtype), device=device)
    dist.recv(values, src=rank)
    return values
