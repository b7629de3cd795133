"""A rank whose stream goes through its node's relay: it stays attached when the relay ends, and never comes back to it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttp.controller.agent_link import request_status
from ttp.controller.process import ControllerProcess
from ttp.launch.links.relay import Relay
from ttp.processor.core.events import ProcessorSettings
from ttp.processor.driver import Processor, ProcessorOptions
from ttp.proto import stream
from ttp.proto.stream import Relayed

from .conftest import LONG_S, NotedHolder, Rank, StartController, until


class RelayedRank(Rank):
    """A rank in threads of this process, with a relay."""

    def __init__(self, rank: int, world_size: int, address: str, save_dir: str, relayed: Relayed) -> None:
        self.holder = NotedHolder(rank, world_size, save_dir)
        self.gate = self.holder.gate
        self.exit_code = None
        self.exited = threading.Event()
        self.processor = Processor(
            ProcessorSettings(rank=rank, heartbeat_s=0.2, reconnect_s=0.05, beats_together=True),
            address,
            "job",
            self.holder,
            self.gate,
            ProcessorOptions(relayed=relayed),
            exit_process=self._note_exit,
        )
        self.processor.start()


class Node:
    """The relay of a node and its ranks."""

    def __init__(self, tmp_path: Path, world_size: int) -> None:
        self._tmp_path, self._world_size = tmp_path, world_size
        self.path = tmp_path / "relay"
        self.silent_s = 5.0  # longer than anything here holds this process up
        self.relays: list[Relay] = []
        self.ranks: list[RelayedRank] = []

    def begin_relay(self) -> Relay:
        self.relays.append(Relay(self.path, tuple(range(self._world_size)), lease_s=3.0))
        self.relays[-1].start()
        return self.relays[-1]

    def begin_ranks(self, controller: ControllerProcess) -> list[RelayedRank]:
        for rank in range(self._world_size):
            root, relayed = str(self._tmp_path / "checkpoints"), Relayed(str(self.path), rank, self.silent_s)
            self.ranks.append(RelayedRank(rank, self._world_size, controller.address, root, relayed))
        for each in self.ranks:
            assert each.processor.wait_welcomed(LONG_S) is not None
        return self.ranks

    def end_relay(self) -> None:
        self.relays.pop().close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node of two ranks; its threads end with the test."""
    before = set(threading.enumerate())
    made = Node(tmp_path, 2)
    yield made
    for rank in made.ranks:
        rank.processor.stop()
    while made.relays:
        made.end_relay()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("ttp-"):
            thread.join(LONG_S)
            assert not thread.is_alive(), f"{thread.name} still runs at {sys._current_frames().get(thread.ident or 0)}"


def carried(relay: Relay, controller: ControllerProcess) -> int:
    """Return how many streams a relay carries to a controller."""
    connection = relay._connections.get(controller.address)
    return len(connection._streams) if connection is not None else 0


def attached(controller: ControllerProcess) -> list[bool]:
    return [rank.attached for rank in request_status(controller.address).ranks]


def is_calm(controller: ControllerProcess, ranks: list[RelayedRank]) -> bool:
    """Say whether the job runs as if nothing had been."""
    status = request_status(controller.address)
    assert not any(rank.exited.is_set() for rank in ranks)
    return status.stage == "running" and attached(controller) == [True] * len(ranks)


def direct(rank: RelayedRank) -> bool:
    """Say whether a rank is on a stream of its own."""
    stream = rank.processor._handler.stream
    return stream is not None and rank.stream.term > 0 and rank.stream._relayed is None


def journaled(tmp_path: Path) -> set[str]:
    """Return the kinds of events that the controller has seen."""
    return {json.loads(line)["event"] for line in (tmp_path / "journal0.jsonl").read_text().splitlines()}


def beats_of(rank: RelayedRank, controller: ControllerProcess) -> None:
    """Wait until the controller has what the rank does now: its heartbeats arrive."""
    rank.train_to(rank.gate.state_step + 2)  # a rank that registers may be said to be in its next step
    step = rank.gate.step
    until(lambda: request_status(controller.address).ranks[rank.holder.rank].step == step, f"step {step} arrives")


def test_a_rank_attaches_through_its_nodes_relay_and_stays_with_it(new_controller: StartController, node: Node) -> None:
    """Also where its stream ends for another reason: the next one goes through the relay again."""
    controller, relay = new_controller(world_size=2), node.begin_relay()
    ranks = node.begin_ranks(controller)
    assert carried(relay, controller) == 2 and not any(map(direct, ranks))
    for rank in ranks:
        beats_of(rank, controller)
    for _ in range(3):
        ranks[0].connect_anew()
        until(lambda: is_calm(controller, ranks), "it is attached again")
        assert not direct(ranks[0])
    until(lambda: carried(relay, controller) == 2, "the streams before have ended")


