"""A replica's memory is altered in a running job, and that has consequences: the wrong process is replaced, or the job ends in front of a good checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, STEPS, arguments
from tests.chaos.launching import WARM, Launch
from ttp.chaos.observed.training_job import TrainingJob

PATIENT = {**WARM, "TTP_IN_PLACE_S": "30"}
"""On a busy machine the fork server still imports for seconds what the first workers had imported."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

TRAINER = """
import torch
import torch.distributed as dist
import ttp

choice, replicas, compare_every, in_place = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "in place"
torch.set_num_threads(1)
ttp.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
optimizer = ttp.TTPReplicaOptimizer(
    model.named_parameters(), lr=1e-3, replicas=replicas, compare_every=compare_every, on_divergence=choice
)
session = ttp.start(optimizer, save_dirs=[str(out / "checkpoints")], in_place="unrehearsed" if in_place else False)
session.resume()
with open(out / f"pids-{rank}", "a") as file:
    print(os.getpid(), file=file)

def await_agent():  # else no process could be replaced yet
    while not any("agent_attached" in path.read_text() for path in (out / "checkpoints").rglob("*journal*.jsonl")):
        time.sleep(0.01)

@ttp.ttp_to_persist
def train():
    if (step := optimizer.current_step) and step % 10 == 0 and session.newest_saved < step:
        session.save(periodic=True)
    for step in range(optimizer.current_step + 1, 41):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        session.set_step_state(step, {})
        optimizer.step()
        if (rank, step) == (1, 23) and not (out / "altered").exists():
            (out / "altered").touch()
            await_agent()
            for tensors in optimizer.holdings().values():
                target = next(tensor for tensor in tensors if tensor.key.endswith("0.weight.exp_avg"))
                target.values[3:4].view(torch.int32).bitwise_xor_(1 << 20)
        if step % 10 == 0:
            session.save(periodic=True)
    note("differ", len(optimizer.compare_replicas()))
    note("bits", "".join(value.item().hex() for p in model.parameters() for value in p.detach().double().flatten()))

train()
session.close()
dist.destroy_process_group()
"""

KILLED = TRAINER.replace(
    "        if step % 10 == 0:\n            session.save(periodic=True)\n    note",
    """        if (rank, step) == (2, 25) and not (out / "killed").exists():
            (out / "killed").touch()
            os.kill(os.getpid(), 9)
        if step % 10 == 0:
            session.save(periodic=True)
    note""",
)
"""Another rank is killed soon after a replica was altered, before any comparison."""

PROTECTED = """
import torch
import torch.distributed as dist
import ttp

choice, in_place = sys.argv[2], sys.argv[3] == "in place"
torch.set_num_threads(1)
ttp.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)), find_unused_parameters=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
guard = ttp.protect(
    model, optimizer, save_dirs=[str(out / "checkpoints")], save_interval=10, compare_every=5, on_divergence=choice, in_place="unrehearsed" if in_place else False
)
with open(out / f"pids-{rank}", "a") as file:
    print(os.getpid(), file=file)

def await_agent():  # else no process could be replaced yet
    while not any("agent_attached" in path.read_text() for path in (out / "checkpoints").rglob("*journal*.jsonl")):
        time.sleep(0.01)

@ttp.ttp_to_persist
def train():
    for step in range(guard.step + 1, 41):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        if (rank, step) == (1, 23) and not (out / "altered").exists():
            (out / "altered").touch()
            await_agent()
            weight = model.module[0].weight
            optimizer.state[weight]["exp_avg"].view(torch.int32)[3, 4].bitwise_xor_(1 << 20)
    note("bits", "".join(value.item().hex() for p in model.parameters() for value in p.detach().double().flatten()))

train()
guard.close()
dist.destroy_process_group()
"""


def _bits(launch: Launch) -> set[str]:
    return {launch.read(name) for name in launch.notes("bits")}


def _saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.name.startswith("iter_"))


