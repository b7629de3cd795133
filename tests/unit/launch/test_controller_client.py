"""Finding the controller in the workers' store, and log_while_waiting it of deaths."""

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

from tests.unit.launch.controller_clients import DEADLINE_S, FakeLink, Switchboard, death
from tests.waiting import until
from ttp.exchange.discovery import controller_key, log_dir_key, process_key
from ttp.exchange.first_step import FirstStep, progress_key
from ttp.launch.links import controller_client
from ttp.launch.links.controller_client import NEWS_S, ControllerClient, ControllerEntry
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.runtime.standby import enter


def test_the_controller_of_this_round_is_found(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """Another round's entry is not taken for it."""
    store.set(controller_key(6), "old:1 11")
    client.start()
    assert not client.connected and client.entry is None
    store.set(controller_key(7), "host:8000 12")
    until(lambda: client.connected)
    assert client.entry == ControllerEntry("host:8000", 12)
    assert list(switchboard.links) == ["host:8000"]


def test_deaths_before_and_after_the_controller_are_reported_in_order(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """A worker may die before rank 0 has published its controller."""
    client.report(death("exiting"))
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    client.report(death("signal SIGKILL"))
    assert switchboard.links["host:8000"].reported == [(1, 71, "exiting"), (1, 71, "signal SIGKILL")]


def test_a_new_controller_under_the_same_key_receives_all_deaths_and_the_old_link_is_closed(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """A standby that has become active publishes itself in the place of the dead one."""
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    client.report(death("exiting"))
    store.set(controller_key(7), "other:9000 13")
    until(lambda: "other:9000" in switchboard.links and client.connected)  # it is when the deaths were reported
    assert switchboard.links["host:8000"].closed
    assert switchboard.links["other:9000"].reported == [(1, 71, "exiting")]


def test_a_controller_that_was_lost_is_known_but_not_connected(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """The link waits for it or for a standby: meanwhile no controller leads the ranks, and deaths are kept for the next one."""
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    link = switchboard.links["host:8000"]
    link.attached = False
    assert not client.connected and client.entry == ControllerEntry("host:8000", 12)
    client.report(death("signal SIGKILL"))
    assert link.reported == [(1, 71, "signal SIGKILL")], "the link says it again to every later controller"
    link.attached = True
    assert client.connected


def test_the_link_learns_of_the_standbys_of_this_round(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """Also of one that is published later, and of none of another round: it is where the controller is replaced from."""
    enter(store, 6, 1, "old:1")
    enter(store, 7, 1, "one:8001")
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    link = switchboard.links["host:8000"]
    until(lambda: link.standbys == ["one:8001"])
    enter(store, 7, 2, "two:8002")
    until(lambda: link.standbys == ["one:8001", "two:8002"])


def test_an_unreachable_controller_is_known_but_not_connected(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It is still to be ended with the job; reports do not raise into the death watch."""
    switchboard.error = ConnectionError("refused")
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.entry is not None)
    client.report(death("exiting"))
    assert not client.connected


def test_a_controller_published_in_the_last_moment_is_known_at_the_end(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Rank 0 publishes and dies before the next look: the controller must not be left behind."""
    client = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    client.start()
    store.set(controller_key(7), "host:8000 12")
    client.close(DEADLINE_S)
    assert client.entry == ControllerEntry("host:8000", 12)
    assert not client.connected


def test_the_journals_folder_is_watched_until_there_was_enough_to_see(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Rank 0 says where it is before its controller has written anything; without a controller it is known as well."""
    seen: list[Path] = []

    def watch(path: Path) -> bool:
        seen.append(path)
        return len(seen) == 3

    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {}, switchboard, watch_log_dir=watch, search_s=0.005)
    client.start()
    store.set(log_dir_key(6), "/old")
    store.set(log_dir_key(7), "/output/log")
    until(lambda: len(seen) == 3)
    client.close()
    assert seen == [Path("/output/log")] * 3 and client.log_dir == Path("/output/log")


def test_the_first_step_is_known_even_when_it_came_in_the_last_moment(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Of this attempt; a later word of it changes nothing."""
    client = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    client.start()
    store.set(progress_key(6), "3")
    assert client.first_step is None
    store.set(progress_key(7), "9")
    client.close(DEADLINE_S)
    assert client.first_step == 9 and client.skipped == ""


def test_a_skipped_checkpoint_is_read_with_the_first_step(store: TCPStore, switchboard: Switchboard) -> None:
    """The newest one, whatever its path: the piece of an older one that this node cannot read may be met before it."""
    reported = FirstStep(store, 7)
    for name in ("iter_0000004", "iter_0000012_superseded_1", "iter_0000012", "iter_0000010"):
        reported.skip(Path("/my runs") / name)
    reported.tell(9)
    client = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    client.start()
    client.close(DEADLINE_S)
    assert (client.first_step, client.skipped) == (9, "/my runs/iter_0000012")


def test_an_invalid_first_step_is_ignored_and_the_search_continues(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    store.set(progress_key(7), "nonsense here")
    client.start()
    client.look_now(DEADLINE_S)
    store.set(controller_key(7), "host:8000 12")
    until(lambda: client.connected)
    assert client.first_step is None and client.skipped == ""


def test_a_later_word_of_the_first_step_changes_nothing(store: TCPStore, client: ControllerClient) -> None:
    store.set(progress_key(7), "9 /runs/iter_0000008")
    client.start()
    until(lambda: client.first_step == 9)
    store.set(progress_key(7), "11")
    client.look_now(DEADLINE_S)
    assert (client.first_step, client.skipped) == (9, "/runs/iter_0000008")


def test_a_garbled_entry_is_not_used(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log; a good one that follows is taken."""
    store.set(controller_key(7), "nonsense")
    client.start()
    until(lambda: "expected `host:port pid`" in caplog.text)
    store.set(controller_key(7), "host:8000 12")
    until(lambda: client.connected)


class Cable:
    """Carries connections to a store, until they are reset or the cable is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()  # guards _ends
        self._ends: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                with self._lock:
                    self._ends.append(near)
                far = socket.create_connection(("127.0.0.1", self._port))
                with self._lock:
                    self._ends.append(far)
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
        self._accepting.join()  # what came just now is broken as well
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
    """Return a client on a node that reaches the store by the cable."""
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
    until(lambda: "reconnecting" in caplog.text)
    store.set(controller_key(7), "host:8000 12")
    until(lambda: far.connected)
    far.look_now(DEADLINE_S)  # the look that found it has ended: what went wrong before is over
    cable.reset()
    until(lambda: caplog.text.count("reconnecting") == 2)
    store.set(controller_key(7), "other:8001 13")
    until(lambda: far.entry == ControllerEntry("other:8001", 13) and far.connected)
    assert switchboard.attempts == 2


def test_the_ranks_entries_are_unknown_while_the_store_does_not_answer(
    store: TCPStore, cable: Cable, far: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first answer, and when the launcher that has the store has ended; then it is not asked for ever."""
    assert far.unanswered == f"the workers' store at 127.0.0.1:{cable.port} does not answer"
    far.start()
    until(lambda: far.unanswered == "")
    cable.cut()
    until(lambda: "a new controller will not be found" in caplog.text)
    assert "does not answer (" in far.unanswered
    begun_s = time.monotonic()
    far.look_now(600.0)
    assert time.monotonic() - begun_s < DEADLINE_S
    store.set(controller_key(7), "host:8000 12")
    assert not far.connected


def looking(client: ControllerClient) -> threading.Thread:
    """Ask for a look, with more time than the test has."""
    thread = threading.Thread(target=client.look_now, args=(600.0,), daemon=True)
    thread.start()
    return thread


def test_a_look_that_is_asked_for_does_not_wait_for_the_next_one(store: TCPStore, switchboard: Switchboard) -> None:
    """At a fault the ranks' newest entries matter, and the wait ends once they are known."""
    client = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=600.0, recheck_s=600.0)
    client.start()
    until(lambda: client.unanswered == "")
    store.set(controller_key(7), "host:8000 12")
    look = looking(client)
    look.join(DEADLINE_S)
    assert not look.is_alive() and client.connected
    assert not client._wake.is_set(), "it would look again and again, without a pause"
    client.close()


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

    client = ControllerClient(JobStore("127.0.0.1", 1, 7), {}, switchboard)
    inner: Any = client
    inner._connect = LostStore
    client.start()
    assert asked.wait(DEADLINE_S)
    look = looking(client)
    until(client._wake.is_set)
    go_on.set()
    look.join(DEADLINE_S)
    assert not look.is_alive() and "does not answer (refused)" in client.unanswered
    client.close()
    client._threads[0].join(DEADLINE_S)  # it logs that afterwards, and `close` does not wait for a lost store's


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port without a listener that no other process gets."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_store_that_never_answered_is_not_given_up(
    port: int, switchboard: Switchboard, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 0's launcher may open it later. The search ends with the attempt all the same."""
    client = ControllerClient(JobStore("127.0.0.1", port, 7), {}, switchboard, search_s=0.01, recheck_s=0.01)
    client.start()
    until(lambda: "reconnecting" in caplog.text)
    client.look_now(0.05)
    assert not client._gone and "a new controller will not be found" not in caplog.text
    client.close()
    for thread in client._threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread.name


class Joined:
    """Stands in for a client's thread: how long its end is waited for."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def join(self, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)


@pytest.mark.parametrize(
    ("begun", "asked_ago_s", "trouble", "waits"),
    [(4, NEWS_S, "", False), (4, 0.0, "", True), (3, NEWS_S, "", True), (3, 0.0, "no connection", False)],
    ids=["a read hangs", "a read is under way", "all reads were answered", "the last read failed"],
)
def test_the_end_does_not_wait_for_a_store_that_does_not_answer(
    begun: int, asked_ago_s: float, trouble: str, waits: bool, tmp_path: Path, switchboard: Switchboard
) -> None:
    """It is lost with its node. The file is read all the same."""
    client = ControllerClient(JobStore("127.0.0.1", 1, 7), {}, switchboard, attempt_dir=tmp_path)
    inner: Any = client
    inner._threads = store, file = Joined(), Joined()
    inner._begun, inner._done, inner._asked_s, inner._trouble = begun, 3, time.monotonic() - asked_ago_s, trouble
    client.close(2.0)
    assert (store.waited_s, file.waited_s) == ([2.0 if waits else 0.0], [2.0])


def test_an_answer_of_long_ago_says_nothing_of_now(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, Switchboard(), search_s=600.0)
    client.start()
    until(lambda: client.unanswered == "")
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + NEWS_S)
    monkeypatch.setattr(controller_client, "time", late)
    assert "does not answer" in client.unanswered
    client.close()


def test_the_ranks_processes_are_passed_on_once_all_have_published_them(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Nothing more is asked then; another attempt's are not taken for them."""
    reported: list[Mapping[int, str]] = []
    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {4: 70, 5: 71}, switchboard, processes_known=reported.append, search_s=0.005)
    store.set(process_key(6, 4), "1 1")
    store.set(process_key(7, 5), "1071 8")
    client.start()
    client.look_now(DEADLINE_S)
    assert reported == []
    store.set(process_key(7, 4), "1070 8")
    until(lambda: reported != [])
    client.look_now(DEADLINE_S)
    client.close()
    assert reported == [{4: "1070 8", 5: "1071 8"}]
