"""State without a replica: ranks, all ranks, keepers and a whole node are lost, and the job goes on from copies in memory, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, run_to_end
from tests.chaos.launching import Launch
from tests.chaos.test_commands import ROOT
from tests.chaos.test_other_trainers import steps_of
from tests.ports import free_port
from ttp.checkpoint.compare import compare
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.verify import verify

STOP = 12
"""The step behind which the ranks wait for the test."""
LAST = 20

TRAINS = f"""
import torch, torch.distributed as dist, ttp
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
dist.init_process_group("gloo")
note("begun", os.getpid())
torch.manual_seed(0)
options = json.loads(os.environ.get("OPTIONS", "{{}}"))
model = torch.nn.Sequential(*(torch.nn.Linear(33, 33) for _ in range(3)))
if dist.get_world_size() > 1:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard = ttp.protect(model, optimizer, save_dirs=[str(out / "checkpoints")], **options)
while guard.step < {LAST}:
    data = torch.randn(4, 33, generator=torch.Generator().manual_seed(1000 * guard.step + rank))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if guard.step == {STOP}:
        note("stopped")
        await_file("go")
guard.save()
guard.close()
dist.destroy_process_group()
"""
PARTITIONED = TRAINS.replace(
    """if dist.get_world_size() > 1:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