def test_a_wrong_replica_of_three_is_replaced_and_the_others_keep_running(tmp_path: Path) -> None:
    with Launch(
        tmp_path, TRAINER, "--nproc-per-node", "3", environ=PATIENT, arguments=("repair", "3", "5", "in place")
    ) as launch:
        assert launch.wait() == 0, launch.text
        text = launch.text
        launch.assert_nothing_left()
    assert "training continues after step 25 with rank 1 in a new process" in text, text
    assert "replicas differ in" in text and "rank 1 against ranks 0, 2" in text, text
    assert {launch.read(name) for name in launch.notes("differ")} == {"0"} and len(_bits(launch)) == 1
    assert [len((tmp_path / f"pids-{rank}").read_text().split()) for rank in range(3)] == [1, 2, 1]
    assert _saved(tmp_path) == ["iter_0000010", "iter_0000020", "iter_0000030", "iter_0000040"]


@pytest.mark.long
def test_without_replacements_the_others_save_and_the_job_restarts(tmp_path: Path) -> None:
    with Launch(
        tmp_path, TRAINER, "--nproc-per-node", "3", "--max-restarts", "1", arguments=("repair", "3", "5", "")
    ) as launch:
        assert launch.wait() == 0, launch.text
        text = launch.text
    assert "iter_0000025" in _saved(tmp_path), text
    assert {launch.read(name) for name in launch.notes("differ")} == {"0"} and len(_bits(launch)) == 1


@pytest.mark.long
def test_two_replicas_that_differ_stop_the_job_and_it_resumes_from_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    """The comparison that finds it is the one in front of a save. What resumes is bit for bit a run that was never altered."""
    whole, job = tmp_path / "whole", tmp_path / "job"
    whole.mkdir()
    job.mkdir()
    arguments = ("stop", "2", "100", "")
    (whole / "altered").touch()
    with Launch(whole, TRAINER, "--nproc-per-node", "2", arguments=arguments) as launch:
        assert launch.wait() == 0, launch.text
        expected = _bits(launch)
    with Launch(job, TRAINER, "--nproc-per-node", "2", "--max-restarts", "3", arguments=arguments) as launch:
        assert launch.wait() == 1, launch.text
        text = launch.text
        launch.assert_nothing_left()
    named = re.search(
        r"ReplicasDiffer: step 30: .*rank 0 against rank 1; they were equal after step 20, .* Resume from (\S+),", text
    )
    assert named, text
    assert Path(named[1]).name == "iter_0000020" and _saved(job) == ["iter_0000010", "iter_0000020"]
    assert "not restarting" in text and not re.search(r"restarting \(\d of", text), text
    with Launch(job, TRAINER, "--nproc-per-node", "2", arguments=arguments, name="again") as launch:
        assert launch.wait() == 0, launch.text
        assert f"resumed from {named[1]} at step 20" in launch.text, launch.text
        assert _bits(launch) == expected and len(expected) == 1


@pytest.mark.long
def test_two_replicas_cannot_be_repaired(tmp_path: Path) -> None:
    arguments = ("repair", "2", "5", "in place")
    with Launch(tmp_path, TRAINER, "--nproc-per-node", "2", environ=WARM, arguments=arguments) as launch:
        assert launch.wait() == 1, launch.text
        text = launch.text
    assert re.search(r"ReplicasDiffer: step 25: .*equal after step 20.*Resume from \S+iter_0000020,", text), text
    assert _saved(tmp_path) == ["iter_0000010", "iter_0000020"], text


@pytest.mark.long
@pytest.mark.parametrize("choice", ["stop", "repair"])
def test_what_the_comparison_after_a_fill_finds_is_not_saved(tmp_path: Path, choice: str) -> None:
    """A replica was altered after the last comparison, and then another rank is killed: the new process's state shows the difference. It is one rank's copy, so
    neither of the other two has a majority, and no line promises that one is replaced."""
    assert KILLED != TRAINER
    arguments = (choice, "3", "100", "in place")
    launcher = ("--nproc-per-node", "3", "--max-restarts", "2")
    with Launch(tmp_path, KILLED, *launcher, environ=WARM, arguments=arguments) as launch:
        status = launch.wait()
        text = launch.text
        launch.assert_nothing_left()
    assert "no majority of holders agrees" in text and "Most holders agree" not in text, text
    assert _saved(tmp_path) == ["iter_0000010", "iter_0000020"] and status == 1, text
    assert re.search(r"ReplicasDiffer: .*they were equal after step 20, .*Resume from \S+iter_0000020,", text), text


