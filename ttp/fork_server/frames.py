"""Messages between the agent and its fork server: JSON with a length before it, and file descriptors beside it, on a Unix socket."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from ttp.inputs import checked

_LENGTH = struct.Struct("!Q")
MOST_DESCRIPTORS = 252
"""One message takes no more (SCM_MAX_FD is 253)."""
MOST_BYTES = 256 << 20
"""Of a message: 64 programs with a megabyte of variables each have a fourth of it. What is longer was not sent by `send`."""


class NotMessage(OSError, ValueError):
    """The other side has sent something else: as if the channel were lost, unless its reader answers."""


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError."""
    body = json.dumps(message).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(body))], list(descriptors))
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message. Raises EOFError when the other side is closed, OSError (TimeoutError when the socket has a timeout; or
    what comes is not a message)."""
    header, descriptors, flags, _ = socket.recv_fds(channel, _LENGTH.size, MOST_DESCRIPTORS)
    try:
        header += _exactly(channel, _LENGTH.size - len(header))
        (size,) = _LENGTH.unpack(header)
        if size > MOST_BYTES:
            raise OSError(f"got a message of {size} bytes, expected at most {MOST_BYTES}")
        message = _read(_exactly(channel, size))
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "no room for the descriptors that came with a message")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors


def readable(channel: socket.socket, timeout_s: float | None) -> bool:
    """Say whether a message, or the end of the other side, comes within `timeout_s`; None: without a limit. Of a descriptor of any number."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000.0 * max(0.0, timeout_s)))


def _read(content: bytes) -> dict[str, Any]:
    try:
        return checked.mapping(json.loads(content), "message")
    except (ValueError, RecursionError) as error:
        raise NotMessage(f"got what is not a message: {' '.join(str(error).split())[:200]}") from None


def _exactly(channel: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = channel.recv(size - len(received))
        if not chunk:
            raise EOFError("the other side has closed the channel")
        received += chunk
    return received
