"""What a spare node does until the job needs it: it looks at the job in the store, and takes a place that is free, or that the controller gives it.

Owns the wait. The controller's order is obeyed within a moment, whatever the store does: that may be lost with the node whose place it is.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from ttp.launch.rendezvous import departures, running_job
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.rendezvous.multi_endpoint import ROUND_S, Endpoint, Stores
from ttp.launch.rendezvous.running_job import RunningJob
from ttp.launch.rendezvous.spare_nodes import (
    LOST_S,
    MOST_AGENTS,
    SPARE,
    Agent,
    Entry,
    PlaceTaken,
    Silence,
    place_to_take,
    read_agents,
    seated,
)
from ttp.proto.messages import TakePlaces

log = logging.getLogger("ttp.launch")

ORDERED_S = 0.05
"""Between two looks while the store's answer, or a health check for an order of the controller, is under way."""


@dataclass(frozen=True, slots=True)
class _View:
    place: Endpoint
    agents: list[Agent]
    over: str
    succeeded: bool
    running: RunningJob | None
    departed: int
    seats: tuple[str, ...]
    """By its number in the group, which agent has a lost node's place."""


@dataclass(frozen=True, slots=True)
class PlaceGiven:
    """A lost node's place in the attempt that runs, which the controller has given to this node."""

    job: RunningJob
    number: int
    """The lost node's, in the group."""
    order: TakePlaces
    at: Endpoint
    """Where the job's nodes have met."""
    departed: int = 0
    """So many nodes had left by then."""
    before: str = ""
    """Which agent had this place before, if it was a spare one's."""


class Attached(Protocol):
    """This node's connection to the job that runs."""

    @property
    def job_runs(self) -> bool:
        """Return whether the controller of the job is connected, and has not ordered its ranks to exit."""

    def follow(self, job: RunningJob) -> None:
        """Attach to this attempt's controller."""

    def order(self, within_s: float) -> TakePlaces | None:
        """Return the controller's order while it is in force; none is waited for so long. None: there is none."""

    def refuse(self, why: str) -> None:
        """Report that the order cannot be carried out."""

    def close(self) -> None: ...


class Health(Protocol):
    """This node's health check."""

    def begin(self, since_monotonic_s: float) -> None:
        """Have the node checked, unless a check has begun since then. Returns at once."""

    def verdict(self) -> str | None:
        """Return why this node is sick, empty: it is not; None: not known yet."""


class UnfitSpare(Exception):
    """This spare's health check has failed when the job needed it; its text is the reason."""


class _Orders:
    """What the controller of the job that runs has ordered this node to do."""

    def __init__(self, attached: Attached | None, health: Health | None) -> None:
        self._attached = attached
        self._health = health
        self._ordered_s = 0.0
        self._view: _View | None = None

    @property
    def job_at(self) -> Endpoint | None:
        """Where the nodes of a job have met that runs now; None: none does, as far as its controller is connected. No other endpoint is looked at then: a
        node that is cut off may have opened one."""
        runs = self._attached is not None and self._attached.job_runs
        return self._view.place if runs and self._view is not None else None

    def follow(self, view: _View) -> None:
        if self._attached is not None and view.running is not None:
            self._view = view
            self._attached.follow(view.running)

    def given(self) -> PlaceGiven | None:
        """Return the place that this node is to take, if it can; None: not yet, or it cannot, which is reported. Raises UnfitSpare."""
        attached, view = self._attached, self._view
        order = attached.order(0.0) if attached is not None else None
        if order is None or attached is None or view is None or view.running is None:
            self._ordered_s = 0.0
            return None
        job = view.running
        self._ordered_s = self._ordered_s or time.monotonic()
        number = job.number_of(order.ranks)
        if number is None:
            attached.refuse(
                f"ranks {order.ranks}: no node has them in attempt {job.start}, the newest in the rendezvous store"
            )
            return None
        try:
            if not _is_fit(self._health, self._ordered_s):
                return None
        except UnfitSpare as unfit:
            attached.refuse(f"this node is sick: {unfit}")
            raise
        return PlaceGiven(job, number, order, view.place, view.departed, view.seats[number])

    def wait(self, within_s: float, over: Callable[[float], bool] | None = None) -> PlaceGiven | None:
        """Wait so long, and no longer than until `over(seconds)`, which waits too, returns True; return at once the place that is given."""
        until_s = time.monotonic() + within_s
        while (left_s := until_s - time.monotonic()) > 0:
            if (given := self.given()) is not None:
                return given
            pause_s = min(ORDERED_S, left_s)
            if over is not None:
                if over(pause_s):
                    return None
            elif self._attached is None or self._ordered_s:
                time.sleep(pause_s)
            else:
                self._attached.order(left_s)
        return self.given()


