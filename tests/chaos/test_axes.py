"""Models that are split over ranks: killed at every point of a step they come back bit for bit, and their checkpoints load
under any other layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.conftest import run_to_end
from tests.chaos.test_kills import assert_equal, published_steps
from tests.unit.trainer.conftest import run_trainings
from tests.unit.trainer.layouts import Axes, assert_state_of, loaded
from ttp.chaos.observed.training_job import Observed, TrainingJob
from ttp.chaos.verdict.timeline import by_step

pytestmark = [pytest.mark.timeout(2400), pytest.mark.long]

STEPS = 12
MICRO_BATCHES = 2
MODEL = {"model_config.num_layers": 4, "model_config.num_query_groups": 2, "model_config.seq_length": 16}
HALVES = {"model_config.num_attention_heads": 2}
"""What the jobs of this folder have beside, and the trainings of `layouts` do not."""


def overrides(axes: Axes) -> list[str]:
    """Return a job's arguments: the same 24 sequences a step in every layout."""
    keys = {
        **MODEL,
        **axes.keys,
        "dataset_config.micro_batch_num": MICRO_BATCHES,
        "dataset_config.batch_size": 24 // MICRO_BATCHES // axes.data,
        "training_config.training_iters": STEPS,
    }
    return [f"--{key}={value}" for key, value in keys.items()]


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


def run(folder: Path, axes: Axes, *more: str, faults: str = "", restarts: int = 3) -> TrainingJob:
    return run_to_end(folder, axes.ranks, *overrides(axes), *more, faults=faults, restarts=restarts, wait_s=800)


def assert_same_curve(job: Observed, other: Observed, within: float = 2e-4) -> None:
    """The same losses and norms to round-off."""
    ours, theirs = by_step(job.metrics()), by_step(other.metrics())
    for step in ours:
        for name in ("loss_value", "grad_norm_value"):
            assert float(ours[step][name]) == pytest.approx(float(theirs[step][name]), rel=within), (step, name)


POINTS = ("backward", "ready", "record", "updating", "done", "gathering")


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_layout_trains_as_data_parallel_and_survives_a_kill_at_every_point_bit_for_bit(
    tmp_path: Path, axes: Axes
) -> None:
    """Six kills, each in another place of a step and of another rank; the job ends as one that nothing happened to."""
    steps = f"--training_config.training_iters={2 * len(POINTS) + 2}"
    whole = run(tmp_path / "whole", axes, steps)
    assert_same_curve(whole, run(tmp_path / "plain", Axes(data=axes.data, experts=axes.experts), steps))
    victims = [(axes.ranks - 1 + 5 * number) % axes.ranks for number in range(len(POINTS))]
    faults = [
        f"kill:rank={victim},step={2 * number + 2},point={point},round={number}"
        for number, (point, victim) in enumerate(zip(POINTS, victims, strict=True))
    ]
    faulted = run(tmp_path / "faulted", axes, steps, faults=";".join(faults), restarts=len(POINTS))
    published = published_steps(faulted)
    assert len(published) == len(POINTS), faulted.console_tail(80)
    for number, (point, step) in enumerate(zip(POINTS, published, strict=True)):
        first = 2 * number + 2
        expected = {"backward": (first - 1,), "ready": (first - 1,)}
        assert step in expected.get(point, (first - 1, first)), (point, published)
    assert_equal(faulted, whole)


@pytest.mark.parametrize("axes", [Axes(data=4), Axes(data=3, pipeline=2), Axes(data=4, experts=4, expert=2)], ids=str)
def test_gradients_that_accumulate_in_shards_survive_a_kill_bit_for_bit(tmp_path: Path, axes: Axes) -> None:
    """While a micro-batch is reduced, when all are, and in the update."""
    points = ("backward", "ready", "updating")
    shard = (
        "--training_config.gradient_accumulation_shard=true",
        f"--training_config.training_iters={2 * len(points) + 2}",
    )
    whole = run(tmp_path / "whole", axes, *shard)
    assert_same_curve(whole, run(tmp_path / "plain", axes, shard[1]))
    faults = [
        f"kill:rank={(axes.ranks - 1 + number) % axes.ranks},step={2 * number + 2},point={point},round={number}"
        for number, point in enumerate(points)
    ]
    faulted = run(tmp_path / "faulted", axes, *shard, faults=";".join(faults), restarts=len(points))
    assert len(published_steps(faulted)) == len(points), faulted.console_tail(80)
    assert_equal(faulted, whole)


