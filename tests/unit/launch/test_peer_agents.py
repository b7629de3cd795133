"""What launchers of one attempt tell each other, over a real store."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from tests.waiting import until
from ttp.launch.links.peer_agents import SILENT_S, PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore

DEADLINE_S = 60.0
LOOK_S = 0.02


class EndsWhenAllKnow:
    """A store whose launcher ends as soon as the other one has said that it knows of all successes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ended = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._ended:
                raise DistNetworkError("Connection reset by peer")
            self._ended = name == "set" and arguments[0].startswith("ttp/nodes/seen/")
            return getattr(self._store, name)(*arguments)

        return call


class Launchers:
    """So many launchers on one store, which one of them has."""

    def __init__(self, count: int, lost_s: float, silent: tuple[int, ...] = ()) -> None:
        self.server: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = JobStore("127.0.0.1", self.server.port, 0)
        self.all = [PeerAgents(place, node, count, look_s=LOOK_S, lost_s=lost_s) for node in range(count)]
        for node, launcher in enumerate(self.all):
            if node not in silent:
                launcher.start()


Make = Callable[..., Launchers]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Launchers] = []

    def start(count: int, lost_s: float = DEADLINE_S, silent: tuple[int, ...] = ()) -> Launchers:
        made.append(Launchers(count, lost_s, silent))
        return made[-1]

    yield start
    for group in made:
        for launcher in group.all:
            launcher.close()


def test_a_faults_begin_reaches_all_others_as_an_age(make: Make) -> None:
    """The first one counts; the node that published it reads no other."""
    first, second, third = make(3).all
    begun_s = time.monotonic() - 40.0
    first.publish_fault(begun_s)
    until(lambda: second.fault_begun_monotonic_s and third.fault_begun_monotonic_s, "news of the fault")
    for other in (second, third):
        heard_s = other.fault_begun_monotonic_s
        assert heard_s is not None and abs(heard_s - begun_s) < 10.0
    second.publish_fault(time.monotonic())
    second.publish_restart("b starts again")
    until(lambda: third.restarts, "news of the restart")
    assert third.fault_begun_monotonic_s is not None and third.fault_begun_monotonic_s < begun_s + 10.0
    assert first.fault_begun_monotonic_s is None


def test_a_success_is_known_before_it_is_published_as_seen(make: Make) -> None:
    """Its launcher may end at once: what fails then has been read."""
    group = make(2, silent=(1,))
    server, other = group.server, group.all[1]
    assert server is not None
    for launcher in group.all:
        launcher.publish_succeeded()
    other._write(server)
    until(lambda: server.check(["ttp/nodes/succeeded/0", "ttp/nodes/succeeded/1"]), "two successes")
    with pytest.raises(DistNetworkError):
        other._read(cast(Store, EndsWhenAllKnow(server)))
    assert other.all_have_succeeded


def test_success_is_known_when_all_have_it_and_the_store_stays_until_they_know(make: Make) -> None:
    """The launcher that has the store does not leave before the others have read the last news in it."""
    group = make(3)
    for launcher in group.all[:2]:
        launcher.publish_succeeded()
    server = group.server
    assert server is not None
    until(lambda: server.check(["ttp/nodes/succeeded/0", "ttp/nodes/succeeded/1"]), "two successes")
    group.all[1].publish_succeeded()  # once more: torch's agent may ask twice
    group.all[1].publish_restart("b starts again")
    until(lambda: group.all[0].restarts, "what was said after it")
    assert not any(launcher.all_have_succeeded for launcher in group.all)
    group.all[2].publish_succeeded()
    until(lambda: group.all[0].all_have_succeeded, "word of all successes where the store is")
    assert all(launcher.all_have_succeeded for launcher in group.all)


def test_a_job_that_failed_elsewhere_is_over_here(make: Make) -> None:
    first, second = make(2).all
    assert first.over == "" and first.restarts == ""
    second.publish_failed("b has failed (rank 1: exit code 3)")
    until(lambda: first.over, "news of the failure")
    assert first.over == "b has failed (rank 1: exit code 3)" and first.lost == ""


def test_the_last_key_is_published_before_the_end(make: Make) -> None:
    """A launcher that fails for good speaks and closes at once."""
    first, second = make(2).all
    second.publish_failed("b has failed")
    second.close()
    until(lambda: first.over, "news of the failure")


