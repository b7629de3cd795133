"""The rendezvous of several nodes, wherever the job meets: torch's handler on the store in use, and another on the next when that is lost.

Owns joining, what nodes say that leave or end the job, and the question who waits. torch's handler does the rendezvous itself. No
call that may hang is made on the agent's own thread without a limit.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from ttp.launch.rendezvous import departures
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.rendezvous.multi_endpoint import ROUND_S, Endpoint, Stores, Window

log = logging.getLogger("ttp.launch")

LOST_LOOKS = 3
"""So many looks in a row without an answer: the place is lost."""
FIRST_PATIENCE_S = 30.0
"""How long the first place of the list is waited for, at a job's start, before another one is opened."""
CLOSE_S = 10.0
"""How long the store may take for each of the last words; one that has not answered is asked no more."""


class MovingRendezvous(RendezvousHandler):
    """Runs torch's handler on the store in use, and makes a new one on the next when that is lost."""

    def __init__(
        self, stores: Stores, make: Callable[[Endpoint], RendezvousHandler], run_id: str, *, join_timeout_s: float
    ) -> None:
        """`make(place)`: torch's handler, as a client of the store at `place`."""
        self._stores = stores
        self._make = make
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s
        self._place: Endpoint | None = None
        self._inner: RendezvousHandler | None = None
        self._waiting: _Waiting | None = None
        self._heard: dict[Endpoint, int] = {}
        """At each place, how many of the nodes that have left this one has heard; those before its own time, too."""
        self._heard_before = 0
        """The same, when it began to join: one that has left since may have been counted in."""
        self._news = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round wherever the job meets. Raises RendezvousTimeoutError, RendezvousClosedError (the job is over,
        and why)."""
        words = self._waiting.over if self._waiting is not None else ""
        self._stop_asking()
        if words:
            raise RendezvousClosedError(f"the job {self._run_id!r} is over: {words}")
        began = time.monotonic()
        while True:
            left_s = began + self._join_timeout_s - time.monotonic()
            if left_s <= 0:
                where = ", ".join(map(str, self._stores.endpoints))
                why = self._stores.trouble() or "all of these answer; were as many nodes started?"
                raise RendezvousTimeoutError(
                    f"too few nodes met within {self._join_timeout_s:.0f} s (--rdzv-conf join_timeout) at {where}: {why}"
                )
            first = self._stores.epoch == 0
            place = self._stores.find(first and time.monotonic() - began < FIRST_PATIENCE_S, left_s)
            joined = self._join(place, left_s) if place is not None else None
            if joined is not None:
                assert self._inner is not None
                assert place is not None
                self._waiting = _Waiting(self._inner, Window(place), self._run_id, self._heard_before, self._drop)
                return joined
            time.sleep(ROUND_S)

    def _join(self, place: Endpoint, left_s: float) -> RendezvousInfo | None:
        """Try at one place; None when it is lost, or the job has moved on from it."""
        if place != self._place or self._inner is None:
            if self._place is not None:
                log.warning("the rendezvous moves from %s to %s", self._place, place)
            self._place, self._inner = place, None
        kept, until = self._inner, time.monotonic() + left_s
        self._hear(place, left_s)
        self._heard_before = self._heard.get(place, 0)

        def run() -> tuple[RendezvousHandler, RendezvousInfo]:
            inner = kept or self._make(place)
            return inner, inner.next_rendezvous()

        attempt = BoundedCall(run)
        unanswered = 0
        while not attempt.wait(ROUND_S):
            left_s = until - time.monotonic()
            unanswered = unanswered + 1 if self._stores.look(place, left_s) is None else 0
            self._hear(place, left_s)
            if unanswered >= LOST_LOOKS:
                why = f"is lost ({self._stores.trouble()})"
            elif (other := self._stores.newer_than(place, left_s)) is not None:
                why = f"is left: the job meets at {other}"
            elif time.monotonic() > until:
                why = "had too few nodes in time"
            else:
                continue
            log.warning("the rendezvous at %s %s", place, why)
            self._inner = None  # its calls may hang for good: they are left to themselves
            return None
        try:
            inner, joined = attempt.result()  # only here: an attempt that was left may end later, and changes nothing
            self._inner = inner
            return joined
        except RendezvousClosedError:
            words = self.failed_elsewhere() or "nobody said why"
            raise RendezvousClosedError(f"the job {self._run_id!r} is over at {place}: {words}") from None
        except (RendezvousConnectionError, RendezvousTimeoutError, RuntimeError) as error:
            log.warning("the rendezvous at %s failed: %s", place, error)
            self._inner = None
            return None

    def _drop(self, lost: RendezvousHandler) -> None:
        """Let go of a handler whose store is lost: its heartbeats, which nobody hears, end with it."""
        if self._inner is lost:
            self._inner = None

    def _hear(self, place: Endpoint, within_s: float = math.inf) -> None:
        """Log what nodes say that have left, but for those that had done so before this one came."""
        before = self._heard.get(place)
        words = self._stores.ask(place, lambda store: departures.left_after(store, self._run_id, before or 0), within_s)
        if words is None:
            return
        self._heard[place] = (before or 0) + len(words)
        if before is not None:
            _log_left(words)
            self._news = self._news or bool(words)

    def heard_of_a_parting(self) -> bool:
        """Say whether a node has told since the last question that it leaves."""
        if self._place is not None:
            self._hear(self._place)
        news, self._news = self._news, False
        return news

    def failed_elsewhere(self) -> str:
        """Return why another node has ended the job, as far as it was heard; empty if none has."""
        if self._waiting is not None and self._waiting.over:
            return self._waiting.over
        if self._place is None:
            return ""
        return self._stores.ask(self._place, lambda store: departures.over(store, self._run_id), CLOSE_S) or ""

    def trouble(self) -> str:
        """Say which places do not answer, and why."""
        return self._stores.trouble()

    def num_nodes_waiting(self) -> int:
        """How many nodes want to join; a node that has left without its ranks' word makes the others meet again as well. 0
        while the store is lost: the workers do not need it."""
        return self._waiting.count if self._waiting is not None else 0

    def _stop_asking(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        inner = self._inner
        return inner is not None and inner.is_closed()

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()  # type: ignore[no-untyped-call]

    def get_run_id(self) -> str:
        return self._run_id

    def leave(self, why: str) -> None:
        """Tell the others, if the store can be reached, why this node goes, and leave the rendezvous open for them."""
        self._stop_asking()
        if self._place is not None and not self._stores.hangs(self._place):
            self._stores.ask(self._place, lambda store: departures.tell_left(store, self._run_id, why), CLOSE_S)
            self._stores.linger(self._place)
        self._inner = None

    def shutdown(self, why: str = "") -> bool:
        """Close the rendezvous for all, if its store can be reached, and say why it failed (empty: it has not); end this agent's
        own store."""
        self._stop_asking()
        inner, self._inner = self._inner, None
        closed = False
        place = self._place
        if place is not None and not self._stores.hangs(place) and self._stores.look(place, CLOSE_S) is not None:
            if why:
                self._stores.ask(place, lambda store: departures.tell_over(store, self._run_id, why), CLOSE_S)
            if inner is not None:
                closing = BoundedCall(inner.shutdown)
                closed = closing.wait(CLOSE_S) and closing.succeeded
            if why:
                self._stores.linger(place)
        self._stores.close()
        return closed


def _log_left(words: Sequence[str]) -> None:
    for text in words:
        log.warning("a node has left: %s", text)


class _Waiting:
    """Asks, now and then, how many nodes want to join or have left, so that the agent need not wait for a store that is gone."""

    def __init__(
        self,
        inner: RendezvousHandler,
        window: Window,
        run_id: str,
        heard: int,
        give_up: Callable[[RendezvousHandler], None],
    ) -> None:
        """`heard`: how many had left before this rendezvous. give_up: called once, when the handler's store is lost."""
        self.count = 0
        self.over = ""
        """Why the job is over, once another node has said so."""
        self._window = window
        self._run_id = run_id
        self._heard = heard
        self._inner: RendezvousHandler | None = inner
        self._give_up = give_up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-waiting-nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more: the handler is for one thread at a time. A question that hangs is not waited for."""
        self._stopping.set()
        self._thread.join(ROUND_S)

    def _run(self) -> None:
        """Ask until told to stop. The handler's connection is never made again, and torch writes a backtrace for each question
        on one that is broken: the window, which looks before it asks, goes first, and a loss ends the handler."""
        unanswered = 0
        while not self._stopping.wait(ROUND_S):
            left = self._left()
            unanswered = 0 if left is not None else unanswered + 1
            count = left or 0
            if self._inner is not None and unanswered == LOST_LOOKS:
                self._lose(f"no store has answered {LOST_LOOKS} times")
            elif self._inner is not None and left is not None:
                try:
                    count = self._inner.num_nodes_waiting() or left
                except (RendezvousError, RuntimeError) as error:
                    self._lose(str(error))
            self.count = count
        self._inner = None

    def _lose(self, why: str) -> None:
        """Let go of the handler, and with it of its heartbeats."""
        inner, self._inner = self._inner, None
        if inner is not None and not self._stopping.is_set():
            log.warning("the rendezvous' store is lost (%s); training goes on, the next start looks for another", why)
            self._give_up(inner)

    def _left(self) -> int | None:
        """Return how many nodes have left since the rendezvous (their ranks will not come, or not come back), and hear whether
        the job is over. None: no store answers."""
        found = self._window.ask(
            lambda store: (
                departures.left_after(store, self._run_id, self._heard),
                departures.over(store, self._run_id),
            )
        )
        if found is None:
            return None
        self.over = self.over or found[1]
        return len(found[0])
