"""A rank's side of its copies, with the test as its keeper."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.high_descriptors import high_socket
from tests.unit.copies.material import described
from ttp.copies import copy_memory
from ttp.copies.copy_memory import CopyMemory
from ttp.copies.region import Region, data_bytes, region_bytes
from ttp.errors import ConfigError
from ttp.fork_server import frames
from ttp.identity.own import socket_name

DESCRIPTION = described(1)
SIZE = region_bytes(DESCRIPTION.slots)


@contextmanager
def keeper(serve: Callable[[socket.socket], None], ranks: int = 1) -> Iterator[str]:
    """Serve so many connections, one behind the other."""
    address = f"@ttp-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_name(address))
        listener.listen()

        def accept() -> None:
            for _ in range(ranks):
                channel, _ = listener.accept()
                with channel:
                    serve(channel)

        serving = threading.Thread(target=accept)
        serving.start()
        try:
            yield address
        finally:
            serving.join()


def test_memory_is_asked_for_with_its_size_and_described_before_the_keeper_uses_it() -> None:
    seen: list[Any] = []
    memory = os.memfd_create("test")
    os.ftruncate(memory, SIZE)

    def serve(channel: socket.socket) -> None:
        seen.append(frames.receive(channel)[0])
        frames.send(channel, {}, [memory])
        seen.append(frames.receive(channel)[0])
        region = Region(memoryview(mmap.mmap(memory, SIZE)))
        seen.append(region.load() and region.description)
        frames.send(channel, {"safe": 1})
        seen.append(frames.receive(channel)[0])

    with keeper(serve) as address:
        rank = CopyMemory(address, DESCRIPTION)
        assert rank.next_message(None) == {"safe": 1}
        assert rank.next_message(0.0) is None
        rank.say({"do": "copied"})
        rank.close()
    asked = {"rank": 0, "use": "copies", "nbytes": SIZE, "written": data_bytes(DESCRIPTION.slots)}
    assert seen == [asked, {"do": "described"}, DESCRIPTION, {"do": "copied"}]
    os.close(memory)


def test_a_node_without_room_is_a_configuration_error_that_says_what_to_do() -> None:
    def serve(channel: socket.socket) -> None:
        frames.receive(channel)
        frames.send(channel, {"error": "9 GiB, expected at most 1 GiB"})
        assert channel.recv(1) == b"", "the connection is given up"

    with keeper(serve) as address, pytest.raises(ConfigError) as refused:
        CopyMemory(address, DESCRIPTION)
    assert str(refused.value) == (
        "copies in memory: got 9 GiB, expected at most 1 GiB. Give the node more memory, shard the state over more ranks, or do without copies"
    )


def test_an_agent_that_is_not_there_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="refused"):
        CopyMemory("@ttp-test-unused", DESCRIPTION)


def test_after_a_lost_keeper_the_next_copy_asks_for_the_memory_anew() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, SIZE)
    served = 0

    def serve(channel: socket.socket) -> None:
        nonlocal served
        served += 1
        frames.receive(channel)
        frames.send(channel, {}, [memory])
        frames.receive(channel)

    with keeper(serve, ranks=2) as address:
        rank = CopyMemory(address, DESCRIPTION)
        with pytest.raises(OSError, match="the copy keeper was lost"):
            rank.next_message(None)
        took_s = rank.take(1, 5, 1, b"{}", [torch.ones(4), torch.ones(2)])
        rank.close()
    assert took_s > 0
    assert served == 2
    os.close(memory)


def test_a_keeper_that_is_lost_during_a_message_gets_no_other() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, SIZE)

    def serve(channel: socket.socket) -> None:
        frames.receive(channel)
        frames.send(channel, {}, [memory])
        frames.receive(channel)

    with keeper(serve) as address:
        rank = CopyMemory(address, DESCRIPTION)
    with pytest.raises(OSError, match="the copy keeper was lost"):
        rank.say({"do": "copied"})
    with pytest.raises(OSError, match="there is no copy keeper"):
        rank.say({"do": "copied"})
    os.close(memory)


def test_a_rank_with_many_open_files_gets_its_keepers_answers() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, SIZE)
    asked = threading.Event()

    def serve(channel: socket.socket) -> None:
        frames.receive(channel)
        frames.send(channel, {}, [memory])
        frames.receive(channel)
        asked.wait()
        frames.send(channel, {"safe": 1})

    with keeper(serve) as address:
        rank = CopyMemory(address, DESCRIPTION)
        assert rank._channel is not None
        rank._channel = high_socket(rank._channel)
        try:
            assert rank.next_message(0.0) is None
        finally:
            asked.set()
        assert rank.next_message(None) == {"safe": 1}
        rank.close()
    os.close(memory)


def test_a_rank_is_ended_before_its_agent_when_memory_runs_out() -> None:
    """From no score of its own, and from one that is nearly the highest."""
    code = """
from pathlib import Path
from ttp.copies.copy_memory import be_ended_first
score = Path("/proc/self/oom_score_adj")
for before in (0, 900):
    score.write_text(str(before))
    be_ended_first()
    print(score.read_text(), end="")
"""
    scores = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert scores == [str(copy_memory.OOM_SCORE), "1000"]
