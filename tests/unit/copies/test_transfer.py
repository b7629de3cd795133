"""A copy's way to the next node's keeper: whole or not at all, whatever happens on the way, and only from a keeper of this attempt."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import threading
from typing import Any

import pytest
import torch

from tests.unit.copies.conftest import credentials, keeper
from tests.unit.copies.material import bits, described, empty_region, region_of
from tests.waiting import replace_sleep, until
from ttp.copies import transfer
from ttp.copies.keeper import Keeper, checksum_of
from ttp.copies.memory import own, received
from ttp.copies.region import Region, data_bytes, region_bytes
from ttp.errors import CheckpointError
from ttp.identity.credentials import Credentials
from ttp.identity.role import Role

STATE = b'{"state": 7}'


def taken(step: int = 5, sequence: int = 3, region: Region | None = None) -> Region:
    """Return a region of rank 0 whose slot 1 has a copy."""
    region = region or region_of(attempt=1)
    region.write(1, step, sequence, STATE, [torch.full((4,), float(step)), torch.ones(2)])
    return region


def of_rank(of: Keeper, attempt: int = 1) -> Region:
    """Return the memory of rank 0 of a keeper's node, with a copy in slot 1."""
    description = described(attempt)
    region, descriptor = of._open(own(0), region_bytes(description.slots), data_bytes(description.slots))
    os.close(descriptor)
    region.describe(description)
    return taken(region=region)


def secure(of: Keeper, region: Region) -> str:
    """Have the copy in slot 1 sent to the next node."""
    peer: list[socket.socket] = []
    try:
        return of._secure(own(0), region, ORDER, peer)
    finally:
        for each in peer:
            each.close()


ORDER = {"slot": 1, "step": 5, "sequence": 3, "send": True, "within_s": 0.0}


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
def test_a_copy_is_in_the_next_nodes_memory_when_it_is_reported_as_safe(secured: bool) -> None:
    with keeper(secured) as (sender, _), keeper(secured) as (receiver, address):
        sender._set_peer({"address": address})
        region, peer = of_rank(sender), list[socket.socket]()
        assert sender._secure(own(0), region, ORDER, peer) == ""
        region.write(0, 6, 4, STATE, [torch.zeros(4), torch.zeros(2)])
        assert sender._secure(own(0), region, {**ORDER, "slot": 0, "step": 6, "sequence": 4}, peer) == ""
        found = receiver._regions[received(0)]
        assert found.description == region.description
        assert [(copy.step, copy.slot, copy.sequence) for copy in found.copies()] == [(6, 0, 4), (5, 1, 3)]
        assert bits(found.held(1, ["a"])[0].values) == bits(torch.full((4,), 5.0))
        assert checksum_of(found, 1) == checksum_of(region, 1)
        # its sender has the answer just before the receiver has noted the checksum
        until(lambda: receiver._sums.get((received(0), 1)) == (3, checksum_of(found, 1)))
        assert isinstance(peer[0], ssl.SSLSocket) is secured
        peer[0].close()


@pytest.mark.parametrize("role", [Role.RANK, Role.CONTROLLER, Role.OPERATOR])
def test_a_process_of_another_role_gives_no_copy(role: Role) -> None:
    refused(connected=lambda address: secured_as(address, credentials(role=role)))


def test_a_keeper_of_another_attempt_gives_no_copy() -> None:
    refused(connected=lambda address: secured_as(address, credentials("job/2")))


def test_a_client_without_a_certificate_gives_no_copy() -> None:
    refused(connected=lambda address: transfer.connect(address, None))


def secured_as(address: str, encoded: dict[str, Any]) -> socket.socket:
    security = transfer.context(Credentials.decode(encoded), server=False)
    security.load_verify_locations(cadata=credentials()["authority"])  # the attacker believes the keeper
    return transfer.connect(address, security)


def refused(connected: Any) -> None:
    with keeper(secured=True) as (receiver, address):
        with pytest.raises((OSError, EOFError)), connected(address) as channel:
            transfer.send(channel, taken(), 1, 3, 0.0, described=False)
        assert receiver._regions == {}


