"""Two agents whose ranks save without a controller, when one agent got SIGTERM: the other one does not cut a slow save short."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import TTPRUN, Launch
from tests.chaos.test_endings import two_nodes
from tests.chaos.test_static import TRAINS
from tests.ports import free_port
from ttp.checkpoint.verify import verify
from ttp.exchange import saved_alone
from ttp.launch.attempts.attempt import EXPIRED_GRACE_S, UNLED_S

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

SLOW_S = UNLED_S + EXPIRED_GRACE_S + 3.0
"""How long rank 1 takes for its part: longer than ranks without a controller are held after a fault, and killed behind it."""

SLOW_SAVE = f"""
from ttp.runtime.state_provider import OptimizerStateProvider
write_parts = OptimizerStateProvider.write_parts
def slowly(*args):
    note("writing")
    time.sleep({SLOW_S} if rank == 1 else 0)
    return write_parts(*args)
OptimizerStateProvider.write_parts = slowly
"""

A_NODE_WAITS = """
import sys
from pathlib import Path
from ttp.launch.__main__ import main
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
out = Path(sys.argv[-1])
FreshStoreRendezvous.num_nodes_waiting = lambda self: int((out / "writing-1-0").exists())
main()
"""
"""ttprun to which torch reports, while its rank saves, that a node waits to be taken in."""


@pytest.mark.parametrize("seen", ["agent killed", "node waits"])
def test_an_agent_without_a_signal_lets_its_ranks_finish_a_slow_save(tmp_path: Path, seen: str) -> None:
    """The only controller is killed, and node 0's agent gets SIGTERM. While node 1's rank saves, node 0's agent and with it the store is
    gone, or the set of nodes changes. Both ranks exit by themselves, and the checkpoint is whole."""
    driver = tmp_path / "driver.py"
    driver.write_text(A_NODE_WAITS)
    port, both = free_port(), []
    with contextlib.ExitStack() as stack:
        for node, program in enumerate((TTPRUN, (str(driver),) if seen == "node waits" else TTPRUN)):
            options = (*two_nodes("static", port, node), "--nproc-per-node", "1", "--max-restarts", "0")
            environ = {"TTP_STANDBYS": "0", "TTP_OT": "120"}
            launch = Launch(
                tmp_path, SLOW_SAVE + TRAINS, *options, program=program, environ=environ, name=f"node{node}"
            )
            both.append(stack.enter_context(launch))
        first, second = both
        first.until(lambda: "step 20:" in first.text, "step")
        (controller,) = [
            pid for pid in first.marked() if b"ttp.controller" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(controller, signal.SIGKILL)
        first.process.send_signal(signal.SIGTERM)
        first.await_notes("writing-0-0", "writing-1-0")
        if seen == "agent killed":
            first.process.kill()
            second.says("rank 1: exited for the restart (exit code 75)")
            assert "the workers' store at 127.0.0.1:" in second.text, "it saw that the store is gone"
        else:
            second.says("rank 1: exited on a preemption notice (exit code 76)")
            assert "the set of nodes changes" in second.text
            assert first.wait() == 1 and "rank 0: exited on a preemption notice (exit code 76)" in first.text
        account = saved_alone.read(tmp_path / "checkpoints" / "ttp_log", 0, 0.0)
        assert account is not None and account.unix_s - account.began_unix_s >= SLOW_S
        assert account.noticed == (0,) and verify(Path(account.path)).step == account.step
        assert "the ranks had no controller" not in first.text + second.text
