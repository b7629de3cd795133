"""The death watch, on real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttp.launch.watch import death_watch
from ttp.launch.watch.death_watch import PF_EXITING, Death, DeathWatch, FlagsProbe, Probe, StatusProbe
from ttp.launch.watch.processes import Lost, exit_status

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DEADLINE_S = 20.0

probes = pytest.mark.parametrize(
    "probe", [pytest.param(FlagsProbe, marks=linux), StatusProbe], ids=["kernel flags", "exit status"]
)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts a child; every child is ended and reaped afterwards."""
    children: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(command or ("sleep", "600"), stdin=subprocess.PIPE))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


class Reports:
    """Collects what the watch reports."""

    def __init__(self) -> None:
        self.seen: list[Death] = []

    def __call__(self, death: Death) -> None:
        self.seen.append(death)


@probes
def test_a_killed_worker_is_reported_with_its_signal(
    spawn: Callable[..., subprocess.Popen[bytes]], probe: Callable[[int], Probe]
) -> None:
    """Only the killed one, last of all with its cause, and it is still there for its parent to reap."""
    children = {rank: spawn() for rank in range(3)}
    reports = Reports()
    watch = DeathWatch({rank: child.pid for rank, child in children.items()}, reports, probe=probe)
    watch.start()
    children[1].kill()
    assert watch.wait(DEADLINE_S, lambda deaths: 1 in deaths and deaths[1].settled)
    watch.stop()
    assert watch.living() == [0, 2]
    assert {(death.rank, death.pid) for death in reports.seen} == {(1, children[1].pid)}
    texts = [death.text for death in reports.seen]
    assert len(texts) <= 2 and texts[-1] == "signal SIGKILL" and texts[0] in ("exiting", "signal SIGKILL")
    assert watch.deaths()[1].failed and watch.deaths()[1].status == -signal.SIGKILL
    assert children[1].wait(DEADLINE_S) == -signal.SIGKILL, "the watch took the status from the parent"


@probes
@pytest.mark.parametrize("code", [0, 1, 75])
def test_an_exit_code_is_reported(
    spawn: Callable[..., subprocess.Popen[bytes]], probe: Callable[[int], Probe], code: int
) -> None:
    """A worker that exits by itself is reported with its exit code; code 0 is not a failure."""
    child = spawn("sh", "-c", f"read line; exit {code}")
    watch = DeathWatch({5: child.pid}, Reports(), probe=probe)
    watch.start()
    assert child.stdin is not None
    child.stdin.write(b"go\n")
    child.stdin.flush()
    assert watch.wait_all(DEADLINE_S)
    watch.stop()
    death = watch.deaths()[5]
    assert (death.text, death.status, death.failed) == (f"exit code {code}", code, code != 0)