@pytest.mark.parametrize("role", [Role.RANK, Role.CONTROLLER])
def test_a_copy_is_not_given_to_another_process_than_a_keeper(role: Role) -> None:
    server = transfer.context(Credentials.decode(credentials(role=role)), server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, keeper(secured=True) as (sender, _):

        def serve() -> None:
            channel, _ = listener.accept()
            try:
                server.wrap_socket(channel, server_side=True).close()
            except OSError:
                channel.close()

        serving = threading.Thread(target=serve)
        serving.start()
        sender._set_peer({"address": f"127.0.0.1:{listener.getsockname()[1]}"})
        region = of_rank(sender)
        answer = secure(sender, region)
        serving.join()
        assert answer.startswith("the next node has not got it: [SSL: CERTIFICATE_VERIFY_FAILED]")


def test_a_peer_is_a_keeper_of_this_attempt_or_refused() -> None:
    for name, message in (("job/1", ""), ("job/2", "expected a keeper of job/2")):
        with keeper(secured=True) as (_, address):
            security = transfer.context(Credentials.decode(credentials()), server=False)
            with transfer.connect(address, security) as channel:
                if message:
                    with pytest.raises(OSError, match=message):
                        transfer.check_keeper(channel, name)
                else:
                    transfer.check_keeper(channel, name)


def test_a_copy_of_another_attempt_is_refused() -> None:
    with keeper() as (sender, _), keeper(attempt=2) as (receiver, address):
        sender._set_peer({"address": address})
        region = of_rank(sender)
        answer = secure(sender, region)
        assert answer == "the next node has not got it: got a copy of attempt 1, expected one of 2"
        assert sender._sums[own(0), 1] == (3, checksum_of(region, 1)), "what the rank has is noted all the same"
        assert receiver._regions == {}


def test_after_a_failure_the_next_copy_connects_anew_and_brings_the_description() -> None:
    with keeper() as (sender, _), keeper() as (receiver, address):
        sender._set_peer({"address": address})
        region, peer = of_rank(sender), list[socket.socket]()
        assert sender._secure(own(0), region, ORDER, peer) == ""
        peer[0].shutdown(socket.SHUT_RDWR)
        assert sender._secure(own(0), region, ORDER, peer) != ""
        assert peer == []
        receiver._begin({"attempt": 2, "job_id": "job/2", "host": "127.0.0.1", "port": 0, "credentials": None})
        region.describe(described(2))
        taken(region=region)
        with (
            transfer.connect(address, None) as channel,
            pytest.raises(OSError, match="without its description"),
        ):
            transfer.send(channel, region, 1, 3, 0.0, described=True)
        assert secure(sender, region) == ""


def test_a_copy_is_spread_over_the_time_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    replace_sleep(monkeypatch, slept.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            transfer._say(theirs, {})
        transfer.send(ours, taken(), 1, 3, 1000.0, True)
    assert 900 < sum(slept) <= 1000


def test_a_next_node_that_cannot_be_reached_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken_port:
        port = taken_port.getsockname()[1]
    with keeper() as (sender, _):
        sender._set_peer({"address": f"127.0.0.1:{port}"})
        answer = secure(sender, of_rank(sender))
        assert answer == "the next node has not got it: [Errno 111] Connection refused"


# --- the form on the wire ---


def stream(region: Region, described_before: bool = False) -> bytes:
    """Return all that a sender sends of slot 1."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):  # the answers
            transfer._say(theirs, {})
        transfer.send(ours, region, 1, 3, 0.0, described_before)
        ours.shutdown(socket.SHUT_WR)
        content = b""
        while part := theirs.recv(1 << 20):
            content += part
        return content


def receive(content: bytes, into: Region) -> Any:
    """Give a receiver these bytes, and then the end of the connection."""
    ours, theirs = socket.socketpair()

    def room(header: dict[str, Any], description: bytes) -> Region:
        if description:
            into.describe(type(described(1)).decode(description))
        return into

    with ours, theirs:
        ours.sendall(content)
        ours.shutdown(socket.SHUT_WR)
        return transfer.receive(theirs, room)


def test_a_connection_that_is_cut_behind_any_byte_leaves_no_copy_but_the_one_before() -> None:
    content, receiver = stream(taken(), described_before=True), region_of(attempt=1)
    assert len(content) > 4096
    for size in range(len(content)):
        taken(step=3, sequence=1, region=receiver)
        with contextlib.suppress(EOFError):
            assert receive(content[:size], receiver) is None, "the connection was closed between two copies"
        found = receiver.read(1)
        assert found is None or found.step == 3
        if found is not None:
            assert bits(receiver.held(1, ["a"])[0].values) == bits(torch.full((4,), 3.0)), size
    receive(content, receiver)
    assert receiver.copies()[0].step == 5


def test_bytes_that_were_changed_on_the_way_are_refused_wherever_they_are() -> None:
    content = stream(taken())
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        receiver = empty_region(described(1))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError, CheckpointError):
            receive(bytes(changed), receiver)
        assert receiver.copies() == [], f"byte {place} of {len(content)}"


def test_a_slot_that_was_written_anew_meanwhile_is_not_taken() -> None:
    region, receiver = taken(), region_of(attempt=1)
    ours, theirs = socket.socketpair()
    ended: list[Any] = []
    with ours, theirs:
        thread = threading.Thread(target=lambda: ended.append(transfer.receive(theirs, lambda *_: receiver)))
        thread.start()
        read, calls = region.read, 0

        def overwritten(slot: int) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                taken(step=7, sequence=5, region=region)
            return read(slot)

        region.read = overwritten  # type: ignore[method-assign]
        checksum, whole = transfer.send(ours, region, 1, 3, 0.0, True)
        thread.join()
    assert (whole, receiver.copies()) == (False, [])
    assert checksum
    assert ended


def test_a_copy_that_is_gone_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert transfer.send(ours, taken(sequence=4), 1, 3, 0.0, True) == ("", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 2}, r"slot: got 2, expected 0 to 1"),
        ({"state": 1 << 40}, r"copy.state: got \d+, expected an integer from 0 to 16777216"),
        ({"data": -1}, r"copy.data: got -1, expected an integer from 0 to 4096"),
        ({"description": 1 << 40}, r"description: got"),
        ({"attempt": 9}, r"got a copy of attempt 9, expected one of 1"),
        ({"rank": 5}, r"got a copy of rank 5 of another node without its description"),
    ],
)
def test_a_copy_that_cannot_be_is_refused_in_one_line(change: dict[str, int], message: str) -> None:
    with keeper() as (sender, _), keeper() as (_, address):
        sender._set_peer({"address": address})
        peer: list[socket.socket] = []
        assert sender._secure(own(0), of_rank(sender), ORDER, peer) == ""
        header = {"rank": 0, "attempt": 1, "slot": 1, "step": 6, "sequence": 4, "state": 0, "data": 0, "description": 0}
        transfer._say(peer[0], header | change)
        assert re.search(message, transfer._next_message(peer[0])["error"])
        peer[0].close()


def test_a_header_of_another_type_is_refused() -> None:
    with keeper() as (_, address), transfer.connect(address, None) as channel:
        channel.sendall(transfer._LENGTH.pack(2) + b"[]")
        assert transfer._next_message(channel) == {"error": "message: got [], expected a mapping of strings to values"}


def test_a_message_too_long_is_refused_before_it_is_read() -> None:
    with keeper() as (_, address), transfer.connect(address, None) as channel:
        channel.sendall(transfer._LENGTH.pack(1 << 60))
        assert "expected at most" in transfer._next_message(channel)["error"]


def test_a_description_that_is_none_is_refused_and_the_keeper_goes_on() -> None:
    with keeper() as (sender, _), keeper() as (_, address):
        with transfer.connect(address, None) as channel:
            header = {"rank": 0, "attempt": 1, "slot": 0, "description": 2}
            transfer._say(channel, header)
            channel.sendall(b"{}")
            assert transfer._next_message(channel) == {"error": "rank: is missing, expected a value"}
        sender._set_peer({"address": address})
        assert secure(sender, of_rank(sender)) == ""
