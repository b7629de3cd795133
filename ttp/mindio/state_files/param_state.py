"""The file of Megatron's distributed optimizer (`distrib_optim.pt`, tag 23.06), read and written.

    {model chunk: {gradient type: {"param", "exp_avg", "exp_avg_sq"}}}

Each entry is one FP32 vector with every parameter of the chunk, in the order of its gradient buffer: the last parameter first. The
vector is padded to a multiple of the data-parallel size. Hyper-parameters, step count and loss scale are in the optimizer's
`state_dict()`, not here. Owns this form. Never talks to another rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ttp.checkpoint.format.keys import model_key, optim_state_key
from ttp.errors import CheckpointMismatch
from ttp.mindio.state_files.whole_state import WholeState

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_PADDING = 1 << 16
"""A vector that is longer than its parameters by this much is another model's: padding is less than the data-parallel size."""

Named = Sequence[tuple[str, torch.nn.Parameter]]


def save(path: str | Path, state: WholeState, chunks: Sequence[Named], ranks: int) -> None:
    """Write `state`. chunks: name and parameter of each model chunk, in the model's order. ranks: the data-parallel size."""
    found: dict[int, dict[torch.dtype, dict[str, torch.Tensor]]] = {}
    for number, named in enumerate(chunks):
        found[number] = {}
        for dtype, members in _by_buffer(named).items():
            total = sum(param.numel() for _, param in members)
            vectors = {key: torch.zeros(-(-total // ranks) * ranks) for key in ("param", *MOMENTS)}
            for name, start, stop, _ in _places(members):
                vectors["param"][start:stop] = state.master(name).reshape(-1)
                for key in MOMENTS:
                    value = state.tensors.get(optim_state_key(name, key))
                    if value is None:
                        raise CheckpointMismatch(
                            f"invalid optimizer for {path}: got no {key!r} of {name!r}, expected Adam's moments. Train without"
                            " --use-distributed-optimizer"
                        )
                    vectors[key][start:stop] = value.reshape(-1)
            found[number][dtype] = vectors
    torch.save(found, path)


def load(path: str | Path, chunks: Sequence[Named], steps: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the tensors of `WholeState`. steps: of each parameter, how many updates its moments have seen. Raises CheckpointMismatch."""
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    tensors: dict[str, torch.Tensor] = {}
    for number, named in enumerate(chunks):
        buffers = list(found[number].values()) if isinstance(found, Mapping) and number in found else []
        expected = list(_by_buffer(named).values())
        if len(buffers) != len(expected):
            raise CheckpointMismatch(
                f"invalid {path}: got {len(buffers)} buffers of model chunk {number}, expected {len(expected)}. Load it with the"
                " pipeline layout and gradient types of the run that wrote it"
            )
        for vectors, members in zip(buffers, expected, strict=True):
            _check(path, number, vectors, sum(param.numel() for _, param in members))
            for name, start, stop, shape in _places(members):
                tensors[model_key(name)] = vectors["param"][start:stop].view(shape)
                for key in MOMENTS:
                    tensors[optim_state_key(name, key)] = vectors[key][start:stop].view(shape)
                tensors[optim_state_key(name, "step")] = torch.tensor(float(steps[name]))
    return tensors


def _check(path: str | Path, number: int, vectors: Any, total: int) -> None:
    for key in ("param", *MOMENTS):
        vector = vectors.get(key) if isinstance(vectors, Mapping) else None
        if not isinstance(vector, torch.Tensor) or not total <= vector.numel() < total + MOST_PADDING:
            got = f"{vector.numel()} elements" if isinstance(vector, torch.Tensor) else type(vector).__name__
            raise CheckpointMismatch(
                f"invalid {path}: got {got} as {key!r} of model chunk {number}, expected {total} and padding. Load it into the"
                " model that wrote it, or its weights only, then call optimizer.reload_model_params()"
            )


def _by_buffer(named: Named) -> dict[torch.dtype, list[tuple[str, torch.nn.Parameter]]]:
    """Divide the parameters by the gradient buffer that they are in: `main_grad`'s type, or their own."""
    found: dict[torch.dtype, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in named:
        found.setdefault(getattr(param, "main_grad", param).dtype, []).append((name, param))
    return found


def _places(members: Named) -> list[tuple[str, int, int, torch.Size]]:
    """Return name, start, stop and shape of each parameter in its buffer, which is filled from its end."""
    stop = sum(param.numel() for _, param in members)
    found = []
    for name, param in members:
        found.append((name, stop - param.numel(), stop, param.shape))
        stop -= param.numel()
    return found
