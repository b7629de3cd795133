"""A rank of the bundled trainer whose device is kept busy at two places of its first attempt, and which notes what came of it.

Started by `jobs.py` as the bundled trainer is, with the same arguments.

1. Behind the backward pass of step READY_STEP a kernel is queued. The rank may be READY only when that has ended.
2. After step FAULT_STEP a longer one is queued on every rank, and the last rank raises. The dump must not wait for the kernels.
3. At the end replicas are compared, then one rank alters its weights, and they are compared again.

On the CPU nothing is queued: there the training threads of the other ranks sleep in 2, and 1 means nothing. Notes are JSON lines in
`noted_RANK.jsonl`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import ttp
from ttp.selftest.long_kernel import LongKernel
from ttp.trainer.__main__ import run_as_program, status_of
from ttp.trainer.config.loader import load_config, parse_overrides
from ttp.trainer.metrics import StepMetrics
from ttp.trainer.train import Trainer, started
from ttp.trainer.world import World, world_from_env

READY_STEP, FAULT_STEP = 4, 8
READY_S = 1.0
FAULT_S = 10.0
"""A dump that takes longer counts as one that waits."""


class RaisedOnPurpose(RuntimeError):
    """The fault of 2."""


class Blocked:
    """What one rank does and notes."""

    def __init__(self, world: World, output_dir: Path) -> None:
        self._world = world
        self._notes = open(output_dir / f"noted_{world.rank}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._kernel: LongKernel | None = None
        self._device = torch.device("cpu")
        self._running: Any = None
        self._first = False

    def begin(self, trainer: Trainer) -> None:
        """Measure the device, and hook the points of a step."""
        self._device = trainer.device
        self._first = trainer.step == 0
        if self._first and self._device.type != "cpu":
            self._kernel = LongKernel(self._device)
            self._hook(trainer.optimizer, self._kernel)

    def on_step(self, metrics: StepMetrics) -> None:
        """Called after each step."""
        if not self._first or metrics.step != FAULT_STEP:
            return
        last = self._world.rank == self._world.size - 1
        if self._kernel is not None:
            running = self._kernel.start(FAULT_S)
            self._note("kernel begun", seconds=FAULT_S)
            threading.Thread(target=self._await, args=(running,), daemon=True).start()
        elif not last:
            self._note("thread sleeps", seconds=FAULT_S)
            time.sleep(FAULT_S)
            self._note("kernel ended")
        if last:
            self._raise()

    def end(self, trainer: Trainer) -> None:
        """Compare the replicas of the last step, as they are and with a rank that has altered its weights."""
        found = trainer.optimizer.compare_replicas()
        self._note("replicas", replicas=trainer.optimizer.layout.replicas, differing=len(found), step=trainer.step)
        if self._world.rank == self._world.size - 1:
            with torch.no_grad():
                for chunk in trainer.chunks:
                    for parameter in chunk.parameters():
                        parameter.add_(1.0)
        logging.disable(logging.WARNING)  # it would read as a fault
        altered = trainer.optimizer.compare_replicas()
        logging.disable(logging.NOTSET)
        self._note("altered", differing=len(altered))

    def _hook(self, optimizer: ttp.TTPReplicaOptimizer, kernel: LongKernel) -> None:
        """Queue a kernel before the optimizer is READY, where no value of the step is read before, and look at it when it is."""
        agree = optimizer.agree

        def behind_a_kernel(sums: Any = None) -> Any:
            if optimizer.current_step + 1 == READY_STEP:
                self._running = kernel.start(READY_S)
            return agree(sums)

        def at_point(name: str, step: int) -> None:
            if step == READY_STEP and name == "ready":
                self._note("ready", final=bool(self._running.query()))

        optimizer.agree = behind_a_kernel  # type: ignore[method-assign]
        optimizer.on_point = at_point

    def _raise(self) -> NoReturn:
        self._note("raises", step=FAULT_STEP)
        raise RaisedOnPurpose(f"the self-test's fault, after step {FAULT_STEP}")

    def _await(self, running: Any) -> None:
        while not running.query():
            time.sleep(0.02)
        self._note("kernel ended")

    def _note(self, what: str, **figures: Any) -> None:
        self._notes.write(json.dumps({"noted": what, "unix_s": time.time(), **figures}) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit status. Raises what is a fault, as the trainer does."""
    _, name, *overrides = sys.argv[1:] if argv is None else argv

    def work() -> None:
        config = load_config(name, parse_overrides(overrides))
        world = world_from_env()
        blocked = Blocked(world, Path(config.training_config.output_dir))
        with started(config, world, on_step=blocked.on_step) as trainer:
            blocked.begin(trainer)
            trainer.train()
            blocked.end(trainer)
            trainer.close()

    return status_of(work, "ttp.selftest.blocked_step")


if __name__ == "__main__":
    run_as_program(program=main)
