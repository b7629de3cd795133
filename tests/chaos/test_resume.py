"""Checkpoints of one world load in another, broken ones are named and skipped, and endings leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S, RunJob, arguments, run_to_end
from ttp.chaos.observed.training_job import TrainingJob, read_jsonl
from ttp.chaos.verdict.timeline import by_step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a job of 4 ranks that saved steps 8 and 16 (global batch 8 sequences)."""
    return run_to_end(tmp_path_factory.mktemp("saved") / "dp4", 4, "--training_config.save_interval=8").output_dir


def copy_of(saved: Path, to: Path, *, last_step: int) -> Path:
    """Copy the checkpoints up to `last_step`, and nothing else."""
    for folder in sorted((saved / "checkpoints").glob("iter_*")):
        if int(folder.name.removeprefix("iter_")) <= last_step:
            shutil.copytree(folder, to / "checkpoints" / folder.name)
    return to


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "batch"), [(2, 4), (3, 2)])
def test_resuming_at_another_size_goes_on_from_the_same_weights_and_data(
    tmp_path: Path, saved: Path, ranks: int, batch: int
) -> None:
    """4 -> 2 with the same global batch continues the same loss curve to round-off; 4 -> 3 continues from the same position."""
    output = copy_of(saved, tmp_path / "other", last_step=8)
    job = run_to_end(output, ranks, f"--dataset_config.batch_size={batch}")
    lines = by_step(job.metrics())
    assert min(lines) == 9
    before = by_step(metrics_of(saved))
    if ranks * batch == 8:
        for step in range(9, 20):
            assert float(lines[step]["loss_value"]) == pytest.approx(float(before[step]["loss_value"]), rel=2e-4)
    assert int(lines[9]["consumed_samples"]) == 8 * 8 + ranks * batch


def metrics_of(output: Path) -> list[dict[str, Any]]:

    return read_jsonl(output / "metrics.jsonl")


@pytest.mark.long
def test_two_ranks_grow_to_four(tmp_path: Path, whole_job: RunJob) -> None:
    """2 -> 4 with the same global batch."""
    small = run_to_end(tmp_path / "dp2", 2, "--training_config.save_interval=8", "--dataset_config.batch_size=4")
    output = copy_of(small.output_dir, tmp_path / "dp4", last_step=8)
    job = run_to_end(output, 4, "--dataset_config.batch_size=2")
    before, after = by_step(small.metrics()), by_step(job.metrics())
    assert min(after) == 9
    for step in range(9, 20):
        assert float(after[step]["loss_value"]) == pytest.approx(float(before[step]["loss_value"]), rel=2e-4)


@pytest.mark.long
def test_altered_checkpoint_is_named_and_the_older_one_used(tmp_path: Path, saved: Path) -> None:
    """One flipped bit in the newest checkpoint."""
    output = copy_of(saved, tmp_path / "altered", last_step=16)
    victim = next((output / "checkpoints" / "iter_0000016").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    job = run_to_end(output, 4)
    console = job.console_tail(400)
    assert victim.name in console and "iter_0000016" in console
    assert [int(line["from_step"]) for line in job.metrics() if line.get("event") == "resume"] == [8]
    assert "lost    8 steps (8 repeated: their checkpoint was broken or not used)" in console
    *_, again, end = read_jsonl(output / "log" / "story.jsonl")
    assert (again["event"], again["first_step"], again["kept_step"], again["steps"]) == ("again", 9, 16, 8)
    assert (
        again["skipped"] == str(output / "checkpoints" / "iter_0000016")
        and end["steps_lost"] == end["steps_again"] == 8
    )


@pytest.mark.long  # test_starts.py shows as much of a script of one's own
def test_checkpoint_of_another_model_is_refused_by_name_once(tmp_path: Path, saved: Path) -> None:
    """The first parameter that does not fit is named; nothing is trained or changed, and nothing restarted in vain."""
    output = copy_of(saved, tmp_path / "other_model", last_step=8)
    job = run_to_end(output, 2, "--model_config.hidden_size=64", status=1)
    console = job.console_tail(400)
    assert "CheckpointMismatch" in console and "model." in console and "expected" in console
    assert "not restarting" in console and len(job.journals()) == 1
    assert "cause   exit code 2: CheckpointMismatch: " in console
    assert by_step(job.metrics()) == {}
    assert sorted(p.name for p in (output / "checkpoints").glob("iter_*")) == ["iter_0000008"]


@pytest.mark.long
def test_never_in_a_used_folder_is_refused_once(tmp_path: Path, saved: Path) -> None:
    """Two runs must not be mixed up, neither at the first start nor by a restart of it."""
    output = copy_of(saved, tmp_path / "used", last_step=8)
    job = run_to_end(output, 2, "--training_config.resume=never", status=1)
    console = job.console_tail(400)
    assert "resume is 'never'" in console and "iter_0000008" in console and "not restarting" in console
    assert by_step(job.metrics()) == {}


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGINT to the launcher in the middle of training: no process of the job remains, and so no port."""
    with TrainingJob(
        tmp_path / "stopped", ranks=2, overrides=arguments("--training_config.training_iters=100000")
    ) as job:
        job.wait_for_step(3)
        os.kill(job.process.pid, signal.SIGINT)
        job.wait(JOB_S)
    assert job.leftovers() == []
