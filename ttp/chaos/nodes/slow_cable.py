"""A slow cable, for kernels without netem: takes every frame from one device and gives it to another one a while later.

    python slow_cable.py PORT TAP MILLISECONDS

PORT is a node's end at the switch, TAP a device that this process makes and that takes PORT's place in the bridge; both
directions are slow. It says `made` when TAP is there, and begins when a line comes. A program of its own, run in the
switch's namespace: it uses nothing but Python's own library, so that it starts in no time.

Frames carry the kernel's header for unfinished checksums and segments (virtio_net_hdr) on both devices, so that what one end
has left for the hardware to do is done by the other one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_FRAME_BYTES = 1 << 17
"""More than the largest frame: 64 KiB of segments that are still one."""


def make_tap(name: str) -> int:
    """Make a device that lasts as long as the descriptor that is returned."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    return tap


def open_port(name: str) -> socket.socket:
    """Receive all frames that come to a device; what is sent to it goes out."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    port.bind((name, _ETH_P_ALL))
    port.setblocking(False)
    return port


class Way:
    """One direction: frames that wait."""

    def __init__(self, read: Callable[[int], bytes], write: Callable[[bytes], int], delay_s: float) -> None:
        self._read, self._write, self._delay_s = read, write, delay_s
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self, now_s: float) -> None:
        """Take all frames that have come."""
        with contextlib.suppress(OSError):  # there are no more; or the cable is pulled
            while frame := self._read(_FRAME_BYTES):
                self._waiting.append((now_s + self._delay_s, frame))

    def give(self, now_s: float) -> float | None:
        """Give what has waited for long enough; return when the next frame has. What cannot go on is lost, as on any cable."""
        while self._waiting and self._waiting[0][0] <= now_s:
            with contextlib.suppress(OSError):
                self._write(self._waiting.popleft()[1])
        return self._waiting[0][0] if self._waiting else None


def forward(port: socket.socket, tap: int, delay_s: float) -> None:
    """Forward for ever."""
    out = Way(port.recv, lambda frame: os.write(tap, frame), delay_s)
    back = Way(lambda nbytes: os.read(tap, nbytes), port.send, delay_s)
    selector = selectors.DefaultSelector()
    selector.register(port, selectors.EVENT_READ, out)
    selector.register(tap, selectors.EVENT_READ, back)
    while True:
        now_s = time.monotonic()
        due = [moment for way in (out, back) if (moment := way.give(now_s)) is not None]
        for key, _ in selector.select(max(0.0, min(due) - time.monotonic()) if due else None):
            key.data.take(time.monotonic())


def main() -> None:
    port_name, tap_name, milliseconds = sys.argv[1:]
    tap = make_tap(tap_name)
    print("made", flush=True)
    if not sys.stdin.readline():
        return
    forward(open_port(port_name), tap, float(milliseconds) / 1e3)


if __name__ == "__main__":
    main()
