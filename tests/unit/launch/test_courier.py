"""Finding the controller in the workers' store, and telling it of deaths."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.start import silent_store
from tests.waiting import until
from ttp.controller_file import Controllers, write
from ttp.launch.courier import ControllerEntry, Courier
from ttp.launch.deathwatch import Death
from ttp.launch.rendezvous import JobStore
from ttp.meeting import controller_key, log_dir_key, process_key
from ttp.progress import FirstStep, progress_key
from ttp.standby import enter

DEADLINE_S = 20.0


class FakeLink:
    """Remembers what a controller was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, str]] = []
        self.standbys: list[str] = []
        self.closed = False
        self.attached = True
        self.sent_away_monotonic_s: float | None = None

    def given_up(self) -> frozenset[int] | None:
        return frozenset({len(self.told)})

    def worker_exit(self, rank: int, pid: int, text: str) -> None:
        self.told.append((rank, pid, text))

    def add_controllers(self, addresses: Sequence[str]) -> None:
        self.standbys = [*self.standbys, *(address for address in addresses if address not in self.standbys)]

    def close(self) -> None:
        self.closed = True


class Switchboard:
    """Opens fake links; counts them by address."""

    def __init__(self) -> None:
        self.links: dict[str, FakeLink] = {}
        self.opened = threading.Condition()
        self.error: Exception | None = None
        self.attempts = 0

    def __call__(self, address: str, pids: Mapping[int, int]) -> FakeLink:
        with self.opened:
            self.attempts += 1
            self.opened.notify_all()
            if self.error is not None:
                raise self.error
            self.links[address] = FakeLink()
            return self.links[address]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def switchboard() -> Switchboard:
    return Switchboard()


@pytest.fixture
def courier(store: TCPStore, switchboard: Switchboard) -> Iterator[Courier]:
    made = Courier(JobStore("127.0.0.1", store.port, 7), {0: 70, 1: 71}, switchboard, search_s=0.01, recheck_s=0.01)
    yield made
    made.close()


def death(text: str) -> Death:
    return Death(1, 71, 1.0, 1.0, text, None, False)


def test_the_controller_of_this_round_is_found(store: TCPStore, switchboard: Switchboard, courier: Courier) -> None:
    """Another round's entry is not taken for it."""
    store.set(controller_key(6), "old:1 11")
    courier.start()
    assert not courier.connected and courier.entry is None
    store.set(controller_key(7), "host:8000 12")
    until(lambda: courier.connected)
    assert courier.entry == ControllerEntry("host:8000", 12)
    assert list(switchboard.links) == ["host:8000"]


def test_deaths_before_and_after_the_controller_are_told_in_order(
    store: TCPStore, switchboard: Switchboard, courier: Courier
) -> None:
    """A worker may die before rank 0 has published its controller."""
    courier.report(death("exiting"))
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.connected)
    courier.report(death("signal SIGKILL"))
    assert switchboard.links["host:8000"].told == [(1, 71, "exiting"), (1, 71, "signal SIGKILL")]


def test_a_new_controller_under_the_same_key_is_told_all_and_the_old_link_closed(
    store: TCPStore, switchboard: Switchboard, courier: Courier
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
    store: TCPStore, switchboard: Switchboard, courier: Courier
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
    store: TCPStore, switchboard: Switchboard, courier: Courier
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
    store: TCPStore, switchboard: Switchboard, courier: Courier, caplog: pytest.LogCaptureFixture
) -> None:
    """It is still to be ended with the job; reports do not raise into the death watch."""
    switchboard.error = ConnectionError("refused")
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.entry is not None)
    courier.report(death("exiting"))
    assert not courier.connected


def test_whom_the_controller_has_given_up_is_asked_on_the_line(
    store: TCPStore, switchboard: Switchboard, courier: Courier
) -> None:
    """Without a controller nothing is known to be decided."""
    assert courier.given_up() is None
    store.set(controller_key(7), "host:8000 12")
    courier.start()
    until(lambda: courier.connected)
    courier.report(death("exiting"))
    assert courier.given_up() == frozenset({1})


