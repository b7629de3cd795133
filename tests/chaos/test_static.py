"""Two launchers of a static job (`--node-rank`, as a rank table and `pretrain_gpt.sh` use it), of which one goes wrong."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.chaos.test_endings import alive, two_nodes
from tests.ports import free_port

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

TRAINER = Path(__file__).resolve().parents[2] / "examples" / "own_trainer" / "train.py"
TRAINS = f"""
import runpy
note("begun", os.getpid())
sys.argv = ["train.py", "--steps", "4000", "--save-dir", str(out / "checkpoints")]
runpy.run_path({str(TRAINER)!r}, run_name="__main__")
"""

ENDS_FIRST = """
from torch.distributed import TCPStore
from ttp.exchange.first_step import progress_key
note("begun", os.getpid())
if rank == 0 and start == "0":
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)
    store.set(progress_key(0), "1")  # no back-off after an attempt with a completed step
    await_file("fail")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_is_killed_and_started_again_joins_the_next_attempt(tmp_path: Path) -> None:
    """Node 0's ranks save and restart; the new launcher goes straight to that attempt, and the job ends well on both."""
    port = free_port()
    with contextlib.ExitStack() as stack:

        def launch(node: int, name: str) -> Launch:
            return stack.enter_context(Launch(tmp_path, TRAINS, *two_nodes("static", port, node), name=name))

        first, second = launch(0, "node0"), launch(1, "node1")
        first.until(lambda: "step 100:" in first.text, "step")
        second.process.kill()
        second.process.wait()
        again = launch(1, "node1-again")
        assert [first.wait(), again.wait()] == [0, 0], first.text + again.text
        assert (
            "attempt 1: rank 0 of 2 on this node" in first.text and "attempt 1: rank 1 of 2 on this node" in again.text
        )
        assert "attempt 0" not in again.text and "no rank called ttp.start" not in again.text
        assert "no step lost" in first.text, "the surviving rank has saved what both had finished"
        assert sorted(first.notes("begun")) == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"]
        for job in (first, second, again):
            job.until(lambda job=job: job.marked() == [], "end of its processes")  # type: ignore[misc]


@pytest.mark.parametrize("restarts", ["1", "0"])
def test_a_node_that_has_succeeded_goes_along_with_node_0s_restart(tmp_path: Path, restarts: str) -> None:
    """It learns of it though node 0 meets it again at once; where no restart remains, both end and say why."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        first, second = [
            stack.enter_context(
                Launch(tmp_path, ENDS_FIRST, *two_nodes("static", port, node),
                       "--max-restarts", "1" if node == 0 else restarts, name=f"node{node}",
                       environ={"TTP_TLS": "False"})  # these workers have no session, and seal nothing
            )
            for node in (0, 1)
        ]  # fmt: skip
        first.await_notes("begun-0-0", "begun-1-0")
        second.until(lambda: not alive(int(second.read("begun-1-0"))), "end of rank 1")
        second.until(lambda: "waiting up to 300 s" in second.text, "word that it waits")
        (tmp_path / "fail").touch()
        statuses = [first.wait(), second.wait()]
        if restarts == "1":
            assert statuses == [0, 0], first.text + second.text
            assert sorted(first.notes("begun")) == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"]
            assert "failed (rank 0: signal SIGKILL) and restarts; restarting with that node" in second.text
        else:
            assert statuses == [1, 0], first.text + second.text
            assert "succeeded, and has no restart left" in first.text
            assert "and this node has no restart left" in second.text
        for job in (first, second):
            job.assert_nothing_left()
