"""What limits this process on its node: memory and processes, by its cgroups and the host.

Owns the reading of /proc and of cgroups of both versions. A container sees its own cgroup only. Takes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
SPARE_PART = 20
"""One part in so many of the node's memory stays free for what grows later."""
_CACHES = ("inactive_file", "active_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class Limit:
    """What a process may take."""

    total: int
    used: int
    source: str

    @property
    def available(self) -> int:
        return max(0, self.total - self.used)

    @property
    def free(self) -> int:
        """Without what stays free for later."""
        return max(0, self.total - self.total // SPARE_PART - self.used)


def memory_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Limit]:
    """Return what limits this process's memory: its cgroup and those above, and the host. Raises OSError, LookupError, ValueError: what the host has
    cannot be read."""
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return [_of_host(proc), *_of_cgroups(proc, cgroups, "memory", *files)]


def process_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Limit]:
    """Return what limits the number of processes and threads beside this one: its cgroup and those above."""
    files = ("pids.max", "pids.current")
    return list(_of_cgroups(proc, cgroups, "pids", files, files))


def _of_cgroups(
    proc: Path, cgroups: Path, controller: str, second: tuple[str, str], first: tuple[str, str]
) -> Iterator[Limit]:
    """second, first: the files of a limit and of what is used, in cgroups of these versions."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _above(cgroups / path.lstrip("/"), cgroups, *second)
            elif controller in controllers.split(","):
                top = cgroups / controller
                yield from _above(top / path.lstrip("/"), top, *first)


def _above(folder: Path, top: Path, limit: str, used: str) -> Iterator[Limit]:
    while True:
        with contextlib.suppress(OSError, ValueError):  # no limit is "max"
            taken = int((folder / used).read_text()) - (_reclaimable(folder) if used.startswith("memory") else 0)
            yield Limit(int((folder / limit).read_text()), max(0, taken), f"{folder / limit}")
        if folder == top or top not in folder.parents:
            return
        folder = folder.parent


def _reclaimable(folder: Path) -> int:
    """Return how much of what a cgroup has taken are caches that the kernel gives back when memory is short, as in the host's MemAvailable."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(fields.get(f"total_{name}", fields.get(name, "0"))) for name in _CACHES)
    return 0


def _of_host(proc: Path) -> Limit:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return Limit(total, total - available, "MemTotal of this host")
