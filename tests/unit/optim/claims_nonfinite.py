"""Claims about losses and gradients that are not finite on one rank. Each function runs on every rank."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ttp
from tests.unit.optim.claims_faults import kept_lines
from tests.unit.optim.material import Net, everyone, job, make, make_net, tokens
from ttp.checkpoint.format.manifest import read_manifest
from ttp.config import Settings
from ttp.errors import NonFinite
from ttp.optim.replica_optimizer import LossScale, TTPReplicaOptimizer


def _skips(optimizer: TTPReplicaOptimizer, net: Net, steps: int, *, sums: bool) -> list[list[str]]:
    """Do steps with a NaN on the last rank; return each rank's lines."""
    with kept_lines() as lines:
        for number in range(steps):
            optimizer.zero_grad()
            loss = net(tokens(number)) * (float("nan") if job.rank == job.world - 1 else 1.0)
            optimizer.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
            assert optimizer.step(sums=[loss.item()] if sums else None).skipped
    return everyone([line for line in lines if "finite" in line])


def a_step_that_is_skipped_is_reported_with_rank_and_step() -> None:
    """By the rank whose loss it is, where step() is given the loss; else by those whose shards have it, or by rank 0 for many. The first one
    and the tenth; with a dynamic loss scale from the step on at which the scale cannot be the cause."""
    culprit, net = job.world - 1, make_net()
    optimizer = make(net)
    said = _skips(optimizer, net, 11, sums=True)
    assert [len(lines) for lines in said] == [0] * culprit + [2], said
    first, tenth = said[culprit]
    assert first.startswith(f"step 1: the sums given to step() by rank {culprit} are [nan]: expected finite"), said
    assert tenth.startswith("step 10: ") and "10 skipped so far" in tenth
    optimizer.close()
    optimizer = make(net)
    lines = [line for own in _skips(optimizer, net, 2, sums=False) for line in own]
    where = r"step 1: the gradient is not finite in the shards of (rank \d|\d+ ranks): "
    assert 1 <= len(lines) <= 4 and all(re.match(where, line) for line in lines), lines
    optimizer.close()
    optimizer = make(net, loss_scale=LossScale(4.0))
    said = _skips(optimizer, net, 4, sums=True)
    assert [line.partition(":")[0] for line in said[culprit]] == ["step 3"], "the scale is 4, 2, 1, 0.5"
    optimizer.close()


class Scored(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output.square().mean()


def _protected(kind: str, clip: ttp.ClipNorm | None, choice: str, folder: Path) -> tuple[list[str], int, bool, str]:
    """Train two steps, the second with a NaN on the last rank; return this rank's lines, the steps done, whether the second changed the
    weights, and what stopped it."""
    torch.manual_seed(3)
    model = Scored()
    wrapped: nn.Module = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (job.world,)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    options = {"clip": clip, "on_nonfinite": choice, "settings": Settings(enable=False)}
    guard = ttp.protect(wrapped, optimizer, save_dirs=[folder], **options)  # type: ignore[arg-type]
    stopped, changed = "", False
    with kept_lines() as lines:
        for step in (1, 2):
            x = torch.full((2, 4), float(step))
            if step == 2 and job.rank == job.world - 1:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            wrapped(x).backward()
            before = _local(model).clone()
            try:
                optimizer.step()
            except NonFinite as error:
                stopped = str(error)
            changed = not torch.equal(before, _local(model))
    done = guard.step
    if not stopped:
        finite = read_manifest(Path(guard.save())).finite
        assert finite is (not changed), (kind, clip, choice, finite)
        guard.close()
    else:
        ttp.current_session().close()
    return [line for line in lines if "finite" in line], done, changed, stopped


def _local(model: Scored) -> torch.Tensor:
    weight: torch.Tensor = model.layer.weight
    local: torch.Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.detach()


def each_choice_holds_under_ddp_and_fsdp_in_both_modes() -> None:
    """The NaN is on one rank: what follows is so on all, and that rank warns."""
    logging.getLogger("ttp").setLevel(logging.WARNING)
    culprit = job.world - 1
    for kind in ("ddp", "fsdp"):
        for clip in (None, ttp.ClipNorm(1.0)):
            for choice in ("warn", "skip", "stop"):
                folder = everyone(tempfile.mkdtemp() if job.rank == 0 else "")[0]
                reported = everyone(_protected(kind, clip, choice, Path(folder)))
                case = (kind, clip, choice, reported)
                lines, done, changed, stopped = zip(*reported, strict=True)
                skips = choice == "skip" or clip is not None
                assert set(done) == {1 if choice == "stop" else 2}, case
                assert set(changed) == {choice != "stop" and not skips}, case
                assert all(("(on_nonfinite='stop')" in text) is (choice == "stop") for text in stopped), case
                if choice != "stop":
                    assert [len(own) for own in lines] == [0] * culprit + [1], case
                    what = "the step is skipped" if skips else "training continues with it"
                    assert lines[culprit][0].startswith(f"step 2: the loss of rank {culprit} is not finite; {what}"), (
                        case
                    )
                if job.rank == 0:
                    shutil.rmtree(folder)
