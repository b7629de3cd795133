"""A controller that is forked, and one that is executed because nothing forks it."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.unit.runtime.conftest import LONG_S
from ttp.controller import process
from ttp.controller.agent_link import request_status
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import CannotListen, start_controller
from ttp.errors import NotWritable
from ttp.fork_server import request
from ttp.fork_server.client import ForkServer, Listener
from ttp.fork_server.forked_process import ForkedOrphan
from ttp.fork_server.forked_program import ENDED
from ttp.fork_server.preload import CONTROLLERS
from ttp.launch.links.controller_shutdown import is_controller
from ttp.proto.address import split_address


def test_a_controller_that_is_forked_is_like_one_that_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens, leads a session of its own, is found by its command line, takes SIGTERM, and its errors are distinguished."""
    monkeypatch.setattr(request, "ANSWER_S", LONG_S)  # a slow server is given up, and the controller executed
    server = ForkServer(CONTROLLERS, Listener())
    server.start(os.environ)
    try:
        start = partial(start_controller, ControllerSettings("job", 1, 1), fork_server=server.address)
        controller = start(journal=tmp_path / "j.jsonl")
        assert isinstance(controller.process, ForkedOrphan)
        assert request_status(controller.address).stage == "assembling"
        assert os.getsid(controller.pid) == controller.pid and is_controller(controller.pid)
        port = int(split_address(controller.address)[0].rpartition(":")[2])
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}: the port is taken"):
            start(journal=tmp_path / "k", port=port, port_wait_s=0.1)
        with pytest.raises(NotWritable, match="cannot write the journal"):
            start(journal=tmp_path)
        controller.terminate()
        assert controller.wait(LONG_S) == 0
    finally:
        server.close()


def test_a_controller_is_executed_where_nothing_forks_it(tmp_path: Path) -> None:
    controller = start_controller(ControllerSettings("job", 1, 1), tmp_path / "j", fork_server=str(tmp_path / "gone"))
    assert not isinstance(controller.process, ForkedOrphan)
    controller.terminate()
    assert controller.wait(LONG_S) == 0


def test_what_keeps_a_controller_from_listening_is_said_whatever_its_end_takes(tmp_path: Path) -> None:
    """A busy machine: one that has said how it ended may still be ending, and one that says nothing is killed."""
    log = tmp_path / "log"
    log.write_text("ttp-controller: cannot write the journal j\n")
    with subprocess.Popen(["sleep", "1.5"]) as ending:
        refused = process._start_error(ending, f"{ENDED}{process.CANNOT_WRITE}", log, 0)
        assert isinstance(refused, NotWritable) and ending.returncode == 0
    with subprocess.Popen(["sleep", "600"]) as silent:
        late = process._start_error(silent, None, log, 0)
        assert "did not say that it listens within 60 s and was killed" in str(late)
        assert silent.returncode == -signal.SIGKILL


def test_a_controller_that_says_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing its output, or half a line, is something else."""
    monkeypatch.setattr(process, "START_TIMEOUT_S", 0.1)
    reader, writer = os.pipe()
    with open(reader, "rb"):
        with open(writer, "wb", buffering=0) as said:
            assert process._read_line(reader) is None
            said.write(b"half")
        assert process._read_line(reader) == "half"
        assert process._read_line(reader) == ""
