"""A Megatron-style trainer, patched for MindIO TTP, loses ranks and goes on bit for bit from the checkpoints that its own
handlers wrote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.chaos.conftest import JOB_S
from tests.chaos.megatron import ROOT, STEPS, Run, assert_same_training, odd_trainer


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "faulted"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "faulted"


def test_two_ranks_go_on_from_the_checkpoint_that_the_trainers_handlers_wrote(folders: tuple[Path, Path]) -> None:
    """Rank 1 dies when it has updated step 13; the save handler runs on rank 0, and the step after is the same bits. The job that
    is under faults was started by the launch script, and prints the patch's lines."""
    whole = Run(folders[0], 2)
    faulted = Run(folders[1], 2, faults="kill:rank=1,step=13,point=done", script=True)
    published = faulted.events()["published"]
    step = published["step"]
    assert isinstance(step, int) and step in (12, 13)  # 12: rank 0 had not got the record yet
    assert published["rank"] == 0
    assert_same_training(faulted, whole, step)
    printed = [f"rank 0 successfully saved checkpoint at iteration {step:7d} to {faulted.save}"]
    printed += [f"saving checkpoint at iteration {saved:7d} to {faulted.save}" for saved in (step, STEPS)]
    printed += [f"optimizer current step has been set to {begun}" for begun in (0, step)]
    assert [line for line in printed if line not in faulted.text] == [], faulted.text
    assert "refresh optimizer step" not in faulted.text, "the optimizer counts every iteration"
    names = {path.name for path in faulted.save.iterdir()}
    assert names == {f"iter_{step:07d}", f"iter_{STEPS:07d}", "latest_checkpointed_iteration.txt"}
    assert "barrier: the optimizer's own all-reduce" in whole.text and "its training thread did not" not in faulted.text


