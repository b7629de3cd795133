"""The fork server of tests that need real ranks: it has imported torch once, and its children begin with that."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
]


def fork_server() -> ForkServerContext:
    """Return the context; the server starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks_to_end(ranks: Sequence[ForkServerProcess], folder: Path, within_s: float, what: str = "") -> None:
    """Start these processes and wait for their end. Raises AssertionError with what they have left in `folder/error_*`, or names those that
    still ran and are killed. `what`: begins each message."""
    for process in ranks:
        process.start()
    deadline = time.monotonic() + within_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
        ranks[rank].join()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error_*")))
    assert not errors, f"{what}\n{errors}"
    assert not late, f"{what}: ranks {late} of {len(ranks)} still ran after {within_s} s"
