"""A job that restarts two hundred times leaves nothing behind from one restart to the next: no descriptor, thread, process, file or memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos.launching import WARM, Launch

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"),
]

RESTARTS, FIRST, LAST = 210, 15, 200
"""Restarts in all; those between which nothing may grow: by the first of them every module that is learned is loaded."""
MEMORY_MB = 24
"""What a process may grow by between them: journals are read, logs are kept in part."""

TRAINER = """
import torch
import torch.distributed as dist
import ttp

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), lr=1e-3)
session = ttp.start(optimizer, save_dirs=[str(out / "checkpoints")], keep_checkpoint_max=2)
session.resume()

@ttp.ttp_to_persist
def train():
    for step in range(optimizer.current_step + 1, optimizer.current_step + 4):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        session.set_step_state(step, {})
        optimizer.step()
        if step % 2 == 0 and int(start) < int(sys.argv[2]):
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    session.save()

note("begun", os.getpid())
train()
session.close()
dist.destroy_process_group()
"""


class Kept(NamedTuple):
    """What a process of the job has at one moment."""

    descriptors: int
    threads: int
    memory_mb: int


def kept_by(pid: int) -> Kept:
    status = Path(f"/proc/{pid}/status").read_text()
    memory = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    threads = next(line.split()[1] for line in status.splitlines() if line.startswith("Threads"))
    return Kept(len(os.listdir(f"/proc/{pid}/fd")), int(threads), int(memory) >> 10)


def servers_of(pid: int) -> list[int]:
    """Return the children of the agent that live as long as it: not workers, nor controllers."""
    lasting = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"\nPPid:\t{pid}\n" in _text(entry / "status"):
            command = _text(entry / "cmdline")
            if "fork_server" in command:
                lasting.append(int(entry.name))
    return sorted(lasting)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def made_in(folder: Path) -> list[Path]:
    """Return what the job has made there; without the folders of torch's own logs, one an attempt, as under torchrun."""
    return [path for path in sorted(folder.rglob("*")) if "torchelastic_" not in str(path)]


def test_nothing_grows_over_two_hundred_restarts(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", str(RESTARTS + 5))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = {**WARM, "TMPDIR": str(temporary)}
    with Launch(tmp_path, TRAINER, *options, environ=environ, arguments=(str(RESTARTS),)) as job:
        seen = {}
        for restart in (FIRST, LAST):
            job.until((tmp_path / f"begun-0-{restart}").exists, f"restart {restart}", 900)
            servers = servers_of(job.process.pid)
            seen[restart] = {
                "agent": kept_by(job.process.pid),
                **{f"server {n}": kept_by(pid) for n, pid in enumerate(servers)},
            }
            if restart == FIRST:
                files, first_servers = len(made_in(temporary)), servers
        assert servers == first_servers, "the same servers all the time"
        assert len(made_in(temporary)) <= files + 8, made_in(temporary)
        for name, then in seen[FIRST].items():
            now = seen[LAST][name]
            assert now.descriptors <= then.descriptors + 4 and now.threads <= then.threads + 2, (name, seen)
            assert now.memory_mb <= then.memory_mb + MEMORY_MB, (name, seen)
        assert job.wait() == 0, job.text[-3000:]
        job.assert_nothing_left()
    assert len(list((tmp_path / "checkpoints").glob("iter_*"))) <= 3