def test_the_store_of_a_launcher_that_fails_for_good_stays_until_the_others_have_read_why(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with that agent: one that polls once a second would find it closed."""
    monkeypatch.setattr("ttp.launch.links.peer_agents.READ_S", DEADLINE_S)
    group = make(3)
    first, *others = group.all
    until(lambda: all(launcher._reached for launcher in others), "first answers")
    first.publish_failed("a has failed")
    first.close()
    group.server = None
    assert [launcher.failed for launcher in others] == ["a has failed", "a has failed"]


def test_an_agent_that_fails_for_good_does_not_wait_for_one_that_does_not_poll(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node may be lost: nothing holds this one."""
    monkeypatch.setattr("ttp.launch.links.peer_agents.READ_S", 0.3)
    first = make(2, silent=(1,)).all[0]
    first.publish_failed("a has failed")
    first.close()
    first._thread.join(DEADLINE_S)
    assert not first._thread.is_alive()


def test_a_node_that_never_spoke_is_lost_to_all_others(make: Make) -> None:
    """It died after the rendezvous was complete: the agent with the store notices, and publishes it."""
    launchers = make(3, lost_s=4.0, silent=(2,)).all
    until(lambda: launchers[0].lost and launchers[1].lost, "news of the loss")
    for launcher in launchers[:2]:
        assert "node 2 of 3" in launcher.lost and launcher.over == ""


def test_a_store_that_does_not_answer_is_a_lost_node(make: Make) -> None:
    """Behind a pulled cable a call never returns."""
    launcher = make(2, lost_s=0.3, silent=(0, 1)).all[1]
    # one question soon after the other: an agent that was delayed itself cannot tell who is silent
    until(lambda: "has not answered for" in launcher.lost and launcher.over, "the store's silence")


def test_a_launcher_that_was_stopped_itself_does_not_miss_the_others() -> None:
    """It has not asked for a while: that says nothing about the store, until the store is silent from then on."""
    now = 0.0
    launcher = PeerAgents(JobStore("127.0.0.1", 1, 0), 1, 2, lost_s=30.0, clock=lambda: now)
    assert launcher.lost == ""
    now = 100.0
    assert launcher.lost == ""
    for _ in range(3):
        now += 11.0
        words = launcher.lost
    assert words == "node 0 (the workers' store at 127.0.0.1:1) has not answered for 33 s"


def test_a_launcher_that_has_left_is_not_lost(make: Make) -> None:
    """Its store is lost and its port is closed: it publishes nothing more, but its node is not lost."""
    group = make(2)
    until(lambda: group.all[1]._reached, "an answer")
    group.all[0].close()
    group.server = None
    until(lambda: group.all[1].over, "the end of the store")
    assert "node 0 has exited" in group.all[1].over and group.all[1].lost == ""
    with contextlib.suppress(RuntimeError):
        group.all[1].close()


class Broken:
    """A store whose calls fail."""

    def __getattr__(self, name: str) -> Any:
        raise DistNetworkError("connection reset by peer")


class Breaks(PeerAgents):
    """A launcher whose calls to the store fail for so many looks."""

    def __init__(self, place: JobStore, failures: int, lost_s: float = DEADLINE_S) -> None:
        super().__init__(place, 1, 2, look_s=LOOK_S, lost_s=lost_s)
        self.failures = failures

    def _write(self, store: Store) -> None:
        if self.failures:
            self.failures -= 1
            super()._write(Broken())  # type: ignore[arg-type]
            raise DistNetworkError("connection reset by peer")  # where it had nothing to write
        super()._write(store)


def test_a_call_that_fails_is_made_again_over_a_new_connection(make: Make) -> None:
    """One lost answer does not mean a lost node: the unpublished keys are published, once, and the others' keys are read as before."""
    group = make(2, silent=(1,))
    assert group.server is not None
    launcher = Breaks(JobStore("127.0.0.1", group.server.port, 0), failures=3)
    launcher.publish_failed("its disk is full")
    launcher.publish_succeeded()
    launcher.start()
    group.all[0].publish_succeeded()
    until(lambda: launcher.all_have_succeeded and group.all[0].all_have_succeeded, "word of both successes")
    until(lambda: "its disk is full" in group.all[0].over, "what was to be published as the calls failed")
    assert launcher.failures == 0 and launcher.lost == launcher.unreached == ""
    launcher.close()


def test_a_store_whose_calls_all_fail_is_a_lost_node_with_the_error(make: Make) -> None:
    """Its node still accepts connections, so it has not exited."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = Breaks(JobStore("127.0.0.1", server.port, 0), failures=10**9, lost_s=0.6)
    launcher.start()
    error = "connection reset by peer"  # the loss may be noticed before the first call has failed
    until(
        lambda: "has not answered for" in (lost := launcher.lost) and error in lost and error in launcher.over
        and error in launcher.unreached, "the loss and its error",
    )  # fmt: skip
    assert launcher.unreached == (
        f"this node never reached the workers' store on node 0 (127.0.0.1:{server.port}) (connection reset by peer)"
    )
    launcher.close()


def test_a_port_that_was_closed_from_the_beginning_is_not_a_node_that_has_left() -> None:
    """A firewall refuses as a node does that has ended; that one had answered before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        launcher = PeerAgents(JobStore("127.0.0.1", probe.getsockname()[1], 0), 1, 2, look_s=LOOK_S, lost_s=0.6)
        launcher.start()
        until(lambda: "has not answered" in launcher.lost and "refused" in launcher.unreached, "the loss")
        launcher.close()


class Thread:
    """Stands in for the thread of an agent: how long its end is waited for."""

    ident = 1

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def join(self, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)


@pytest.mark.parametrize(
    ("silent_s", "failed", "waits"), [(SILENT_S, False, False), (2.9, False, True), (60.0, True, True)]
)
def test_an_attempt_that_another_follows_does_not_wait_for_a_silent_store(
    silent_s: float, failed: bool, waits: bool
) -> None:
    """It is lost with node 0, and the thread goes on by itself. An agent that ends the job has to publish why."""
    now = [100.0]
    launcher = PeerAgents(JobStore("127.0.0.1", 1, 0), 1, 2, clock=lambda: now[0])
    thread: Any = Thread()
    launcher._thread = thread
    (launcher.publish_failed if failed else launcher.publish_restart)("node-b: exit code 3")
    now[0] += silent_s
    launcher.close()
    assert bool(thread.waited_s) is waits


def test_a_node_with_a_new_heartbeat_is_not_lost_any_more(make: Make) -> None:
    """Its launcher had no time for a while, as on a loaded machine."""
    group = make(2, lost_s=1.0, silent=(1,))
    until(lambda: group.all[0].lost, "the loss")
    group.all[1].start()
    until(lambda: not group.all[0].lost, "the return")
