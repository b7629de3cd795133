"""The simulation's agents against the shipped link of an agent: the same controllers, deaths and standbys, on one clock.

`ttp.controller.agent_link` has a thread, a stream and a clock; here its loop runs on this thread, on streams and a clock of the test.
Whenever nothing has happened for a while, both have come to the same controller, and have told it the same.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.simulation.agents import Agent
from tests.simulation.network import Route
from tests.simulation.scheduler import Scheduler
from ttp.controller import agent_link
from ttp.proto.codec import DownwardParcel
from ttp.proto.fence import Fence
from ttp.proto.messages import AgentHello, Beat, Downward, Successors, Upward, WorkerExit

COUNT = 3
LEASE_S, BEAT_S, SLOWEST_S = 3.0, 0.2, 0.01
GREETING_S = 5.0
SETTLED_S = (COUNT + 1) * (GREETING_S + LEASE_S)
"""Within it an agent has tried every controller, those that are stopped included."""
ADDRESSES = tuple(f"c{place}" for place in range(COUNT))


class Over(BaseException):
    """The script has come to its end."""


class Controller:
    """A controller as its agents see it: it listens, greets, beats while it leads, and is told of deaths."""

    def __init__(self, job: Job, place: int) -> None:
        self.job, self.place, self.term = job, place, 1 + place
        self.gone, self.stopped, self.leads = False, False, place == 0
        self.cut_until, self.route = 0.0, Route()
        self.told: dict[str, set[Upward]] = {"twin": set(), "shipped": set()}
        """By whom: who it is, and the deaths."""
        self.streams: list[ShippedStream] = []

    @property
    def heard(self) -> bool:
        return self.leads and not self.gone and not self.stopped

    @property
    def successors(self) -> Successors:
        return Successors(ADDRESSES[self.place + 1 :], LEASE_S)

    def _note(self, who: str, message: Upward) -> None:
        if isinstance(message, AgentHello | WorkerExit):
            self.told[who].add(message)

    # as the simulation's agents call it

    def hear_agent(self, link: Any, message: Upward) -> None:
        self._note("twin", message)
        if self.heard:
            self.job.twin.take_in(self, self.successors)  # type: ignore[arg-type]

    def agent_gone(self, link: Any) -> None:
        """It keeps no list."""

    # as the shipped one's streams do

    def hear_stream(self, stream: ShippedStream, message: Upward) -> None:
        if self.gone:
            return
        self._note("shipped", message)
        if isinstance(message, AgentHello) and self.heard:
            stream.deliver(self.successors)

    def beat(self) -> None:
        if self.heard:
            for stream in self.streams:
                stream.deliver(Beat())

    # what befalls it

    def kill(self) -> None:
        self.gone = True
        for stream in list(self.streams):
            stream.end("connection reset", refused=False)

    def lead(self) -> None:
        """Ranks have come to it."""
        self.leads = True
        if self.heard:
            self.job.twin.take_in(self, self.successors)  # type: ignore[arg-type]
            for stream in self.streams:
                stream.deliver(self.successors)

    def go_on(self) -> None:
        self.stopped = False
        for stream in list(self.streams):
            stream.greet()
        if self.leads:
            self.lead()


class ShippedStream:
    """In the place of `ControlStream`."""

    def __init__(self, address: str, job_id: str, listener: Any, fence: int = 0) -> None:
        self.job = Job.now_running
        self.controller = self.job.controllers[ADDRESSES.index(address)]
        self._listener, self._fence = listener, Fence(job_id, fence)
        self._over = False
        self.refused = False

    @property
    def term(self) -> int:
        return self._fence.term

    def start(self) -> None:
        self.job.scheduler.after(SLOWEST_S, self._connect)

    def _connect(self) -> None:
        if self.controller.gone:
            self.end("connection refused", refused=True)
        elif not self._over:
            self.controller.streams.append(self)
            self.job.scheduler.after(GREETING_S, self._give_up)
            self.greet()

    def _give_up(self) -> None:
        if not self.term:
            self.end("CANCELLED", refused=False)

    def greet(self) -> None:
        if self._over or self.controller.stopped or self.term:
            return
        if refusal := self._fence.refusal("there", "job", self.controller.term):
            self.end(refusal, refused=True)
        else:
            self._listener.stream_opened(self)

    def deliver(self, message: Downward) -> None:
        if self.term and not self._over:
            self._listener.stream_received(self, DownwardParcel("job", self.term, (), message))

    def send(self, *messages: Upward) -> None:
        for message in messages:
            self.job.scheduler.after(SLOWEST_S, partial(self.controller.hear_stream, self, message))

    def end(self, reason: str, refused: bool) -> None:
        if not self._over:
            self.refused = refused
            self.close()
            self._listener.stream_closed(self, reason)

    def close(self, drain_s: float = 0.0) -> None:
        self._over = True
        if self in self.controller.streams:
            self.controller.streams.remove(self)


class Event:
    """Waiting for it lets the world go on."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = Job.now_running.scheduler.look = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        scheduler = Job.now_running.scheduler
        until = scheduler.now + timeout
        if not self._set and not scheduler.run(until, self.is_set):
            scheduler.now = until
        return self._set


