"""Finding the controller in the workers' store, and telling it of deaths."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.couriers import DEADLINE_S, FakeLink, Switchboard, death
from tests.waiting import until
from ttp.exchange.discovery import controller_key, log_dir_key, process_key
from ttp.exchange.first_step import FirstStep, progress_key
from ttp.launch.links import controller_client as courier_module
from ttp.launch.links.controller_client import NEWS_S, ControllerClient, ControllerEntry
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.runtime.standby import enter


def test_the_controller_of_this_round_is_found(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient
) -> None:
    """Another round's entry is not taken for it."""
    store.set(controller_key(6), "old:1 11")
    courier.start()
    assert not courier.connected and courier.entry is None
    store.set(controller_key(7), "host:8000 12")
    until(lambda: courier.connected)
    assert courier.entry == ControllerEntry("host:8000", 12)
    assert list(switchboard.links) == ["host:8000"]


def test_deaths_before_and_after_the_controller_are_told_in_order(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient
) -> None:
    """A worker may die before rank 0 has published its controller."""
    courier.report(death("exiting"))
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.connected)
    courier.report(death("signal SIGKILL"))
    assert switchboard.links["host:8000"].told == [(1, 71, "exiting"), (1, 71, "signal SIGKILL")]


def test_a_new_controller_under_the_same_key_is_told_all_and_the_old_link_closed(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient
) -> None:
    """A standby that has become active publishes itself in the place of the dead one."""
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.connected)
    courier.report(death("exiting"))
    store.set(controller_key(7), "other:9000 13")
    until(lambda: "other:9000" in switchboard.links and switchboard.links["host:8000"].closed)
    assert switchboard.links["other:9000"].told == [(1, 71, "exiting")]


def test_a_controller_that_was_lost_is_known_but_not_connected(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient
) -> None:
    """The link waits for it or for a standby: while it waits nobody leads the ranks, and deaths are kept for whoever comes."""
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.connected)
    link = switchboard.links["host:8000"]
    link.attached = False
    assert not courier.connected and courier.entry == ControllerEntry("host:8000", 12)
    courier.report(death("signal SIGKILL"))
    assert link.told == [(1, 71, "signal SIGKILL")], "the link says it again to every later controller"
    link.attached = True
    assert courier.connected


def test_the_link_learns_of_the_standbys_of_this_round(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient
) -> None:
    """Also of one that is published later, and of none of another round: it is where the controller is replaced from."""
    enter(store, 6, 1, "old:1")
    enter(store, 7, 1, "one:8001")
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.connected)
    link = switchboard.links["host:8000"]
    until(lambda: link.standbys == ["one:8001"])
    enter(store, 7, 2, "two:8002")
    until(lambda: link.standbys == ["one:8001", "two:8002"])


