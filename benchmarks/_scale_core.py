"""The controller's pure machine alone at scale, for `benchmarks.scale`: no wire, no threads, one event after another.

Times are processor seconds, so that what else the machine does counts little.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable
from typing import Any

from benchmarks._scale_world import STEP, World, file_entry, registration, report
from ttp.controller.__main__ import gc_thresholds
from ttp.controller.core import machine
from ttp.controller.core.facts.events import ControllerSettings, Effect, Event, HeartbeatBatch, Received, Send
from ttp.controller.core.facts.state import ControllerState, Stage
from ttp.proto.messages import (
    Heartbeat,
    Phase,
    Published,
    PublishOrder,
    RolledForward,
    ShareResult,
    WorkerExit,
    WriteOrder,
    Written,
)

DEAD = 3
SAMPLES = 2000


class Bench:
    """A machine that is fed event by event; `took` has every step's seconds since the last `start`."""

    def __init__(self, world: World) -> None:
        self.world, self.now = world, 1.0
        self.state: ControllerState = machine.initial(ControllerSettings(world.job_id, 1, world.size, lease_s=1e9), 0.0)
        self.took: list[float] = []
        self.effects: list[Effect] = []

    def step(self, event: Event) -> None:
        began = time.thread_time()
        self.state, effects = machine.transition(self.state, event, self.now)
        self.took.append(time.thread_time() - began)
        self.effects.extend(effects)

    def run(self, events: Iterable[Event]) -> list[float]:
        """Feed all; return seconds for each. What came out is in `effects`."""
        self.took, self.effects = [], []
        gc.collect()
        for event in events:
            self.step(event)
        return self.took

    def reached(self, stage: Stage) -> bool:
        return self.state.stage is stage

    def sent(self, kind: type) -> list[tuple[int, Any]]:
        sends = [effect for effect in self.effects if isinstance(effect, Send) and isinstance(effect.message, kind)]
        return [(rank, send.message) for send in sends for rank in send.ranks]


def measure(size: int) -> float:
    """Drive one fault at `size` ranks, every second one rolling forward; print; return seconds of decision and plan."""
    world = World(size, ready_every=2)
    bench = Bench(world)
    gc.set_threshold(*gc_thresholds(size))  # as the controller's process does
    lines = []

    def note(what: str, took: list[float], last: bool = False) -> float:
        body = took[:-1] if last and len(took) > 1 else took
        text = f"  {what:32} {len(took):7,} events, {sum(took):7.3f} s, median {1e6 * statistics.median(body):7.1f} us"
        lines.append(
            text + (f", the last one {1e3 * took[-1]:8.1f} ms" if last else f", worst {1e3 * max(took):8.1f} ms")
        )
        return took[-1]

    note("registrations, assembling", bench.run(Received(registration(world, rank)) for rank in range(size)), last=True)
    assert bench.reached(Stage.RUNNING)
    beats = (Received(Heartbeat(rank % size, Phase.COMPUTE, STEP)) for rank in range(SAMPLES))
    note("heartbeats, one by one", bench.run(beats))
    together = (
        HeartbeatBatch(
            tuple(Heartbeat((first + rank) % size, Phase.COMPUTE, STEP) for rank in range(world.ranks_per_node))
        )
        for first in range(0, SAMPLES, world.ranks_per_node)
    )
    note(f"heartbeats, {world.ranks_per_node} together", bench.run(together))
    note("death to Freeze", bench.run([Received(WorkerExit(DEAD, 1000 + DEAD, "signal SIGKILL", 0.0))]))
    alive = [rank for rank in range(size) if rank != DEAD]
    freeze_id = bench.state.freeze_id
    decided = note(
        "state reports, decision", bench.run(Received(report(world, r, freeze_id)) for r in alive), last=True
    )
    rolling = [rank for rank in alive if world.is_ready(rank)]
    planned = note(
        "roll-forwards, plan", bench.run(Received(RolledForward(r, freeze_id, STEP)) for r in rolling), last=True
    )
    orders = bench.sent(WriteOrder)
    assert len(orders) == len(alive), f"{len(orders)} orders"
    note("write answers, publish order", bench.run(_answers(orders)), last=True)
    ((publisher, order),) = bench.sent(PublishOrder)
    note("published", bench.run([Received(Published(publisher, freeze_id, order.step, "/checkpoints/iter"))]))
    assert bench.reached(Stage.EXITING)
    print(f"pure core, {size:,} ranks: decision {1e3 * decided:.0f} ms + plan {1e3 * planned:.0f} ms")
    print("\n".join(lines), flush=True)
    return decided + planned


def _answers(orders: list[tuple[int, WriteOrder]]) -> Iterable[Event]:
    for rank, order in orders:
        result = ShareResult((file_entry(order.parts, rank),))
        yield Received(Written(rank, order.freeze_id, order.tmp_name, order.parts, result))
