"""A node's relay between real ranks and a real controller: it carries their streams in one connection, changes nothing of them, and ranks leave one
that does not run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ttp.controller.agent_link import request_status
from ttp.controller.process import ControllerProcess
from ttp.launch.links.relay import BUNDLE_BYTES, Relay, bundles
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import DownwardParcel
from ttp.proto.messages import Finished, Heartbeat, Phase, Registration, ShardGroup, Welcome
from ttp.proto.stream import ControlStream, Relayed

from .conftest import LONG_S, StartController, until

RANKS = (0, 1, 2)
SILENT_S = 1.5  # longer than anything here holds the relay up


class Caller:
    """One rank's stream through the relay, and what became of it."""

    def __init__(self, rank: int, address: str, path: Path, silent_s: float = LONG_S) -> None:
        self.rank, self.received, self.reason = rank, list[str](), ""
        self.opened, self.welcomed, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.stream = ControlStream(address, "job", self, relayed=Relayed(str(path), rank, silent_s))
        self.stream.start()

    def registers(self, save_dirs: tuple[str, ...] = ("/nowhere",)) -> None:
        assert self.opened.wait(LONG_S), self.reason
        group = ShardGroup("g", "all", 1 << 20)
        self.stream.send(Registration(self.rank, 3, "host", 100 + self.rank, (group,), 0, save_dirs, "{}"))

    def ends(self) -> str:
        assert self.closed.wait(LONG_S)
        return self.reason

    # the stream's listener

    def stream_opened(self, stream: ControlStream) -> None:
        self.opened.set()

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        self.received.append(type(parcel.message).__name__)
        if isinstance(parcel.message, Welcome):
            self.welcomed.set()

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        self.reason = reason
        self.closed.set()


Call = Callable[..., Caller]


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    made = Relay(tmp_path / "relay", RANKS, lease_s=3.0)
    made.start()
    yield made
    made.close()


@pytest.fixture
def call(relay: Relay) -> Iterator[Call]:
    """Open streams through the relay; close them at the end."""
    callers: list[Caller] = []

    def start(rank: int, address: str, path: Path | None = None, silent_s: float = LONG_S) -> Caller:
        callers.append(Caller(rank, address, path or relay.path, silent_s))
        return callers[-1]

    yield start
    for caller in callers:
        caller.stream.close()
        caller.ends()


def attached(controller: ControllerProcess) -> list[bool]:
    return [rank.attached for rank in request_status(controller.address).ranks]


def connections(controller: ControllerProcess) -> int:
    """Return how many connections to its port are established."""
    port = int(controller.address.partition("/")[0].rpartition(":")[2])
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    local = [line.split() for line in lines]
    return sum(int(words[1].rpartition(":")[2], 16) == port and words[3] == "01" for words in local)


def assembled(controller: ControllerProcess, call: Call, silent_s: float = LONG_S) -> list[Caller]:
    callers = [call(rank, controller.address, silent_s=silent_s) for rank in RANKS]
    for caller in callers:
        caller.registers()
    for caller in callers:
        assert caller.welcomed.wait(LONG_S), caller.reason
    return callers


def test_ranks_share_one_connection_and_one_that_leaves_takes_no_other_along(
    new_controller: StartController, call: Call
) -> None:
    controller = new_controller(world_size=3)
    before = connections(controller)
    callers = assembled(controller, call)
    assert connections(controller) == before + 1
    callers[1].stream.close()
    until(lambda: attached(controller) == [True, False, True], "the controller learns that a rank's stream has ended")
    again = call(1, controller.address)
    again.registers()
    until(lambda: attached(controller) == [True, True, True], "it is back")
    assert not callers[0].closed.is_set() and not callers[2].closed.is_set()
    until(lambda: connections(controller) == before + 1, "one connection more: that of the last look ends by itself")
    for caller in (callers[0], callers[2], again):
        caller.stream.close()
    until(lambda: connections(controller) == before, "the connection ends with its last stream")


def test_a_controller_that_is_killed_ends_its_streams_and_is_refused_after_that(
    new_controller: StartController, call: Call
) -> None:
    """As on streams of the ranks' own: the relay is not to blame, and the next controller is asked at once."""
    controller = new_controller(world_size=3)
    callers = assembled(controller, call)
    controller.process.kill()
    assert all("UNAVAILABLE" in caller.ends() for caller in callers)
    assert not any(caller.stream.relay_failed or caller.stream.refused for caller in callers)
    assert controller.wait(LONG_S) is not None, "its port is closed"
    late = call(0, controller.address)
    late.ends()
    assert late.stream.refused and not late.stream.relay_failed


def test_a_controller_that_stands_still_is_not_taken_for_a_relay_that_does(
    new_controller: StartController, call: Call
) -> None:
    """The relay shows all the while that it runs itself."""
    controller = new_controller(world_size=3, lease_s=60.0)
    (first, *_) = assembled(controller, call, SILENT_S)
    controller.process.send_signal(signal.SIGSTOP)
    try:
        assert not first.closed.wait(2 * SILENT_S), first.reason
        late = call(1, controller.address, silent_s=SILENT_S)
        assert not late.closed.wait(1.5 * SILENT_S) and not late.opened.is_set()
    finally:
        controller.process.send_signal(signal.SIGCONT)
    assert late.opened.wait(LONG_S)


