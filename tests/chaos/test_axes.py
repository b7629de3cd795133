"""Models that are split over ranks: killed at every point of a step they come back bit for bit, and their checkpoints load
under any other layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.conftest import run_to_end
from tests.chaos.test_kills import assert_equal, published_steps
from ttp.chaos.job import Job
from ttp.chaos.verdict import by_step

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

STEPS = 12
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Axes:
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    sequence: bool = False
    experts: int = 0
    """Experts of each layer."""
    expert: int = 1
    """Ranks that they are divided over."""

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def arguments(self) -> list[str]:
        """The same eight sequences a step in every layout."""
        at = "--parallel_config."
        given = [
            f"{at}tensor_model_parallel_size={self.tensor}",
            f"{at}pipeline_model_parallel_size={self.pipeline}",
            f"--dataset_config.micro_batch_num={MICRO_BATCHES}",
            f"--dataset_config.batch_size={24 // MICRO_BATCHES // self.data}",
            f"--training_config.training_iters={STEPS}",
            "--model_config.num_layers=4",
            "--model_config.num_query_groups=2",
            "--model_config.seq_length=16",
        ]
        if self.experts:
            given.append(f"--model_config.num_experts={self.experts}")
            given.append(f"{at}expert_model_parallel_size={self.expert}")
        if self.virtual:
            given.append(f"{at}virtual_pipeline_model_parallel_size={self.virtual}")
        return [*given, f"{at}sequence_parallel=true"] if self.sequence else given

    def __str__(self) -> str:
        text = f"dp{self.data}tp{self.tensor}pp{self.pipeline}"
        text += (f"v{self.virtual}" if self.virtual else "") + ("sp" if self.sequence else "")
        return text + (f"ep{self.expert}of{self.experts}" if self.experts else "")


LAYOUTS = (
    Axes(data=2, pipeline=2),
    Axes(data=2, tensor=2, sequence=True),
    Axes(data=2, tensor=2),
    Axes(data=2, pipeline=2, virtual=2),
    Axes(data=3, tensor=2),
    Axes(data=2, tensor=2, pipeline=2, sequence=True),
    Axes(data=4, experts=4, expert=2),
)
TIED = (
    "--model_config.untie_embeddings_and_output_weights=false", "--model_config.position_embedding_type=absolute",
    "--model_config.normalization=LayerNorm", "--model_config.use_bias=true", "--model_config.activation=gelu",
)  # fmt: skip
"""GPT-2's choices."""


def run(folder: Path, axes: Axes, *more: str, faults: str = "", restarts: int = 3) -> Job:
    return run_to_end(folder, axes.ranks, *axes.arguments, *more, faults=faults, restarts=restarts)


def assert_same_curve(job: Job, other: Job, within: float = 2e-4) -> None:
    """The same losses and norms to round-off."""
    ours, theirs = by_step(job.metrics()), by_step(other.metrics())
    for step in ours:
        for name in ("loss_value", "grad_norm_value"):
            assert float(ours[step][name]) == pytest.approx(float(theirs[step][name]), rel=within), (step, name)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_layout_trains_as_data_parallel_and_survives_kills_bit_for_bit(tmp_path: Path, axes: Axes) -> None:
    """A rank of the last stage or slice dies in the middle of its update, rank 0 ready for another one."""
    whole = run(tmp_path / "whole", axes)
    assert_same_curve(whole, run(tmp_path / "plain", Axes(data=axes.data, experts=axes.experts)))
    last = axes.ranks - 1
    faults = f"kill:rank={last},step=4,point=updating,round=0;kill:rank=0,step=8,point=ready,round=1"
    hurt = run(tmp_path / "hurt", axes, faults=faults)
    steps = published_steps(hurt)
    assert len(steps) == 2 and steps[0] in (3, 4) and steps[1] in (7, 8), hurt.console_tail(60)
    assert_equal(hurt, whole)


@pytest.mark.parametrize("point", ["backward", "ready", "record", "updating", "done", "gathering"])
@pytest.mark.parametrize(
    "axes",
    [Axes(data=2, tensor=2, sequence=True), Axes(data=2, pipeline=2), Axes(data=2, tensor=2, pipeline=2)],
    ids=str,
)
def test_a_kill_at_every_point_of_a_step_under_every_layout(tmp_path: Path, axes: Axes, point: str) -> None:
    """Any rank may be the victim; which, the point decides."""
    whole = run(tmp_path / "whole", axes)
    victim = sum(map(ord, point)) % axes.ranks
    hurt = run(tmp_path / "hurt", axes, faults=f"kill:rank={victim},step=5,point={point}")
    assert published_steps(hurt)[0] in (4, 5)
    assert_equal(hurt, whole)


def moved(job: Job, to: Path) -> Path:
    """Give a job's checkpoints to another one, without copying them."""
    to.mkdir(parents=True)
    os.symlink(job.output_dir / "checkpoints", to / "checkpoints")
    return to


def weights_under(tmp_path: Path, job: Job, layouts: Sequence[Axes], *more: str) -> set[str]:
    """Load a job's last checkpoint under other layouts, without another step; return the hashes of the weights."""
    found = set()
    for axes in layouts:
        other = run(moved(job, tmp_path / f"under_{axes}"), axes, *more)
        found.add(str(other.final()["weights_sha256"]))
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_any_layout_loads_under_any_other(tmp_path: Path, tied: bool) -> None:
    """The weights have the same bits whatever the layout that reads them; and the losses go on to round-off."""
    more = (*TIED, "--training_config.save_interval=6") if tied else ("--training_config.save_interval=6",)
    layouts = [
        Axes(), Axes(data=2), Axes(data=2, tensor=2), Axes(data=2, pipeline=2), Axes(data=2, tensor=2, pipeline=2),
    ]  # fmt: skip
    for axes in layouts[2:]:
        job = run(tmp_path / f"from_{axes}", axes, *more)
        folder = tmp_path / f"{axes}"
        folder.mkdir()
        assert weights_under(folder, job, layouts, *more) == {str(job.final()["weights_sha256"])}