def moved(job: TrainingJob, to: Path) -> Path:
    """Give a job's checkpoints to another one, without copying them."""
    to.mkdir(parents=True)
    os.symlink(job.output_dir / "checkpoints", to / "checkpoints")
    return to


def weights_under(tmp_path: Path, job: TrainingJob, layouts: Sequence[Axes], *more: str) -> set[str]:
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


@pytest.mark.parametrize(
    ("axes", "others"),
    [
        (Axes(data=4), [Axes(data=2, tensor=2), Axes(data=2, pipeline=2)]),
        (Axes(data=2, tensor=2), [Axes(data=4), Axes(data=2, tensor=2, pipeline=2)]),
        (Axes(data=2, pipeline=2), [Axes(data=2, tensor=2), Axes(data=3)]),
        (Axes(data=2, tensor=2, pipeline=2), [Axes(data=4), Axes(tensor=2)]),
        (Axes(data=4, experts=4, expert=2), [Axes(data=2, tensor=2, experts=4), Axes(experts=4)]),
    ],
    ids=str,
)
def test_a_dying_gasp_of_any_layout_loads_under_any_other_bit_for_bit(
    tmp_path: Path, axes: Axes, others: list[Axes]
) -> None:
    """Masters and both moments, put together after loading, are what torch alone reads in the files that the survivors wrote."""
    victim = axes.ranks - 1
    faulted = run(tmp_path / "faulted", axes, faults=f"kill:rank={victim},step=5,point=updating")
    step = published_steps(faulted)[0]
    gasp = faulted.output_dir / "checkpoints" / f"iter_{step:07d}"
    folder = tmp_path / "under"
    folder.mkdir()
    layouts = [axes, *others, Axes(experts=axes.experts)]
    done = run_trainings(
        folder, [loaded(str(number), gasp, to, {**MODEL, **HALVES}) for number, to in enumerate(layouts)]
    )
    for result in done.values():
        assert_state_of(result, gasp)


SCALED = (
    "--model_config.compute_dtype=float16",
    f"--training_config.loss_scale={2.0**18}",
    "--training_config.loss_scale_window=2",
    f"--training_config.training_iters={2 * STEPS}",
)
"""A scale that keeps growing until float16 overflows."""


@pytest.mark.parametrize(
    "axes", [Axes(data=2), Axes(data=2, tensor=2), Axes(data=2, pipeline=2), Axes(data=4, experts=4, expert=2)], ids=str
)
def test_kills_around_a_skipped_step_keep_the_loss_scale(tmp_path: Path, axes: Axes) -> None:
    """One rank dies in a step that overflows, another right after it: scales, skips, losses and weights are those of a baseline run."""
    whole = run(tmp_path / "whole", axes, *SCALED)
    lines = by_step(whole.metrics())
    skipped = [step for step, line in sorted(lines.items()) if line["skipped"]]
    trained = [step for step in lines if step not in skipped]
    late = [step for step in skipped if step < 2 * STEPS and any(step > before for before in trained)]
    assert len(late) >= 2 and len(trained) >= STEPS, "the scale was meant to meet its limit again and again"
    first, second = late[0], late[-1]
    faults = (
        f"kill:rank={axes.ranks - 1},step={first},point=updating,round=0;"
        f"kill:rank=0,step={second + 1},point=ready,round=1"
    )
    faulted = run(tmp_path / "faulted", axes, *SCALED, faults=faults)
    published = published_steps(faulted)
    assert published[0] in (first - 1, first) and published[1] in (second, second + 1), (published, skipped)
    assert_equal(faulted, whole)
    ours = by_step(faulted.metrics())
    for name in ("loss_scale", "skipped"):
        assert {step: line[name] for step, line in ours.items()} == {step: line[name] for step, line in lines.items()}
