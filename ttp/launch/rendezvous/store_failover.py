"""Failover of the rendezvous: torch's handler on the store in use, and a new handler on the next store when that is lost.

Owns joining, the reasons of nodes that leave or end the job, and the number of waiting nodes. torch's handler does the rendezvous itself. Never
makes a call that may hang on the agent's own thread without a time limit.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from ttp.launch.rendezvous import departures, running_job
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.rendezvous.departures import Excluded
from ttp.launch.rendezvous.job_secret import OtherSecret
from ttp.launch.rendezvous.multi_endpoint import ROUND_S, Endpoint, Stores
from ttp.launch.rendezvous.node_polls import LOST_LOOKS, NodePolls
from ttp.launch.rendezvous.running_job import RunningJob, WasReplaced
from ttp.launch.rendezvous.sealed_state import StateRefused
from ttp.launch.rendezvous.spare_nodes import (
    JOINING,
    LEFT,
    LOST_S,
    MOST_AGENTS,
    RUNNING,
    SICK,
    Entry,
    MeetingAnew,
    PlaceTaken,
    Silence,
    seated,
    sit_down,
)
from ttp.launch.rendezvous.waiting_spare import Attached, Health, PlaceGiven, wait_for_place

log = logging.getLogger("ttp.launch")

FIRST_PATIENCE_S = 30.0
"""How long a new job waits for the first endpoint of the list before it opens another one."""
CLOSE_S = 10.0
"""How long the store may take for each of the last calls; after one without an answer there are no more."""
EXCLUDE_S = 30.0
"""How long a node that is sick before it has joined looks for a store to publish it in: another node may have to open one first."""


_FAILURES = (RendezvousConnectionError, RendezvousStateError, RendezvousTimeoutError)


class TooFewNodes(RendezvousTimeoutError):
    """A job that ran, or that has excluded sick nodes, has too few nodes left: it asks to be started again, with others."""


class FailoverRendezvous(RendezvousHandler):
    """Runs torch's handler on the store in use, and makes a new one on the next when that is lost."""

    def __init__(
        self,
        stores: Stores,
        make: Callable[[Endpoint, int, int, bool], RendezvousHandler],
        run_id: str,
        *,
        join_timeout_s: float,
        node: str = "",
        spare_node: bool = False,
        health: Health | None = None,
        min_nodes: int = 1,
        max_nodes: int = MOST_AGENTS,
        waits_for_more: bool = False,
    ) -> None:
        """`make(place, epoch, nodes, moved)`: torch's handler, as a client of the store at endpoint `place` under an epoch; it is complete with so
        many nodes, 0: `max_nodes`; `moved`: the last attempt's nodes have met elsewhere, and may meet there again. `node`: this node's name. `spare_node`: it joins when the job has lost another node, and has passed its `health` check
        then. `min_nodes`, `max_nodes`: of the job. `waits_for_more`: with fewer than `max_nodes` it waits for others as long as torch does."""
        self._stores = stores
        self._make = make
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s
        self._entry = Entry(run_id, node, stores.serves)
        self._spare_node = spare_node
        self._health = health
        self._max_nodes = max_nodes
        self._anew_meeting = MeetingAnew(stores, run_id, self._entry, min_nodes, max_nodes, waits_for_more)
        self._secret = stores.secret
        self.took_place: PlaceTaken | None = None
        """Whose place this node, a spare, takes in the next attempt."""
        self._place: Endpoint | None = None
        self._epoch = 0
        """The epoch of `_inner`."""
        self._inner: RendezvousHandler | None = None
        self._anew = False
        """The last join ended because the nodes meet under another epoch: at once."""
        self._suspended: tuple[Endpoint, int, BoundedCall[tuple[RendezvousHandler, RendezvousInfo]]] | None = None
        """The call that joins at an endpoint, under an epoch, whose store seemed to be lost: a second one there would be counted as another node."""
        self._waiting: NodePolls | None = None
        self._silence, self._waits_for_place = Silence(LOST_S), False
        self._departed: dict[Endpoint, int] = {}
        """By endpoint, how many departures this node has read there, those before its own time included."""
        self._departed_before = 0
        """The same when it began to join: a node that has left since may be counted in the rendezvous."""
        self._departure_seen = self._announced = False
        self._excluded_read: dict[Endpoint, int] = {}
        """By endpoint, how many of its excluded nodes this one has read."""
        self._excluded: list[Excluded] = []
        """All of them, in order, each once."""
        self._not_taken = 0
        """From which on they have not been returned."""

    def wait_as_spare(self, attached: Attached | None = None) -> PlaceGiven | None:
        """On a spare node, wait until the job has lost another node; then this one is as any other. Return its place in the attempt that runs, None
        where it meets the others. Raises RendezvousError and UnfitSpare, see `wait_for_place`."""
        if not self._spare_node:
            return None
        taken = wait_for_place(
            self._stores, self._run_id, self._entry, self._join_timeout_s, self._health, self._max_nodes, attached
        )
        self._spare_node = False
        if isinstance(taken, PlaceTaken):
            self.took_place = taken
            return None
        self._enter(taken)
        return taken

    def become_spare(self) -> None:
        """Wait as a spare node before the next meeting: another node has this one's place."""
        self._stop_polling()
        if self._anew_meeting.met_at is not None:
            self._stores.go_back(self._anew_meeting.met_at, self._entry.agent.epoch)
        self._spare_node, self._inner, self._place = True, None, None
        self._entry.met(-1, 0, 0)
        self._entry.took(0)

    def _was_replaced(self) -> bool:
        """Return whether another agent has this one's place in the attempt for which it has met the others, as far as the store there answers."""
        place, number, start = self._anew_meeting.met_at, self._anew_meeting.number, self._entry.agent.start
        if place is None or start < 0 or not self._stores.accepts_connections(place):
            return False
        found = self._stores.ask(place, lambda store: seated(store, self._run_id, start, number), CLOSE_S)
        return bool(found) and found != str(self._entry.number_at(place))

    def publish_running(self, job: RunningJob) -> None:
        """Publish what runs, for spare nodes; on node 0, once all have met."""
        if self._place is not None:
            self._stores.ask(self._place, functools.partial(running_job.publish, run_id=self._run_id, job=job), CLOSE_S)

    @property
    def agent_number(self) -> int:
        """This agent's number among the entries of the store in use."""
        return self._entry.agent.number

    @property
    def epoch(self) -> int:
        """Under which epoch the nodes have met."""
        return self._epoch

    def _enter(self, given: PlaceGiven) -> None:
        """Be one of the nodes that have met for the attempt that runs, without a meeting."""
        self._place, self._epoch, self._inner = given.at, given.job.epoch, None
        self._secret.met = True
        self._entry.met(given.job.start, len(given.job.nodes), self._epoch)
        self._anew_meeting.met(given.at, given.number)
        self._entry.took(given.job.nodes[given.number].agent)
        self._departed_before = self._departed[given.at] = given.departed
        self._poll(given.at, given)

    def _poll(self, place: Endpoint, given: PlaceGiven | None = None) -> None:
        """Begin to poll the store, over another connection. `given`: this agent is seated there first."""

        def renew(store: Store) -> None:
            nonlocal given
            self._entry.renew(store, place, RUNNING)
            if given is not None:
                own = self._entry.number_at(place)
                sit_down(store, self._run_id, given.job.start, given.number, given.before, own)
                given = None

        self._waiting = NodePolls(
            self._inner,
            self._stores.window(place),
            self._run_id,
            self._departed_before,
            self._drop,
            make=functools.partial(self._make, place, self._epoch, 0, False) if self._inner is None else None,
            epoch=self._epoch,
            renew=renew,
            drain=self._asked_to_leave,
        )

    def met(self, start: int, size: int) -> None:
        """Note the attempt that this node and the others have joined."""
        self.took_place = None
        self._entry.met(start, size, self._epoch)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round at the endpoint in use; the time limit begins anew while the job has no place for this node. Raises
        RendezvousTimeoutError (TooFewNodes where another allocation may help), RendezvousClosedError (why the job is over),
        RendezvousGracefulExitError (it has succeeded without this node), OtherSecret, WasReplaced."""
        waiting = self._waiting
        self._stop_polling()
        if waiting is not None and waiting.over:
            raise RendezvousClosedError(f"the job {self._run_id!r} is over: {waiting.over}")
        if waiting is not None and self._place is not None:
            # A store that is connected is slow: `find` waits for it, so that not all move.
            if waiting.unanswered > 1 and not waiting.connected:
                self._stores.gave_no_answer(self._place)
            elif waiting.unanswered <= 1:
                self._stores.ask(self._place, functools.partial(self._entry.renew, place=self._place, state=JOINING))
        began = time.monotonic()
        while True:
            left_s = began + self._join_timeout_s - time.monotonic()
            first, self._anew = self._stores.epoch == 0, False
            place = self._stores.find(first and time.monotonic() - began < FIRST_PATIENCE_S, left_s)
            joined = None
            if place is not None and self._was_replaced():
                raise WasReplaced(f"another node has the place of {self._entry.agent.node}")
            if place is not None and self._has_all_nodes(place, left_s):
                began = time.monotonic()
            elif left_s <= 0:
                where = ", ".join(map(str, self._stores.endpoints))
                why = self._stores.trouble() or "all endpoints answer. Check that every node was started"
                sick = f"; excluded: {'; '.join(map(str, self._excluded))}" if self._excluded else ""
                kind = TooFewNodes if sick or self._entry.agent.start >= 0 else RendezvousTimeoutError
                raise kind(
                    f"too few nodes joined within {self._join_timeout_s:.0f} s (--rdzv-conf join_timeout) at {where}: {why}{sick}"
                )
            elif place is not None:
                joined = self._join(place, left_s)
            if joined is not None:
                assert self._inner is not None and place is not None
                self._secret.met = True
                self._anew_meeting.met(place, joined.rank)
                self._poll(place)
                return joined
            if not self._anew:
                time.sleep(ROUND_S)

    def _has_all_nodes(self, place: Endpoint, within_s: float) -> bool:
        """Return whether a job runs there that has no place for this node, which was never of it. Raises what `_end` returns."""
        if self._entry.agent.start >= 0:
            return False
        look = functools.partial(
            running_job.has_all_nodes, run_id=self._run_id, silence=self._silence, most=self._max_nodes
        )
        full = bool(self._stores.ask(place, look, within_s))
        if full and (end := self._end(place, within_s)) is not None:
            raise end
        if full and not self._waits_for_place:
            self._waits_for_place = True
            log.warning(
                "the job has all its %d nodes: this one waits until a place is free. Start it with --spare-node to take a lost node's at once",
                self._max_nodes,
            )
        return full

    def _end(self, place: Endpoint, within_s: float) -> RendezvousClosedError | RendezvousGracefulExitError | None:
        """Return the error for a node that is not needed any more: the job has failed, or has succeeded without it. None: neither is known."""
        found = self._stores.ask(place, functools.partial(departures.end, run_id=self._run_id), within_s)
        why, succeeded = found or ("", False)
        if succeeded and not why:
            if self._entry.agent.start < 0:
                log.warning("the job %r has succeeded without this node. Give a new job a new --rdzv-id", self._run_id)
                return RendezvousGracefulExitError(f"the job {self._run_id!r} has succeeded")
            why = "it has succeeded on other nodes, which do not meet this one again"
        return RendezvousClosedError(f"the job {self._run_id!r} is over at {place}: {why}") if why else None

    def _join(self, place: Endpoint, left_s: float) -> RendezvousInfo | None:
        """Try to join at one endpoint; None: it is lost, or the job uses another one. Raises WasReplaced."""
        epoch = self._stores.epoch
        if (place, epoch) != (self._place, self._epoch) or self._inner is None:
            if self._place not in (None, place):
                log.warning("moving the rendezvous from %s to %s", self._place, place)
            self._place, self._epoch, self._inner = place, epoch, None
        if self._anew_meeting.is_over(place, epoch):
            self._stores.begin_anew(place, epoch)
            self._anew = True
            return None
        kept, until = self._inner, time.monotonic() + left_s
        self._read_departures(place, left_s)
        self._departed_before = self._departed.get(place, 0)

        nodes, moved = self._anew_meeting.begin(place, epoch, time.monotonic()), self._anew_meeting.moved(place)
        if self._stores.epoch != epoch:  # it has begun one for those that are here
            self._anew = True
            return None
        if self._anew_meeting.waits(place, time.monotonic()):
            return None

        def run() -> tuple[RendezvousHandler, RendezvousInfo]:
            inner = kept or self._make(place, epoch, nodes, moved)
            return inner, inner.next_rendezvous()

        suspended, self._suspended = self._suspended, None
        call = suspended[2] if suspended is not None and suspended[:2] == (place, epoch) else BoundedCall(run)
        unanswered = 0
        while not call.wait(ROUND_S):
            left_s = until - time.monotonic()
            now = self._stores.look(place, left_s)
            unanswered = unanswered + 1 if now is None else 0
            self._read_departures(place, left_s)
            if unanswered >= LOST_LOOKS:
                why, self._suspended = f"is lost ({self._stores.trouble()})", (place, epoch, call)
            elif (other := self._stores.newer_than(place, left_s)) is not None:
                why = f"is out of use: the job meets at {other}"
            elif self._was_replaced():
                raise WasReplaced(f"another node has the place of {self._entry.agent.node}")
            elif (now is not None and now > epoch) or self._anew_meeting.look(place, epoch, time.monotonic()):
                why, self._anew = "has begun anew, without nodes that are lost", True
            elif self._secret.read():
                why, self._anew = "has another secret than this node, whose own was replaced", True
            elif time.monotonic() > until:
                why = "had too few nodes in time"
            else:
                continue
            log.warning("the rendezvous at %s %s", place, why)
            self._inner = None  # its calls may hang forever
            return None
        try:
            inner, joined = call.result()  # only here: an abandoned call may end later, without effect
            self._inner = inner
            return joined
        except RendezvousClosedError:
            unknown = RendezvousClosedError(f"the job {self._run_id!r} is over at {place}: no node has reported why")
            raise self._end(place, CLOSE_S) or unknown from None
        except OtherSecret:
            raise
        except (*_FAILURES, RuntimeError, ValueError) as error:
            log.warning("the rendezvous at %s failed: %s", place, error)
            self._inner = None
            if isinstance(error, StateRefused):  # under the next epoch the state has another key
                self._stores.begin_anew(place, epoch)
            return None

    def _drop(self, lost: RendezvousHandler) -> None:
        """Drop a handler whose store is lost; its heartbeats end with it."""
        if self._inner is lost:
            self._inner = None

    def _read_departures(self, place: Endpoint, within_s: float = math.inf) -> None:
        """Log why nodes have left, except for those that left before this one joined."""
        before = self._departed.get(place)
        known = self._excluded_read.get(place, 0)

        def read(store: Store) -> tuple[tuple[str, ...], tuple[Excluded, ...]]:
            self._entry.renew(store, place, JOINING)
            reasons = departures.departures_after(store, self._run_id, before or 0)
            return reasons, departures.excluded_after(store, self._run_id, known)

        found = self._stores.ask(place, read, within_s)
        if found is None:
            return
        reasons, excluded = found
        self._excluded_read[place] = known + len(excluded)
        for each in excluded:
            if each not in self._excluded:  # the same entry may be in the store before
                self._excluded.append(each)
                log.warning("a node is excluded: %s", each)
        self._departed[place] = (before or 0) + len(reasons)
        if before is not None:
            for why in reasons:
                log.warning("a node has left: %s", why)
            self._departure_seen = self._departure_seen or bool(reasons)

    def take_excluded(self) -> list[Excluded]:
        """Return the nodes that were excluded, as far as this one has read, and that no earlier call has returned."""
        found, self._not_taken = self._excluded[self._not_taken :], len(self._excluded)
        return found

    def saw_departure(self) -> bool:
        """Return whether a node has left since the last call."""
        if self._place is not None:
            self._read_departures(self._place)
        seen, self._departure_seen = self._departure_seen, False
        return seen

    def failed_elsewhere(self) -> str:
        """Return why another node has ended the job, as far as is known; empty: none has."""
        if self._waiting is not None and self._waiting.over:
            return self._waiting.over
        if self._place is None:
            return ""
        return self._stores.ask(self._place, lambda store: departures.over(store, self._run_id), CLOSE_S) or ""

    def trouble(self) -> str:
        """Return which endpoints do not answer, and why."""
        return self._stores.trouble()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join. A departed node counts too: the others must join a new rendezvous. 0 while the store is lost: the
        workers do not need it."""
        return self._waiting.count if self._waiting is not None else 0

    def _stop_polling(self) -> None:
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

    def _asked_to_leave(self, store: Store) -> str:
        return departures.asked_to_leave(store, self._run_id, self._entry.agent.number)

    @property
    def drain(self) -> str:
        """Why this node shall leave at a step boundary (`ttp drain`); empty: it was not asked to."""
        return self._waiting.drain if self._waiting is not None else ""

    def announce_leave(self, why: str) -> None:
        """Publish why this node will leave, before its ranks have ended: the others' save the same step, and meet anew. `leave` must follow."""
        if self._place is not None and not self._announced and not self._was_replaced():
            published = self._stores.ask(
                self._place, lambda store: departures.publish_departure(store, self._run_id, why), CLOSE_S
            )
            self._announced = published is not None

    def leave(self, why: str) -> None:
        """Publish why this node leaves, if the store is reachable, and keep the rendezvous open for the others."""
        self._stop_polling()
        if self._place is not None and not self._stores.hangs(self._place):
            place, replaced = self._place, self._was_replaced()

            def publish(store: Store) -> None:
                if not self._announced and not replaced:
                    departures.publish_departure(store, self._run_id, why)
                self._entry.renew(store, place, LEFT)

            self._stores.ask(place, publish, CLOSE_S)
            self._stores.linger(place)
        self._place = self._inner = None

    @property
    def node(self) -> str:
        """This node's name, as the others know it."""
        return self._entry.agent.node

    def exclude(self, reason: str) -> None:
        """Publish that this node is sick, and keep the rendezvous open for the others. A node that has not joined yet waits for a store in use,
        for EXCLUDE_S at most."""
        self._stop_polling()
        place, until_s, joined = self._place, time.monotonic() + EXCLUDE_S, self._place is not None
        while place is None and (place := self._stores.find_in_use()) is None and time.monotonic() < until_s:
            time.sleep(ROUND_S)
        self._place = self._inner = None
        if place is None or self._stores.hangs(place):
            log.warning("no rendezvous store answers: the other nodes do not learn that this one is excluded")
            return
        excluded, found = Excluded(self._entry.agent.node, reason), place

        def publish(store: Store) -> None:
            departures.publish_excluded(store, self._run_id, excluded)
            if joined:  # else no rendezvous counts this node, and the others need not meet again
                departures.publish_departure(store, self._run_id, f"{excluded.node} is sick")
            self._entry.renew(store, found, LEFT if self._spare_node else SICK)  # a spare has no place that were free

        self._stores.ask(place, publish, CLOSE_S)
        self._stores.linger(place)

    def shutdown(self, why: str = "") -> bool:
        """Close the rendezvous for all, if its store is reachable, and publish why the job failed (empty: it has not); end this agent's own
        store."""
        self._stop_polling()
        inner, self._inner = self._inner, None
        closed = False
        place = self._place
        ours = place is not None and not self._stores.hangs(place) and not self._was_replaced()
        if place is not None and ours and self._stores.look(place, CLOSE_S) is not None:
            publish = functools.partial(running_job.publish_end, run_id=self._run_id, own=self._entry.agent, why=why)
            others_wait = self._stores.ask(place, publish, CLOSE_S)
            if inner is not None:
                closing = BoundedCall(inner.shutdown)
                closed = closing.wait(CLOSE_S) and closing.succeeded
            if why or others_wait:
                self._stores.linger(place)
        self._stores.close()
        return closed
