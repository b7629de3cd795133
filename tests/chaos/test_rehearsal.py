"""Jobs whose ranks leave `train`, make their process groups again and enter it again: bits as if they never had, and what cannot be entered again is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, run_to_end
from tests.chaos.launching import Launch
from tests.chaos.test_axes import overrides
from tests.chaos.test_kills import assert_equal
from tests.unit.trainer.layouts import Axes
from ttp.chaos.observed.training_job import TrainingJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

EVERY = "every:3"
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = (
    Axes(data=3),
    Axes(data=4),
    Axes(data=2, tensor=2, sequence=True),
    Axes(data=2, pipeline=2),
    Axes(data=2, pipeline=2, virtual=2),
    Axes(data=4, experts=4, expert=2),
    Axes(data=2, tensor=2, pipeline=2),
)
TIED = "--model_config.untie_embeddings_and_output_weights=false"


def console(job: TrainingJob) -> str:
    return (job.output_dir / "console.log").read_text(errors="replace")


def entered_again(text: str) -> int:
    """Return how often the end of a job says that train was exited and entered again."""
    return sum(int(count) for count in re.findall(r"exited and entered again (\d+) times, with equal results", text))


def test_a_job_that_is_killed_while_it_rehearses_ends_with_the_baselines_bits(
    tmp_path: Path, whole_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step that is to be computed twice; where within it: `test_a_death_at_any_moment_of_a_rehearsal_costs_nothing`."""
    whole = whole_job(2)
    monkeypatch.setenv("TTP_REHEARSE", EVERY)
    job = run_to_end(tmp_path / "rehearsed", 2, faults="kill:rank=1,step=9,point=backward")
    assert_equal(job, whole)
    text = console(job)
    assert "rehearsal: step 6 was computed twice with equal results" in text and entered_again(text) >= 2


@pytest.mark.long
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_layout_gives_the_baselines_bits(tmp_path: Path, axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (*overrides(axes), *([TIED] if axes.pipeline > 1 else []))
    whole = run_to_end(tmp_path / "whole", axes.ranks, *given)
    monkeypatch.setenv("TTP_REHEARSE", EVERY)
    job = run_to_end(tmp_path / "rehearsed", axes.ranks, *given)
    assert_equal(job, whole)
    assert entered_again(console(job)) == 4


LOOP = """
import torch
import torch.distributed as dist
import ttp

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard = ttp.protect(model, optimizer, save_dirs=[str(out / "checkpoints")], on_data_mismatch=sys.argv[2])
batches = iter([torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(50)])

@ttp.ttp_to_persist
def train():
    for step in range(guard.step + 1, 11):
        BATCH
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    guard.save()

train()
note("weights", sum(p.double().sum() for p in model.parameters()).item().hex())
guard.close()
dist.destroy_process_group()
"""
DYING = """
seen = []
def die(moment):
    if rank == 1 and start == "0" and moment == sys.argv[3] and step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
guard.session.regrouping.on_regroup(lambda successor: die("groups made"))
"""
"""Before train: rank 1 dies at one moment of step 6's rehearsal."""
DYING_STEP = """        seen.append(step)
        die("first try" if seen.count(step) == 1 else "second try")
        try:
            optimizer.step()
        except BaseException:
            die("on the way out")
            raise
"""
SCALED = """
import torch
import torch.distributed as dist
import ttp

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
scaler = torch.amp.GradScaler("cpu")
guard = ttp.protect(model, optimizer, schedulers=[scheduler], state={"scaler": scaler}, save_dirs=[str(out / "checkpoints")])

@ttp.ttp_to_persist
def train():
    for step in range(guard.step + 1, 13):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if step == 8 and rank == 1 and start == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    guard.save()

train()
note("weights", sum(p.double().sum() for p in model.parameters()).item().hex())
note("rate", scheduler.get_last_lr()[0].hex())
guard.close()
dist.destroy_process_group()
"""
OUTSIDE = LOOP.replace("BATCH", "x = next(batches)")
OF_THE_STEP = LOOP.replace("BATCH", "x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))")


@pytest.mark.long
def test_a_loop_that_begins_from_the_step_can_be_entered_again_and_an_iterator_from_outside_is_named(
    tmp_path: Path,
) -> None:
    """By the fingerprint of the batch where that is an error, else by another result of the step. Once no new step was made, there is no restart."""
    results = {}
    for name, every in (("whole", ""), ("rehearsed", EVERY)):
        out = tmp_path / name
        out.mkdir()
        with Launch(
            out, OF_THE_STEP, "--nproc-per-node", "2", environ={"TTP_REHEARSE": every}, arguments=("error",)
        ) as job:
            assert job.wait() == 0, job.text
            results[name] = job.read("weights-0-0")
            assert entered_again(job.text) == (3 if every else 0)
    assert results["whole"] == results["rehearsed"]
    for choice, named in (
        ("error", "the model was called with another batch in step 3"),
        ("warn", "step 3 gave another result"),
    ):
        out = tmp_path / choice
        out.mkdir()
        with Launch(out, OUTSIDE, "--nproc-per-node", "2", environ={"TTP_REHEARSE": EVERY}, arguments=(choice,)) as job:
            assert job.wait() == 1, job.text
            assert named in job.text and "not restarting: " in job.text and "no restart: " in job.text
            job.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["first try", "on the way out", "groups made", "second try"])
