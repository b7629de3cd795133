"""Ports for servers that a test starts later."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path

KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MANY = 20_000
PROCESSES = 50
"""Processes that ask at the same time and have ports of their own. Until the server listens, nothing shows that its port is given."""

_asked = itertools.count(random.SystemRandom().randrange(MANY))


def free_port() -> int:
    """Return a free port that the kernel does not give to a process which asks for any: it is still free when its server is there,
    seconds later. Neither another call here nor another test process is given the same meanwhile."""
    try:
        lowest = int(KERNELS.read_text().split()[0])
    except OSError:
        lowest = 0
    own = MANY // PROCESSES
    while True:
        first = lowest - MANY + os.getpid() % PROCESSES * own
        port = first + next(_asked) % own if lowest > MANY + 1024 else 0
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
