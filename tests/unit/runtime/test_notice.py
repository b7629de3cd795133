"""SIGTERM as a notice: seen while the main thread is stuck, shared with the user's handler, gone after the end and in
forked children. Each case is a process of its own: signals are the whole process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, sys, threading, time
from ttp.runtime.preemption import Notice
seen = threading.Event()
def say(*words):  # one write: two threads speak
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
notice = Notice(lambda text: (say("noticed", text), seen.set()))
def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
me = os.getpid()
"""

CASES = {
    # The main thread never comes back to Python: only the side thread can see the signal.
    "stuck": (
        """
import ctypes
assert notice.listen()
threading.Thread(target=lambda: (os.kill(me, signal.SIGTERM), seen.wait(30), os._exit(0)), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
ctypes.CDLL(None).sleep(60)
""",
        ["noticed SIGTERM"],
    ),
    "users_handler": (
        """
signal.signal(signal.SIGTERM, lambda number, frame: say("user", number))
notice.listen()
os.kill(me, signal.SIGTERM)
until(seen.is_set)
""",
        ["noticed SIGTERM", "user 15"],
    ),
    "other_signals": (
        """
notice.listen()
signal.signal(signal.SIGUSR1, lambda *_: say("usr1"))
os.kill(me, signal.SIGUSR1)
assert not seen.wait(0.2)
""",
        ["usr1"],
    ),
    "ignored": (
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert not notice.listen()
os.kill(me, signal.SIGTERM)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
notice.close()
""",
        [],
    ),
    "restored": (
        """
import socket
other = socket.socketpair()
other[1].setblocking(False)
signal.set_wakeup_fd(other[1].fileno())
def mine(*_): pass
signal.signal(signal.SIGTERM, mine)
notice.listen()
os.kill(me, signal.SIGTERM)
until(seen.is_set)
say("passed on", other[0].recv(1)[0])
notice.close()
assert signal.getsignal(signal.SIGTERM) is mine
assert signal.set_wakeup_fd(-1) == other[1].fileno()
assert not [t for t in threading.enumerate() if t.name == "ttp-notice"]
""",
        ["noticed SIGTERM", "passed on 15"],
    ),
    "a_later_handler_stays": (
        """
notice.listen()
def later(*_): say("later")
signal.signal(signal.SIGTERM, later)
os.kill(me, signal.SIGTERM)
until(seen.is_set)
notice.close()
assert signal.getsignal(signal.SIGTERM) is later
""",
        ["later", "noticed SIGTERM"],
    ),
    # A data loader's worker, ended by SIGTERM: it dies of it, and no rank learns of a notice.
    "forked_child": (
        """
notice.listen()
ready, go = os.pipe()
child = os.fork()
if child == 0:
    os.write(go, b"x")
    time.sleep(60)
    os._exit(1)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert not seen.wait(0.2)
os.kill(me, signal.SIGTERM)
until(seen.is_set)
""",
        ["child -15", "noticed SIGTERM"],
    ),
    "not_the_main_thread": (
        """
answers = []
thread = threading.Thread(target=lambda: answers.append(notice.listen()))
thread.start(); thread.join()
assert answers == [False] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
notice.close()
""",
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sigterm_is_a_notice(case: str) -> None:
    code, expected = CASES[case]
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == expected
