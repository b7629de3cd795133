"""The simulation's agents against the shipped link of an agent: the same controllers, deaths and standbys, on one clock.

`ttp.controller.agent_link` has a thread, a stream and a clock; here its loop runs on this thread, on streams and a clock of the test.
Whenever nothing has happened for a while, both have come to the same controller, and have reported the same to it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.simulation.agents import Agent
from tests.simulation.network import Route
from tests.simulation.scheduler import Scheduler
from ttp.controller import agent_link
from ttp.proto.codec import DownwardParcel
from ttp.proto.fence import Fence
from ttp.proto.messages import AgentHello, Downward, Exit, KeepAlive, StandbyList, Upward, Vouch, WorkerExit

COUNT = 3
LEASE_S, BEAT_S, SLOWEST_S = 3.0, 0.2, 0.01
GREETING_S = 5.0
SETTLED_S = (COUNT + 1) * (GREETING_S + LEASE_S)
"""Within it an agent has tried every controller, those that are stopped included."""
ADDRESSES = tuple(f"c{place}" for place in range(COUNT))


class Over(BaseException):
    """The script has come to its end."""


class Controller:
    """A controller as its agents see it: it listens, greets, sends heartbeats while it leads, and receives reports of deaths."""

    def __init__(self, job: Job, place: int) -> None:
        self.job, self.place, self.term = job, place, 1 + place
        self.gone, self.stopped, self.leads = False, False, place == 0
        self.cut_until, self.route = 0.0, Route()
        self.received: dict[str, set[Upward]] = {"twin": set(), "shipped": set()}
        """By whom: who it is, and the deaths."""
        self.streams: list[ShippedStream] = []
        self.vouched_s = 0.0
        self.sent_away = False

    @property
    def sends(self) -> bool:
        return self.leads and not self.gone and not self.stopped

    @property
    def successors(self) -> StandbyList:
        return StandbyList(ADDRESSES[self.place + 1 :], LEASE_S)

    def _note(self, who: str, message: Upward) -> None:
        if isinstance(message, AgentHello | WorkerExit):
            self.received[who].add(message)
        elif isinstance(message, Vouch) and who == "shipped":
            assert message.ranks, "a vouch for no rank"
            self.vouched_s = self.job.now

    # as the simulation's agents call it

    def receive_from_agent(self, link: Any, message: Upward) -> None:
        self._note("twin", message)
        if self.sends:
            self.job.twin.take_in(self, self.successors)  # type: ignore[arg-type]

    def agent_gone(self, link: Any) -> None:
        """It keeps no list."""

    # as the shipped one's streams do

    def receive_from_rank(self, stream: ShippedStream, message: Upward) -> None:
        if self.gone:
            return
        self._note("shipped", message)
        if isinstance(message, AgentHello) and self.sends:
            stream.deliver(self.successors)

    def beat(self) -> None:
        if self.sends:
            for stream in self.streams:
                stream.deliver(KeepAlive())

    # its faults

    def kill(self) -> None:
        self.gone = True
        for stream in list(self.streams):
            stream.end("connection reset", refused=False)

    def lead(self) -> None:
        """Ranks have come to it."""
        self.leads = True
        if self.sends:
            self.job.twin.take_in(self, self.successors)  # type: ignore[arg-type]
            for stream in self.streams:
                stream.deliver(self.successors)

    def send_away(self) -> None:
        if self.sends and self.streams:
            self.sent_away = True
            for stream in self.streams:
                stream.deliver(Exit(75, "step 7 is saved"))

    def go_on(self) -> None:
        self.stopped = False
        for stream in list(self.streams):
            stream.greet()
        if self.leads:
            self.lead()


class ShippedStream:
    """In the place of `ControlStream`."""

    def __init__(self, address: str, job_id: str, listener: Any, fence: int = 0, greeting_s: float = 0.0) -> None:
        self.job = Job.now_running
        self.controller = self.job.controllers[ADDRESSES.index(address)]
        self._listener, self._fence = listener, Fence(job_id, fence)
        self._over = self._said = False
        self.refused = False
        self.drains: list[float] = []

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
            self.job.scheduler.after(SLOWEST_S, partial(self.controller.receive_from_rank, self, message))

    def end(self, reason: str, refused: bool) -> None:
        if not self._over:
            self.refused = refused
            self.close()
            self._say_closed(reason)

    def close(self, drain_s: float = 0.0) -> None:
        self.drains.append(drain_s)
        self._over = True
        if self in self.controller.streams:
            self.controller.streams.remove(self)
        self.job.scheduler.after(SLOWEST_S, partial(self._say_closed, "closed here"))

    def _say_closed(self, reason: str) -> None:
        if not self._said:
            self._said = True
            self._listener.stream_closed(self, reason)


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
        job, scheduler = Job.now_running, Job.now_running.scheduler
        until = scheduler.now + timeout
        if not self._set and not scheduler.run(until, self.is_set):
            scheduler.now = until
        scheduler.now, job.asleep_s = scheduler.now + job.asleep_s, 0.0  # it looks before it has read anything
        return self._set


class Job:
    """What both agents report, and the clock."""

    now_running: Job

    def __init__(self, seed: int) -> None:
        Job.now_running = self
        self.scheduler = Scheduler()
        self.rng, self.slowest_s = random.Random(seed), SLOWEST_S
        self.times = SimpleNamespace(heartbeat_s=BEAT_S, lease_s=LEASE_S)
        self.training = SimpleNamespace(layout=SimpleNamespace(hosts=(0, 0, 0)))
        self.ranks = [SimpleNamespace(rank=rank, node=0, runs=True, pid=100 + rank) for rank in range(3)]
        self.standbys = SimpleNamespace(listed=())
        self.controllers = [Controller(self, place) for place in range(COUNT)]
        self.twin = Agent(self, 0)  # type: ignore[arg-type]
        self.dead: set[int] = set()
        self.asleep_s = 0.0
        """The process of the shipped link is stopped for so long."""
        self.shipped = agent_link.AgentLink("c0", "job", "host0", (0, 1, 2), (100, 101, 102), self._running)
        self._beat()

    @property
    def now(self) -> float:
        return self.scheduler.now

    def _running(self) -> dict[int, int]:
        return {rank: 100 + rank for rank in range(3) if rank not in self.dead}

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
                self.dead.add(which)
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
            case "sends away":
                controller.send_away()

    def compare(self) -> None:
        """Where a controller sends and no later one has sent before, both are there."""
        there, link = self.controllers[self.shipped._place], self.shipped
        assert len(set(link._controllers)) == len(link._controllers)
        assert sum(len(controller.streams) for controller in self.controllers) <= 1, "streams stay open"
        led_by = next((one for one in self.controllers if one.term == link._fence), None)
        assert (link.sent_away_monotonic_s is not None) == (led_by is not None and led_by.sent_away)
        if link.attached:
            assert (
                len(self.dead) == 3
                or self.now <= there.vouched_s + LEASE_S / agent_link.VOUCHES_A_LEASE + 2 * agent_link.LOOK_S
            )
            assert there.sends and self.twin.place == there.place, (
                f"the simulation's agent is at c{self.twin.controller.place}"
            )
            assert there.received["twin"] == there.received["shipped"]
        else:
            assert not self.twin.controller.sends or self.twin._link is None, "the simulation's agent has a controller"


def run(script: list[tuple[str, int]], seed: int) -> Job:
    job = Job(seed)
    if seed % 2:  # else the first controller names them
        job.standbys.listed = ADDRESSES
        job.shipped.add_controllers(ADDRESSES)

    def settle() -> None:
        job.compare()

    def end() -> None:
        raise Over

    moment = 0.0
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
    st.tuples(st.sampled_from(("killed", "stopped", "goes on", "leads", "sends away")), st.integers(0, COUNT - 1)),
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


@settings(derandomize=True)
@given(script=st.lists(ACTS, max_size=8), seed=st.integers(0, 9))
@example(script=[("dies", 1), ("leads", 1), ("killed", 0)], seed=0)
@example(script=[("dies", 1), ("leads", 1), ("sends away", 0), ("killed", 0)], seed=1)
@example(script=[("leads", 1), ("stopped", 0)], seed=0)
@example(script=[("dies", 0), ("dies", 1), ("dies", 2)], seed=1)
@example(script=[("killed", 0)], seed=1)
@example(script=[("leads", 1), ("stopped", 0), ("goes on", 0), ("killed", 1)], seed=0)
def test_both_agents_come_to_the_same_controller_and_tell_it_the_same(script: list[tuple[str, int]], seed: int) -> None:
    run(script, seed)


def run_until(job: Job, moment: float) -> None:
    """Let the shipped link's loop run until then."""

    def end() -> None:
        raise Over

    job.scheduler.at(moment, end)
    with pytest.raises(Over):
        job.shipped._run()


