"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MANY = 10_000


def free_port() -> int:
    """Return a free port that the kernel does not give to a process which asks for any: it is still free when its server is there,
    seconds later."""
    try:
        lowest = int(KERNELS.read_text().split()[0])
    except OSError:
        lowest = 0
    while True:
        port = random.SystemRandom().randrange(lowest - MANY, lowest) if lowest > MANY + 1024 else 0
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
