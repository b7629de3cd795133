"""A process that not even SIGKILL ends, as in the kernel on a failing disk, holds up no part of the agent."""

from __future__ import annotations

import io
import logging
import os
import subprocess
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.waiting import until
from ttp.fork_server.client import ForkServer
from ttp.fork_server.kill import KILL_WAIT_S
from ttp.launch.attempts.copies import Copies
from ttp.launch.attempts.mirror import Mirror
from ttp.launch.report.event_command import EventCommand


class Unkillable:
    """A child as `subprocess.Popen` shows one that never ends."""

    pid, returncode, stdin = 1 << 30, None, None
    waited: list[float]

    def __init__(self, *given: Any, **named: Any) -> None:
        Unkillable.waited = []

    def poll(self) -> None: ...

    def kill(self) -> None: ...

    def send_signal(self, number: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "waits without a limit"
        self.waited.append(timeout)
        raise subprocess.TimeoutExpired([], timeout)


def end_mirror() -> object:
    mirror = Mirror()
    mirror._process = cast(Any, Unkillable())
    mirror._kill()
    return mirror._process


def end_keeper() -> object:
    copies = Copies()
    copies._process = cast(Any, Unkillable())
    copies.close()
    return copies._process


def end_fork_server() -> object:
    server = ForkServer([])
    server._process = cast(Any, Unkillable())
    server.close()
    return server._process


@pytest.mark.parametrize(
    ("end", "what"),
    [(end_mirror, "the mirror process"), (end_keeper, "the copy keeper"), (end_fork_server, "the fork server")],
    ids=["mirror", "copy keeper", "fork server"],
)
def test_the_agents_main_thread_goes_on_without_a_process_that_sigkill_does_not_end(
    end: Callable[[], object], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        assert end() is None
    assert 0.0 < Unkillable.waited[-1] <= KILL_WAIT_S
    [warning] = caplog.messages
    assert warning.startswith(
        f"{what} (pid {Unkillable.pid}) did not end within 30 s after SIGKILL; no longer waiting."
    )


def test_the_next_event_is_tried_after_a_command_that_sigkill_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = []

    class Command(Unkillable):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__()
            self.stdin = cast(Any, io.BytesIO())
            started.append(self)

        def communicate(self, event: bytes, timeout: float) -> None:
            raise subprocess.TimeoutExpired([], timeout)

    monkeypatch.setattr(subprocess, "Popen", Command)
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    command = EventCommand(["hangs"])
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        for number in range(2):
            command.put(f"{number}\n")
        until(lambda: len(started) == 2, "the second event's command")
        command.close()
    assert "the command of --on-event (pid" in caplog.text and "did not end within 30 s after SIGKILL" in caplog.text
