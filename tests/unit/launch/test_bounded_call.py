"""Calls that hang are abandoned, and an interpreter that ends despite them flushes its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ttp import launch
from ttp.launch.rendezvous import bounded_call
from ttp.launch.rendezvous.bounded_call import BoundedCall


def test_what_a_call_has_failed_with_is_known_in_a_line() -> None:
    def fail() -> None:
        raise RuntimeError("no answer\nframe #0\nframe #1")

    call = BoundedCall(fail)
    assert call.wait(30) and not call.succeeded and call.trouble == "no answer"
    other = BoundedCall(lambda: 3)
    assert other.wait(30) and other.trouble == "" and other.result() == 3


def test_a_process_without_such_calls_ends_as_ever() -> None:
    """Its exit handlers run, though the thread that logs notices lives as long as the process."""
    program = """
import atexit, signal, sys, threading
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from ttp.launch.rendezvous.bounded_call import BoundedCall, end_despite_calls
from ttp.launch.attempts.signals import ShutdownSignals
signal.signal(signal.SIGTERM, _terminate_process_handler)
ShutdownSignals().install()
assert BoundedCall(lambda: 3).wait(30)
for thread in threading.enumerate():
    if thread.name == "ttp-rendezvous":
        thread.join(30)
atexit.register(lambda: print(*sorted(thread.name for thread in threading.enumerate())))
end_despite_calls(3)
sys.exit(4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (4, "MainThread ttp-signals\n"), done.stderr


def test_every_thread_of_the_launcher_is_known_to_hang_or_to_wait_only() -> None:
    """A new one must be judged: an interpreter that unwinds a call to a store aborts, one that is ended at once runs no exit handlers."""
    (folder,) = launch.__path__
    sources = [path.read_text() for path in sorted(Path(folder).rglob("*.py"))]
    made = [re.findall(r'name="([^"]*)"', call) for text in sources for call in re.findall(r"\bThread\((.*)\)", text)]
    names = {name for found in made for name in found}
    assert all(made) and len(made) == sum(text.count("threading.Thread(") for text in sources)
    assert names == {
        *bounded_call._MAY_HANG,
        "ttp-signals",
        "ttp-death-watch",
        "ttp-controller-file",
        "ttp-copies",
        "ttp-mirror",
        "ttp-on-event",
        "ttp-health-check",
        "ttp-replacements",
        "ttp-relay",
    } - {"RendezvousKeepAlive"}


def test_a_process_ends_while_a_call_hangs_in_torch() -> None:
    """With its own exit code and all that it has said; unwinding the call's thread would abort it."""
    program = """
import socket, sys
from torch.distributed import TCPStore
from ttp.launch.rendezvous.bounded_call import BoundedCall, end_despite_calls
server = socket.create_server(("127.0.0.1", 0))
call = BoundedCall(lambda: TCPStore("127.0.0.1", server.getsockname()[1], is_master=False))
assert not call.wait(0.5)
sys.stdout.write("said")
end_despite_calls(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "said"), done.stderr
