"""Out-of-memory kills are distinguished from other SIGKILLs: with fake files, and with a real limit where one may be set."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttp.launch.watch.death_watch import DeathWatch
from ttp.launch.watch.oom import FIRST_PID_NAMESPACE, KernelLog, OutOfMemory, counter_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")

MOUNT_V1 = "36 29 0:33 {root} {point} rw,relatime - cgroup cgroup rw,memory\n"
MOUNT_CPU = "35 29 0:32 / /nowhere/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
MOUNT_V2 = "30 24 0:26 {root} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


class Machine:
    """A made-up `/proc`, cgroup tree and kernel log."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.tree = root / "tree"
        self.log = root / "kmsg"
        self.log.write_bytes(b"")
        (self.proc / "self" / "ns").mkdir(parents=True)
        (self.proc / "self" / "ns" / "pid").write_text("")
        (self.proc / "self" / "cgroup").write_text("0::/launcher\n")

    def mount(self, *lines: str, root: str = "/") -> None:
        text = "".join(line.format(root=root, point=self.tree) for line in lines)
        (self.proc / "self" / "mountinfo").write_text(text)

    def worker(self, pid: int, cgroup: str) -> None:
        (self.proc / str(pid)).mkdir()
        (self.proc / str(pid) / "cgroup").write_text(cgroup)

    def count(self, path: str, kills: int) -> None:
        file = self.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"low 0\nhigh 3\noom 7\noom_kill {kills}\n")

    def watch(self, *pids: int) -> OutOfMemory:
        return OutOfMemory(pids, proc=self.proc, kernel_log=self.log)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_version_2_each_kill_explains_one_worker(machine: Machine) -> None:
    """Kills from before this attempt explain nothing; the file and its count are named."""
    machine.mount(MOUNT_CPU, MOUNT_V2)
    for pid in (11, 12, 13):
        machine.worker(pid, "0::/job/step\n")
    machine.count("job/step/memory.events", 4)
    memory = machine.watch(11, 12, 13)
    assert memory.explain(11) == ""
    machine.count("job/step/memory.events", 5)
    assert memory.explain(12) == f"out of memory (oom_kill in {machine.tree}/job/step/memory.events rose to 5)"
    assert memory.explain(13) == ""


def test_version_1_beside_version_2(machine: Machine) -> None:
    """A hybrid system: the memory controller is version 1's; each worker has its own cgroup."""
    machine.mount(MOUNT_CPU, MOUNT_V2.replace("{point}", "/nowhere"), MOUNT_V1)
    machine.worker(11, "5:cpuset:/\n4:memory:/job/a\n2:cpu,cpuacct:/job\n0::/job/a\n")
    machine.worker(12, "4:memory:/job/b\n0::/job/b\n")
    machine.count("job/a/memory.oom_control", 0)
    machine.count("job/b/memory.oom_control", 0)
    memory = machine.watch(11, 12)
    machine.count("job/b/memory.oom_control", 1)
    assert memory.explain(11) == ""
    assert "job/b/memory.oom_control rose to 1" in memory.explain(12)


@pytest.mark.parametrize(("root", "cgroup"), [("/docker/7f", "/docker/7f/worker"), ("/docker/7f", "/elsewhere")])
def test_a_container_sees_a_part_of_the_tree(machine: Machine, root: str, cgroup: str) -> None:
    """The mount begins at the container's own cgroup; one outside it is looked up at the mount itself."""
    machine.mount(MOUNT_V2, root=root)
    machine.worker(11, f"0::{cgroup}\n")
    place = "worker/memory.events" if cgroup.startswith(root) else "memory.events"
    machine.count(place, 0)
    memory = machine.watch(11)
    machine.count(place, 1)
    assert place in memory.explain(11)


def test_a_worker_that_is_gone_already_counts_in_the_launchers_cgroup(machine: Machine) -> None:
    """It inherited that one."""
    machine.mount(MOUNT_V2)
    machine.count("launcher/memory.events", 0)
    memory = machine.watch(11)
    machine.count("launcher/memory.events", 1)
    assert "launcher/memory.events" in memory.explain(11)


