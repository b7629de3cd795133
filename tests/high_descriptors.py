"""Descriptors of 1,024 and above, as a process with many open files has them: `select.select` takes none of them."""

from __future__ import annotations

import fcntl
import os
import resource
import socket

LOWEST = 1024


def high(descriptor: int) -> int:
    """Replace a descriptor by one of a high number; the old one is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= 2 * LOWEST:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * LOWEST), hard))
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    os.close(descriptor)
    return found


def high_socket(channel: socket.socket) -> socket.socket:
    """Return the same socket behind a high number, with the same timeout; the one given is used up."""
    timeout_s = channel.gettimeout()
    moved = socket.socket(fileno=high(channel.detach()))
    moved.settimeout(timeout_s)
    return moved
