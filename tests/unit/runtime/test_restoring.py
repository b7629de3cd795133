"""Real controllers, killed one after the other, and the processors of a job's ranks that replace them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ttp.config import Settings
from ttp.controller.agent_link import request_status
from ttp.errors import ControllerError
from ttp.processor.core.events import ProcessorSettings
from ttp.processor.driver import Processor, ProcessorOptions
from ttp.runtime.standby import Standbys, listed

from .conftest import LONG_S, NotedHolder, StartController

RANKS = 2
SETTINGS = Settings(job_id="job", heartbeat_s=0.2, lease_s=3.0, one_node=True, node_rank=0)


class Started:
    """The ranks of a job in threads of this process, and the standbys that they start."""

    def __init__(self, first: str, folder: Path) -> None:
        """`first`: the address of the controller that the job begins with."""
        self.first = first
        self.store = HashStore()
        self.standbys = [Standbys(SETTINGS, RANKS, folder / f"log{rank}", lambda: self.store) for rank in range(RANKS)]
        self.processors = []
        for rank, standbys in enumerate(self.standbys):
            settings = ProcessorSettings(rank=rank, heartbeat_s=0.2, reconnect_s=0.05, address=first, look_s=0.5)
            holder = NotedHolder(rank, RANKS, str(folder / "checkpoints"))
            processor = Processor(
                settings, first, "job", holder, holder.gate, ProcessorOptions(starter=standbys), exit_process=self._exit
            )
            processor.start()
            self.processors.append(processor)

    def _exit(self, code: int) -> None:
        raise AssertionError(f"a rank left with {code}")

    def listed(self) -> tuple[str, ...]:
        return listed(self.store, 0)

    def has_started(self, count: int) -> bool:
        return len(self.listed()) == count

    def led_by(self, address: str) -> bool:
        """Say whether all ranks are with this controller, and train."""
        with contextlib.suppress(ControllerError):
            led = request_status(address, job_id="job").stage == "running"
            return led and all(processor.controller == address for processor in self.processors)
        return False

    def close(self) -> None:
        for processor in self.processors:
            processor.stop()
        for standbys in self.standbys:
            for process in standbys.running:
                process.process.kill()
            standbys.dismiss()


@pytest.fixture
def job(new_controller: StartController, tmp_path: Path) -> Iterator[Started]:
    first = new_controller(RANKS, standbys=1)
    started = Started(first.address, tmp_path)
    yield started
    started.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 3 * LONG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def kill(address: str) -> None:
    os.kill(request_status(address, job_id="job").pid, signal.SIGKILL)


def test_every_lost_controller_is_replaced(job: Started) -> None:
    """The job began without its standby. Then one controller after the other is killed, and at last all that there are at once."""
    leader = job.first
    for count in (1, 2, 3):
        until(partial(job.has_started, count), f"{count} standbys")
        successor = job.listed()[-1]
        kill(leader)
        until(partial(job.led_by, successor), "the standby leads")
        leader = successor
    until(partial(job.has_started, 4), "a standby behind the third")
    kill(job.listed()[-1])
    kill(leader)
    until(lambda: len(job.listed()) > 4 and job.led_by(job.listed()[-1]), "rank 0 started a controller")