def test_ranks_whose_relay_ends_connect_themselves_and_use_no_later_one(
    new_controller: StartController, node: Node, tmp_path: Path
) -> None:
    """None is taken for dead meanwhile, and what was frozen goes on; that another relay listens at the same path changes nothing."""
    controller = new_controller(world_size=2)
    node.begin_relay()
    ranks = node.begin_ranks(controller)
    node.end_relay()
    until(lambda: all(map(direct, ranks)), "streams of their own")
    until(lambda: is_calm(controller, ranks), "all are attached")
    later = node.begin_relay()
    ranks[0].connect_anew()
    until(lambda: is_calm(controller, ranks), "it is attached again")
    assert all(map(direct, ranks))
    assert later._connections == {}, "no rank has come to it"
    for rank in ranks:
        beats_of(rank, controller)
    assert journaled(tmp_path) <= {"registered", "assembled", "suspect", "freeze_sent", "cleared", "thawed"}


def test_a_rank_whose_node_has_no_relay_any_more_attaches_itself(new_controller: StartController, node: Node) -> None:
    """The relay was there when the variable was set, and ended before the rank's first try."""
    controller = new_controller(world_size=2)
    ranks = node.begin_ranks(controller)
    assert all(map(direct, ranks))
    until(lambda: is_calm(controller, ranks), "all are attached")


def test_a_rank_leaves_a_relay_that_stands_still(new_controller: StartController, node: Node, tmp_path: Path) -> None:
    """It is silent, and its connections stay; when it goes on it finds that its streams have ended."""
    node.silent_s = 0.6
    controller, relay = new_controller(world_size=2, lease_s=10.0), node.begin_relay()
    ranks = node.begin_ranks(controller)
    goes_on = threading.Event()
    relay._loop.call_soon_threadsafe(goes_on.wait, LONG_S)
    try:
        until(lambda: all(map(direct, ranks)), "streams of their own")
        for rank in ranks:
            beats_of(rank, controller)  # a stream is open before the controller has its rank's registration
    finally:
        goes_on.set()
    until(lambda: is_calm(controller, ranks), "all are attached")
    until(lambda: carried(relay, controller) == 0, "the relay learns of it")
    for rank in ranks:
        assert direct(rank)
        beats_of(rank, controller)
    assert journaled(tmp_path) == {"registered", "assembled"}, "no rank was suspected: each came before its lease"


@pytest.mark.parametrize(("held_s", "left"), [(0.45, True), (0.0, True), (60.0, False)])
def test_a_rank_that_is_held_itself_leaves_a_silent_relay_all_the_same(
    held_s: float, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks late each time, by `held_s`: only what it was held for does not count. One that is held for longer than it waits cannot tell yet."""
    now, silent_s, cancelled = [0.0], 0.6, list[bool]()
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def look(timeout_s: float) -> bool:
        now[0] += timeout_s + held_s
        return now[0] > (20 * silent_s if held_s < silent_s else 2 * held_s)

    watch = stream._Watch.__new__(stream._Watch)
    watch.received_at, watch.fired, watch._silent_s = 0.0, False, silent_s
    watch._call = SimpleNamespace(cancel=lambda: cancelled.append(True))  # type: ignore[assignment]
    watch._ended = SimpleNamespace(wait=look)  # type: ignore[assignment]
    watch._run()
    assert watch.fired is bool(cancelled) is left


def test_each_absence_of_its_own_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    now, silent_s, held_s = [0.0], 0.6, 0.5

    def look(timeout_s: float) -> bool:
        now[0] += timeout_s + (held_s if now[0] < 2 * held_s else 0.0)
        return False

    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = stream._Watch.__new__(stream._Watch)
    watch.received_at, watch.fired, watch._silent_s = 0.0, False, silent_s
    watch._call = SimpleNamespace(cancel=lambda: None)  # type: ignore[assignment]
    watch._ended = SimpleNamespace(wait=look)  # type: ignore[assignment]
    watch._run()
    assert watch.fired and now[0] > silent_s + 2 * held_s


def test_what_comes_while_a_rank_excuses_its_own_absence_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that receives notes it just after the other one has looked: the wait begins anew with it."""
    now, silent_s, held_s, came = [0.0], 0.6, 0.3, [0.0]

    class Watch(stream._Watch):
        @property
        def received_at(self) -> float:
            before = came[-1]
            if len(came) == 1:
                came.append(now[0])
            return before

        @received_at.setter
        def received_at(self, moment: float) -> None:
            came.append(moment)

    def look(timeout_s: float) -> bool:
        now[0] += timeout_s + (held_s if now[0] == 0.0 else 0.0)
        return False

    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = Watch.__new__(Watch)
    watch.fired, watch._silent_s = False, silent_s
    watch._call = SimpleNamespace(cancel=lambda: None)  # type: ignore[assignment]
    watch._ended = SimpleNamespace(wait=look)  # type: ignore[assignment]
    watch._run()
    assert watch.fired and now[0] > came[1] + silent_s
