"""A node that goes: what the others learn of it, and that it does not close the rendezvous for them when it alone is broken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import TTPRUN, Launch
from tests.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

BROKEN = """
from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from ttp.launch import agent
from ttp.launch.__main__ import main
whole = LocalElasticAgent._assign_worker_ranks
def breaks(self, *args, **kwargs):
    whole(self, *args, **kwargs)
    raise DistStoreError("wait timeout after 60000ms")
LocalElasticAgent._assign_worker_ranks = breaks
agent.BROKEN_ROUNDS = 2
main()
"""
"""ttprun on a node whose rendezvous is complete and breaks, every time."""

WAITING = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
note("begun", os.environ["WORLD_SIZE"])
while os.environ["WORLD_SIZE"] == "3":  # for ranks that will not come
    time.sleep(0.01)
"""


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def place(port: int) -> tuple[str, ...]:
    return (
        *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-id", "j", "--local-addr", "127.0.0.1"),
        *("--rdzv-conf", "join_timeout=120,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"),
    )


@pytest.mark.long
def test_a_node_that_alone_is_broken_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """After so many broken rounds it says why and goes; the others, whose ranks wait for its, learn of it and meet again."""
    driver = tmp_path / "driver.py"
    driver.write_text(BROKEN)
    port, nodes = free_port(), []
    options = place(port)
    with contextlib.ExitStack() as stack:
        for number, program in enumerate((TTPRUN, TTPRUN, (str(driver),))):
            launch = Launch(tmp_path, WAITING, "--nnodes", "2:3", *options, program=program, name=f"node{number}")
            nodes.append(stack.enter_context(launch))
            # The first one has the store: were it the broken one's, its leaving would be reported as the loss of the store.
            launch.until(lambda: listens(port), "a store")
        assert nodes[2].wait() == 1
        assert "the rendezvous broke after it was complete (wait timeout after 60000ms)" in nodes[2].text
        assert [node.wait() for node in nodes[:2]] == [0, 0], nodes[0].text + nodes[1].text
        for node in nodes[:2]:
            assert "DistStoreError: wait timeout after 60000ms" in node.text and "a node has left: " in node.text
            assert "no restart left" not in node.text
        last = sorted(nodes[0].notes("begun"), key=lambda name: int(name.split("-")[2]))[-1]
        assert nodes[0].read(last) == "2"
        for node in nodes:
            node.assert_nothing_left()


REFUSED = """
note("begun")
if rank == 1:
    await_file("begun-0-0")
    sys.exit(2)
await_file("refused")
sys.exit(3)
"""


@pytest.mark.long
def test_a_node_on_which_the_job_has_failed_says_so_to_the_others(tmp_path: Path) -> None:
    """It closes the rendezvous: there is nothing to come back to. The other one, which wants to, ends with its words."""
    options, nodes = place(free_port()), []
    with contextlib.ExitStack() as stack:
        for number in range(2):
            launch = Launch(tmp_path, REFUSED, "--nnodes", "2", *options, name=f"node{number}")
            nodes.append(stack.enter_context(launch))
        nodes[0].await_notes("begun-0-0", "begun-1-0")
        nodes[1].says(" of 2 on this node")
        with_one = 1 if ": rank 1 of 2 on this node" in nodes[1].text else 0
        assert nodes[with_one].wait() == 1
        (tmp_path / "refused").touch()  # the store may be gone by now: it was kept until the other had received
        other = nodes[1 - with_one]
        assert other.wait() == 1
        # It has learned of it before its own worker ended, or learns of it as it wants to meet the other again.
        assert "the job failed on another node: " in other.text or "the job 'j' is over" in other.text
        assert "rank 1: exit code 2; exit code 2 means an invalid command line or configuration" in other.text
        for node in nodes:
            node.assert_nothing_left()


LOST = """
from ttp.launch.links import peer_agents
from ttp.launch.__main__ import main
peer_agents.LOST_S = 4.0
main()
"""
"""ttprun with less patience for a node of which nothing is received."""

FOR_GOOD = """
world = os.environ["WORLD_SIZE"]
note("begun" + world, os.getpid())
while world == "3" or not (out / "lost").exists():  # as in torch's collectives: for ranks that will not come
    time.sleep(0.01)
"""


