"""Calls that may hang are left to themselves, and an interpreter that ends despite them says what it was to say."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ttp.launch.aside import Aside, calls_under_way, end_despite_calls


def test_what_a_call_has_failed_with_is_known_in_a_line() -> None:
    def fail() -> None:
        raise RuntimeError("no answer\nframe #0\nframe #1")

    call = Aside(fail)
    assert call.wait(30) and not call.succeeded and call.trouble == "no answer"
    other = Aside(lambda: 3)
    assert other.wait(30) and other.trouble == "" and other.result() == 3


def test_a_process_without_such_calls_ends_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit handlers run."""
    monkeypatch.setattr("threading.enumerate", lambda: [threading.main_thread()])
    assert not calls_under_way()
    end_despite_calls(3)


def test_a_process_ends_while_a_call_hangs_in_torch() -> None:
    """With its own exit code and all that it has said; unwinding the call's thread would abort it."""
    program = """
import socket, sys
from torch.distributed import TCPStore
from ttp.launch.aside import Aside, end_despite_calls
server = socket.create_server(("127.0.0.1", 0))
call = Aside(lambda: TCPStore("127.0.0.1", server.getsockname()[1], is_master=False))
assert not call.wait(0.5)
sys.stdout.write("said")
end_despite_calls(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "said"), done.stderr
