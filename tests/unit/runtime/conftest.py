"""Ranks without tensors: a holder that keeps notes, and a whole rank around it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttp.controller.agent_link import request_shutdown
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import ControllerProcess, start_controller
from ttp.errors import ControllerError
from ttp.processor.core.events import ProcessorSettings
from ttp.processor.driver import Processor, ProcessorOptions
from ttp.processor.gate import Gate
from ttp.proto.codec import DownwardParcel
from ttp.proto.messages import (
    CommitRecord,
    Downward,
    FileEntry,
    PublishOrder,
    Registration,
    ShardGroup,
    ShareResult,
    WriteOrder,
)
from ttp.proto.stream import ControlStream

LONG_S = 30.0
"""Nothing here should take it: a wait that does is a failure."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another process or thread does, where it gives no other sign."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def commit_record(step: int) -> CommitRecord:
    return CommitRecord(step, 1.5, 1.0, False, 1.0, (1e-3,), (2.0,))


class NotedHolder:
    """A state holder that writes down what it is asked for. Rank r holds the groups r and r+1 of a ring."""

    def __init__(self, rank: int, world_size: int, save_dir: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.save_dir = save_dir
        self.gate = Gate(rank)
        self.rolled: list[CommitRecord] = []
        self.written: list[WriteOrder] = []
        self.published: list[PublishOrder] = []

    def registration(self) -> Registration:
        groups = sorted({self.rank, (self.rank + 1) % self.world_size})
        return Registration(
            rank=self.rank,
            world_size=self.world_size,
            host=f"host{self.rank}",
            pid=1000 + self.rank,
            groups=tuple(ShardGroup(f"g{group}", f"shard {group}", 100) for group in groups),
            state_step=self.gate.state_step,
            save_dirs=(self.save_dir,),
            layout="{}",
        )

    def roll_forward(self, record: CommitRecord) -> int:
        self.rolled.append(record)
        return record.step

    def write(self, order: WriteOrder) -> ShareResult:
        self.written.append(order)
        return ShareResult((FileEntry(f"rank{self.rank}.distcp", 100, "00", self.rank),))

    def publish(self, order: PublishOrder) -> str:
        self.published.append(order)
        return f"{order.directory}/iter_{order.step:07d}"


class Rank:
    """A rank in threads of this process: its exit is noted instead of carried out."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str | Callable[[], str | None],
        save_dir: str,
        freeze_timeout_s: float = 5.0,
    ) -> None:
        self.holder = NotedHolder(rank, world_size, save_dir)
        self.gate = self.holder.gate
        self.exit_code: int | None = None
        self.exited = threading.Event()
        self.processor = Processor(
            ProcessorSettings(rank=rank, heartbeat_s=0.2, reconnect_s=0.05),
            address,
            "job",
            self.holder,
            self.gate,
            ProcessorOptions(freeze_timeout_s=freeze_timeout_s),
            exit_process=self._note_exit,
        )
        self.processor.start()

    def _note_exit(self, code: int) -> None:
        self.exit_code = code
        self.exited.set()

    @property
    def stream(self) -> ControlStream:
        """The stream to the controller that this rank is on now."""
        stream = self.processor._handler.stream
        assert isinstance(stream, ControlStream)
        return stream

    def connect_anew(self) -> ControlStream:
        """Break the stream and wait for another one to be open; return the one before."""
        old = self.stream
        old.close()

        def is_open() -> bool:
            stream = self.processor._handler.stream
            return stream not in (None, old) and self.stream.term > 0

        until(is_open, "a new stream")
        return old

    def receive(self, message: Downward, stream: ControlStream | None = None) -> None:
        """Put a message in the processor's queue, as that stream (default: the one of now) does with what it reads."""
        rank = self.holder.rank
        self.processor.stream_received(stream or self.stream, DownwardParcel("job", 1, (rank,), message))

    def train_to(self, step: int) -> None:
        """Finish every update up to `step`."""
        for number in range(self.gate.state_step + 1, step + 1):
            self.gate.computing(number)
            self.gate.ready(number)
            self.gate.begin_update(number, commit_record(number))
            self.gate.end_update(number)


StartController = Callable[..., ControllerProcess]
StartRanks = Callable[..., list[Rank]]


@pytest.fixture
def new_controller(tmp_path: Path) -> Iterator[StartController]:
    """Start controllers of job `job`, and see that none remains."""
    started: list[ControllerProcess] = []

    def start(world_size: int = 3, journal: Path | None = None, **given: Any) -> ControllerProcess:
        place = {name: given.pop(name) for name in ("port", "port_wait_s", "guardians") if name in given}
        fields = {"job_id": "job", "term": 1, "heartbeat_s": 0.2, "lease_s": 3.0, **given}
        settings = ControllerSettings(world_size=world_size, **fields)
        started.append(start_controller(settings, journal or tmp_path / f"journal{len(started)}.jsonl", **place))
        return started[-1]

    yield start
    for controller in started:
        if controller.wait(0.0) is None:  # by message: at SIGTERM it waits a lease for ranks to come back
            with contextlib.suppress(ControllerError):
                request_shutdown(controller.address, reason="the test is over")
        if controller.wait(LONG_S) is None:
            controller.process.kill()
            controller.wait(LONG_S)
            raise AssertionError(f"controller {controller.pid} did not end when it was asked to")


@pytest.fixture
def new_ranks(tmp_path: Path) -> Iterator[StartRanks]:
    """Start ranks and wait until the controller has welcomed them; stop them at the end, and see that no thread remains."""
    before = set(threading.enumerate())
    ranks: list[Rank] = []

    def start(address: str, world_size: int, freeze_timeout_s: float = 5.0) -> list[Rank]:
        root = str(tmp_path / "checkpoints")
        new = [Rank(rank, world_size, address, root, freeze_timeout_s) for rank in range(world_size)]
        ranks.extend(new)
        for rank in new:
            assert rank.processor.wait_welcomed(LONG_S) is not None
        return new

    yield start
    for rank in ranks:
        rank.processor.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG_S)
        if thread.is_alive():
            stack = sys._current_frames().get(thread.ident or 0)
            raise AssertionError(f"thread {thread.name} still runs at {stack}")
