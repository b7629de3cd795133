"""Finding the controller in the file that this node's ranks write, beside the workers' store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.attempts import silent_store
from tests.unit.launch.controller_clients import DEADLINE_S, FakeLink, Switchboard, death
from tests.waiting import until
from ttp.exchange.controller_file import Controllers, write
from ttp.exchange.discovery import controller_key, log_dir_key
from ttp.launch.links.controller_client import ControllerClient, ControllerEntry
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.runtime.standby import enter

KNOWN = Controllers(("host:8000",), 12, "/output/log")


@pytest.fixture
def alone(tmp_path: Path, switchboard: Switchboard) -> Iterator[ControllerClient]:
    """Return a client whose store accepts connections and never answers."""
    with silent_store() as port:
        place = JobStore("127.0.0.1", port, 7)
        made = ControllerClient(place, {1: 71}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
        yield made
    made.close()


def test_a_controller_is_found_and_receives_deaths_though_the_store_never_answers(
    tmp_path: Path, switchboard: Switchboard, alone: ControllerClient
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
    assert link.reported == [(1, 71, "exiting")] and switchboard.attempts == 1
    assert "does not answer" in alone.unanswered


def test_a_look_that_is_asked_for_reads_the_file_too(tmp_path: Path, switchboard: Switchboard) -> None:
    """At a fault the store may be slow, and what the ranks wrote a moment ago is on this node."""
    with silent_store() as port:
        place = JobStore("127.0.0.1", port, 7)
        client = ControllerClient(place, {}, switchboard, attempt_dir=tmp_path, search_s=600.0)
        client.start()
        client.look_now(0.1)
        assert client.entry is None
        write(tmp_path, KNOWN)
        client.look_now(0.1)
        until(lambda: client.connected, "the controller, long before the next look")
    client.close()


def test_a_file_that_was_written_in_the_last_moment_is_read_at_the_end(
    tmp_path: Path, switchboard: Switchboard
) -> None:
    """The journals are read after the ranks and the controllers have ended."""
    with silent_store() as port:
        client = ControllerClient(JobStore("127.0.0.1", port, 7), {}, switchboard, attempt_dir=tmp_path, search_s=600.0)
        client.start()
        until(lambda: client._file_done == 1, "the first look, which finds nothing")
        write(tmp_path, KNOWN)
        client.close(2.0)
    assert client.log_dir == Path("/output/log") and client.entry == ControllerEntry("host:8000", 12)
    assert switchboard.attempts == 0


def test_what_file_and_store_both_have_is_one_controller(
    store: TCPStore, tmp_path: Path, switchboard: Switchboard
) -> None:
    """On another node than rank 0's the file does not know its process."""
    write(tmp_path, Controllers(("host:8000", "one:8001"), 0, "/own/log"))
    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {4: 70}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
    client.start()
    until(lambda: client.connected)
    store.set(controller_key(7), "host:8000 12")
    store.set(log_dir_key(7), "/rank/0/log")
    enter(store, 7, 1, "one:8001")
    client.look_now(DEADLINE_S)
    assert client.entry == ControllerEntry("host:8000", 12) and client.log_dir == Path("/own/log")
    write(tmp_path, Controllers(("host:8000", "one:8001", "two:8002"), 0, "/own/log"))
    link = switchboard.links["host:8000"]
    until(lambda: link.standbys == ["one:8001", "two:8002"])
    assert switchboard.attempts == 1 and client.entry == ControllerEntry("host:8000", 12) and not link.closed
    client.close()


def test_the_newest_controller_counts_wherever_it_is_named(
    store: TCPStore, tmp_path: Path, switchboard: Switchboard
) -> None:
    """What was read before in the other place is not taken for news again at every look."""
    store.set(controller_key(7), "host:8000 12")
    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
    client.start()
    until(lambda: client.connected)
    write(tmp_path, Controllers(("other:9000",), 13, "/output/log"))
    until(lambda: client.entry == ControllerEntry("other:9000", 13) and client.connected)
    for _ in range(3):
        client.look_now(DEADLINE_S)
    assert client.entry == ControllerEntry("other:9000", 13) and switchboard.attempts == 2
    store.set(controller_key(7), "third:9001 14")
    until(lambda: client.entry == ControllerEntry("third:9001", 14) and client.connected)
    for _ in range(3):
        client.look_now(DEADLINE_S)
    assert client.entry == ControllerEntry("third:9001", 14) and switchboard.attempts == 3
    client.close()