def test_a_worker_that_is_reaped_by_another_is_gone_without_a_cause(
    spawn: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """The watch ends its work on that worker; it does not claim a failure that it cannot know."""
    child = spawn()
    child.kill()
    child.wait()
    watch = DeathWatch({0: child.pid}, Reports())
    watch.start()
    assert watch.wait_all(DEADLINE_S)
    watch.stop()
    assert watch.deaths()[0].text == Lost.LOST.value and not watch.deaths()[0].failed


def test_exiting_is_reported_before_the_cause_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the kernel frees a big process its status is not known: `exiting` comes at once, the cause later."""
    freed = threading.Event()

    class Ending:
        def __init__(self, pid: int) -> None:
            pass

        def ending(self) -> bool:
            return True

        def gone(self) -> bool:
            return freed.is_set()

        def running(self) -> bool:
            return False

        def status(self) -> None:
            return None

        def close(self) -> None:
            pass

    monkeypatch.setattr(
        "ttp.launch.watch.death_watch.exit_status", lambda pid: -signal.SIGKILL if freed.is_set() else None
    )
    reports = Reports()
    watch = DeathWatch({3: 12345}, reports, probe=Ending)
    watch.start()
    assert watch.wait(DEADLINE_S, lambda deaths: 3 in deaths)
    assert [(d.text, d.settled) for d in watch.deaths().values()] == [("exiting", False)]
    assert watch.living() == [3], "a worker that is still being freed counts as living"
    freed.set()
    assert watch.wait_all(DEADLINE_S)
    watch.stop()
    assert [death.text for death in reports.seen] == ["exiting", "signal SIGKILL"]
    assert reports.seen[0].seen_monotonic_s == reports.seen[1].seen_monotonic_s, "the first sight counts"


@linux
def test_the_flags_of_this_living_process_are_clean() -> None:
    """A live process is not ending, whatever its name looks like in the stat line."""
    probe = FlagsProbe(os.getpid())
    assert not probe.ending()
    probe.close()


@probes
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, 75, 0], ids=str)
def test_a_processs_status_is_read_before_its_end(
    spawn: Callable[..., subprocess.Popen[bytes]], probe: Callable[[int], Probe], end: int
) -> None:
    """A signal or an exit code; 0 also means that the kernel does not show it, and counts as unknown."""
    child = spawn("sh", "-c", f"read line; exit {end}")
    look = probe(child.pid)
    assert look.status() is None, "it runs"
    assert child.stdin is not None
    if isinstance(end, signal.Signals):
        child.send_signal(end)
    else:
        child.stdin.write(b"go\n")
        child.stdin.flush()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look.status() == (-end if isinstance(end, signal.Signals) else end or None)
    look.close()


@linux
def test_a_big_process_is_named_while_the_kernel_still_frees_it() -> None:
    """From its flags and the kernel's exit code only: the parent cannot wait for it before its memory is freed."""
    code = "import sys; held = bytearray(b'x') * (1 << 29); print(flush=True); sys.stdin.read()"
    for _ in range(20):  # on a busy machine it may be freed before the first look, which shows nothing
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None and child.stdout is not None
        with child.stdin, child.stdout:
            child.stdout.readline()
            probe = FlagsProbe(child.pid)
            child.kill()
            while not (probe.ending() and probe.status() is not None) and exit_status(child.pid) is None:
                pass
            early, freed = probe.status(), exit_status(child.pid)
            child.wait()
            probe.close()
        if freed is None:
            break
    assert freed is None, "it was freed before the first look, 20 times: the test has shown nothing"
    assert early == -signal.SIGKILL


@linux
def test_a_name_with_brackets_does_not_confuse_the_flags(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """The command's name stands in the stat line unescaped."""
    code = "import sys; open('/proc/self/comm', 'w').write('a) Z 1 (b'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        child.stdout.readline()
        probe = FlagsProbe(child.pid)
        assert not probe.ending()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert probe.ending()
        probe.close()
        assert exit_status(child.pid) == -signal.SIGKILL
        child.wait()


def test_a_watch_that_fails_says_so_instead_of_seeing_everybody_alive() -> None:
    """Else the launcher would wait for ever."""

    def fail(death: Death) -> None:
        raise ValueError("no line to the controller")

    watch = DeathWatch({0: 2**22 + 1}, fail)  # no such process
    watch.start()
    with pytest.raises(RuntimeError, match="the death watch has failed: no line to the controller"):
        watch.wait_all(DEADLINE_S)
    watch.stop()


@linux
def test_a_worker_is_not_taken_for_dead_because_this_process_has_no_descriptor_left(
    spawn: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is asked for meanwhile; the flags are read as soon as they can be."""
    child = spawn()
    free = os.open

    def none_left(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).startswith("/proc/"):
            raise OSError(errno.EMFILE, "Too many open files")
        return free(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", none_left)
    probe = FlagsProbe(child.pid)
    assert not probe.ending() and not probe.gone()
    monkeypatch.setattr(os, "open", free)
    assert not probe.ending()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert probe.ending() and probe.gone()
    late = FlagsProbe(child.pid)
    monkeypatch.setattr(os, "open", none_left)
    assert FlagsProbe(child.pid).ending(), "the status says that it has ended"
    for each in (probe, late):
        each.close()


def test_the_watch_is_stopped_at_once_however_long_its_poll(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """A launcher that ends does not wait for the next look."""
    watch = DeathWatch({0: spawn().pid}, Reports(), poll_s=60.0)
    watch.start()
    begun_s = time.monotonic()
    watch.stop()
    assert time.monotonic() - begun_s < 30.0


SHELL = """
python -c "import os, sys; print(os.getpid(), flush=True); sys.stdin.readline(); sys.exit(75)" <&3 &
exec 3<&-
trap '' USR1
wait $!
exit $?
"""
"""A worker that is a shell: the rank is its child."""


@pytest.fixture
def wrapped() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Return a shell and its child, which ends with status 75 when it gets a line."""
    script = f"exec 3<&0\n{SHELL}".replace("python ", f"{sys.executable} ", 1)
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        yield shell, int(shell.stdout.readline())
        os.killpg(shell.pid, signal.SIGKILL)


@linux
@pytest.mark.parametrize("first", ["the rank", "the shell"])
def test_a_rank_that_a_shell_has_started_ends_when_it_does_itself(
    wrapped: tuple[subprocess.Popen[str], int], first: str
) -> None:
    """It is reported with its own process's pid. A shell that exits first is not a death; its status is the final one."""
    shell, rank_pid = wrapped
    reports = Reports()
    watch = DeathWatch({4: shell.pid}, reports)
    watch.follow(4, rank_pid)
    watch.start()
    assert shell.stdin is not None
    if first == "the shell":
        os.kill(shell.pid, signal.SIGKILL)
        os.waitid(os.P_PID, shell.pid, os.WEXITED | os.WNOWAIT)
        assert watch.living() == [4] and watch.begun() == [] and not watch.wait_all(0.1)
        assert reports.seen == []
    shell.stdin.write("\n")
    shell.stdin.flush()
    assert watch.wait_all(DEADLINE_S)
    watch.stop()
    death = watch.deaths()[4]
    assert death.pid == rank_pid
    assert death.status == (75 if first == "the rank" else -signal.SIGKILL)


@linux
def test_a_worker_that_begins_to_end_is_seen_before_the_next_poll(
    spawn: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """So that it is not reaped before the watch has read its status; where the watch is late, it takes over the others' status."""
    children = [spawn(), spawn()]
    watch = DeathWatch({rank: child.pid for rank, child in enumerate(children)}, Reports(), poll_s=60.0)
    assert watch.begun() == []
    children[1].kill()
    os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)
    assert watch.begun() == [1] and watch.deaths() == {}
    children[1].wait()
    watch.start()
    assert watch.wait(DEADLINE_S, lambda deaths: 1 in deaths)
    assert watch.deaths()[1].lost and not watch.deaths()[1].failed
    watch.learn(0, 3)
    watch.learn(1, -signal.SIGKILL)
    watch.stop()
    assert watch.deaths()[1].text == "signal SIGKILL" and watch.deaths()[1].failed and 0 not in watch.deaths()


@linux
def test_a_process_runs_that_is_neither_ending_nor_stopped(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """What an agent vouches for. A process that goes on after a stop runs again."""
    children = {rank: spawn() for rank in range(3)}
    pids = {rank: child.pid for rank, child in children.items()}
    watch = DeathWatch(pids, Reports())
    watch.start()
    try:
        assert watch.running() == pids
        os.kill(pids[0], signal.SIGSTOP)
        os.waitid(os.P_PID, pids[0], os.WSTOPPED | os.WNOWAIT)
        children[1].kill()
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
        assert watch.running() == {2: pids[2]}
        os.kill(pids[0], signal.SIGCONT)
        os.waitid(os.P_PID, pids[0], os.WCONTINUED | os.WNOWAIT)
        assert watch.running() == {0: pids[0], 2: pids[2]}
        other = spawn()
        watch.follow(2, other.pid)
        assert watch.running() == {0: pids[0], 2: other.pid}, "the rank that a worker's shell has started"
    finally:
        watch.stop()
    assert watch.running() == {}, "the watch has stopped"


@linux
@pytest.mark.parametrize(
    ("state", "flags", "runs"),
    [
        (b"R", 0, True),
        (b"D", 0, True),
        (b"R", PF_EXITING, False),
        (b"D", PF_EXITING, False),
        (b"T", 0, False),
        (b"t", 0, False),
    ],
)
def test_a_process_that_frees_its_memory_does_not_run(
    monkeypatch: pytest.MonkeyPatch, state: bytes, flags: int, runs: bool
) -> None:
    """A big one does so for seconds, in the states of one that runs. Nor does one that is traced."""
    probe = FlagsProbe(os.getpid())
    monkeypatch.setattr(probe, "_fields", lambda: [state, *[b"0"] * 5, b"%d" % flags])
    assert probe.running() is runs
    probe.close()


def test_without_flags_no_process_is_said_to_run(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Whether it is stopped cannot be seen."""
    watch = DeathWatch({0: spawn().pid}, Reports(), probe=StatusProbe)
    watch.start()
    assert watch.running() == {}
    watch.stop()


def test_a_watch_that_has_failed_says_of_no_process_that_it_runs() -> None:
    class Failing(StatusProbe):
        def ending(self) -> bool:
            raise ValueError("a bug")

        def running(self) -> bool:
            return True

    watch = DeathWatch({0: os.getpid()}, Reports(), probe=Failing)
    watch.start()
    with pytest.raises(RuntimeError):
        watch.wait(DEADLINE_S, lambda deaths: bool(watch.living()) and False)
    assert watch.running() == {}
    watch.stop()


@linux
def test_a_living_worker_whose_flags_have_not_changed_costs_one_read(
    spawn: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is taken apart again only after a change: a new name, and its end."""
    split: list[bytes] = []
    whole = death_watch._split

    def noted(line: bytes) -> list[bytes]:
        split.append(line)
        return whole(line)

    monkeypatch.setattr(death_watch, "_split", noted)
    child = spawn("sh", "-c", "read line; printf 'a) S 1 (b' > /proc/$$/comm; read line")
    comm = Path(f"/proc/{child.pid}/comm")
    while comm.read_text() != "sh\n":  # forked, and not yet executed: the flags change then
        pass
    probe = FlagsProbe(child.pid)
    assert not any(probe.ending() for _ in range(50))
    assert len(split) == 1
    assert child.stdin is not None
    child.stdin.write(b"go\n")
    child.stdin.flush()
    while comm.read_text() != "a) S 1 (b\n":
        pass
    assert not any(probe.ending() for _ in range(50))
    assert len(split) == 2
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert probe.ending() and probe.gone()
    probe.close()


@probes
def test_another_process_can_have_a_ranks_place(
    spawn: Callable[..., subprocess.Popen[bytes]], probe: Callable[[int], Probe]
) -> None:
    """Also where no other worker runs. The first one's death is forgotten, and the other's is reported."""
    first, second, reports = spawn(), spawn(), Reports()
    watch = DeathWatch({1: first.pid}, reports, poll_s=0.002, probe=probe)
    watch.start()
    try:
        first.kill()
        assert watch.wait_all(DEADLINE_S) and watch.living() == []
        watch.replace(1, second.pid)
        assert watch.deaths() == {} and watch.living() == [1]
        second.kill()
        assert watch.wait_all(DEADLINE_S) and watch.deaths()[1].pid == second.pid
        assert {death.pid for death in reports.seen} == {first.pid, second.pid}
    finally:
        watch.stop()


def test_a_death_is_reported_before_others_see_it(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Whoever has the process replaced then knows that its status was reported."""
    worker, seen = spawn(), []
    watch = DeathWatch({1: worker.pid}, lambda death: seen.append(dict(watch.deaths()).get(1)), poll_s=0.002)
    watch.start()
    try:
        worker.kill()
        assert watch.wait_all(DEADLINE_S)
    finally:
        watch.stop()
    assert all(before is None or not before.settled for before in seen)