def test_an_unreachable_controller_is_known_but_not_connected(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It is still to be ended with the job; reports do not raise into the death watch."""
    switchboard.error = ConnectionError("refused")
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.entry is not None)
    courier.report(death("exiting"))
    assert not courier.connected


def test_a_controller_published_in_the_last_moment_is_known_at_the_end(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Rank 0 publishes and dies before the next look: the controller must not be left behind."""
    courier = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    courier.start()
    store.set(controller_key(7), "host:8000 12")
    courier.close(DEADLINE_S)
    assert courier.entry == ControllerEntry("host:8000", 12)
    assert not courier.connected


def test_the_journals_folder_is_watched_until_there_was_enough_to_see(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Rank 0 says where it is before its controller has written anything; without a controller it is known as well."""
    seen: list[Path] = []

    def watch(path: Path) -> bool:
        seen.append(path)
        return len(seen) == 3

    place = JobStore("127.0.0.1", store.port, 7)
    courier = ControllerClient(place, {}, switchboard, watch_log_dir=watch, search_s=0.005)
    courier.start()
    store.set(log_dir_key(6), "/old")
    store.set(log_dir_key(7), "/output/log")
    until(lambda: len(seen) == 3)
    courier.close()
    assert seen == [Path("/output/log")] * 3 and courier.log_dir == Path("/output/log")


def test_the_first_step_is_known_even_when_it_came_in_the_last_moment(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Of this start; a later word of it changes nothing."""
    courier = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    courier.start()
    store.set(progress_key(6), "3")
    assert courier.first_step is None
    store.set(progress_key(7), "9")
    courier.close(DEADLINE_S)
    assert courier.first_step == 9 and courier.skipped == ""


def test_a_checkpoint_that_was_skipped_is_told_with_the_first_step(store: TCPStore, switchboard: Switchboard) -> None:
    """The newest one, whatever its path: the piece of an older one that this node cannot read may be met before it."""
    told = FirstStep(store, 7)
    for name in ("iter_0000004", "iter_0000012_superseded_1", "iter_0000012", "iter_0000010"):
        told.skip(Path("/my runs") / name)
    told.tell(9)
    courier = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    courier.start()
    courier.close(DEADLINE_S)
    assert (courier.first_step, courier.skipped) == (9, "/my runs/iter_0000012")


def test_a_first_step_that_is_no_number_is_not_used_and_the_search_goes_on(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient
) -> None:
    store.set(progress_key(7), "nonsense here")
    courier.start()
    courier.look_now(DEADLINE_S)
    store.set(controller_key(7), "host:8000 12")
    until(lambda: courier.connected)
    assert courier.first_step is None and courier.skipped == ""


def test_a_later_word_of_the_first_step_changes_nothing(store: TCPStore, courier: ControllerClient) -> None:
    store.set(progress_key(7), "9 /runs/iter_0000008")
    courier.start()
    until(lambda: courier.first_step == 9)
    store.set(progress_key(7), "11")
    courier.look_now(DEADLINE_S)
    assert (courier.first_step, courier.skipped) == (9, "/runs/iter_0000008")


def test_a_garbled_entry_is_not_used(
    store: TCPStore, switchboard: Switchboard, courier: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log; a good one that follows is taken."""
    store.set(controller_key(7), "nonsense")
    courier.start()
    until(lambda: "wanted `host:port pid`" in caplog.text)
    store.set(controller_key(7), "host:8000 12")
    until(lambda: courier.connected)


class Cable:
    """Carries connections to a store, until they are reset or the cable is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()  # guards _ends
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                with self._lock:
                    self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                sink.sendall(received)
        self._end(source, sink)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Break all connections that there are."""
        with self._lock:
            self._end(*self._ends)

    def cut(self) -> None:
        """Break all, and take none any more."""
        self._end(self._server)
        self._server.close()
        self.reset()

    def close(self) -> None:
        self.cut()
        with self._lock:
            for end in self._ends:
                end.close()


@pytest.fixture
def cable(store: TCPStore) -> Iterator[Cable]:
    made = Cable(store.port)
    yield made
    made.close()


@pytest.fixture
def far(cable: Cable, switchboard: Switchboard) -> Iterator[ControllerClient]:
    """Return a courier on a node that reaches the store by the cable."""
    made = ControllerClient(JobStore("127.0.0.1", cable.port, 7), {1: 71}, switchboard, search_s=0.01, recheck_s=0.01)
    yield made
    made.close()


def test_a_controller_that_is_published_after_a_reset_connection_is_found(
    store: TCPStore, cable: Cable, switchboard: Switchboard, far: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was found before stays, and its link as well."""
    far.start()
    until(lambda: far.unanswered == "")
    cable.reset()
    until(lambda: "connecting anew" in caplog.text)
    store.set(controller_key(7), "host:8000 12")
    until(lambda: far.connected)
    far.look_now(DEADLINE_S)  # the look that found it has ended: what went wrong before is over
    cable.reset()
    until(lambda: caplog.text.count("connecting anew") == 2)
    store.set(controller_key(7), "other:8001 13")
    until(lambda: far.entry == ControllerEntry("other:8001", 13) and far.connected)
    assert switchboard.attempts == 2


def test_what_the_ranks_have_told_is_not_known_while_the_store_does_not_answer(
    store: TCPStore, cable: Cable, far: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first answer, and when the launcher that has the store has ended; then it is not asked for ever."""
    assert far.unanswered == f"the workers' store at 127.0.0.1:{cable.port} does not answer"
    far.start()
    until(lambda: far.unanswered == "")
    cable.cut()
    until(lambda: "a new controller would not be found" in caplog.text)
    assert "does not answer (" in far.unanswered
    begun_s = time.monotonic()
    far.look_now(600.0)
    assert time.monotonic() - begun_s < DEADLINE_S
    store.set(controller_key(7), "host:8000 12")
    assert not far.connected


def looking(courier: ControllerClient) -> threading.Thread:
    """Ask for a look, with more time than the test has."""
    thread = threading.Thread(target=courier.look_now, args=(600.0,), daemon=True)
    thread.start()
    return thread


def test_a_look_that_is_asked_for_does_not_wait_for_the_next_one(store: TCPStore, switchboard: Switchboard) -> None:
    """At a fault it matters what the ranks told a moment ago; and nobody waits once it is known."""
    courier = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=600.0, recheck_s=600.0)
    courier.start()
    until(lambda: courier.unanswered == "")
    store.set(controller_key(7), "host:8000 12")
    look = looking(courier)
    look.join(DEADLINE_S)
    assert not look.is_alive() and courier.connected
    assert not courier._wake.is_set(), "it would look again and again, without a pause"
    courier.close()


def test_a_look_has_ended_only_when_what_it_found_is_taken_in(store: TCPStore) -> None:
    """Who asked for it goes by what is known then."""
    ended: list[bool] = []

    def open_link(address: str, pids: Mapping[int, int]) -> FakeLink:
        ended.append(made._done == made._begun)
        return FakeLink()

    made = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, open_link, search_s=600.0)
    store.set(controller_key(7), "host:8000 12")
    made.start()
    until(lambda: made.connected)
    made.close()
    assert ended == [False]


def test_who_waits_for_a_look_goes_on_when_the_store_is_lost_for_good(switchboard: Switchboard) -> None:
    """A fault's time runs meanwhile."""
    asked, go_on = threading.Event(), threading.Event()

    class LostStore:
        def check(self, keys: Sequence[str]) -> bool:
            asked.set()
            assert go_on.wait(DEADLINE_S)
            raise ConnectionRefusedError("refused")

    courier = ControllerClient(JobStore("127.0.0.1", 1, 7), {}, switchboard)
    inner: Any = courier
    inner._connect = LostStore
    courier.start()
    assert asked.wait(DEADLINE_S)
    look = looking(courier)
    until(courier._wake.is_set)
    go_on.set()
    look.join(DEADLINE_S)
    assert not look.is_alive() and "does not answer (refused)" in courier.unanswered
    courier.close(DEADLINE_S)  # its thread logs that afterwards


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port at which nobody listens, and that nobody else is given."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_store_that_never_answered_is_not_given_up(
    port: int, switchboard: Switchboard, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 0's launcher may open it later. The search ends with the attempt all the same."""
    courier = ControllerClient(JobStore("127.0.0.1", port, 7), {}, switchboard, search_s=0.01, recheck_s=0.01)
    courier.start()
    until(lambda: "connecting anew" in caplog.text)
    courier.look_now(0.05)
    assert not courier._gone and "a new controller would not be found" not in caplog.text
    courier.close()
    for thread in courier._threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread.name


def test_an_answer_of_long_ago_says_nothing_of_now(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    courier = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, Switchboard(), search_s=600.0)
    courier.start()
    until(lambda: courier.unanswered == "")
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + NEWS_S)
    monkeypatch.setattr(courier_module, "time", late)
    assert "does not answer" in courier.unanswered
    courier.close()


def test_the_ranks_processes_are_told_once_when_all_have_said_them(store: TCPStore, switchboard: Switchboard) -> None:
    """Nothing more is asked then; another start's are not taken for them."""
    told: list[Mapping[int, str]] = []
    place = JobStore("127.0.0.1", store.port, 7)
    courier = ControllerClient(place, {4: 70, 5: 71}, switchboard, processes_known=told.append, search_s=0.005)
    store.set(process_key(6, 4), "1 1")
    store.set(process_key(7, 5), "1071 8")
    courier.start()
    courier.look_now(DEADLINE_S)
    assert told == []
    store.set(process_key(7, 4), "1070 8")
    until(lambda: told != [])
    courier.look_now(DEADLINE_S)
    courier.close()
    assert told == [{4: "1070 8", 5: "1071 8"}]
