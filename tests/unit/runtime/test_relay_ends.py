"""What a relay leaves behind: no open files, whatever it was doing, and no process that has crashed."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from ttp.launch.attempts.relays import Relays
from ttp.launch.links import relay as relay_module
from ttp.launch.links.relay import Relay


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_attempt_after_attempt_no_file_remains_open() -> None:
    """Else a job of many attempts comes to its limit of open files: each relay had a loop with three."""
    relays = Relays(True, lambda world_size: 3.0)
    relays.begin((0,), 2)
    before = open_files()
    for _ in range(20):
        assert relays.begin((0,), 2)
    assert open_files() < before + 20
    relays.close()


def test_a_relay_is_closed_while_it_begins_to_listen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that is stopped before it has started would take the process along."""
    monkeypatch.setattr(relay_module, "START_S", 0.0)
    for number in range(30):
        relay = Relay(tmp_path / str(number), (0,), 3.0)
        with contextlib.suppress(TimeoutError):
            relay.start()
        relay.close()
        assert relay._loop.is_closed() and not relay._thread.is_alive()


def test_a_relay_whose_thread_cannot_be_started_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    relays = Relays(True, lambda world_size: 3.0)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        assert relays.begin((0,), 2) == ""
    assert "can't start new thread" in caplog.text
    assert relays.begin((0,), 2)
    relays.close()
    relays.close()