class Job:
    """What both agents are told, and the clock."""

    now_running: Job

    def __init__(self, seed: int) -> None:
        Job.now_running = self
        self.scheduler = Scheduler()
        self.rng, self.slowest_s = random.Random(seed), SLOWEST_S
        self.times = SimpleNamespace(heartbeat_s=BEAT_S, lease_s=LEASE_S)
        self.training = SimpleNamespace(layout=SimpleNamespace(hosts=(0, 0, 0)))
        self.ranks = [SimpleNamespace(runs=True, pid=100 + rank) for rank in range(3)]
        self.standbys = SimpleNamespace(listed=())
        self.controllers = [Controller(self, place) for place in range(COUNT)]
        self.twin = Agent(self, 0)  # type: ignore[arg-type]
        self.shipped = agent_link.AgentLink("c0", "job", "host0", (0, 1, 2), (100, 101, 102))
        self._beat()

    @property
    def now(self) -> float:
        return self.scheduler.now

    def controller_at(self, address: str) -> Controller:
        return self.controllers[ADDRESSES.index(address)]

    def _beat(self) -> None:
        for controller in self.controllers:
            controller.beat()
        self.scheduler.after(BEAT_S, self._beat)

    # the script

    def act(self, what: str, which: int) -> None:
        controller = self.controllers[which]
        match what:
            case "dies":
                report = WorkerExit(which, 100 + which, "signal SIGKILL", 0.0)
                self.twin.tell(report)
                self.shipped.worker_exit(which, 100 + which, "signal SIGKILL")
            case "killed":
                controller.kill()
            case "stopped":
                controller.stopped = True
            case "goes on" if controller.stopped and not controller.gone:
                controller.go_on()
            case "leads":
                controller.lead()

    def compare(self) -> None:
        """Where a controller can be heard that no later one has been heard before, both are there."""
        there = self.controllers[self.shipped._place]
        if self.shipped.attached:
            assert there.heard and self.twin._place == there.place, (
                f"the simulation's agent is at c{self.twin.controller.place}"
            )
            assert there.told["twin"] == there.told["shipped"]
        else:
            assert not self.twin.controller.heard or self.twin._link is None, "the simulation's agent has a controller"


def run(script: list[tuple[str, int]], seed: int) -> Job:
    job = Job(seed)
    job.standbys.listed = ADDRESSES
    job.shipped.add_controllers(ADDRESSES)

    def settle() -> None:
        job.compare()

    def end() -> None:
        raise Over

    moment = 1.0
    for what, which in script:
        act: Callable[[], None] = lambda what=what, which=which: job.act(what, which)  # type: ignore[misc]  # noqa: E731
        job.scheduler.at(moment, act)
        moment += SETTLED_S
        job.scheduler.at(moment, settle)
    job.scheduler.at(moment + 0.01, end)
    with pytest.raises(Over):
        job.shipped._run()
    return job


ACTS = st.one_of(
    st.tuples(st.just("dies"), st.integers(0, 2)),
    st.tuples(st.sampled_from(("killed", "stopped", "goes on", "leads")), st.integers(0, COUNT - 1)),
)


@pytest.fixture(autouse=True, scope="module")
def link_in_this_thread() -> Any:
    """The shipped link with the world of this test around it."""
    with pytest.MonkeyPatch.context() as patch:
        thread = SimpleNamespace(start=lambda: None, join=lambda timeout: None)
        patch.setattr(agent_link, "ControlStream", ShippedStream)
        patch.setattr(
            agent_link,
            "threading",
            SimpleNamespace(Lock=threading.Lock, Event=Event, Thread=lambda **_: thread),
        )
        clock = lambda: Job.now_running.scheduler.now  # noqa: E731
        patch.setattr(agent_link, "time", SimpleNamespace(monotonic=clock, time=lambda: 0.0))
        yield


@given(script=st.lists(ACTS, max_size=8), seed=st.integers(0, 9))
@example(script=[("dies", 1), ("leads", 1), ("killed", 0)], seed=0)
@example(script=[("leads", 1), ("stopped", 0), ("goes on", 0), ("killed", 1)], seed=0)
def test_both_agents_come_to_the_same_controller_and_tell_it_the_same(script: list[tuple[str, int]], seed: int) -> None:
    run(script, seed)
