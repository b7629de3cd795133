"""The state of one model part in one process's memory: what one of a trainer's own checkpoint files holds.

Owns its form, its gathering from the ranks of the part for a periodic checkpoint, and its reading from the shares that writers
left at a fault. Never changes the optimizer, except in `load`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.file_index import Contents
from ttp.checkpoint.format.keys import model_key, nested_path, optim_state_key
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.reader import read_into
from ttp.errors import CheckpointMismatch
from ttp.exchange.json_collectives import exchange_json, world
from ttp.optim.replica_optimizer import TTPReplicaOptimizer

FORM = 2
"""Version of the mapping that `WholeState.to_dict` returns; 1 has the moments as `state`."""


@dataclass(frozen=True, slots=True)
class WholeState:
    """Every tensor of a model part's state of `step`, whole, on the CPU."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    """By the checkpoint's key: `model.<name>` (FP32 master), `optim.state.<name>.<key>`."""
    host: Mapping[str, Any]
    """Loss scale and hyper-parameters, as the optimizer's `host_state`."""

    def master(self, name: str) -> torch.Tensor:
        """Return the FP32 values of a parameter."""
        return self.tensors[model_key(name)]

    def renamed(self, names: Mapping[str, str]) -> WholeState:
        """Return the same state with other names of the parameters; those that `names` does not have stay."""
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in self.tensors.items():
            match nested_path(key):
                case ("model", str(name)):
                    tensors[model_key(names.get(name, name))] = tensor
                case (_, _, str(name), str(part)):
                    tensors[optim_state_key(names.get(name, name), part)] = tensor
        return WholeState(self.step, tensors, self.host)

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
        return {"ttp_form": FORM, "step": self.step, "masters": masters, "moments": state, "host": dict(self.host)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> WholeState:
        """Take what `to_dict` returned. Raises CheckpointMismatch for anything else."""
        form = found.get("ttp_form")
        if form not in (1, FORM):
            raise CheckpointMismatch(
                f"the optimizer's part of the checkpoint has the entries {sorted(map(str, found))[:8]}, expected what"
                " ttp.mindio.modellink.TTPReplicaOptimizer.state_dict() returns, or the whole state of torch's or Megatron's optimizer; of"
                " any other load the model's weights only (without the optimizer's state, then optimizer.reload_model_params())"
            )
        tensors = {model_key(name): tensor for name, tensor in found["masters"].items()}
        for name, parts in found["state" if form == 1 else "moments"].items():
            tensors.update({optim_state_key(name, part): tensor for part, tensor in parts.items()})
        return cls(int(found["step"]), tensors, found["host"])


def part_tensors(optimizer: TTPReplicaOptimizer, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return key and shape of every tensor of the model part with these parameters."""
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in optimizer.expected_tensors().items():
        path = nested_path(key)
        if (path[1] if path[0] == "model" else path[2]) in names:
            found[key] = shape
    return found


def load_whole(state: WholeState, optimizer: TTPReplicaOptimizer, names: Collection[str]) -> None:
    """Give every rank its shards of its part's `state` (all ranks call). Raises CheckpointMismatch before anything is changed."""
    where = f"the optimizer's part of the checkpoint of step {state.step}"
    for key, shape in sorted(part_tensors(optimizer, names).items()):
        got = state.tensors.get(key)
        if got is None or tuple(got.shape) != tuple(shape):
            found_as = "is not there" if got is None else f"has shape {tuple(got.shape)}"
            raise CheckpointMismatch(
                f"{where}: {key!r} {found_as}, expected shape {tuple(shape)}; is it another model's?"
            )
    for target in optimizer.load_begin():
        source = state.tensors[target.key].reshape(-1)
        target.values.copy_(source[target.start : target.start + target.values.numel()])
    optimizer.load_end(state.step, dict(state.host))


def read_whole(
    folder: Path, contents: Contents, step: int, host: Mapping[str, Any], expected: Collection[str]
) -> WholeState:
    """Read the tensors with the keys `expected` that `contents` lists from `folder`. Raises CorruptCheckpoint."""
    listed = {entry.key: entry for entry in reversed(contents.tensors) if entry.key in expected}
    tensors = {key: torch.empty(entry.shape, dtype=dcp.dtype_of(entry.dtype)) for key, entry in listed.items()}
    targets = [HeldTensor(key, tuple(tensor.shape), 0, tensor.view(-1)) for key, tensor in tensors.items()]
    read_into(folder, targets, dcp.metadata_of(contents))
    return WholeState(step, tensors, host)


def gather_whole(optimizer: TTPReplicaOptimizer, names: Collection[str], group: Any, writer: int) -> WholeState | None:
    """Bring each model part's state together on its writer (the ranks of `group` call, between two steps); None on the others.

    group: the ranks that share parameters (None: all). writer: the rank that writes the file of this rank's part.
    """
    rank, _ = world()
    optimizer.finish_gather()
    optimizer.lane.drain()
    expected = part_tensors(optimizer, names) if rank == writer else {}
    held = {(target.key, target.start): target for target in optimizer.load_targets()}
    pieces = [
        (key, start, each.values.numel(), dcp.dtype_name(each.values.dtype)) for (key, start), each in held.items()
    ]
    gathered = exchange_json([rank, pieces, sorted(expected)], optimizer.device, group)
    wishes = [(other, frozenset(keys)) for other, _, keys in gathered if keys]
    tensors = {key: torch.empty(shape, dtype=torch.float32) for key, shape in expected.items()}
    seen: set[tuple[str, int]] = set()
    for holder, its_pieces, _ in gathered:
        for key, start, numel, dtype in its_pieces:
            if (key, start) in seen:
                continue
            seen.add((key, start))
            for receiver in (other for other, keys in wishes if key in keys):
                if rank == holder != receiver:
                    dist.send(held[key, start].values.contiguous(), dst=receiver)
                elif rank == receiver:
                    here = rank == holder
                    values = held[key, start].values if here else _received(numel, dtype, holder, optimizer.device)
                    tensors[key].view(-1)[start : start + numel].copy_(values)
    return WholeState(optimizer.current_step, tensors, optimizer.host_state()) if rank == writer else None


def _received(numel: int, dtype: str, rank: int, device: torch.device) -> torch.Tensor:
    values = torch.empty(numel, dtype=dcp.dtype_of(dtype), device=device)
    dist.recv(values, src=rank)
    return values
