"""Ranks that stand still for good on one node, and a job that is over on the other: that node's launcher ends too."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.chaos.test_endings import alive, two_nodes
from tests.chaos.test_static import TRAINS
from tests.ports import free_port

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_node_whose_ranks_are_stopped_ends_with_a_job_that_has_failed_on_another(
    tmp_path: Path, backend: str
) -> None:
    """Nothing dies there, nobody waits to be taken in, and the controller's word reaches no rank: only the launcher hears it."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                Launch(tmp_path, TRAINS, *two_nodes(backend, port, node), "--nproc-per-node", "2", "--max-restarts", "0",
                       name=f"node{node}")
            )
            for node in (0, 1)
        ]  # fmt: skip
        both[0].await_notes(*(f"begun-{rank}-0" for rank in range(4)))
        for job in both:
            job.says(" of 4 on this node")
        first = next(job for job in both if ": ranks 0-1 of 4 on this node" in job.text)
        second = next(job for job in both if job is not first)
        pids = [int(first.read(f"begun-{rank}-0")) for rank in range(4)]
        first.until(lambda: "step 20:" in first.text, "step", within_s=180)
        for pid in pids[2:]:
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)

        assert [first.wait(), second.wait()] == [1, 1], first.text + second.text
        assert not any(map(alive, pids))
        assert "the controller has sent the ranks away; holding ranks 2-3" in second.text
        assert "ranks 2-3: stopped, and can save nothing any more: killed" in second.text
        assert "not restarting: ranks 2-3" in second.text and "the job has failed on another node: " in second.text
        assert "signal SIGKILL" in second.text.partition("the job has failed on another node: ")[2]
        for job in both:
            job.assert_nothing_left()