def test_a_relay_that_stands_still_is_left_by_its_ranks(
    new_controller: StartController, call: Call, relay: Relay
) -> None:
    controller = new_controller(world_size=3)
    callers = assembled(controller, call, SILENT_S)
    goes_on = threading.Event()
    relay._loop.call_soon_threadsafe(goes_on.wait, LONG_S)
    try:
        late = call(1, controller.address, silent_s=SILENT_S)  # it does not get as far as a sign of life
        for caller in (*callers, late):
            assert f"nothing received from this node's relay for {SILENT_S:g} s" in caller.ends()
            assert caller.stream.relay_failed and not caller.stream.refused
    finally:
        goes_on.set()


def test_a_relay_that_is_gone_says_nothing_about_the_controller(
    new_controller: StartController, call: Call, relay: Relay, tmp_path: Path
) -> None:
    controller = new_controller(world_size=3)
    nowhere = call(0, controller.address, tmp_path / "nothing")
    assert nowhere.ends() and nowhere.stream.relay_failed and not nowhere.stream.refused
    assert "\n" not in nowhere.reason
    callers = assembled(controller, call)
    relay.close()
    for caller in callers:
        caller.ends()
        assert caller.stream.relay_failed and not caller.stream.refused, caller.reason
    until(lambda: attached(controller) == [False] * 3, "the controller learns that all have ended")


def test_a_relay_carries_the_ranks_of_its_node_alone(new_controller: StartController, call: Call) -> None:
    foreign = call(3, new_controller(world_size=4).address)
    assert "got a stream of rank 3" in foreign.ends() and "expected one of ranks [0, 1, 2]" in foreign.reason


def test_what_the_controller_refuses_is_refused_in_its_words(new_controller: StartController, call: Call) -> None:
    """A rank that says something before it has registered: its stream ends, and no other."""
    controller = new_controller(world_size=3)
    early, other = call(0, controller.address), call(1, controller.address)
    other.registers()
    assert early.opened.wait(LONG_S)
    early.stream.send(Heartbeat(0, Phase.COMPUTE, 1, False, False, 0, False, False, 0, ()))
    assert "FAILED_PRECONDITION" in early.ends() and "register first" in early.reason
    assert not early.stream.relay_failed and not other.closed.is_set()


def test_a_table_that_goes_in_chunks_is_carried(new_controller: StartController, call: Call) -> None:
    controller = new_controller(world_size=3)
    caller = call(0, controller.address)
    caller.registers(tuple(f"/{number}/{'x' * 2000}" for number in range(6_000)))
    until(lambda: attached(controller)[0], "a registration of more than a message may have")


def test_what_comes_together_is_one_message() -> None:
    """The ranks' heartbeats of one moment; what comes later is another one, in order, and the last is behind none."""
    first, late = ([pb.CarriedUpward(streams=[number], envelope=b"beat") for number in of] for of in (RANKS, (7,)))

    async def carry() -> list[list[int]]:
        queue: asyncio.Queue[pb.CarriedUpward | None] = asyncio.Queue()
        sent = bundles(queue)
        for part in first:
            queue.put_nowait(part)
        taken = [await anext(sent)]
        for last in (*late, None):
            queue.put_nowait(last)
        return [
            [number for part in bundle.parts for number in part.streams]
            for bundle in [*taken, *[bundle async for bundle in sent]]
        ]

    assert asyncio.run(carry()) == [[*RANKS], [7]]


def test_a_message_that_is_large_enough_is_sent_at_once() -> None:
    async def carry() -> list[int]:
        queue: asyncio.Queue[pb.CarriedUpward | None] = asyncio.Queue()
        for part in (*[pb.CarriedUpward(streams=[1], envelope=bytes(BUNDLE_BYTES // 2))] * 5, None):
            queue.put_nowait(part)
        return [len(bundle.parts) async for bundle in bundles(queue)]

    assert asyncio.run(carry()) == [2, 2, 1]


def test_a_connection_on_which_nothing_comes_takes_no_more_streams(
    new_controller: StartController, tmp_path: Path
) -> None:
    """The controller stands still, as a connection does that a network has dropped; a rank that tries again gets another one."""
    controller = new_controller(world_size=3, lease_s=60.0)
    relay = Relay(tmp_path / "impatient", RANKS, lease_s=2.0)
    stale_s, relay._stale_s = relay._stale_s, LONG_S  # both ranks are to come to one connection
    relay.start()
    callers = [Caller(rank, controller.address, relay.path) for rank in (0, 1)]
    for caller in callers:
        caller.registers()
    until(lambda: attached(controller) == [True, True, False], "both are there")
    relay._stale_s = stale_s
    controller.process.send_signal(signal.SIGSTOP)
    try:
        (first,) = relay._all
        until(lambda: time.monotonic() - first.received_at > relay._stale_s, "nothing has come for half a lease")
        callers.append(Caller(2, controller.address, relay.path))
        until(lambda: len(relay._all) == 2, "another connection")
    finally:
        controller.process.send_signal(signal.SIGCONT)
    assert callers[2].opened.wait(LONG_S)
    for caller in callers:
        caller.stream.close()
        caller.ends()
    relay.close()


def test_the_last_message_of_a_rank_goes_out_before_the_relay_ends(
    new_controller: StartController, call: Call, relay: Relay
) -> None:
    controller = new_controller(world_size=3)
    (first, *_) = assembled(controller, call)
    first.stream.send(Finished(0))
    first.stream.close(drain_s=1.0)
    relay.close()
    until(lambda: finished(controller)[0], "its last message")


def finished(controller: ControllerProcess) -> list[bool]:
    return [rank.finished for rank in request_status(controller.address).ranks]