def wait_for_place(
    stores: Stores,
    run_id: str,
    entry: Entry,
    silence_s: float,
    health: Health | None = None,
    max_nodes: int = MOST_AGENTS,
    attached: Attached | None = None,
) -> PlaceTaken | PlaceGiven:
    """Wait until the job, of `max_nodes` at most, needs this node; return whose place it takes. `health`: it is checked anew before it takes one,
    which no other spare takes meanwhile. `attached`: its controller may give it the place of a lost node while the others train on; a call of
    `stores` may be under way then, in another thread.

    Raises UnfitSpare, RendezvousGracefulExitError when the job has succeeded, RendezvousClosedError when it has failed, RendezvousTimeoutError when a job that
    was there has not been seen for `silence_s`. Before, there is no time limit.
    """
    where = ", ".join(map(str, stores.endpoints))
    log.info("waiting as a spare node for job %r at %s, without a time limit", run_id, where)
    silence, seen_s, moved_s, needed_s = Silence(LOST_S), 0.0, 0.0, 0.0
    before: Endpoint | None = None
    left: Endpoint | None = None
    served_by = gone_with = ""
    orders = _Orders(attached, health)
    while True:
        given_up = threading.Event()
        looking = BoundedCall(functools.partial(_find_and_look, stores, run_id, entry, orders.job_at, given_up))
        if (given := orders.wait(float("inf"), looking.wait)) is not None:
            given_up.set()
            return given
        view, now_s = looking.result(), time.monotonic()
        if orders.job_at is not None:
            seen_s = now_s
        if view is not None:
            if view.over:
                raise RendezvousClosedError(f"the job {run_id!r} is over: {view.over}")
            if view.succeeded:
                log.info("the job %r has succeeded without this spare node", run_id)
                raise RendezvousGracefulExitError(f"the job {run_id!r} has succeeded")
            if view.place != before:
                left, before, moved_s, silence, gone_with = before, view.place, now_s, Silence(LOST_S), served_by
            lost = silence.of(view.agents, now_s)
            served_by = next((agent.node for agent in reversed(view.agents) if agent.serves), "")
            if any(agent.state != SPARE and agent.number not in lost for agent in view.agents):
                seen_s = now_s
            orders.follow(view)
            # After a move the agents come to the new store one by one. Who has moved may be wrong: this agent has looked at the old one itself.
            gone = "" if left is None or stores.accepts_connections(left) else gone_with
            unsettled = gone if now_s - moved_s < LOST_S else None
            taken = None
            if orders.job_at is None:
                taken = place_to_take(view.agents, lost, entry.agent.number, max_nodes, unsettled)
            needed_s = (needed_s or now_s) if taken is not None else 0.0
            if taken is not None and _is_fit(health, needed_s):
                log.warning("%s", PlaceTaken(entry.agent.node, taken.node))
                entry.took(taken.number)
                if taken.start >= 0:  # else they have not met: there is nothing to begin anew
                    stores.begin_anew(view.place, taken.epoch)
                return PlaceTaken(entry.agent.node, taken.node)
        if seen_s and now_s - seen_s > silence_s:
            raise RendezvousTimeoutError(
                f"no node of the job {run_id!r} was seen at {where} for {silence_s:.0f} s (--rdzv-conf join_timeout)"
            )
        if (given := orders.wait(ROUND_S)) is not None:
            return given


def _is_fit(health: Health | None, needed_s: float) -> bool:
    """Return whether this node has passed a check since it is needed. Raises UnfitSpare."""
    if health is None:
        return True
    health.begin(needed_s)
    sick = health.verdict()
    if sick:
        raise UnfitSpare(sick)
    return sick is not None


def _find_and_look(
    stores: Stores, run_id: str, entry: Entry, job_at: Endpoint | None, given_up: threading.Event
) -> _View | None:
    """Look at the job where it runs, else where its nodes meet. `given_up`: this node has a place, and renews its entry as any other."""
    place = job_at if job_at is not None else stores.find_in_use()
    if place is None:
        return None
    return stores.ask(place, functools.partial(_look, run_id=run_id, entry=entry, place=place, given_up=given_up))


def _look(store: Store, *, run_id: str, entry: Entry, place: Endpoint, given_up: threading.Event) -> _View:
    if not given_up.is_set():
        entry.renew(store, place, SPARE)
    running = running_job.read(store, run_id)
    seats = range(len(running.nodes)) if running is not None else ()
    over, succeeded = departures.end(store, run_id)
    return _View(
        place,
        read_agents(store, run_id),
        over,
        succeeded,
        running,
        len(departures.departures_after(store, run_id, 0)),
        tuple(seated(store, run_id, running.start, number) for number in seats) if running is not None else (),
    )