def test_the_own_nodes_place_of_the_journals_counts_wherever_it_is_read_first(store: TCPStore, tmp_path: Path) -> None:
    """Rank 0's may be on another node's disk. The file may be read while the store answers, too."""
    client = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, Switchboard(), attempt_dir=tmp_path)
    store.set(log_dir_key(7), "/rank/0/log")
    client._look_for_log_dir(store)
    assert client.log_dir == Path("/rank/0/log")
    write(tmp_path, Controllers(("host:8000",), 0, "/own/log"))
    client._read(tmp_path, open_link=False)
    assert client.log_dir == Path("/own/log")
    slow = ControllerClient(JobStore("127.0.0.1", store.port, 7), {}, Switchboard(), attempt_dir=tmp_path)

    def get(key: str) -> bytes:
        slow._read(tmp_path, open_link=False)
        return b"/rank/0/log"

    answers: Any = SimpleNamespace(check=lambda keys: True, get=get)
    slow._look_for_log_dir(answers)
    assert slow.log_dir == Path("/own/log")


def test_standbys_that_were_read_before_the_link_was_open_are_added_to_it(
    tmp_path: Path, switchboard: Switchboard, alone: ControllerClient
) -> None:
    write(tmp_path, Controllers(("host:8000", "one:8001"), 12, "/output/log"))
    alone.start()
    until(lambda: alone.connected)
    assert switchboard.links["host:8000"].standbys == ["one:8001"]


def test_a_link_to_a_controller_that_was_replaced_meanwhile_is_closed(store: TCPStore, tmp_path: Path) -> None:
    """It took long to open. The later one stays, and receives the deaths."""
    opening, go_on = threading.Event(), threading.Event()
    links = {"host:8000": FakeLink(), "other:9000": FakeLink()}

    def open_link(address: str, pids: Mapping[int, int]) -> FakeLink:
        if address == "host:8000":
            opening.set()
            assert go_on.wait(DEADLINE_S)
        return links[address]

    write(tmp_path, KNOWN)
    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {1: 71}, open_link, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
    client.start()
    assert opening.wait(DEADLINE_S)
    store.set(controller_key(7), "other:9000 13")
    until(lambda: client.connected)
    go_on.set()
    until(lambda: links["host:8000"].closed)
    client.report(death("exiting"))
    assert client.connected and client.entry == ControllerEntry("other:9000", 13)
    assert links["other:9000"].reported == [(1, 71, "exiting")] and links["host:8000"].reported == []
    client.close()


def test_a_look_that_is_asked_for_waits_for_the_file_too(store: TCPStore, tmp_path: Path) -> None:
    """The store has answered, and what the file holds is not taken in yet."""
    opening, go_on = threading.Event(), threading.Event()
    acts: list[str] = []

    def open_link(address: str, pids: Mapping[int, int]) -> FakeLink:
        opening.set()
        assert go_on.wait(DEADLINE_S)
        acts.append("opened")
        return FakeLink()

    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {}, open_link, attempt_dir=tmp_path, search_s=600.0, recheck_s=0.01)
    client.start()
    until(lambda: client._done == 1 and client._file_done == 1, "the first looks, which find nothing")
    write(tmp_path, KNOWN)

    def look() -> None:
        client.look_now(600.0)
        acts.append("looked")

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    assert opening.wait(DEADLINE_S)
    until(lambda: client._done >= 2, "the store's answer")  # once a controller is known, looks follow soon
    go_on.set()
    looker.join(DEADLINE_S)
    assert acts == ["opened", "looked"]
    client.close()


def test_a_refused_file_is_named_once_and_the_store_asked_alone(
    store: TCPStore, tmp_path: Path, switchboard: Switchboard, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is good later is taken."""
    (tmp_path / "controllers.json").write_text('{"addresses": ["nonsense"], "pid": 1, "log_dir": "/l"}')
    place = JobStore("127.0.0.1", store.port, 7)
    client = ControllerClient(place, {}, switchboard, attempt_dir=tmp_path, search_s=0.01, recheck_s=0.01)
    client.start()
    client.look_now(DEADLINE_S)
    client.look_now(DEADLINE_S)
    (line,) = [record.getMessage() for record in caplog.records if "invalid controllers' file" in record.getMessage()]
    assert "addresses[0]: got 'nonsense', expected host:port" in line and "\n" not in line
    store.set(controller_key(7), "host:8000 12")
    until(lambda: client.connected)
    write(tmp_path, KNOWN)
    until(lambda: client.log_dir == Path("/output/log"))
    client.close()


def test_a_link_that_is_opened_behind_the_end_is_closed(tmp_path: Path) -> None:
    """A look may be held up until then. The link would try to attach to a controller that is gone, once an attempt."""
    opening, go_on, link = threading.Event(), threading.Event(), FakeLink()

    def slow(address: str, pids: Mapping[int, int]) -> FakeLink:
        opening.set()
        assert go_on.wait(DEADLINE_S)
        return link

    write(tmp_path, KNOWN)
    with silent_store() as port:
        client = ControllerClient(JobStore("127.0.0.1", port, 7), {}, slow, attempt_dir=tmp_path)
        client.start()
        assert opening.wait(DEADLINE_S)
        client.close(0.01)
        go_on.set()
        until(lambda: link.closed)
    assert not client.connected
