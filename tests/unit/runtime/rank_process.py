"""A rank in a process of its own: `rank_process.py ADDRESS` is rank 2 of 3, with `--alone` rank 0 of 1. Trains a step and
waits until it is killed or gets a preemption notice; with `--stuck` it is preempted while its main thread holds the logging lock."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from ttp.processor.core.events import ProcessorSettings
from ttp.processor.driver import Processor, ProcessorOptions
from ttp.proto.messages import CommitRecord

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.unit.runtime.conftest import NotedHolder


def main() -> None:
    alone = "--alone" in sys.argv
    rank, world_size = (0, 1) if alone else (2, 3)
    holder = NotedHolder(rank, world_size, "/nowhere")
    settings = ProcessorSettings(rank=rank, heartbeat_s=0.2, boundary_s=0.2)
    processor = Processor(settings, sys.argv[1], "job", holder, holder.gate, ProcessorOptions(watch_parent=alone))
    holder.gate.computing(1)
    holder.gate.ready(1)
    holder.gate.begin_update(1, CommitRecord(1, 1.5, 1.0, False, 1.0, (1e-3,), (2.0,)))
    holder.gate.end_update(1)
    processor.start()  # behind the step: a fault may come as soon as the rank is registered
    if "--stuck" in sys.argv:
        logging.basicConfig(level=logging.DEBUG)
        assert processor.wait_welcomed(30.0) is not None
        logging.getLogger().handlers[0].acquire()
        processor.preempted()
    threading.Event().wait()


if __name__ == "__main__":
    main()
