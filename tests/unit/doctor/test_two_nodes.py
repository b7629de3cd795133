"""`ttp doctor --listen` and `--peer`: round trip, clocks, versions, and what answers in a doctor's place."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ttp.addresses import listen
from ttp.doctor import two_nodes
from ttp.doctor.finding import FAILED, OK, WARNING, Finding


@contextmanager
def listening(serve: Callable[[socket.socket], object], server: socket.socket | None = None) -> Iterator[str]:
    """Serve in a thread until the block ends; yield the address."""
    server = server or socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with suppress(OSError):  # the block has ended
            serve(server)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
        server.close()
        assert not thread.is_alive()


def asked(address: str) -> dict[str, Finding]:
    return {each.name.rpartition(", ")[2]: each for each in two_nodes.ask(address)}


@pytest.mark.parametrize(
    ("ahead_s", "status"), [(0.0, OK), (0.9, OK), (2.0, WARNING), (-2.0, WARNING), (301.0, FAILED)]
)
def test_the_other_nodes_clock_is_compared(ahead_s: float, status: str) -> None:
    named: list[str] = []
    with listening(lambda server: two_nodes.serve(server, named.append, lambda: time.time() + ahead_s)) as address:
        found = asked(address)
        assert asked(address)["versions"].status == OK, "it answers the next one, too"
    assert found["clock"].status == status and found["clock"].figures["offset_s"] == pytest.approx(ahead_s, abs=0.05)
    assert (found["round trip"].status, found["versions"].status) == (OK, OK)
    assert len(named) == 2 and named[0].startswith("127.0.0.1 asked: TTP ")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_peer_of_either_version_is_answered_and_named_by_its_address(host: str) -> None:
    """One that comes by version 4 to a socket for both is named as on a socket for its own."""
    named: list[str] = []
    with listening(lambda server: two_nodes.serve(server, named.append), listen("", 0)) as address:
        found = list(two_nodes.ask(f"[{host}]:{address.rpartition(':')[2]}"))
    assert found[0].status == OK and named[0].startswith(f"{host} asked: TTP ")


@pytest.mark.parametrize(("name", "status"), [("ttp", FAILED), ("torch", WARNING), ("python", WARNING)])
def test_other_versions_are_named(name: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(lambda server: two_nodes.serve(server, lambda line: None)) as address:
        own = two_nodes.own_versions()
        here = threading.get_ident()
        monkeypatch.setattr(
            two_nodes, "own_versions", lambda: own | ({name: "0.0.1"} if threading.get_ident() == here else {})
        )
        found = asked(address)["versions"]
    assert found.status == status and found.found == f"{name} {own[name]} there, 0.0.1 here"


def test_a_slow_network_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_nodes, "SLOW_ROUND_TRIP_S", 0.0)
    with listening(lambda server: two_nodes.serve(server, lambda line: None)) as address:
        assert asked(address)["round trip"].status == WARNING


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"[1]\n",
        b'{"unix_s": "now"}\n',
        b'{"unix_s": 1.0}\n',
        b"",
        b"x" * 10_000,
        b"[" * 4090 + b"\n",
    ],
)
def test_something_else_at_that_address_is_said_in_one_line(answer: bytes) -> None:
    def other(server: socket.socket) -> None:
        while True:
            channel, _ = server.accept()
            with channel:
                channel.recv(100)
                channel.sendall(answer)

    with listening(other) as address:
        (found,) = two_nodes.ask(address)
    assert found.status == FAILED and "does not answer" in found.found and "ttp doctor --listen" in found.do
    assert "\n" not in found.found


def test_a_port_on_which_nothing_listens_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (found,) = two_nodes.ask(f"127.0.0.1:{free.getsockname()[1]}")
    assert found.status == FAILED and "Connection refused" in found.found


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"{}\n",
        b"x" * 10_000,
        b"[" * 4090 + b"\n",
        b'{"ttp": 1, "torch": [], "python": {}}\n',
    ],
)
def test_garbage_neither_gets_an_answer_nor_ends_the_server(garbage: bytes) -> None:
    with listening(lambda server: two_nodes.serve(server, lambda line: None)) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as channel:
            channel.settimeout(10.0)
            with suppress(OSError):  # it is closed before all is read
                channel.sendall(garbage)
                channel.shutdown(socket.SHUT_WR)
                assert channel.recv(100) == b""
        assert asked(address)["versions"].status == OK


def test_only_versions_and_the_time_are_said() -> None:
    with listening(lambda server: two_nodes.serve(server, lambda line: None)) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as channel, channel.makefile("rwb") as lines:
            lines.write(json.dumps(two_nodes.own_versions()).encode() + b"\n")
            lines.flush()
            assert sorted(json.loads(lines.readline())) == ["python", "torch", "ttp", "unix_s"]
