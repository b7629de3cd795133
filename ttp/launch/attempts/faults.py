"""The fault of an attempt: its cause and its one deadline, however many rounds it has.

Owns when a fault begins, and when it is over though its attempt is not: all processes that it has cost were replaced, and the ranks train on.
Never waits, never decides what follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.report.exit_status import RankFailure, describe, first_failure
from ttp.launch.watch.death_watch import Death

log = logging.getLogger("ttp.launch")


def log_unprotected(unanswered: str, starting: bool) -> None:
    """Log that no checkpoint will be written, or why it is not known (`unanswered`), at the begin of a fault without a controller."""
    if unanswered:
        log.warning("cannot determine whether the ranks have a controller: %s", unanswered)
    else:
        log.warning(
            "no rank called ttp.start()%s; this attempt is unprotected and no emergency checkpoint will be written",
            " so far" if starting else "",
        )


class Faults:
    """The faults of one attempt, one at a time. `replaced` and `over` may be called from any thread, the others are the agent's main thread's."""

    def __init__(
        self, total_timeout_s: float, peers: PeerAgents | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total_timeout_s`: TTP_OT. `peers`: the other nodes' agents; None: there are none."""
        self._total_timeout_s = total_timeout_s
        self._peers = peers
        self._clock = clock
        self._current: RankFailure | None = None
        self._published = False
        self._lock = threading.Lock()
        self._replaced_since_s: float | None = None  # guarded by the lock
        """The begin of a fault whose processes were replaced: its recovery may still fail. None: there is none."""

    @property
    def current(self) -> RankFailure | None:
        """The fault that survivors are held for, or that the ranks leave for; None: there is none."""
        return self._current

    def begin(self, why: str, deaths: Mapping[int, Death]) -> RankFailure:
        """Return the current fault, a new one if there is none. `why`: a cause that is not one of the deaths."""
        if self._current is None:
            first = first_failure(deaths)
            cause = why or (describe(first) if first is not None else "unknown cause")
            begun_s = first.seen_monotonic_s if first is not None else self._clock()
            if not why and (earlier_s := self._not_over_since_s()) is not None and earlier_s < begun_s:
                log.info(
                    "the fault began %.0f s ago, and its recovery has failed: its deadline applies", begun_s - earlier_s
                )
                begun_s = earlier_s
            elsewhere_s = self._peers.fault_begun_monotonic_s if self._peers is not None else None
            if elsewhere_s is not None and elsewhere_s < begun_s:
                log.info("the fault began %.0f s ago on another node; its deadline applies", begun_s - elsewhere_s)
                begun_s = elsewhere_s
            self._current = RankFailure(cause, begun_s, begun_s + self._total_timeout_s)
            if why:
                self.publish()
        return self._current

    def publish(self) -> None:
        """Publish the current fault to the other nodes, once: an attempt has one that ends it. Not while it may still be recovered from: the next
        fault on another node would have its deadline."""
        if self._peers is not None and self._current is not None and not self._published:
            self._published = True
            self._peers.publish_fault(self._current.begun_monotonic_s)

    def left_s(self, fault: RankFailure) -> float:
        """Return how long a fault may still last; it may have begun earlier on another node."""
        elsewhere_s = self._peers.fault_begun_monotonic_s if self._peers is not None else None
        now_s = self._clock()
        left_s = fault.left_s(now_s)
        return left_s if elsewhere_s is None else min(left_s, max(0.0, elsewhere_s + self._total_timeout_s - now_s))

    def replaced(self, begun_monotonic_s: float) -> None:
        """A process that ended then was replaced: what follows until `over` is the same fault."""
        with self._lock:
            known_s = self._replaced_since_s
            if known_s is None or not self._may_last(known_s) or begun_monotonic_s < known_s:
                self._replaced_since_s = begun_monotonic_s

    def recovered(self) -> None:
        """All processes that have failed were replaced."""
        self._current = None

    def over(self) -> None:
        """The controller has opened the gates: the next failure is another fault's.

        The order may be lost with a connection. So a fault is over after its deadline too: until then the controller has ended it, in one way or
        the other. What a second fault loses in between is only time, as its deadline is the first one's.
        """
        with self._lock:
            self._replaced_since_s = None

    def _not_over_since_s(self) -> float | None:
        with self._lock:
            since_s = self._replaced_since_s
        return since_s if since_s is not None and self._may_last(since_s) else None

    def _may_last(self, begun_s: float) -> bool:
        return self._clock() < begun_s + self._total_timeout_s