def test_a_death_at_any_moment_of_a_rehearsal_costs_nothing(tmp_path: Path, moment: str) -> None:
    """Before READY, between the step's being given up and new groups, behind those, and before READY the second time."""
    script = OF_THE_STEP.replace("@ttp.ttp_to_persist", DYING + "\n@ttp.ttp_to_persist")
    script = script.replace("def train():", "def train():\n    global step").replace(
        "        optimizer.step()\n", DYING_STEP
    )
    results = []
    for name, every in (("whole", ""), ("rehearsed", EVERY)):
        out = tmp_path / name
        out.mkdir()
        arguments = ("error", moment if every else "")
        with Launch(out, script, "--nproc-per-node", "2", environ={"TTP_REHEARSE": every}, arguments=arguments) as job:
            assert job.wait() == 0, job.text
            (weights,) = job.notes("weights-0")
            results.append(job.read(weights))
            assert ("; no step lost" in job.text and weights == "weights-0-1") == bool(every), job.text
    assert results[0] == results[1]


@pytest.mark.long
@pytest.mark.parametrize("every", ["every:1", "every:2"])
def test_schedules_and_scaled_gradients_are_those_of_a_job_without_rehearsals(tmp_path: Path, every: str) -> None:
    """A schedule that recurs and a GradScaler with its unscale_, in steps one after the other; then a kill and a restart."""
    results = []
    for name, chosen in (("whole", ""), ("rehearsed", every)):
        out = tmp_path / name
        out.mkdir()
        with Launch(out, SCALED, "--nproc-per-node", "2", environ={"TTP_REHEARSE": chosen}) as job:
            assert job.wait() == 0, job.text
            results.append([job.read(f"{note}-0-1") for note in ("weights", "rate")])
            assert bool(entered_again(job.text)) == bool(chosen), job.text
    assert results[0] == results[1]


@pytest.mark.long
def test_an_optimizer_in_parts_has_its_group_renewed(tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer sends its parts within its step."""
    parts = OF_THE_STEP.replace(
        "torch.optim.AdamW(model.parameters(), lr=1e-2)",
        "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)",
    )
    parts = parts.replace("import ttp\n", "import torch.distributed.optim\nimport ttp\n").replace(
        "save_dirs=", "copies='memory', save_dirs="
    )
    results = []
    for name, every in (("whole", ""), ("rehearsed", EVERY)):
        out = tmp_path / name
        out.mkdir()
        with Launch(out, parts, "--nproc-per-node", "2", environ={"TTP_REHEARSE": every}, arguments=("error",)) as job:
            assert job.wait() == 0, job.text
            results.append(job.read("weights-0-0"))
    assert results[0] == results[1] and entered_again(job.text) == 3


@pytest.mark.long
def test_a_function_without_the_decorator_is_not_left_and_the_end_says_so(tmp_path: Path) -> None:
    bare = OF_THE_STEP.replace("@ttp.ttp_to_persist", "")
    with Launch(tmp_path, bare, "--nproc-per-node", "1", environ={"TTP_REHEARSE": EVERY}, arguments=("error",)) as job:
        assert job.wait() == 0, job.text
        assert "rehearsal: no step was computed twice (TTP_REHEARSE=every:3): begin the session before" in job.text


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "script", "given"),
    [
        (2, "ddp/train.py", ("--epochs", "2", "--clip", "1", "--ema", "0.9", "--optimizer", "SGD")),
        (3, "ddp/train.py", ("--epochs", "2")),
        (4, "hsdp/train.py", ("--steps", "20")),
        (2, "hsdp/train.py", ("--steps", "20", "--replicate", "1", "--copies")),
    ],
)
def test_protected_trainers_give_the_baselines_losses_and_weights(
    tmp_path: Path, ranks: int, script: str, given: tuple[str, ...]
) -> None:
    """With batch norm, dropout, a shuffling sampler, a schedule that recurs, an average; with replicas of shards, and without."""
    printed = []
    for every in ("", "every:4"):
        out = tmp_path / f"rehearsed {every}"
        out.mkdir()
        program = (
            "import runpy\nsys.argv = sys.argv[2:]\nimport torch, ttp\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        )
        arguments = (str(ROOT / "examples" / script), *given, "--save-dir", str(out / "checkpoints"))
        with Launch(
            out, program, "--nproc-per-node", str(ranks), environ={"TTP_REHEARSE": every}, arguments=arguments
        ) as job:
            assert job.wait() == 0, job.text
            printed.append(sorted(set(re.findall(r"(?:step \d+: loss|final weights).*", job.text))))
            assert entered_again(job.text) == (
                len([line for line in printed[0] if line.startswith("step")]) // 4 if every else 0
            )
    assert printed[0] == printed[1] and len(printed[0]) >= 20
