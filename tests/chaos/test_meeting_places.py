"""Where launchers meet, with real ones: in a file, at an address that is not a machine's own, and at places that are not there."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.launching import DEADLINE_S, Launch
from tests.ports import free_port
from ttp.chaos.nodes.namespaces import Nodes, why_not
from ttp.launch.rendezvous.multi_endpoint import ANSWER_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"),
]

C10D = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "j", "--local-addr", "127.0.0.1", "--rdzv-endpoint")

FALLS_ONCE = """
note("begun")
if start == "0":
    await_file(f"begun-{1 - rank}-0")
    sys.exit(3 if rank == 1 else 75)
"""


def test_two_nodes_meet_in_a_file_and_again_after_a_fault(tmp_path: Path) -> None:
    """The file is shared, as on one machine; each attempt has its own store all the same."""
    options = (*C10D, str(tmp_path / "store"), "--rdzv-conf", "store_type=file", "--max-restarts", "1")
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Launch(tmp_path, FALLS_ONCE, *options, name=f"node{n}")) for n in range(2)]
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.text for node in nodes)
        assert nodes[0].notes("begun") == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"]
        for node in nodes:
            node.assert_nothing_left()


@contextlib.contextmanager
def deaf_listener() -> Iterator[int]:
    """Take connections at a port, and say nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_a_place_that_never_answers_ends_the_launcher_in_time(tmp_path: Path) -> None:
    """In a line, with torchrun's exit code: the calls that hang in torch neither hold it up nor abort it."""
    with deaf_listener() as port:
        began = time.monotonic()
        with Launch(tmp_path, "", *C10D, f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=5") as job:
            assert job.wait() == 1, job.text
            assert time.monotonic() - began < ANSWER_S, "an answer has 30 s, but for join_timeout"
    assert f"ttprun: error: too few nodes joined within 5 s (--rdzv-conf join_timeout) at 127.0.0.1:{port}" in job.text
    assert f"127.0.0.1:{port}: it accepts connections, but no store answered within" in job.text
    assert "Traceback" not in job.text and "Aborted" not in job.text and "terminate called" not in job.text


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("nosuch-host-x.invalid:29400", "the name 'nosuch-host-x.invalid' does not resolve"),
        ("127.0.0.1:{port}", "connection refused"),
    ],
    ids=["mistyped", "dead"],
)
def test_a_place_that_is_not_reached_is_reported_with_the_reason_long_before_the_end(
    tmp_path: Path, place: str, why: str
) -> None:
    """It goes on trying as long as it is configured to, and ends with the same reason in a line."""
    place = place.format(port=free_port())
    with Launch(tmp_path, "", *C10D, place, "--rdzv-conf", "join_timeout=45,is_host=0") as job:
        job.until(lambda: f"waiting for 2 nodes, this one included, to join at {place}" in job.text, "waiting line")
        job.until(lambda: f"s so far); {place}: {why}" in job.text, "reason")
        assert job.process.poll() is None, "it goes on trying"
        assert job.wait() == 1
    assert f"too few nodes joined within 45 s (--rdzv-conf join_timeout) at {place}: {place}: {why}" in job.text
    assert "Traceback" not in job.text


def test_a_static_job_whose_node_0_is_not_reached_names_the_reason(tmp_path: Path) -> None:
    """Soon, and in a line at the end of --rdzv-conf timeout."""
    port = str(free_port())
    options = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    with Launch(tmp_path, "", *options, "--rdzv-conf", "timeout=20") as job:
        job.until(lambda: f"s so far); 127.0.0.1:{port}: connection refused" in job.text, "reason")
        assert job.wait() == 1
    assert (
        f"ttprun: error: the rendezvous timed out: this node waited for 2 nodes, this one included, to join at 127.0.0.1:{port}"
        in job.text
    )
    assert "Traceback" not in job.text


@pytest.mark.skipif(importlib.util.find_spec("etcd") is not None, reason="etcd's client is installed")
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_a_client_that_is_not_installed_is_named(tmp_path: Path, backend: str) -> None:
    """Nothing is started: the command line asks for what is not there."""
    options = ("--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", "127.0.0.1:2379", "--rdzv-id", "j")
    with Launch(tmp_path, "", *options) as job:
        assert job.wait() == 2
    assert f"ttprun: error: invalid --rdzv-backend: got '{backend}', whose client cannot be imported" in job.text
    assert "Traceback" not in job.text


FORWARD = """
import socket, sys, threading
server = socket.create_server(("", 29400))
def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    try:
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
print("ready", flush=True)
while True:
    near, _ = server.accept()
    try:
        far = socket.create_connection((sys.argv[1], 29400), 2)
    except OSError:
        near.close()
        continue
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_node_keeps_the_store_of_an_address_that_only_leads_to_it(tmp_path: Path) -> None:
    """As a container's published port does: the endpoint is another machine's, which hands its connections on."""
    worker = tmp_path / "worker.py"
    worker.write_text("import pathlib, sys; pathlib.Path(sys.argv[1], 'done').touch()\n")
    log, ready = tmp_path / "launcher.log", tmp_path / "ready"
    with Nodes(2) as (node, gate), open(log, "wb") as output, open(ready, "wb") as said:
        forward = gate.popen([sys.executable, "-c", FORWARD, node.address], output=said)
        deadline = time.monotonic() + DEADLINE_S
        while not ready.read_text():
            assert time.monotonic() < deadline and forward.poll() is None
            time.sleep(0.05)
        options = [
            "--nnodes",
            "1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{gate.address}:29400",
            "--rdzv-id",
            "j",
        ]
        command = [sys.executable, "-m", "ttp.launch", *options, "--rdzv-conf", "is_host=1,join_timeout=60"]
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        launcher = node.popen([*command, str(worker), str(tmp_path)], output=output, environ=environ)
        try:
            assert launcher.wait(DEADLINE_S) == 0, log.read_text()
        except subprocess.TimeoutExpired:
            raise AssertionError(log.read_text()) from None
        finally:
            for process in (launcher, forward):
                process.kill()
                process.wait()
    assert (tmp_path / "done").exists()