@pytest.mark.long
def test_three_ranks_save_a_step_that_one_had_rolled_forward(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Rank 0 has the record of step 13 and has not begun when rank 1 dies behind it: its work thread finishes the step, its
    training thread counts on, and what it saves has the schedule, the samples and the random numbers of step 13."""
    trainer = odd_trainer(tmp_path)
    whole = Run(folders[0], 3, trainer=trainer)
    begun = "slow:rank=0,step=13,point=record,for=4;slow:rank=1,step=13,point=updating,for=1"  # rank 2 has it by then
    faults = f"{begun};kill:rank=1,step=13,point=done"
    faulted = Run(folders[1], 3, faults=faults, trainer=trainer)
    events = faulted.events()
    assert events["published"]["rank"] == 0 and events["published"]["step"] == 13
    assert_same_training(faulted, whole, 13)
    assert "its training thread did not" not in faulted.text


@pytest.mark.long
def test_four_ranks_with_local_copies_in_bf16_meet_three_faults(folders: tuple[Path, Path]) -> None:
    """Shards of other ranks are in the file; a periodic checkpoint lies between faults; rank 0 dies in an update, another in the gather, and a third is
    with a preemption notice."""
    arguments = ("--bf16", "--local-copy-os", "--save-interval", "8")
    whole = Run(folders[0], 4, *arguments)
    faults = "kill:rank=0,step=6,point=updating;kill:rank=2,step=11,point=gathering,round=1;term:rank=1,step=15,point=backward,round=2"
    faulted = Run(folders[1], 4, *arguments, faults=faults)
    first, second = (faulted.events(start)["published"]["step"] for start in (0, 1))
    assert first in (5, 6) and second in (10, 11)
    assert (
        faulted.events(2)["published"]["step"] == 15
    )  # with a preemption notice: the step in flight is finished first
    assert faulted.events()["published"]["rank"] != 0
    assert isinstance(second, int)
    assert "local copy: every rank keeps the state of the step before" in whole.text
    missing = sorted(set(whole.lines) - set(faulted.lines))
    assert missing in ([], [first]), f"{missing}\n{faulted.text}"
    assert all(whole.lines[step] == line for step, line in faulted.lines.items()), faulted.text
    assert (faulted.save / "iter_0000008").is_dir()
    weights = faulted.final_weights()
    assert all(torch.equal(weights[name], value) for name, value in whole.final_weights().items())


@pytest.mark.long
def test_three_kills_around_the_spanning_collective_of_three_ranks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Who gets the record before the death reaches it is a race; whatever step comes of it, the training is the same."""
    trainer = odd_trainer(tmp_path)
    whole = Run(folders[0], 3, trainer=trainer)
    faults = (
        "kill:rank=1,step=5,point=ready",
        "kill:rank=2,step=9,point=record,round=1",
        "kill:rank=0,step=14,point=record,round=2",
    )
    faulted = Run(folders[1], 3, faults=";".join(faults), trainer=trainer)
    steps = [faulted.events(start)["published"]["step"] for start in range(3)]
    assert steps[0] == 4 and steps[1] in (8, 9) and steps[2] in (13, 14)
    assert all(whole.lines[step] == line for step, line in faulted.lines.items()), faulted.text
    assert faulted.text.count("successfully loaded checkpoint") == 3
    weights = faulted.final_weights()
    assert all(torch.equal(weights[name], value) for name, value in whole.final_weights().items())


@pytest.mark.long
def test_a_save_rank_that_dies_in_its_handler_is_followed_by_another(folders: tuple[Path, Path]) -> None:
    """Rank 0, the first save rank, is killed while it publishes: another rank's handlers write the same step."""
    whole = Run(folders[0], 4)
    faults = "kill:rank=3,step=9,point=done;kill:rank=0,step=9,point=publish,call=3"
    faulted = Run(folders[1], 4, faults=faults)
    published = faulted.events()["published"]
    if (
        published["step"] == 9
    ):  # else no survivor had the record of step 9, and there was no publish of it to be killed in
        assert published["rank"] != 0
    assert isinstance(published["step"], int)
    assert_same_training(faulted, whole, published["step"])


@pytest.mark.long
def test_enable_ttp_false_is_the_trainer_as_it_was(tmp_path: Path) -> None:
    """Its own optimizer, torchrun, no controller; it trains to the end and resumes from its own checkpoint."""
    plain = Run(tmp_path, 2, launcher="torch.distributed.run", enable=False)
    assert sorted(plain.lines) == list(range(1, STEPS + 1))
    assert not (tmp_path / "mindio").exists()


@pytest.mark.long
@pytest.mark.parametrize("arguments", [(), ("--use-distributed-optimizer",)], ids=["whole", "distributed"])
def test_ttp_is_switched_on_and_off_with_the_moments(folders: tuple[Path, Path], arguments: tuple[str, ...]) -> None:
    """The trainer's own checkpoint is read by TTP's optimizer, and the other way round: the losses are those of a run without TTP."""
    plain = Run(folders[0], 2, *arguments, enable=False)
    losses = {step: float.fromhex(line[2]) for step, line in plain.lines.items()}
    for last, enable in ((6, False), (13, True), (STEPS, False)):
        found = Run(folders[1], 2, *arguments, "--train-iters", str(last), enable=enable)
        assert max(found.lines) == last
        for step, line in found.lines.items():
            assert float.fromhex(line[2]) == pytest.approx(losses[step], rel=1e-4), f"step {step}\n{found.text}"


def the_documents_loop() -> str:
    """Return the smallest trainer, as docs/mindio.md shows it."""
    (loop,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "mindio.md").read_text(), re.MULTILINE | re.DOTALL)
    assert isinstance(loop, str)
    return loop


def test_the_documents_loop_is_short_and_compiles() -> None:
    """It is there to be copied: forty lines at most, blank ones not counted."""
    lines = [line for line in the_documents_loop().splitlines() if line.strip()]
    compile(the_documents_loop(), "loop.py", "exec")
    assert len(lines) <= 40


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_documents_loop_goes_on_bit_for_bit(folders: tuple[Path, Path], ranks: int) -> None:
    """Copied and run as the page says: the losses after a kill are those of the baseline run."""
    reported: list[dict[tuple[str, str], str]] = []
    for folder, faults in zip(folders, ("", "kill:rank=1,step=13,point=done"), strict=True):
        (folder / "loop.py").write_text(the_documents_loop())
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TTP_FAULTS": faults, "TTP_CONTROLLER_PORT": "0"}
        command = [sys.executable, "-m", "ttp.launch", "--nproc-per-node", str(ranks), "loop.py"]
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=JOB_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # Not whole lines: two ranks that print at once may share one.
        found = re.findall(r"rank (\d+) iteration (\d+) loss ([-+.e\d]+)", done.stdout)
        reported.append({(rank, iteration): loss for rank, iteration, loss in found})
        assert ("restarting" in done.stderr) == bool(faults), done.stderr
    whole, faulted = reported
    assert len(whole) == 40 * ranks
    assert all(faulted[key] == whole[key] for key in faulted) and {key for key in whole if int(key[1]) > 13} <= set(
        faulted
    )
    assert {path.name for path in folders[1].glob("iter_*")} <= {"iter_0000012", "iter_0000013"}