def test_a_controller_that_has_ended_is_left_at_once() -> None:
    """Nothing listens at its address: no lease is waited for."""
    job = Job(0)
    job.controllers[1].lead()
    job.scheduler.at(5.0, job.controllers[0].kill)
    run_until(job, 6.0)
    assert job.shipped.attached and job.shipped._place == 1


def test_an_agent_that_was_stopped_itself_does_not_blame_its_controller() -> None:
    """No message came for longer than a lease; what was sent meanwhile comes now, on the same stream."""
    job = Job(0)
    streams: list[Any] = []

    def sleep() -> None:
        streams.append(job.shipped._stream)
        job.asleep_s = 4 * LEASE_S

    job.scheduler.at(5.0, sleep)
    run_until(job, 5.0 + 4 * LEASE_S + 1.0)
    assert job.shipped.attached and job.shipped._place == 0 and job.shipped._stream is streams[0]


def test_a_link_that_is_closed_lets_out_what_was_said_and_ends_its_loop() -> None:
    job = Job(0)
    job.scheduler.at(5.0, job.shipped.close)
    job.shipped._run()
    stream: Any = job.shipped._stream
    assert stream.drains[0] == 1.0 and job.now <= 5.0 + 2 * agent_link.LOOK_S + agent_link.RECONNECT_S


def test_a_link_that_is_closed_before_its_stream_is_open_says_nothing() -> None:
    """The launcher has ended its round: who it is, is of no account any more."""
    job = Job(0)
    job.controllers[0].stopped = True
    job.scheduler.at(1.0, job.shipped.close)
    job.shipped._run()
    stream: Any = job.shipped._stream
    job.shipped.stream_opened(stream)
    job.scheduler.run(2.0, lambda: False)
    assert not job.shipped.attached and not job.controllers[0].received["shipped"]
