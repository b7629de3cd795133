"""Copies in memory under a real limit of a memory cgroup: what the budget is, and which process the kernel ends first."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.chaos.test_commands import ROOT
from tests.chaos.test_copies import EVERY_STEP, STOP, TRAINS, keeper_of, last_of, saved_steps, stopped
from ttp.launch.watch.oom import Counter

MIB = 1 << 20

BUDGET = """
import os, sys
from ttp.copies.memory import NoRoom, Owner
from ttp.copies.node_limits import memory_limits
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))

def shown():
    limit = min(memory_limits(), key=lambda one: one.free)
    print(limit.source, limit.total >> 20, limit.used >> 20)

owner = Owner()
shown()
with open(owner.obtain("rank 0", 100 << 20, 100 << 20), "wb", closefd=False) as memory:
    memory.write(bytes(100 << 20))
shown()
try:
    owner.obtain("rank 1", 100 << 20, 100 << 20)
except NoRoom as error:
    print(error)
"""
"""In a group of 200 MiB."""

IN_GROUP = """
import os, runpy
open(os.environ["GROUP"] + "/cgroup.procs", "w").write(str(os.getpid()))
runpy.run_module("ttp.launch", run_name="__main__", alter_sys=True)
"""

PRESSURE = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from ttp.launch.watch.oom import Counter
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
counter, memory, some = Counter(Path(sys.argv[3])), os.memfd_create("pressure"), bytes(64 << 10)
while counter.read() == 0:
    os.write(memory, some)
"""
"""A small process takes memory that counts as the group's, and as no process's, until the kernel has ended another one."""


@dataclass(frozen=True)
class Group:
    folder: Path
    limit: Path
    kills: Counter


def made(name: str, nbytes: int) -> Group:
    """Make a memory cgroup. Raises OSError: it cannot be made here."""
    top, one = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    if (one / "memory.limit_in_bytes").exists():
        folder, limit, kills = one / name, "memory.limit_in_bytes", "memory.oom_control"
    else:
        (top / "cgroup.subtree_control").write_text("+memory")
        folder, limit, kills = top / name, "memory.max", "memory.events"
    folder.mkdir()
    (folder / limit).write_text(str(nbytes))
    with contextlib.suppress(OSError):
        (folder / "memory.swap.max").write_text("0")  # else pages go there, for minutes
    return Group(folder, folder / limit, Counter(folder / kills))


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """A memory cgroup of its own, with so many MiB."""
    try:
        found = made(f"ttp_test_{os.getpid()}", request.param * MIB)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield found
    with contextlib.suppress(OSError):  # its processes have ended, and the kernel may not have noticed
        found.folder.rmdir()


@pytest.mark.parametrize("group", [200], indirect=True)
def test_the_budget_is_what_the_cgroup_has_left(group: Group) -> None:
    """Its limit is below the host's memory; pages that are written are counted there, and what does not fit is refused with the figures."""
    done = subprocess.run(
        [sys.executable, "-c", BUDGET, str(group.folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, after, refused = done.stdout.splitlines()
    source, total, used = before.split()
    assert (source, total) == (str(group.limit), "200")
    assert 100 <= int(after.split()[2]) - int(used) <= 102
    assert refused.startswith("100.0 MiB for rank 1 beside 100.0 MiB of other copies, expected at most ")
    assert f"({group.limit}: 200.0 MiB, used 1" in refused


@pytest.mark.long
@pytest.mark.parametrize("group", [3000], indirect=True)
def test_without_memory_the_kernel_ends_a_rank_and_its_copy_is_saved(tmp_path: Path, group: Group) -> None:
    """Not the agent, which has the copies, nor the keeper, nor the process that forks them, all of which have imported torch as the ranks have."""
    environ = {**EVERY_STEP, "GROUP": str(group.folder)}
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    with Launch(tmp_path, TRAINS, *options, program=("-c", IN_GROUP), environ=environ) as job:
        ranks, keeper = stopped(job, 2), keeper_of(job)
        taking = [sys.executable, "-c", PRESSURE, str(group.folder), str(ROOT), str(group.kills.path)]
        subprocess.run(taking, check=True, timeout=120)
        assert group.kills.read() == 1
        job.says("restarting (1 of 1 restarts)")
        assert not set(ranks) & set(job.marked()) and keeper_of(job) == keeper
        (tmp_path / "go").touch()
        assert job.process.wait(240) == 0, job.text
        assert saved_steps(job.text) == [STOP], job.text
        assert "out of memory" in job.text
        last_of(tmp_path)
