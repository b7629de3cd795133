"""The rendezvous of a job on one node without an endpoint: there is no other node to meet.

torch's own handler would serve a store for other nodes, send heartbeats to it, and wait up to 0.3 s before the first attempt and before the first
restart, so that many nodes do not come at once. Never opens a socket.
"""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousInfo


class OneNode(RendezvousHandler):
    """This node is rank 0 of 1, at once, in every attempt."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return an empty store for the next attempt. Raises RendezvousClosedError after `set_closed`."""
        if self._closed:
            raise RendezvousClosedError
        return RendezvousInfo(HashStore(), 0, 1, None)  # type: ignore[arg-type]  # the attempt's address comes from FreshStoreRendezvous

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True