def test_nothing_to_read_explains_nothing(machine: Machine, tmp_path: Path) -> None:
    """No cgroups; a kernel too old to count; no log; no `/proc` at all."""
    assert machine.watch(11).explain(11) == ""
    machine.mount(MOUNT_V1)
    machine.worker(11, "4:memory:/job\n")
    (machine.tree / "job").mkdir(parents=True)
    (machine.tree / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert machine.watch(11).explain(11) == ""
    assert OutOfMemory([11], proc=tmp_path / "no", kernel_log=tmp_path / "no").explain(11) == ""


def test_the_kernels_log_names_the_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what comes after the attempt began, and only where its numbers are this process's own."""
    machine.log.write_bytes(b"3,1,5,-;Out of memory: Killed process 11 (python) total-vm:9kB\n")
    hidden = KernelLog(machine.log, machine.proc)
    assert not hidden.has_killed(12)
    real = os.stat

    def stat(path: Path) -> os.stat_result:
        found = real(path)
        return os.stat_result((found.st_mode, FIRST_PID_NAMESPACE, *tuple(found)[2:]))

    monkeypatch.setattr("ttp.launch.watch.oom.os.stat", stat)
    log = KernelLog(machine.log, machine.proc)
    with open(machine.log, "ab") as file:
        file.write(b"3,2,6,-;Memory cgroup out of memory: Killed process 12 (python) total-vm:9kB\n")
    assert log.has_killed(12) and not log.has_killed(11) and not log.has_killed(1)
    assert not hidden.has_killed(12)
    memory = machine.watch(13)
    with open(machine.log, "ab") as file:
        file.write(b"3,3,7,-;Out of memory: Killed process 13 (python) total-vm:9kB\n")
    assert memory.explain(13) == "out of memory (the kernel's log names the process)"
    for opened in (log, hidden, memory):
        opened.close()


LIMIT_BYTES = 64 << 20
EATER = "import sys; print(flush=True); sys.stdin.readline(); kept = [bytearray(1 << 20) for _ in range(1024)]"


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real cgroup below this process's own, with a limit of 64 MiB."""
    counter = counter_of("self")
    if counter is None:
        pytest.skip("this process's memory cgroup cannot be read")
    place = counter.path.parent / f"ttp_test_{os.getpid()}"
    names = ("memory.limit_in_bytes",) if counter.path.name == "memory.oom_control" else ("memory.max",)
    try:
        place.mkdir()
        (place / names[0]).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):  # no swap accounting here
            (place / "memory.swap.max").write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            place.rmdir()
        pytest.skip(f"no cgroup with a limit may be made here: {error}")
    yield place
    deadline = time.monotonic() + 20
    while True:
        try:
            return place.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{place} is still in use"
            time.sleep(0.05)


def test_a_real_limit_is_distinguished_from_a_real_kill(limited: Path) -> None:
    """One worker eats more than its cgroup may have; another gets SIGKILL from us. Both ended by the same signal."""
    enter = 'echo $$ > "$0" && exec "$@"'  # no preexec_fn: beside gRPC's threads 35 of 1,253 such forks aborted
    command = ["sh", "-c", enter, str(limited / "cgroup.procs"), sys.executable, "-c", EATER]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        assert [worker.stdout.readline() for worker in workers if worker.stdout is not None] == [b"\n", b"\n"]
        memory = OutOfMemory([worker.pid for worker in workers])
        watch = DeathWatch(
            {rank: worker.pid for rank, worker in enumerate(workers)}, lambda death: None, explain_kill=memory.explain
        )
        watch.start()
        workers[0].kill()
        assert watch.wait(60, lambda deaths: 0 in deaths and deaths[0].settled)
        assert workers[1].stdin is not None
        workers[1].stdin.write(b"\n")
        workers[1].stdin.close()
        assert watch.wait_all(60)
        texts = [watch.deaths()[rank].text for rank in (0, 1)]
        watch.stop()
        memory.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL, -signal.SIGKILL]
    assert texts[0] == "signal SIGKILL"
    assert texts[1].startswith("signal SIGKILL, out of memory (")


def test_a_worker_that_begins_later_has_its_own_count(machine: Machine) -> None:
    """From then on: what its cgroup has counted before is another's. One that shares a cgroup shares its count."""
    machine.mount(MOUNT_V2)
    machine.worker(7, "0::/job/a\n")
    machine.worker(8, "0::/job/b\n")
    machine.worker(9, "0::/job/a\n")
    machine.count("job/a/memory.events", 0)
    machine.count("job/b/memory.events", 4)
    memory = machine.watch(7)
    machine.count("job/a/memory.events", 1)
    assert memory.explain(7)
    memory.add(8)
    memory.add(9)
    assert not memory.explain(8) and not memory.explain(9)
    machine.count("job/b/memory.events", 5)
    assert memory.explain(8)