""",
    """from torch.distributed.optim import ZeroRedundancyOptimizer
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
""",
)
"""The optimizer's state in parts, one on each rank; the weights on all."""
EVERY_STEP = {"OPTIONS": '{"copies": "memory", "copy_every": 1}'}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the last checkpoint of a job of four ranks without a fault, and without copies."""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "go").touch()
    with Launch(folder, TRAINS, "--nproc-per-node", "4") as job:
        assert job.process.wait(240) == 0, job.text
    return last_of(folder)


def last_of(folder: Path) -> Path:
    newest = list_checkpoints([folder / "checkpoints"])[0]
    assert verify(newest).step == LAST
    return newest


def equal_but_for_the_first_batch(one: Path, other: Path) -> bool:
    """The state holds a mark of the first batch of its attempt, besides what training made."""
    tallies = compare(Reader(one, verify(one)), Reader(other, verify(other)))
    return {each.name for tally in tallies.values() for each in tally.differences} <= {"state.trainer.seen.first"}


def stopped(job: Launch, ranks: int) -> list[int]:
    """Wait until all ranks have finished the step behind which they wait; return their processes."""
    job.await_notes(*(f"stopped-{rank}-0" for rank in range(ranks)))
    return [int(job.read(f"begun-{rank}-0")) for rank in range(ranks)]


def saved_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"saved step (\d+) from copies in the memory of", text)]


def keeper_of(job: Launch) -> int:
    (keeper,) = (pid for pid in job.marked() if b"\0ttp.copies\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return keeper


def assert_goes_on(job: Launch, folder: Path, untouched: Path) -> None:
    (folder / "go").touch()
    assert job.process.wait(240) == 0, job.text
    assert saved_steps(job.text) == [STOP], job.text
    assert equal_but_for_the_first_batch(untouched, last_of(folder))
    job.until(lambda: not job.marked(), "end of all processes")


@pytest.mark.long
@pytest.mark.parametrize(
    "victims",
    [(2,), (0,), (0, 1, 2, 3)],
    ids=["rank 2", "rank 0", "all ranks"],
)
def test_full_shards_survive_the_death_of_ranks(tmp_path: Path, untouched: Path, victims: tuple[int, ...]) -> None:
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "4", "--max-restarts", "1", environ=EVERY_STEP) as job:
        pids = stopped(job, 4)
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        job.says("restarting (1 of 1 restarts)")
        assert_goes_on(job, tmp_path, untouched)
        assert "saved   step 12 from copies in memory: " in job.text
        assert "all others from copies in memory, some steps back" in job.text
        assert len(victims) == 4 or re.search(r"lost +0 steps;", job.text), job.text


@pytest.mark.long
def test_the_example_goes_on_a_few_steps_back(tmp_path: Path) -> None:
    """Under the budget, which decides after two copies how often there is another one."""
    example = [sys.executable, "-m", "ttp.launch", "--nproc-per-node", "4", str(ROOT / "examples/hsdp/train.py")]
    options = ["--replicate", "1", "--copies", "--steps", "30", "--save-dir", str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TTP_FAULTS": "kill:rank=2,step=21,point=updating"}
    done = subprocess.run([*example, *options], env=environ, capture_output=True, text=True, timeout=JOB_S, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    (saved,) = saved_steps(text)
    steps = steps_of(text)
    assert 0 < saved < 21 and f"step {saved} from copies in memory: " in text
    assert sorted(steps) == list(range(1, 31))
    assert all(len(lines) == 1 for lines in steps.values()), "a step that was trained again has other bits"


@pytest.mark.long
def test_a_part_of_the_optimizers_state_survives_its_rank(tmp_path: Path) -> None:
    whole, faulted = tmp_path / "whole", tmp_path / "faulted"
    whole.mkdir()
    faulted.mkdir()
    (whole / "go").touch()
    with Launch(whole, PARTITIONED, "--nproc-per-node", "2", environ=EVERY_STEP, name="whole") as job:
        assert job.process.wait(240) == 0, job.text
    with Launch(faulted, PARTITIONED, "--nproc-per-node", "2", "--max-restarts", "1", environ=EVERY_STEP) as job:
        os.kill(stopped(job, 2)[1], signal.SIGKILL)
        job.says("restarting (1 of 1 restarts)")
        assert_goes_on(job, faulted, last_of(whole))


@pytest.mark.long
def test_a_lone_rank_survives_its_own_death(tmp_path: Path) -> None:
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "1", "--max-restarts", "1", environ=EVERY_STEP) as job:
        os.kill(stopped(job, 1)[0], signal.SIGKILL)
        job.says("restarting (1 of 1 restarts)")
        (tmp_path / "go").touch()
        assert job.process.wait(240) == 0, job.text
        assert saved_steps(job.text) == [STOP]
        last_of(tmp_path)


@pytest.mark.long
def test_copies_outlive_the_keeper_and_then_the_ranks(tmp_path: Path, untouched: Path) -> None:
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "4", "--max-restarts", "1", environ=EVERY_STEP) as job:
        pids = stopped(job, 4)
        os.kill(keeper_of(job), signal.SIGKILL)
        job.says("its copies are kept")
        os.kill(pids[1], signal.SIGKILL)
        job.says("restarting (1 of 1 restarts)")
        assert_goes_on(job, tmp_path, untouched)


@pytest.mark.long
def test_a_lost_keeper_costs_no_step(tmp_path: Path, untouched: Path) -> None:
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "4", environ=EVERY_STEP) as job:
        stopped(job, 4)
        os.kill(keeper_of(job), signal.SIGKILL)
        job.says("its copies are kept")
        (tmp_path / "go").touch()
        assert job.process.wait(240) == 0, job.text
        assert equal_but_for_the_first_batch(untouched, last_of(tmp_path))
        assert "the copy keeper was lost" in job.text


@pytest.mark.long
def test_a_whole_node_is_lost_and_its_shards_are_in_the_next_ones_memory(tmp_path: Path, untouched: Path) -> None:
    port = free_port()

    def agent(node: int, name: str) -> Launch:
        own = f"127.0.0.{2 + node}"
        endpoints = f"127.0.0.2:{port},127.0.0.3:{port}"
        place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoints, "--rdzv-id", "j", "--local-addr", own)
        options = ("--nnodes", "2", *place, "--nproc-per-node", "2", "--max-restarts", "1")
        return Launch(tmp_path, TRAINS, *options, environ={**EVERY_STEP, "TTP_HOST": own}, name=name)

    with agent(0, "first") as kept, agent(1, "second") as lost:
        stopped(kept, 4)
        lost.process.send_signal(signal.SIGSTOP)  # it starts nothing any more
        for pid in {*lost.marked(), lost.process.pid}:
            os.kill(pid, signal.SIGKILL)
        with agent(1, "third") as again:
            (tmp_path / "go").touch()
            assert kept.process.wait(300) == 0, kept.text
            assert again.process.wait(60) == 0, again.text
        (saved,) = saved_steps(kept.text)
        assert STOP - 1 <= saved <= STOP, kept.text  # the last copy may have been on its way
        assert "from copies in the memory of 1 node" in kept.text
        assert equal_but_for_the_first_batch(untouched, last_of(tmp_path))


@pytest.mark.long
def test_saves_that_are_not_waited_for_are_whole_and_a_fault_meanwhile_takes_the_newest_step(
    tmp_path: Path, untouched: Path
) -> None:
    environ = {"OPTIONS": '{"copies": "memory", "copy_every": 1, "save_interval": 4, "save_wait": false}'}
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "4", "--max-restarts", "1", environ=environ) as job:
        pids = stopped(job, 4)
        os.kill(pids[3], signal.SIGKILL)
        job.says("restarting (1 of 1 restarts)")
        (tmp_path / "go").touch()
        assert job.process.wait(240) == 0, job.text
        assert saved_steps(job.text) in ([STOP], []), job.text  # the save of that very step may be on disk first
        found = {verify(path).step for path in list_checkpoints([tmp_path / "checkpoints"])}
        assert {4, 8, 12, 16, LAST} <= found
        assert equal_but_for_the_first_batch(untouched, last_of(tmp_path))
        assert not list((tmp_path / "checkpoints").glob("*_tmp_*"))


@pytest.mark.long
def test_the_bundled_trainer_without_replicas_goes_on_from_copies(tmp_path: Path) -> None:
    alone = "--parallel_config.optimizer_replicas=1"
    whole = run_to_end(tmp_path / "whole", 2, alone)
    faults = "kill:rank=1,step=9,point=updating"
    faulted = run_to_end(tmp_path / "faulted", 2, alone, "--training_config.copies=memory", faults=faults)
    (saved,) = saved_steps(faulted.console_tail(200))
    assert 0 < saved < 9 and faulted.final() == whole.final()


@pytest.mark.long
def test_copies_are_refused_without_ttprun_and_where_they_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    torchrun = ("-m", "torch.distributed.run")
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "2", program=torchrun, environ=EVERY_STEP, name="plain") as job:
        assert job.process.wait(240) == 1
        assert "copies='memory': got no ttprun, expected its agent to keep them. Start the job with ttprun" in job.text
    environ = {**EVERY_STEP, "TTP_SHARED_DIRS": "False"}
    with Launch(tmp_path, TRAINS, "--nproc-per-node", "2", environ=environ, name="own") as job:
        assert job.process.wait(240) == 1
        assert "copies='memory': got TTP_SHARED_DIRS=False" in job.text
        assert "not restarting" in job.text