def start_of_three(folder: Path) -> str:
    """Return the number of the attempt in which three ranks have begun; empty: there was none yet."""
    begun = [path.name.split("-") for path in folder.glob("begun3-*")]
    starts = [start for _, _, start in begun]
    return next((start for start in starts if starts.count(start) == 3), "")


@pytest.mark.long
@pytest.mark.parametrize("has_store", [True, False])
def test_a_node_lost_before_its_ranks_are_known_is_reported_and_the_others_go_on(
    tmp_path: Path, has_store: bool
) -> None:
    """Its launcher and rank are stopped: nothing is received from them, and nothing is closed. The others do not wait for torch's
    half an hour, whether the workers' store was there or elsewhere."""
    driver = tmp_path / "driver.py"
    driver.write_text(LOST)
    port, nodes = free_port(), []
    options = list(place(port))
    options[options.index("--rdzv-conf") + 1] += ",is_host=0"
    with contextlib.ExitStack() as stack:
        keeper = [sys.executable, "-m", "ttp.launch.stores", "--port", str(port)]
        store = stack.enter_context(subprocess.Popen(keeper, stdout=subprocess.PIPE))
        stack.callback(store.kill)
        assert store.stdout is not None and store.stdout.readline()
        for number in range(3):
            launch = Launch(
                tmp_path, FOR_GOOD, "--nnodes", "2:3", *options, program=(str(driver),), name=f"node{number}"
            )
            nodes.append(stack.enter_context(launch))
        nodes[0].until(lambda: bool(start_of_three(tmp_path)), "attempt of three ranks")
        start = start_of_three(tmp_path)
        nodes[0].until(lambda: all(f"attempt {start}: rank " in node.text for node in nodes), "word of it from all")
        lost = next(node for node in nodes if (f"attempt {start}: rank 0 of 3" in node.text) == has_store)
        rank = lost.text.partition(f"attempt {start}: rank ")[2][0]
        worker = int(lost.read(f"begun3-{rank}-{start}"))
        for pid in (lost.process.pid, worker):
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "lost").touch()
        others = [node for node in nodes if node is not lost]
        assert [node.wait() for node in others] == [0, 0], others[0].text + others[1].text
        words = "node 0 (the workers' store at" if has_store else "no heartbeat from node"
        assert any("a node was lost before the ranks had a controller: " + words in node.text for node in others)
        for node in others:
            assert "no restart left" not in node.text and "restarting (" not in node.text
            node.assert_nothing_left()
        assert {f"begun2-{rank}-{int(start) + 1}" for rank in (0, 1)} <= set(nodes[0].notes("begun2"))


CUT_OFF = """
from ttp.launch import endings; from ttp.launch.links import peer_agents
from ttp.launch.__main__ import main
from ttp.launch.rendezvous.fresh_store import JobStore
def connect(*_):
    raise TimeoutError("timed out")
JobStore.connect = connect
peer_agents.LOST_S = 4.0
endings.LOST_STARTS = 2
main()
"""
"""ttprun on a node from which the rendezvous is reached, and the launchers' way to the workers' store is not."""


@pytest.mark.long
def test_a_node_that_never_reaches_the_workers_store_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """Without that all would start again for ever: the rendezvous is complete each time, and no restart is counted."""
    (tmp_path / "cut_off.py").write_text(CUT_OFF)
    (tmp_path / "driver.py").write_text(LOST)
    options, nodes = place(free_port()), []
    with contextlib.ExitStack() as stack:
        for number, driver in enumerate(("driver.py", "driver.py", "cut_off.py")):
            launch = Launch(
                tmp_path,
                WAITING,
                "--nnodes",
                "2:3",
                *options,
                program=(str(tmp_path / driver),),
                name=f"node{number}",
            )
            nodes.append(stack.enter_context(launch))
        assert nodes[2].wait() == 1
        said = "ttprun: error: 2 attempts in a row ended before the ranks had a controller: "
        assert said in nodes[2].text and "Traceback" not in nodes[2].text
        assert "(timed out)" in nodes[2].text.partition(said)[2]
        assert [node.wait() for node in nodes[:2]] == [0, 0], nodes[0].text + nodes[1].text
        for node in nodes[:2]:
            assert "a node has left: " in node.text and "restarting (" not in node.text
        for node in nodes:
            node.assert_nothing_left()
