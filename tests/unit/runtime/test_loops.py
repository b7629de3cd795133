"""The loops of both drivers, on a clock and a queue of the test: when which item is taken, and when the clock is heeded.

The simulation runs the handlers that the loops call, in an order of its own; what it takes for granted of the loops is shown here.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ttp.controller import driver as controllers
from ttp.controller.core.facts.events import ControllerSettings
from ttp.processor import driver as processors
from ttp.processor.core.events import ProcessorSettings
from ttp.processor.gate import Gate

TICK_S = 0.25
MOST_CALLS = 4000
"""A loop that comes to so many has no end."""


@dataclass
class World:
    """Time, the queue and the handler of one driver, and all that was done, in its order."""

    arrivals: list[tuple[float, int]]
    """(when, which item), in their order."""
    deadline: float = inf
    """The machine's, which no tick moves."""
    slow_s: float = 0.0
    """How long an item takes."""
    now: float = 0.0
    done: list[tuple[str, Any]] = field(default_factory=list)
    ends_after: int = 0
    """The last item; the handler is finished then."""
    idle: bool = True
    next_tick: float = 0.0
    finished: str = ""
    running: bool = True
    asked_at: int = 0

    # the queue

    def get(self, timeout: float) -> int:
        assert timeout >= 0 and len(self.done) < MOST_CALLS, "the loop spins"
        self.done.append(("waits", timeout))
        if self.arrivals and self.arrivals[0][0] <= self.now + timeout:
            when, item = self.arrivals.pop(0)
            self.now = max(self.now, when)
            return item
        self.now += timeout
        raise queue.Empty

    def empty(self) -> bool:
        return not self.arrivals or self.arrivals[0][0] > self.now

    # the handler

    def begin(self) -> None:
        self.done.append(("begins", None))
        self.next_tick = self.now + TICK_S

    def due(self, soonest: float = -inf) -> float:
        self.asked_at = len(self.done)
        return min(self.next_tick, max(self.deadline, soonest))

    def take(self, item: int) -> None:
        self.done.append(("takes", item))
        self.now += self.slow_s
        if item == self.ends_after:
            self.finished, self.running = "over", False

    def advance(self, due: float) -> None:
        self.done.append(("advances", due))
        assert self.done[self.asked_at][0] == "waits", "what was due before the item came"
        assert self.idle == (self.done[-2][0] == "waits"), "the journal's lines wait while an item is handled"
        if self.now >= due:
            self.tick()

    def tick(self) -> None:
        self.done.append(("ticks", self.now))
        self.next_tick = self.now + TICK_S

    def close_stream(self, drain_s: float) -> None:
        self.done.append(("closes", drain_s))

    # the journal

    def driver_busy(self) -> None:
        self.idle = False

    def driver_idle(self) -> None:
        self.idle = True


def run_controller(world: World) -> None:
    """Run the loop of the controller's driver to its end, on this thread."""
    journal: Any = world
    settings = ControllerSettings("job", 1, 1)
    on_finish: Callable[[str], None] = lambda reason: world.done.append(("finishes", (reason, world.idle)))  # noqa: E731
    driver = controllers.Driver(settings, journal, on_finish, clock=lambda: world.now)
    inner: Any = driver
    inner._handler, inner._queue = world, world
    driver._run()


def run_processor(world: World) -> None:
    holder: Any = SimpleNamespace(registration=lambda: None)
    driver = processors.Processor(
        ProcessorSettings(0, 0.2, 0.05), "c0", "job", holder, Gate(0), clock=lambda: world.now
    )
    inner: Any = driver
    inner._handler, inner._queue = world, world
    driver._run()


LOOPS = {"controller": run_controller, "processor": run_processor}
ARRIVALS = st.lists(st.floats(0.0, 0.7), max_size=30).map(sorted)


@pytest.mark.parametrize("loop", LOOPS)
@given(times=ARRIVALS, deadline=st.sampled_from((inf, 0.0, 1.0)), slow_s=st.sampled_from((0.0, 0.01, 0.3)))
@example(times=[0.0] * 30, deadline=inf, slow_s=0.3)
@example(times=[], deadline=0.0, slow_s=0.0)
def test_items_are_taken_in_order_and_the_clock_is_heeded_between_them(
    loop: str, times: list[float], deadline: float, slow_s: float
) -> None:
    """Each item once; a tick as soon as one is due, also when items keep coming; never a wait beyond what is due, and a machine that is
    due all the time is asked every LEAST_WAIT_S."""
    count = len(times) + 1
    arrivals = [(when, number) for number, when in enumerate([*times, max(times, default=0.0) + 1.0])]
    world = World(arrivals, deadline, slow_s, ends_after=count - 1)
    LOOPS[loop](world)
    assert world.done[0] == ("begins", None)
    assert [item for what, item in world.done if what == "takes"] == list(range(count))
    waits = [timeout for what, timeout in world.done if what == "waits"]
    assert max(waits) <= TICK_S + controllers.LEAST_WAIT_S
    between = 0
    for what, _ in world.done:
        between = 0 if what == "ticks" else between + (what == "takes")
        assert between * slow_s <= TICK_S + slow_s, "no tick came while items did"
    if deadline == 0.0 and slow_s == 0.0:
        assert len(waits) <= count + world.now / controllers.LEAST_WAIT_S + 2, "it spins"
    if loop == "controller":
        assert world.done[-1] == ("finishes", ("over", True)), "its journal is written before it ends"
    else:
        assert world.done[-1] == ("closes", 1.0), "what was said goes out before the stream ends"
        assert world.done[1][0] == "ticks", "it looks for its controller at once"
