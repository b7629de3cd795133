"""A small model's state, cut over any number of holders, saved and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ttp.checkpoint.format import tiling
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.publish import publish
from ttp.checkpoint.reader import read_into
from ttp.checkpoint.write import write_share
from ttp.proto.messages import Cause, CauseKind, CommitRecord, ShareResult

CAUSE = Cause(CauseKind.EXITED, (2,), "signal SIGKILL")


@dataclass(frozen=True)
class Job:
    """The whole state of a model, and how holders hold it."""

    tensors: Mapping[str, torch.Tensor]

    def held(self) -> list[HeldTensor]:
        return [HeldTensor(key, tuple(t.shape), 0, t.detach().reshape(-1)) for key, t in self.tensors.items()]

    def shares(self, holders: int) -> list[list[HeldTensor]]:
        """Cut by bytes, at any element."""
        return tiling.split_parts(self.held(), holders)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(t.shape) for key, t in self.tensors.items()}

    def write(self, directory: Path, tmp_name: str, holders: int) -> list[ShareResult]:
        return [write_share(directory, tmp_name, rank, share, {}) for rank, share in enumerate(self.shares(holders))]

    def publish(self, directory: Path, tmp_name: str, results: list[ShareResult], step: int, **fields: Any) -> Path:
        given: dict[str, Any] = {
            "cause": CAUSE,
            "record": CommitRecord(step, 1.5, 0.7, False, 1024.0, (3e-4,), (0.1,)),
            "state": {"optimizer": {"param_groups": []}, "trainer": {"samples": step * 8}},
            "layout": {"dp": len(results)},
            "expected": self.shapes(),
        }
        return Path(publish(directory, tmp_name, step=step, results=results, **(given | fields)))

    def save(self, directory: Path, step: int, holders: int = 3, attempt: str = "a", **fields: Any) -> Path:
        tmp_name = f"iter_{step:07d}_tmp_{attempt}"
        return self.publish(directory, tmp_name, self.write(directory, tmp_name, holders), step, **fields)

    def read(self, path: Path, holders: int = 1) -> dict[str, torch.Tensor]:
        """Read it back by `holders` ranks, each its own part, into memory that held other values."""
        blank = {key: torch.full_like(t, 77) for key, t in self.tensors.items()}
        for share in tiling.split_parts(Job(blank).held(), holders):
            read_into(path, share)
        return blank

    def assert_equal(self, other: Mapping[str, torch.Tensor]) -> None:
        assert other.keys() == self.tensors.keys()
        for key, t in self.tensors.items():
            assert torch.equal(other[key].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)), key

    def later(self) -> Job:
        """The state some steps on."""
        return replace(self, tensors={key: (t + 1).to(t.dtype) for key, t in self.tensors.items()})


@pytest.fixture
def job() -> Job:
    return make_job()


def make_job() -> Job:
    """Return tensors of a small model and its optimizer."""
    g = torch.Generator().manual_seed(7)
    shapes = {
        "embed": (13, 6),
        "layers.0.w": (5, 7, 3),
        "layers.0.b": (5,),
        "norm": (1, 1, 9),
        "scale": (),
        "none": (0, 4),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=g)
        tensors[f"optim.state.{name}.exp_avg"] = torch.randn(shape, generator=g, dtype=torch.float64)
        tensors[f"optim.state.{name}.step"] = torch.tensor(42.0)
    tensors["model.half"] = torch.randn(31, generator=g).to(torch.bfloat16)
    tensors["model.flags"] = torch.rand(17, generator=g) > 0.5
    return Job(tensors)
