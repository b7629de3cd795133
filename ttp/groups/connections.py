"""The TCP connections of process groups, so that a thread comes out of a collective whose other members are gone.

gloo reports a lost member to its neighbours only, and to none while the member is merely stopped; nothing in torch ends an operation that waits.
Shutting a connection down does, on both of its ends, unless a message is half way on it: see `ttp.groups.polled_wait`. Connections are known by inode, never by descriptor: numbers of descriptors are used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import termios
from array import array
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ttp.groups.device_backends import all_groups

_DESCRIPTORS = "/proc/self/fd"
_SOCKET = "socket:["
_EVENT_LOOP = "anon_inode:[eventpoll]"
_TASKS = "/proc/self/task"
_GLOO_RUNS = "pt_gloo_runloo"
"""What the kernel keeps of the name of a thread that carries operations out: 15 characters."""
_GLOO_LOOP = "gloo_tcp_loop"
"""The name of a thread that reads and writes all connections of a group."""
_A_MOMENT = timedelta(milliseconds=1)
_TURN_TICKS = 3
"""CPU time of a loop, in ticks of 10 ms, within which it looks at each of its connections many times."""


class Connections:
    """Those that were opened while `opening` ran, in this process."""

    def __init__(self) -> None:
        self._inodes: frozenset[int] = frozenset()
        self._since: tuple[dict[int, int], dict[str, int]] = {}, {}
        """The bytes that wait on each open connection as they were last seen to change, and the CPU time of each loop then."""

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Remember the connections that are opened in this block, in place of those before: those that an event loop looks at, as gloo's does. A
        control stream that another thread opens in this moment is among them, and breaks with them."""
        before = frozenset(_sockets())
        try:
            yield
        finally:
            polled = _polled()
            opened = {
                inode: descriptor
                for inode, descriptor in _sockets().items()
                if inode not in before and descriptor in polled
            }
            self._inodes = frozenset(inode for inode, descriptor in opened.items() if _connected(descriptor, inode))

    def shut_down(self) -> int:
        """Shut all of them down, in both directions, and return how many are not closed. Safe from any thread, and more than once."""
        count = 0
        for inode, descriptor in _sockets().items():
            if inode in self._inodes:
                count += 1
                _connected(descriptor, inode, shut=True)
        return count

    def without_memory(self) -> bool:
        """Say whether the messages that still come over open connections, after `shut_down`, can be written to no memory: gloo takes no byte more of one
        whose memory is gone, and leaves its connection open (pair.cc: prepareRead). True once no byte was taken while a loop has spun for
        `_TURN_TICKS`, and every other one has, too, or sleeps: one that could read would have. Call it repeatedly; the first call returns False."""
        waiting = {inode: _unread(descriptor) for inode, descriptor in _sockets().items() if inode in self._inodes}
        loops = _threads(_GLOO_LOOP)
        before, since = self._since
        if waiting != before:
            self._since = waiting, {task: ticks for task, (_, ticks) in loops.items()}
            return False
        turned = {task for task, (_, ticks) in loops.items() if ticks - since.get(task, ticks) >= _TURN_TICKS}
        return bool(turned) and all(task in turned or not running for task, (running, _) in loops.items())


def end_waits() -> None:
    """End what waits for a message over a connection that gloo reads no more: the memory of another message on it was given back, so that gloo never
    learns that it was shut down (pair.cc: prepareRead). A receive that does not come in time closes every connection of its group (unbound_buffer.cc:
    waitRecv), and what waits there raises."""
    for group in all_groups():
        for peer in range(group.size()):
            if peer != group.rank():
                with contextlib.suppress(RuntimeError, ValueError):  # a connection that is closed; a group of devices
                    work = dist.irecv(torch.zeros(1), group=group, group_src=peer)
                    assert work is not None  # this rank is a member
                    work.wait(_A_MOMENT)


def computing() -> bool:
    """Say whether a thread of gloo's runs now. One that sleeps waits for a message, and no message comes over a closed connection."""
    return any(running for running, _ in _threads(_GLOO_RUNS).values())


def _threads(named: str) -> dict[str, tuple[bool, int]]:
    """Return this process's threads whose names begin so: whether each runs now, and its CPU time in ticks."""
    found = {}
    for task in os.listdir(_TASKS):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"{_TASKS}/{task}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name.startswith(named):
                fields = rest.split()
                found[task] = fields[0] in "RD", int(fields[11]) + int(fields[12])
    return found


def _unread(descriptor: int) -> int:
    """Return how many bytes wait on a socket; -1: it is closed."""
    count = array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return -1
    return count[0]


def _sockets() -> dict[int, int]:
    """Return this process's sockets: descriptors by inode."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind = os.readlink(f"{_DESCRIPTORS}/{name}")
            if kind.startswith(_SOCKET):
                found[int(kind[len(_SOCKET) : -1])] = int(name)
    return found


def _polled() -> set[int]:
    """Return the descriptors that this process's event loops look at."""
    found: set[int] = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_DESCRIPTORS}/{name}") == _EVENT_LOOP:
                with open(f"{_DESCRIPTORS}info/{name}", encoding="ascii") as file:
                    found.update(int(line.split()[1]) for line in file if line.startswith("tfd:"))
    return found


def _connected(descriptor: int, inode: int, shut: bool = False) -> bool:
    """Say whether it is a connection, and shut it down if asked, through a descriptor of its own: the number may be another socket's by now. A socket
    that listens is left alone: gloo ends the process when its own stops to."""
    try:
        own = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with own, contextlib.suppress(OSError):
        if os.fstat(own.fileno()).st_ino == inode and own.family in (socket.AF_INET, socket.AF_INET6):
            own.getpeername()
            if shut:
                own.shutdown(socket.SHUT_RDWR)
            return True
    return False
