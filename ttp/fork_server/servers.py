"""The fork servers of a node: one for its workers, one for its controllers.

They are two because a controller needs no torch: its memory stays small, and the kernel picks larger processes when memory runs out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ttp.fork_server.client import ForkServer, Listener
from ttp.fork_server.preload import CONTROLLERS, for_workers

log = logging.getLogger("ttp.launch")


class ForkServers:
    """Started by `begin` and `begin_controllers`, ended by `close`."""

    def __init__(self) -> None:
        self.workers = ForkServer(for_workers())
        self.controllers: ForkServer | None = None
        """None: not begun, or there is no place for its socket."""

    def begin(self, environ: Mapping[str, str]) -> None:
        """Have the workers' modules imported. Nothing of torch or numpy need be loaded here."""
        self.workers.start({"OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0", **environ})  # as ttprun sets them

    def begin_controllers(self, environ: Mapping[str, str], preload: Sequence[str]) -> None:
        """Have `preload` imported for the workers too, and the controllers' modules by a server of their own."""
        self.workers.also_import(preload)
        try:
            self.controllers = ForkServer(CONTROLLERS, Listener())
        except OSError as error:
            log.warning(
                "controllers import for themselves: no socket can be made in the folder for temporary files: %s", error
            )
            return
        self.controllers.start(environ)

    @property
    def address(self) -> str:
        """Where ranks have controllers forked; empty: nowhere."""
        return self.controllers.address if self.controllers is not None else ""

    def look(self) -> None:
        """Start again what has died."""
        self.workers.look()
        if self.controllers is not None:
            self.controllers.look()

    def close(self) -> None:
        self.workers.close()
        if self.controllers is not None:
            self.controllers.close()
