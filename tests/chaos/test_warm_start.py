"""Forked workers in real jobs: what users' scripts do, and that no process remains."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.chaos.launching import WARM, Launch
from tests.chaos.test_commands import ROOT

LOADERS = """
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, at): return at
def double(rank, queue): queue.put(2)
if __name__ == "__main__":
    for context in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=context)
        note(f"loaded_{context}", sum(int(batch.sum()) for batch in loader))
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(double, args=(queue,), nprocs=1)
    note("spawned", queue.get())
"""


@pytest.mark.long
def test_a_forked_worker_starts_processes_of_its_own(tmp_path: Path) -> None:
    """Data loaders by every method, and functions of the script in new interpreters."""
    with Launch(tmp_path, LOADERS, "--nproc-per-node", "2", environ=WARM) as job:
        assert job.wait() == 0, job.text
        assert "forked 2 workers from" in job.text
        for rank in range(2):
            assert [job.read(f"loaded_{way}-{rank}-0") for way in ("fork", "spawn", "forkserver")] == ["28"] * 3
            assert job.read(f"spawned-{rank}-0") == "2"
        job.assert_nothing_left()


LEARNS = """
known = "networkx" in sys.modules
import networkx, torch
from torch import nn
import torch.distributed as dist
import ttp
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = ttp.protect(model, optimizer, save_dirs=[str(out / "saved")])
note("known", known)
while guard.step < 40:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if guard.step == 20 and start == "0" and rank == 1:
        await_file("learned")
        os.kill(os.getpid(), signal.SIGKILL)
guard.save()
guard.close()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_what_the_workers_import_is_known_to_those_of_the_next_attempt(tmp_path: Path) -> None:
    """A package that was not named is imported by the script at the first attempt, and preloaded at the second."""
    with Launch(tmp_path, LEARNS, "--nproc-per-node", "2", environ=WARM) as job:
        job.says("modules that the workers had imported")
        (tmp_path / "learned").touch()
        assert job.wait() == 0, job.text
        assert {job.read(f"known-{rank}-{start}") for rank in (0, 1) for start in (0,)} == {"False"}
        assert {job.read(f"known-{rank}-1") for rank in (0, 1)} == {"True"}, job.text
        job.assert_nothing_left()


@pytest.mark.parametrize("victim", ["server", "agent"])
def test_the_end_of_server_or_agent_leaves_nothing(tmp_path: Path, victim: str) -> None:
    """The death of the server is not a fault: the job succeeds, and the next attempt has another one. That of the agent ends all."""
    worker = "import torch\nnote('begun', os.getppid())\nawait_file('go')\nsys.exit(0 if start == '1' else 3)"
    with Launch(tmp_path, worker, "--nproc-per-node", "2", environ=WARM) as job:
        job.says("attempt 0: ")
        job.await_notes("begun-0-0", "begun-1-0")
        assert job.read("begun-0-0") == str(job.process.pid)
        [server] = map(int, re.findall(r"forked 2 workers from process (\d+)", job.text))
        os.kill(server if victim == "server" else job.process.pid, signal.SIGKILL)
        if victim == "server":
            job.says("starting another one")
            (tmp_path / "go").touch()
            assert job.wait() == 0, job.text
            assert len(set(re.findall(r"forked 2 workers from process (\d+)", job.text))) == 2
        else:
            (tmp_path / "go").touch()
        job.until(lambda: not job.marked(), "end of all")


@pytest.mark.long
def test_a_job_has_the_same_bits_forked_and_executed(tmp_path: Path) -> None:
    """Weights after the same steps, hashed by the trainer."""
    hashes = {}
    for warm in ("True", "False"):
        out = tmp_path / warm
        out.mkdir()
        options = ("--training_config.training_iters", "6", "--training_config.output_dir", str(out / "run"))
        worker = "from ttp.trainer.__main__ import main\nsys.exit(main(sys.argv[2:]))"
        with Launch(out, worker, "--nproc-per-node", "2", environ={"TTP_WARM_START": warm}, arguments=options) as job:
            assert job.wait() == 0, job.text
            assert ("forked 2 workers" in job.text) == (warm == "True")
        hashes[warm] = json.loads((out / "run" / "final.json").read_text())
    assert hashes["True"] == hashes["False"]


def test_the_page_shows_the_lines_that_are_logged() -> None:
    page = (ROOT / "docs" / "warm_starts.md").read_text()
    assert (
        "forked 4 workers from process" in page
        and "started 4 workers without the fork server: an imported module started" in page
    )
