"""The relay of one node, attempt after attempt.

Owns the folder of its socket. A node whose relay cannot be had does without: its ranks connect to controllers themselves.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttp import files
from ttp.heartbeats import is_relayed

if TYPE_CHECKING:
    from ttp.launch.links.relay import Relay

log = logging.getLogger("ttp.launch")


class Relays:
    """The node's relay, attempt after attempt: each has other ranks, and other certificates."""

    def __init__(self, asked: bool | None, lease_of: Callable[[int], float]) -> None:
        """`asked`: TTP_RELAY; None: it is not set. `lease_of(world_size)`: that of a job of so many ranks, in seconds."""
        self._asked, self._lease_of = asked, lease_of
        self._folder: Path | None = None
        self._relay: Relay | None = None
        self._count = 0

    def begin(self, ranks: Sequence[int], world_size: int) -> str:
        """Return what the attempt's workers are to have as TTP_RELAY_SOCKET; empty: there is no relay."""
        self._end()
        if not ranks or not is_relayed(self._asked, world_size):
            return ""
        from ttp.launch.links.relay import Relay  # loads gRPC

        try:
            self._folder = self._folder or files.make_temporary("ttp-relay-")
            self._count += 1
            self._relay = Relay(self._folder / str(self._count), tuple(ranks), self._lease_of(world_size))
            self._relay.start()
        except (OSError, RuntimeError, TimeoutError) as error:
            log.warning(
                "the ranks of this node connect to controllers themselves: its relay cannot listen (%s);"
                " set TMPDIR to a folder that this user can write to, with a path of at most 80 characters",
                error,
            )
            self._end()
            return ""
        return str(self._relay.path)

    def close(self) -> None:
        self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            try:
                relay.close()
            except Exception:  # the next attempt has another one
                log.warning("the relay of the attempt before did not end as it should", exc_info=True)
