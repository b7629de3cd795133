"""Polls of the rendezvous store while the ranks train: how many nodes wait to join or have left, whether the job is over, and who shall leave.

Owns the thread in which they run, so that the agent never waits for a lost store, and the renewal of this agent's entry. Decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from ttp.launch.rendezvous import departures
from ttp.launch.rendezvous.multi_endpoint import ROUND_S, Window

log = logging.getLogger("ttp.launch")

LOST_LOOKS = 3
"""After so many reads in a row without an answer an endpoint is lost."""


class NodePolls:
    """Polls how many nodes wait to join or have left, in a thread, so that the agent never waits for a lost store."""

    def __init__(
        self,
        inner: RendezvousHandler | None,
        window: Window,
        run_id: str,
        departed: int,
        give_up: Callable[[RendezvousHandler], None],
        *,
        epoch: int,
        renew: Callable[[Store], None],
        drain: Callable[[Store], str] = lambda store: "",
        make: Callable[[], RendezvousHandler] | None = None,
    ) -> None:
        """`inner`: None on a node that has taken a lost one's place without a meeting; `make()` returns one that has not joined, once the store answers. `departed`: how many had left before this rendezvous. give_up: called once, when the handler's store is lost. epoch: the store's, of
        this rendezvous. renew: renews this agent's entry. drain: returns why it shall leave; empty: it stays."""
        self.count = 0
        self.unanswered = 0
        """How many calls in a row the store has not answered."""
        self.drain = ""
        """Why this agent shall leave at a step boundary, once it was asked to."""
        self.over = ""
        """Why the job is over, once another node has published it."""
        self._window = window
        self._run_id = run_id
        self._departed = departed
        self._epoch = epoch
        self._renew = renew
        self._drain = drain
        self._inner: RendezvousHandler | None = inner
        self._give_up = give_up
        self._make = make
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-waiting-nodes", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the endpoint accepted a connection in the last poll."""
        return self._window.connected

    def stop(self) -> None:
        """Stop polling: only one thread at a time may use the handler. A call that hangs is abandoned."""
        self._stopping.set()
        self._thread.join(ROUND_S)

    def _run(self) -> None:
        """Poll until stopped. The handler never reconnects, and torch logs a backtrace for each call on a broken connection: the window, which
        checks the port first, is asked before it, and a loss ends the handler."""
        while not self._stopping.wait(ROUND_S):
            left = self._left()
            self.unanswered = 0 if left is not None else self.unanswered + 1
            count = left or 0
            if left is not None and self._make is not None:
                self._inner = self._made()
            if self._inner is not None and self.unanswered == LOST_LOOKS:
                self._lose(f"no store has answered {LOST_LOOKS} times")
            elif self._inner is not None and left is not None:
                try:
                    count = self._inner.num_nodes_waiting() or left
                except (RendezvousError, RuntimeError) as error:
                    self._lose(str(error))
            self.count = count
        self._inner = None

    def _made(self) -> RendezvousHandler | None:
        make, self._make = self._make, None
        try:
            return make() if make is not None else None
        except (RendezvousError, RuntimeError, ValueError) as error:
            log.warning("which nodes wait to join is not known here: %s", error)
            return None

    def _lose(self, why: str) -> None:
        """Drop the handler, and its heartbeats with it."""
        inner, self._inner = self._inner, None
        if inner is not None and not self._stopping.is_set():
            log.warning(
                "the rendezvous store is lost (%s); training continues, the next attempt uses another store", why
            )
            self._give_up(inner)

    def _left(self) -> int | None:
        """Return how many nodes have left since the rendezvous (without their ranks the attempt cannot run), one more if the nodes meet anew, and
        read whether the job is over. None: no store answers."""
        found = self._window.ask(self._ask)
        if found is None:
            return None
        reasons, over, epoch = found
        self.over = self.over or over
        return len(reasons) + int(epoch > self._epoch)

    def _ask(self, store: Store) -> tuple[tuple[str, ...], str, int]:
        self._renew(store)
        self.drain = self.drain or self._drain(store)
        reasons = departures.departures_after(store, self._run_id, self._departed)
        return reasons, departures.over(store, self._run_id), self._window.epoch_in(store)
