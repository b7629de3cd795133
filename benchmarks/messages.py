"""What is sent per step: nothing. A real controller and real processors; the gates go through a hundred thousand updates.

Heartbeats are set an hour apart, so that whatever a step sent would stand alone. Exit status 1 if anything was sent.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import start_controller
from ttp.processor.core.events import ProcessorSettings
from ttp.processor.driver import Processor
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord, PublishOrder, Registration, ShardGroup, ShareResult, Upward, WriteOrder
from ttp.proto.stream import ControlStream

RANKS = 2
UPDATES = 100_000
HOUR_S = 3600.0


class Holder:
    """Holds one shard group in name only: nothing is ever written here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def registration(self) -> Registration:
        groups = (ShardGroup("bench", "shard 0 of 1", 0),)
        return Registration(self.rank, RANKS, "localhost", self.rank, groups, 0, ("/nowhere",), "{}")

    def roll_forward(self, record: CommitRecord) -> int:
        raise NotImplementedError

    def write(self, order: WriteOrder) -> ShareResult:
        raise NotImplementedError

    def publish(self, order: PublishOrder) -> str:
        raise NotImplementedError


def main() -> int:
    sent: list[str] = []
    send = ControlStream.send

    def counted(self: ControlStream, *messages: Upward) -> None:
        sent.extend(type(message).__name__ for message in messages)
        send(self, *messages)

    ControlStream.send = counted  # type: ignore[method-assign]  # the benchmark counts at the last place before the wire
    with tempfile.TemporaryDirectory() as folder:
        settings = ControllerSettings("bench", 1, RANKS, heartbeat_s=HOUR_S, lease_s=3 * HOUR_S)
        controller = start_controller(settings, Path(folder) / "journal_0.jsonl")
        gates = [Gate(rank) for rank in range(RANKS)]
        processors = [
            Processor(ProcessorSettings(rank, heartbeat_s=HOUR_S), controller.address, "bench", Holder(rank), gate)
            for rank, gate in enumerate(gates)
        ]
        try:
            for processor in processors:
                processor.start()
            for processor in processors:
                assert processor.wait_welcomed(30.0) is not None
            deadline = time.monotonic() + 10.0
            while sent.count("Heartbeat") < RANKS and time.monotonic() < deadline:  # the first follows the welcome
                time.sleep(0.01)
            before = list(sent)
            began = time.perf_counter()
            for step in range(1, UPDATES + 1):
                record = CommitRecord(step, 1.0, 1.0, False, 1.0, (1e-3,), ())
                for gate in gates:
                    gate.computing(step)
                    gate.ready(step)
                    gate.begin_update(step, record)
                    gate.end_update(step)
            elapsed = time.perf_counter() - began
            during = sent[len(before) :]
        finally:
            for processor in processors:
                processor.stop()
            controller.terminate()
            controller.wait(10.0)
    print(f"before the first step: {len(before)} messages ({', '.join(sorted(set(before)))})")
    print(f"during {UPDATES:,} updates of {RANKS} ranks ({elapsed:.2f} s): {len(during)} messages {during[:5] or ''}")
    return 1 if during else 0


if __name__ == "__main__":
    sys.exit(main())
