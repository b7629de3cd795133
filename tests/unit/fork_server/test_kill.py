"""Processes are killed all at once, and waited for within one limit."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ttp.fork_server import kill
from ttp.fork_server.kill import KILL_WAIT_S, kill_and_wait


class Unkillable:
    """A child that not even SIGKILL ends; its clock is the test's."""

    def __init__(self, pid: int, clock: SimpleNamespace, seen: list[str]) -> None:
        self.pid, self._clock, self._seen = pid, clock, seen

    def send_signal(self, number: int, /) -> None:
        self._seen.append(f"{signal.Signals(number).name} to {self.pid}")

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "waits without a limit"
        self._seen.append(f"{timeout:g} s for {self.pid}")
        self._clock.now_s += timeout
        raise subprocess.TimeoutExpired([], timeout)


def test_a_process_is_killed_and_reaped_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        with caplog.at_level(logging.WARNING, "ttp.launch"):
            kill_and_wait("a child", [child])
        assert child.returncode == -signal.SIGKILL
    assert caplog.text == ""


def test_several_processes_that_sigkill_does_not_end_share_one_limit_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All have the signal before the first is waited for."""
    clock, seen = SimpleNamespace(now_s=100.0), list[str]()
    monkeypatch.setattr(kill, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        kill_and_wait("the workers", [Unkillable(pid, clock, seen) for pid in (71, 72)])
    assert seen == ["SIGKILL to 71", "SIGKILL to 72", f"{KILL_WAIT_S:g} s for 71", "0 s for 72"]
    [warning] = caplog.messages
    assert warning.startswith("the workers (pids 71, 72) did not end within 30 s after SIGKILL; no longer waiting.")
