"""This node's seat in the job: taken only while its health check passes, and given up with the reason when it fails.

Owns what follows from a verdict: the other agents learn of it through the rendezvous store, the report has it, and the agent ends. The nodes that
others have excluded are reported here too.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import NoReturn, Protocol

from ttp.launch.health.node_health import NodeHealth, SickNode
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.report.exit_status import first_failure
from ttp.launch.report.reporter import Reporter
from ttp.launch.watch.death_watch import Death
from ttp.proto.messages import SAVED_EXIT_CODES


class WatchedWorkers(Protocol):
    """The workers of an attempt on this node."""

    def deaths(self) -> Mapping[int, Death]:
        """Return those that have ended, by rank."""


class Seat:
    """One agent's. `health`: None: it is never checked."""

    def __init__(self, health: NodeHealth | None, handler: FreshStoreRendezvous, reporter: Reporter | None) -> None:
        self._health = health
        self._handler = handler
        self._reporter = reporter
        self._since_s = time.monotonic()
        """A verdict must be newer: of this agent's start, or the last fault on this node."""

    def fault(self, workers: WatchedWorkers) -> None:
        """Have the node checked, beside whatever follows, if one of its workers has failed. Returns at once."""
        if self._health is None:
            return
        failed = {rank: death for rank, death in workers.deaths().items() if death.status not in SAVED_EXIT_CODES}
        if (first := first_failure(failed)) is not None:
            self._since_s = max(self._since_s, first.seen_monotonic_s)
            self._health.begin(self._since_s)

    def condition(self) -> str:
        """Return on what this node's part in the next attempt depends, behind `; `, for people; empty: on nothing, or its check has passed."""
        sick = "" if self._health is None else self._health.verdict()
        if sick:
            return (
                f"; this node's health check failed ({sick}): it is excluded (exit code 75) unless a second one passes"
            )
        return (
            "; this node takes part if its health check passes, else it is excluded (exit code 75)"
            if sick is None
            else ""
        )

    def take(self) -> None:
        """Wait for the verdict before the node joins. A check that has failed beside a fault is run once more: what the dump took, and what
        the survivors held, is free by now. Raises SickNode."""
        if self._health is not None:
            called_s = time.monotonic()
            if self._health.judge(self._since_s) and (sick := self._health.judge(called_s)):
                self.give_up(sick)

    def give_up(self, sick: str) -> NoReturn:
        """Tell the other nodes and the report, and raise SickNode."""
        shared_name = self._handler.exclude(sick)
        if self._reporter is not None:
            self._reporter.sick_here(shared_name or socket.gethostname(), sick, shared=bool(shared_name))
        raise SickNode(f"this node is excluded: {sick}. Repair it, or start this command on another node")

    def report_others(self) -> None:
        """Report the nodes that were excluded, as far as they are known here."""
        for each in self._handler.take_excluded():
            if self._reporter is not None:
                self._reporter.excluded(each.node, each.reason)