def test_a_controller_published_in_the_last_moment_is_known_at_the_end(
    store: TCPStore, switchboard: Switchboard
) -> None:
    """Rank 0 publishes and dies before the next look: the controller must not be left behind."""
    courier = Courier(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
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
    courier = Courier(place, {}, switchboard, watch_log_dir=watch, search_s=0.005)
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
    courier = Courier(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
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
    courier = Courier(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=60.0)
    courier.start()
    courier.close(DEADLINE_S)
    assert (courier.first_step, courier.skipped) == (9, "/my runs/iter_0000012")


def test_a_garbled_entry_is_not_used(
    store: TCPStore, switchboard: Switchboard, courier: Courier, caplog: pytest.LogCaptureFixture
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
def far(cable: Cable, switchboard: Switchboard) -> Iterator[Courier]:
    """Return a courier on a node that reaches the store by the cable."""
    made = Courier(JobStore("127.0.0.1", cable.port, 7), {1: 71}, switchboard, search_s=0.01, recheck_s=0.01)
    yield made
    made.close()


def test_a_controller_that_is_published_after_a_reset_connection_is_found(
    store: TCPStore, cable: Cable, switchboard: Switchboard, far: Courier, caplog: pytest.LogCaptureFixture
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
    store: TCPStore, cable: Cable, far: Courier, caplog: pytest.LogCaptureFixture
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


def test_a_look_that_is_asked_for_does_not_wait_for_the_next_one(store: TCPStore, switchboard: Switchboard) -> None:
    """At a fault it matters what the ranks told a moment ago."""
    courier = Courier(JobStore("127.0.0.1", store.port, 7), {}, switchboard, search_s=600.0)
    courier.start()
    until(lambda: courier.unanswered == "")
    store.set(controller_key(7), "host:8000 12")
    courier.look_now(DEADLINE_S)
    assert courier.connected
    courier.close()


def test_the_ranks_processes_are_told_once_when_all_have_said_them(store: TCPStore, switchboard: Switchboard) -> None:
    """Nothing more is asked then; another start's are not taken for them."""
    told: list[Mapping[int, str]] = []
    place = JobStore("127.0.0.1", store.port, 7)
    courier = Courier(place, {4: 70, 5: 71}, switchboard, processes_known=told.append, search_s=0.005)
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


# --- the file of this node's ranks ---


KNOWN = Controllers(("host:8000",), 12, "/output/log")


@pytest.fixture
def alone(tmp_path: Path, switchboard: Switchboard) -> Iterator[Courier]:
    """Return a courier whose store takes connections and never answers."""
    with silent_store() as port:
        place = JobStore("127.0.0.1", port, 7)
        made = Courier(place, {1: 71}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
        yield made
    made.close()


def test_a_controller_is_found_and_told_of_deaths_though_the_store_never_answers(
    tmp_path: Path, switchboard: Switchboard, alone: Courier
) -> None:
    """With the place of its journals, and with the standbys that the ranks write down when they know of them."""
    alone.start()
    alone.report(death("exiting"))
    assert not alone.connected and alone.log_dir is None
    write(tmp_path, KNOWN)
    until(lambda: alone.connected)
    assert alone.entry == ControllerEntry("host:8000", 12) and alone.log_dir == Path("/output/log")
    write(tmp_path, Controllers(("host:8000", "one:8001"), 12, "/output/log"))
    link = switchboard.links["host:8000"]
    until(lambda: link.standbys == ["one:8001"])
    assert link.told == [(1, 71, "exiting")] and switchboard.attempts == 1
    assert "does not answer" in alone.unanswered


def test_a_look_that_is_asked_for_reads_the_file_too(tmp_path: Path, switchboard: Switchboard) -> None:
    """At a fault the store may be slow, and what the ranks wrote a moment ago is on this node."""
    with silent_store() as port:
        place = JobStore("127.0.0.1", port, 7)
        courier = Courier(place, {}, switchboard, attempt_dir=tmp_path, search_s=600.0)
        courier.start()
        courier.look_now(0.1)
        assert courier.entry is None
        write(tmp_path, KNOWN)
        courier.look_now(0.1)
        until(lambda: courier.connected, "the controller, long before the next look")
    courier.close()


def test_a_file_that_was_written_in_the_last_moment_is_read_at_the_end(
    tmp_path: Path, switchboard: Switchboard
) -> None:
    """The journals are read after the ranks and the controllers have ended."""
    with silent_store() as port:
        courier = Courier(JobStore("127.0.0.1", port, 7), {}, switchboard, attempt_dir=tmp_path, search_s=600.0)
        courier.start()
        courier.look_now(0.1)
        write(tmp_path, KNOWN)
        courier.close(0.5)
    assert courier.log_dir == Path("/output/log") and courier.entry == ControllerEntry("host:8000", 12)
    assert switchboard.attempts == 0


def test_what_file_and_store_both_have_is_one_controller(
    store: TCPStore, tmp_path: Path, switchboard: Switchboard
) -> None:
    """On another node than rank 0's the file does not know its process."""
    write(tmp_path, Controllers(("host:8000", "one:8001"), 0, "/own/log"))
    place = JobStore("127.0.0.1", store.port, 7)
    courier = Courier(place, {4: 70}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
    courier.start()
    until(lambda: courier.connected)
    store.set(controller_key(7), "host:8000 12")
    store.set(log_dir_key(7), "/rank/0/log")
    enter(store, 7, 1, "one:8001")
    courier.look_now(DEADLINE_S)
    assert courier.entry == ControllerEntry("host:8000", 12) and courier.log_dir == Path("/own/log")
    write(tmp_path, Controllers(("host:8000", "one:8001", "two:8002"), 0, "/own/log"))
    link = switchboard.links["host:8000"]
    until(lambda: link.standbys == ["one:8001", "two:8002"])
    assert switchboard.attempts == 1 and courier.entry == ControllerEntry("host:8000", 12) and not link.closed
    courier.close()


def test_a_refused_file_is_named_once_and_the_store_asked_alone(
    store: TCPStore, tmp_path: Path, switchboard: Switchboard, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is good later is taken."""
    (tmp_path / "controllers.json").write_text('{"addresses": ["nonsense"], "pid": 1, "log_dir": "/l"}')
    place = JobStore("127.0.0.1", store.port, 7)
    courier = Courier(place, {}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
    courier.start()
    courier.look_now(DEADLINE_S)
    courier.look_now(DEADLINE_S)
    (line,) = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert "addresses[0]: got 'nonsense', expected host:port" in line and "\n" not in line
    store.set(controller_key(7), "host:8000 12")
    until(lambda: courier.connected)
    write(tmp_path, KNOWN)
    until(lambda: courier.log_dir == Path("/output/log"))
    courier.close()


def test_a_link_that_is_opened_behind_the_end_is_closed(tmp_path: Path) -> None:
    """A look may be held up until then. The link would try to attach to a controller that is gone, once an attempt."""
    opening, go_on, link = threading.Event(), threading.Event(), FakeLink()

    def slow(address: str, pids: Mapping[int, int]) -> FakeLink:
        opening.set()
        assert go_on.wait(DEADLINE_S)
        return link

    write(tmp_path, KNOWN)
    with silent_store() as port:
        courier = Courier(JobStore("127.0.0.1", port, 7), {}, slow, attempt_dir=tmp_path)
        courier.start()
        assert opening.wait(DEADLINE_S)
        courier.close(0.01)
        go_on.set()
        until(lambda: link.closed)
    assert not courier.connected
