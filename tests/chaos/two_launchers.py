"""Two launchers of one job that train, two ranks each, on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.launching import Launch
from tests.chaos.test_endings import two_nodes
from tests.chaos.test_static import TRAINS
from tests.ports import free_port


def train_on_two(
    stack: contextlib.ExitStack,
    folder: Path,
    *options: str,
    backend: str = "c10d",
    environ: Mapping[str, str] | None = None,
) -> tuple[Launch, Launch, list[int]]:
    """Return the launcher of ranks 0 and 1, that of ranks 2 and 3, and the ranks' processes, once they have done 20 steps. `stack`
    ends them."""
    port, both = free_port(), []
    for node in range(2):
        words = (*two_nodes(backend, port, node), "--nproc-per-node", "2", *options)
        both.append(stack.enter_context(Launch(folder, TRAINS, *words, environ=environ, name=f"node{node}")))
    both[0].await_notes(*(f"begun-{rank}-0" for rank in range(4)))
    for job in both:
        job.says(" of 4 on this node")
    first = next(job for job in both if ": ranks 0-1 of 4 on this node" in job.text)
    second = next(job for job in both if job is not first)
    pids = [int(first.read(f"begun-{rank}-0")) for rank in range(4)]
    first.until(lambda: "step 20:" in first.text, "step", within_s=180)
    return first, second, pids
