"""A spare node's connection to the job that runs: its controller may give it the places of a lost node's ranks.

Owns that connection, under a certificate without ranks, from the time at which the rendezvous store names the attempt until this node's own workers
run. Starts no process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ttp.errors import TTPError
from ttp.identity.secret import Secret
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.rendezvous.running_job import RunningJob
from ttp.proto.messages import Replace, TakePlaces, Thaw
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp.launch")


class AttachedSpare:
    """One spare node's. `running` and `take` may be called from any thread, the others are the agent's main thread's."""

    def __init__(
        self, launching: LaunchContext, places: int, decode: Callable[[RunningJob], tuple[JobStore, Secret]]
    ) -> None:
        """`places`: so many ranks a node has. `decode(job)`: the attempt's store and secret."""
        self._launching = launching
        self._places = places
        self._decode = decode
        self._job: RunningJob | None = None
        self._client: ControllerClient | None = None
        self._came = threading.Condition()  # guards the order
        self._order: TakePlaces | None = None

    # --- for the connection ---

    @property
    def places(self) -> int:
        return self._places

    def running(self) -> Mapping[int, int]:
        return {}

    def take(self, order: Replace | TakePlaces | Thaw) -> None:
        if isinstance(order, TakePlaces):
            log.warning("controller: take the places of %s, whose node is lost", ranks_text(order.ranks))
            with self._came:
                self._order = order
                self._came.notify_all()

    # --- for the agent ---

    @property
    def leader(self) -> str:
        """The address of the controller that has sent the order, as far as is known."""
        return self._client.leader if self._client is not None else ""

    @property
    def job_runs(self) -> bool:
        """Whether the job's controller is connected, and has not ordered its ranks to exit."""
        client = self._client
        return client is not None and client.connected and client.sent_away_monotonic_s is None

    def follow(self, job: RunningJob) -> None:
        """Attach to this attempt's controller, once there is one, in place of an earlier attempt's."""
        if job == self._job:
            return
        self.close()
        self._job = job
        try:
            job_store, secret = self._decode(job)
            if (identities := self._launching.identities) is not None:
                identities.begin(secret, job_store.job_id, job_store.round_number, ())
        except (ValueError, TTPError) as error:
            log.warning("this spare node takes no place in the attempt that runs: %s", error)
            return
        self._client = ControllerClient(
            job_store,
            {},
            lambda address, pids: self._launching.open_link(address, job_store.job_id, pids, self),
            lost_store_level=logging.DEBUG,
        )
        self._client.start()

    def order(self, within_s: float) -> TakePlaces | None:
        """Return the newest order, which is waited for so long; None: there is none, or the ranks were ordered to exit since."""
        with self._came:
            self._came.wait_for(lambda: self._order is not None, within_s)
            if self._client is not None and self._client.sent_away_monotonic_s is not None:
                self._order = None
            return self._order

    def refuse(self, why: str) -> None:
        """Report that the order, if there is one, cannot be carried out."""
        with self._came:
            order, self._order = self._order, None
        if order is not None and self._client is not None:
            for rank in order.ranks:
                self._client.replace_failed(rank, order.freeze_id, why)

    def close(self) -> None:
        """End the connection: this node's own workers run, or it follows another attempt."""
        client, self._client, self._job = self._client, None, None
        with self._came:
            self._order = None
        if client is not None:
            client.close()
