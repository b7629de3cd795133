"""Streams and events in the right order, on a device that is played by lists: what an update waits for, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ttp.interfaces.update_tracker import NullTracker
from ttp.optim import step_state
from ttp.optim.device_stream import Lane
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.proto.messages import CommitRecord

CUDA = torch.device("cuda:0")


class FakeEvent:
    """Stands for all that was queued on a stream when it was recorded."""

    def __init__(self, device: FakeDevice) -> None:
        self.behind: frozenset[str] = frozenset()
        self.waited = 0
        self._device = device

    def record(self, stream: FakeStream) -> None:
        self.behind = frozenset(stream.behind)

    def query(self) -> bool:
        return self.behind <= self._device.finished

    def synchronize(self) -> None:
        self.waited += 1


class FakeStream:
    """`behind`: the work that must be finished before anything that is queued from now on begins."""

    def __init__(self) -> None:
        self.behind: set[str] = set()

    def wait_stream(self, other: FakeStream) -> None:
        self.behind |= other.behind

    def wait_event(self, event: FakeEvent) -> None:
        self.behind |= event.behind


class FakeDevice:
    """What `torch.get_device_module` gives: streams, events, and the current stream of the one thread that asks."""

    def __init__(self) -> None:
        self.current = FakeStream()
        self.finished: set[str] = set()

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream()

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def queue(self, work: str) -> None:
        self.current.behind.add(work)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Return the device that torch finds."""
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def test_gradients_are_ready_behind_their_reductions_on_the_side_stream(device: FakeDevice) -> None:
    """A reduction begins behind backward, beside the main stream, and READY is behind both."""
    lane = Lane(CUDA)
    device.queue("backward")
    with lane.side():
        assert device.current.behind == {"backward"}
        device.queue("reduction")
    assert device.current.behind == {"backward"}, "backward goes on beside the reduction"
    lane.join()
    lane.mark_ready()
    with lane.after_ready():
        assert device.current.behind == {"backward", "reduction"}


def test_another_thread_rolls_forward_behind_the_gradients_and_not_behind_a_stuck_collective(
    device: FakeDevice,
) -> None:
    """Its stream is new, and waits for two events only: the gradients' and the update's before."""
    lane = Lane(CUDA)
    device.queue("update of step 4")
    lane.mark_updated()
    device.queue("gradients of step 5")
    lane.mark_ready()
    device.queue("a collective that never ends")
    main = device.current
    with lane.after_ready():
        assert device.current is not main
        assert device.current.behind == {"update of step 4", "gradients of step 5"}
        device.queue("update of step 5")
        lane.mark_updated()
    device.finished |= {"update of step 4", "gradients of step 5", "update of step 5"}
    assert lane.drain_within(0.0), "a dump need not wait for the collective"


def test_an_update_that_the_device_has_not_finished_is_waited_for_no_longer_than_asked(device: FakeDevice) -> None:
    """A dump reads only behind the update's event."""
    lane = Lane(CUDA)
    assert lane.ordered and lane.drain_within(0.0), "there was no update yet"
    device.queue("update")
    lane.mark_updated()
    assert not lane.drain_within(0.002)
    device.finished.add("update")
    assert lane.drain_within(0.0)


def test_a_cpu_has_no_streams() -> None:
    """Every call is free there."""
    lane = Lane(torch.device("cpu"))
    with lane.side(), lane.after_ready():
        lane.mark_ready()
        lane.mark_updated()
        lane.join()
        lane.drain()
    assert not lane.ordered and lane.drain_within(0.0)


class Events(NullTracker):
    """Writes the phases down, among the lane's marks."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def ready(self, step: int) -> None:
        self.lines.append("ready")

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        self.lines.append("begin")

    def end_update(self, step: int) -> None:
        self.lines.append("end")


def test_a_step_marks_both_events_before_it_reports_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """READY is reported behind the event of the reduced gradients, the end of the update behind the event of the update: whoever
    learns of a phase finds the event that it has to wait for."""
    events = Events()

    class Marked(Lane):
        def __init__(self, device: torch.device) -> None:
            super().__init__(CUDA)

        def join(self) -> None:
            events.lines.append("join")
            super().join()

        def mark_ready(self) -> None:
            events.lines.append("mark ready")
            super().mark_ready()

        def mark_updated(self) -> None:
            events.lines.append("mark updated")
            super().mark_updated()

    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(step_state, "Lane", Marked)
    net = torch.nn.Linear(8, 8)
    optimizer: Any = TTPReplicaOptimizer(net.named_parameters(), lr=0.1)
    optimizer.attach(events)
    optimizer.zero_grad()
    torch.autograd.backward(net(torch.ones(2, 8)).square().mean())
    events.lines.clear()
    optimizer.step()
    assert events.lines == ["join", "mark ready", "ready", "begin", "mark updated", "end"]
    assert optimizer.lane.ordered
    optimizer.close()
