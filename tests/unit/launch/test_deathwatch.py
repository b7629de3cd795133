"""The death watch, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ttp.launch.deathwatch import Death, DeathWatch, FlagsProbe, Probe, StatusProbe
from ttp.launch.processes import Lost, exit_status

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
    assert texts in (["signal SIGKILL"], ["exiting", "signal SIGKILL"])
    assert watch.deaths()[1].failed and watch.deaths()[1].status == -signal.SIGKILL
    assert children[1].wait(DEADLINE_S) == -signal.SIGKILL, "the watch took the status from the parent"


@probes
@pytest.mark.parametrize("code", [0, 1, 75])
def test_an_exit_code_is_reported(
    spawn: Callable[..., subprocess.Popen[bytes]], probe: Callable[[int], Probe], code: int
) -> None:
    """A worker that leaves by itself is told with its exit code; code 0 is no failure."""
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

        def close(self) -> None:
            pass

    monkeypatch.setattr("ttp.launch.deathwatch.exit_status", lambda pid: -signal.SIGKILL if freed.is_set() else None)
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
