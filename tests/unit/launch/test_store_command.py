"""`python -m ttp.launch.stores`: a machine that does not train keeps the rendezvous store, until a signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.ports import free_port
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores

SIGNALLED_AT_ONCE = """
import os, signal, sys, threading
from ttp.launch.rendezvous import multi_endpoint
threading.Thread(target=threading.Event().wait, daemon=True).start()
multi_endpoint.print = lambda *_, **__: os.kill(os.getpid(), int(sys.argv[1]))
status = multi_endpoint.main(["--port", sys.argv[2]])
os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(status)
"""
"""The signal comes as the port is announced, to a process with another thread that blocks no signal, as those of numpy; and once more as it ends."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_machine_that_does_not_train_can_keep_the_store(number: signal.Signals) -> None:
    """Until a signal."""
    place = Endpoint("127.0.0.1", free_port())
    command = [sys.executable, "-m", "ttp.launch.stores", "--port", str(place.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == f"rendezvous store on port {place.port}\n"
        one = Stores((place,), hosting=False)
        assert one.find(patient=True) == place
        keeper.send_signal(number)
        assert keeper.wait(30) == 0
    assert one.look(place) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_as_the_store_begins_ends_it_in_order(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SIGNALLED_AT_ONCE, str(int(number)), str(free_port())]
    done = subprocess.run(command, timeout=60, check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
