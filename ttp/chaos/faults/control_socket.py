"""The harness's end of the socket on which ranks tell of their steps and take orders (`ttp.chaos.faults.rank_hook`).

Owns the socket and its connections; knows no schedule. One thread: whoever calls `poll` gets what has come.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import socket
from collections.abc import Sequence
from typing import Any

from ttp import files
from ttp.chaos.faults.rank_hook import FaultOrder, order_line

Message = dict[str, Any]
_READ_BYTES = 1 << 16


class Peer:
    """One rank of one attempt."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.facts: Message = {}
        """Its hello: rank, world_size, pid, start, save_dirs."""
        self.lost = False
        self._rest = b""

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])

    def give(self, orders: Sequence[FaultOrder], *, cancel: Sequence[int] = ()) -> None:
        """Send orders, and the ids of earlier ones that are not to happen any more; a rank that has gone does not get them."""
        line = json.dumps({"cancel": list(cancel), "orders": [order_line(order) for order in orders]}) + "\n"
        with contextlib.suppress(OSError):
            self.connection.sendall(line.encode())

    def receive(self) -> list[Message]:
        """Return the whole lines that have come; marks itself lost at the end of them."""
        try:
            content = self.connection.recv(_READ_BYTES)
        except OSError:
            content = b""
        self.lost = not content
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [json.loads(line) for line in lines]


class Control:
    """A listening socket in a folder of its own. Use as a context manager."""

    def __init__(self) -> None:
        self._folder = files.make_temporary("ttp-chaos-")  # a socket's path may have 107 characters
        self.path = self._folder / "ranks"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        files.bind(self._listener, self.path)
        self._listener.listen(1024)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.peers: list[Peer] = []
        """Those that can still say something."""

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *exc: object) -> None:
        for peer in self.peers:
            peer.connection.close()
        self._selector.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def poll(self, timeout_s: float) -> list[tuple[Peer, Message]]:
        """Return what ranks have said; waits at most so long for the first. A peer that is `lost` says no more."""
        received: list[tuple[Peer, Message]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                connection, _ = self._listener.accept()
                peer = Peer(connection)
                self.peers.append(peer)
                self._selector.register(connection, selectors.EVENT_READ, peer)
                continue
            peer = key.data
            for message in peer.receive():
                if message["type"] == "hello":
                    peer.facts = message
                received.append((peer, message))
            if peer.lost:
                self._selector.unregister(peer.connection)
                peer.connection.close()
                self.peers.remove(peer)
        return received