@pytest.mark.long
def test_a_wrong_replica_under_protect_is_replaced(tmp_path: Path) -> None:
    with Launch(
        tmp_path, PROTECTED, "--nproc-per-node", "3", environ=PATIENT, arguments=("repair", "in place")
    ) as launch:
        assert launch.wait() == 0, launch.text
        text = launch.text
        launch.assert_nothing_left()
    assert "training continues after step 25 with rank 1 in a new process" in text, text
    assert [len((tmp_path / f"pids-{rank}").read_text().split()) for rank in range(3)] == [1, 2, 1]
    assert len(_bits(launch)) == 1 and _saved(tmp_path)[:2] == ["iter_0000010", "iter_0000020"]


@pytest.mark.long
def test_replicas_that_differ_under_protect_stop_the_job(tmp_path: Path) -> None:
    with Launch(tmp_path, PROTECTED, "--nproc-per-node", "3", environ=WARM, arguments=("stop", "")) as launch:
        assert launch.wait() == 1, launch.text
        text = launch.text
    assert re.search(r"ReplicasDiffer: after step 25, .*equal after step 20.*Resume from \S+iter_0000020,", text), text
    assert _saved(tmp_path) == ["iter_0000010", "iter_0000020"], text


FLIPS = """
import os, runpy, sys
from pathlib import Path
import torch
import ttp

rank, out, at, step_of = int(os.environ["RANK"]), Path(sys.argv.pop(1)), int(sys.argv.pop(1)), ttp.TTPReplicaOptimizer.step

def step(self, *args, **kwargs):
    result = step_of(self, *args, **kwargs)
    if (rank, result.step) == (1, at) and not (out / "altered").exists():
        (out / "altered").touch()
        target = next(tensor for held in self.holdings().values() for tensor in held if tensor.key.endswith(".exp_avg"))
        target.values[:1].view(torch.int32).bitwise_xor_(1 << 20)
    return result

ttp.TTPReplicaOptimizer.step = step
runpy.run_module("ttp.trainer", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("choice", "at", "found", "status"), [("repair", 9, 10, 0), ("repair", 8, 8, 0), ("stop", 9, 10, 1)]
)
def test_the_bundled_trainer_does_what_its_configuration_asks_for(
    choice: str, at: int, found: int, status: int, tmp_path: Path
) -> None:
    """Behind a step that is compared; in front of a save, which is then made of replicas that are equal."""
    program = tmp_path / "flips.py"
    program.write_text(FLIPS)
    parallel = {"optimizer_replicas": 3, "compare_replicas_every": 5, "on_divergence": choice}
    overrides = [f"--parallel_config.{key}={value}" for key, value in parallel.items()]
    with TrainingJob(
        tmp_path / "job",
        ranks=3,
        overrides=arguments(*overrides, "--training_config.save_interval=4"),
        environ={"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30"},
        launcher=("--max-restarts", "2"),
        program=(str(program), str(tmp_path), str(at)),
    ) as job:
        assert job.wait(JOB_S) == status
    text = (tmp_path / "job" / "console.log").read_text(errors="replace")
    saved = sorted(path.name for path in (tmp_path / "job" / "checkpoints").glob("iter_*"))
    if choice == "repair":
        assert saved == [f"iter_{step:07d}" for step in range(4, STEPS + 1, 4)], saved
        assert f"training continues after step {found} with rank 1 in a new process" in text, text[-4000:]
    else:
        assert re.search(r"ReplicasDiffer: step 10: .*rank 1 against ranks 0, 2; they were equal after step 8", text), (
            text
        )
        assert saved == ["iter_0000004", "iter_0000008"]
        assert re.search(r"Resume from \S+iter_0000008,", text) and len(job.starts()) == 1, text[-4000:]
