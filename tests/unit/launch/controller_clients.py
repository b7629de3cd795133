"""What the tests of the controller client share: links that record what they receive, and the switchboard that opens them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from ttp.launch.watch.death_watch import Death
from ttp.proto.messages import CauseKind

DEADLINE_S = 20.0


class FakeLink:
    """Records the deaths that were reported to a controller."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, int, str]] = []
        self.replacements: list[tuple[int, int]] = []
        self.refusals: list[tuple[int, int, str]] = []
        self.standbys: list[str] = []
        self.added: list[tuple[str, ...]] = []
        """What it was called with, each time."""
        self.closed = False
        self.attached = True
        self.leader = ""
        self.lease_s = 0.0
        self.sent_away_monotonic_s: float | None = None
        self.frozen_by: CauseKind | None = None

    def given_up(self) -> frozenset[int] | None:
        return frozenset({len(self.reported)})

    def worker_exit(self, rank: int, pid: int, text: str) -> None:
        self.reported.append((rank, pid, text))

    def replaced(self, rank: int, pid: int) -> None:
        self.replacements.append((rank, pid))

    def replace_failed(self, rank: int, freeze_id: int, error: str) -> None:
        self.refusals.append((rank, freeze_id, error))

    def add_controllers(self, addresses: Sequence[str]) -> None:
        self.added.append(tuple(addresses))
        self.standbys = [*self.standbys, *(address for address in addresses if address not in self.standbys)]

    def close(self) -> None:
        self.closed = True


class Switchboard:
    """Opens fake links; counts them by address."""

    def __init__(self) -> None:
        self.links: dict[str, FakeLink] = {}
        self.opened = threading.Condition()
        self.error: Exception | None = None
        self.attempts = 0

    def __call__(self, address: str, pids: Mapping[int, int]) -> FakeLink:
        with self.opened:
            self.attempts += 1
            self.opened.notify_all()
            if self.error is not None:
                raise self.error
            self.links[address] = FakeLink()
            return self.links[address]


def death(text: str) -> Death:
    return Death(1, 71, 1.0, 1.0, text, None, False)
