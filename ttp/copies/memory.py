"""Memory for copies that an agent owns: it outlives every other process of the node, and is gone with the agent however that ends.

Anonymous files (memfd) whose pages are counted against the agent's own cgroup. Owns what may be taken of the node's memory: more is refused, with
the figures, before a step is trained. Never maps anything itself.
"""

from __future__ import annotations

import os
import threading

from ttp.copies.node_limits import Limit, memory_limits
from ttp.text.wording import size_text


def own(rank: int) -> str:
    """Return the name of the memory for a rank of this node."""
    return f"rank {rank}"


def received(rank: int) -> str:
    """Return the name of the memory for a rank of another node."""
    return f"rank {rank} of another node"


def of_save(rank: int) -> str:
    """Return the name of the memory for what a rank of this node saves."""
    return f"save of rank {rank}"


class NoRoom(Exception):
    """The node has no memory for it; its text is one line with the figures."""


class Owner:
    """Any thread."""

    def __init__(self, limits: list[Limit] | None = None) -> None:
        """limits: the node's; None: as they are at each request."""
        self._limits = limits
        self._lock = threading.Lock()  # guards the two below
        self._memories: dict[str, tuple[int, int]] = {}
        """Name -> descriptor and size."""
        self._reserved: dict[str, int] = {}

    def obtain(self, name: str, nbytes: int, written: int) -> int:
        """Return a descriptor of memory of this size, for the caller to close: of the memory that has this name already, if it has this size. `written`: how
        much of it will be written; the rest takes no memory. Raises NoRoom, OSError."""
        with self._lock:
            descriptor, size = self._memories.get(name, (-1, 0))
            if size == nbytes:
                return os.dup(descriptor)
            if descriptor >= 0:
                self._drop(name)
            promised = sum(self._reserved.values()) - self._resident()
            limit = min(self._limits or memory_limits(), key=lambda one: one.free)
            if written > limit.free - max(0, promised):
                raise NoRoom(
                    f"{size_text(written)} for {name} beside {size_text(sum(self._reserved.values()))} of other copies, expected at most"
                    f" {size_text(max(0, limit.free - max(0, promised)))} ({limit.source}: {size_text(limit.total)}, used"
                    f" {size_text(limit.used)})"
                )
            descriptor = os.memfd_create(f"ttp-{name}", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, nbytes)
            except (OSError, OverflowError) as error:
                os.close(descriptor)
                raise NoRoom(f"{size_text(nbytes)} for {name}: {error}") from None
            self._memories[name], self._reserved[name] = (descriptor, nbytes), written
            return os.dup(descriptor)

    def all(self) -> dict[str, tuple[int, int]]:
        """Return descriptor and size of each by name."""
        with self._lock:
            return dict(self._memories)

    def drop(self, names: set[str]) -> None:
        """Give these back, if they are there."""
        with self._lock:
            for name in names & set(self._memories):
                self._drop(name)

    def _drop(self, name: str) -> None:
        descriptor, _ = self._memories.pop(name)
        del self._reserved[name]
        os.close(descriptor)

    def _resident(self) -> int:
        """Return how much has been written of all."""
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor, _ in self._memories.values())
