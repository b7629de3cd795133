"""What comes to a copy keeper, from other nodes' keepers, from ranks and from files: taken, or refused in one line; the keeper goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.test_files import changed, one_line
from tests.unit.copies.conftest import keeper
from tests.unit.copies.material import described, empty_region
from tests.unit.copies.test_transfer import of_rank, secure
from ttp.copies import keeper as keepers
from ttp.copies import transfer
from ttp.copies.checkpoints import publish_copy, read_share
from ttp.copies.keeper import Keeper
from ttp.copies.memory import NoRoom
from ttp.copies.region import Description, Region, region_bytes
from ttp.errors import CheckpointError
from ttp.fork_server import frames
from ttp.proto.messages import Cause, CauseKind, FileEntry, ShareResult

settings.load_profile("fuzz")

STATE = b'{"state": 7}'
LENGTH = struct.Struct("!Q")
FACTS: dict[str, Any] = {
    "layout": {"dp": 2},
    "expected": {"model.x": [4]},
    "param_names": [["x"]],
    "directories": ["/c"],
    "passed_over": {"/c/iter_0000042": 7},
    "sign_key": "",
    "verify_key": "",
}
DESCRIPTION = described(1, 0, FACTS)
HEADER: dict[str, Any] = {
    "rank": 0,
    "attempt": 1,
    "slot": 1,
    "step": 5,
    "sequence": 3,
    "state": len(STATE),
    "data": 80,
    "description": 0,
}
HELD = {"record": None, "state": {"optimizer": {"param_groups": [{"lr": 0.1, "params": []}]}, "trainer": {}}}
OTHER = (b"", b"[" * 100_000, b"1" * 5000, b"\xff\xfe", b"null", b"{}", b"[]", b'"x"')


def spoilt(base: Any, rng: random.Random) -> bytes:
    content = json.dumps(changed(base, rng) if rng.random() < 0.7 else base).encode()
    if rng.random() < 0.15:
        content = rng.choice((*OTHER, rng.randbytes(30), content[: rng.randrange(len(content))]))
    return content


def a_message(content: bytes, rng: random.Random) -> bytes:
    size = rng.choice((0, 1, len(content) + 1, 2**40, 2**64 - 1)) if rng.random() < 0.1 else len(content)
    return LENGTH.pack(size) + content


def a_copy(rng: random.Random) -> bytes:
    """Return all that a keeper sends of one copy, something of it changed."""
    description = DESCRIPTION.encode() if rng.random() < 0.4 else spoilt(json.loads(DESCRIPTION.encode()), rng)
    header = {**HEADER, "description": len(description) if rng.random() < 0.9 else rng.choice((0, 1, 2**63))}
    data = rng.randbytes(80)
    digest = xxhash.xxh3_128(STATE + data).hexdigest()
    checksum = {"checksum": digest, "header": transfer._checksum_of(header, description)}
    parts = [a_message(spoilt(header, rng) if rng.random() < 0.6 else json.dumps(header).encode(), rng), description, STATE, data,
             a_message(spoilt(checksum, rng), rng)]  # fmt: skip
    if rng.random() < 0.2:
        del parts[rng.randrange(len(parts))]
    return b"".join(parts) * rng.choice((1, 1, 2))


@contextlib.contextmanager
def sent(content: bytes) -> Iterator[socket.socket]:
    """Return the end of a connection on which this comes, and then its end."""
    here, there = socket.socketpair()
    here.settimeout(30.0)

    def talk() -> None:
        with there, contextlib.suppress(OSError):
            there.sendall(content)
            there.shutdown(socket.SHUT_WR)
            while there.recv(1 << 16):
                pass

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield here
    finally:
        here.close()
        thread.join()


@given(st.randoms(use_true_random=True))
def test_a_description_is_read_or_refused_in_one_line(rng: random.Random) -> None:
    """No place of one that is read lies outside of its slot."""
    try:
        found = Description.decode(spoilt(json.loads(DESCRIPTION.encode()), rng))
    except ValueError as error:
        one_line(error)
        return
    if sum(place.nbytes for slot in found.slots for place in slot) < 1 << 16:
        region = empty_region(found)
        region.describe(found)
        for slot in range(len(found.slots)):
            region.held(slot, found.groups)
            region.clear(slot)


@pytest.fixture(scope="module")
def taking() -> Iterator[tuple[Keeper, str]]:
    with keeper() as made:
        yield made


@given(rng=st.randoms(use_true_random=True))
def test_a_copy_is_taken_or_refused(taking: tuple[Keeper, str], rng: random.Random) -> None:
    of, _ = taking
    with sent(a_copy(rng)) as channel:
        try:
            while transfer.receive(channel, of._room) is not None:
                pass
        except (OSError, ValueError, EOFError, CheckpointError, NoRoom) as error:
            one_line(error)


@settings(max_examples=10)
@given(rng=st.randoms(use_true_random=True))
def test_a_keeper_takes_copies_after_whatever_came_to_it(rng: random.Random) -> None:
    """From other nodes' keepers and from ranks; no thread of it ends with an exception."""
    failures: list[Any] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        with mock.patch.object(keepers, "PEER_S", 0.05), keeper() as (sender, _), keeper() as (receiver, address):
            for _ in range(5):
                with sent(a_copy(rng)) as channel:
                    receiver._serve_keeper(channel)
                with sent(rank_asks(rng)) as channel:
                    receiver.serve_rank(channel)
            sender._set_peer({"address": address})
            assert secure(sender, of_rank(sender)) == ""
            receiver._offers({})
    finally:
        threading.excepthook = before
    assert not failures, failures


