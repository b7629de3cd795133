"""An optimizer that keeps a part of its state on each rank and sends parameters within its step: protected by copies in memory alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.errors import CheckpointError, ConfigError
from ttp.proto.messages import CommitRecord

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of its TorchScript
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def parts() -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    model = torch.nn.Linear(2, 2)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


@pytest.mark.usefixtures("lone_group")
def test_it_is_refused_without_copies_in_memory() -> None:
    with pytest.raises(ConfigError, match=r"sends parameters within its step .* give ttp.protect copies='memory'"):
        AdoptedOptimizer(*parts())


@pytest.mark.usefixtures("lone_group")
def test_no_rank_finishes_its_step_alone_and_its_state_stays() -> None:
    """Another thread than the training's would wait in a broadcast for ranks that are gone."""
    model, optimizer = parts()
    adopted = AdoptedOptimizer(model, optimizer, copied=True)
    before = [values.clone() for values in model.parameters()]
    model(torch.ones(2)).sum().backward()
    with pytest.raises(CheckpointError, match="step 1: ZeroRedundancyOptimizer needs all ranks to finish it"):
        adopted.roll_forward(CommitRecord(1, 1.0, 1.0, False, 1.0, (0.1,), ()))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert {label.label.partition(":")[0] for label in adopted.shard_groups()} == {
        "whole state",
        "optimizer state of rank 0",
    }
    adopted.close()