def rank_asks(rng: random.Random) -> bytes:
    """Return what a rank sends: for its memory, then that it has copied, or wants a save."""
    asks = {"rank": 0, "use": "copies", "nbytes": region_bytes(DESCRIPTION.slots), "written": 1 << 12}
    copied = {"do": "copied", "slot": 0, "step": 5, "sequence": 3, "send": False}
    parts = [spoilt(each, rng) for each in (asks, {"do": "described"}, copied)]
    return b"".join(a_message(part, rng) for part in parts[: rng.choice((1, 3, 3))])


@given(st.randoms(use_true_random=True))
def test_a_frame_is_read_or_not_a_message(rng: random.Random) -> None:
    with sent(a_message(spoilt({"kind": "fork", "programs": [{"argv": ["a"]}]}, rng), rng)) as channel:
        try:
            message, descriptors = frames.receive(channel)
        except (OSError, EOFError) as error:
            one_line(error)
        else:
            assert type(message) is dict and not descriptors


@given(st.randoms(use_true_random=True))
def test_a_share_is_read_or_refused_in_one_line(rng: random.Random) -> None:
    share = {"files": [asdict(FileEntry("__0_s_0.distcp", 10, "xxh3_128:00", 0))]}
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        path = Path(folder) / "share_1.json"
        path.write_bytes(spoilt(share if rng.random() < 0.8 else {"error": "no room"}, rng))
        try:
            found = read_share(path)
        except (CheckpointError, OSError) as error:
            one_line(error)
        else:
            assert isinstance(found.get("error", ""), str) and all(
                isinstance(each, FileEntry) for each in found.get("files", ())
            )


def region_with(state: bytes, facts: dict[str, Any]) -> Region:
    description = described(1, 0, facts)
    region = empty_region(description)
    region.describe(description)
    region.state(0)[: len(state)] = state
    region.commit(0, 5, 3, len(state))
    return region


@given(st.randoms(use_true_random=True))
def test_a_copy_is_published_or_refused_whatever_its_host_state_holds(rng: random.Random) -> None:
    """Of no files: it is never published."""
    region = region_with(spoilt(HELD, rng), changed(FACTS, rng) if rng.random() < 0.4 else FACTS)
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        place = {"directory": folder, "tmp_name": "iter_0000005_tmp_copies", "step": 5, "term": 1}
        with pytest.raises(CheckpointError) as refused:
            publish_copy(region, 0, place, Cause(CauseKind.EXITED, (1,), "signal SIGKILL"), (ShareResult(()),))
    assert "\n" not in str(refused.value)


logging.getLogger("ttp.copies").setLevel(logging.ERROR)
