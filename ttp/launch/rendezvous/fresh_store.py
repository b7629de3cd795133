"""The workers' store: a fresh one for every attempt, in the agent of the node that has rank 0.

torch's own handler makes one store for all restarts. The workers then read the addresses of their dead predecessors in it, and a node that joins
later waits for a key that is not written again: with torch 2.13 every restart of a gloo job fails. Here each rendezvous ends with a new, empty
store, whose address is published in the rendezvous store. Owns that store. Never hosted by a worker, so that it outlives rank 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from datetime import timedelta

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from ttp.addresses import LOOPBACK, address_of
from ttp.config import start_name
from ttp.errors import ConfigError
from ttp.exchange.sealed_store import attempts_seal, sealed
from ttp.identity.secret import Secret
from ttp.launch.hosts.listening import serve
from ttp.launch.rendezvous import departures, static_join
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.rendezvous.job_secret import JobSecret
from ttp.launch.rendezvous.multi_endpoint import CONNECT_S
from ttp.launch.rendezvous.running_job import RunningJob, RunningNode, WasReplaced
from ttp.launch.rendezvous.spare_nodes import PlaceTaken
from ttp.launch.rendezvous.store_failover import CLOSE_S, FailoverRendezvous
from ttp.launch.rendezvous.waiting_spare import Attached, PlaceGiven

log = logging.getLogger("ttp.launch")

_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_KEY = "ttp/job_store"
_ASSIGNED = "torchelastic/assigned_ranks"
"""Under which torch's agents find which ranks a node has."""
LOOK_TIMEOUT = timedelta(seconds=5)
"""How long a read of another node's store may take: the node may be lost."""


JOIN_S = 900.0
"""torchrun's time for all nodes of a static job to join."""

FIRST_LOG_S = 5.0
NEXT_LOG_S = 60.0
"""After how long a rendezvous logs what it waits for, first and again."""


class StoreNotReached(RuntimeError):
    """The agent cannot reach the store that it has made for a later attempt: its host name resolves differently now."""


@dataclass(frozen=True, slots=True)
class JobStore:
    """Where the workers of one attempt find their store (MASTER_ADDR, MASTER_PORT), and the attempt's number."""

    host: str
    port: int
    round_number: int
    """0 for the job's first attempt; it grows with each, and is the same on all nodes."""
    job_id: str = ""
    """The attempt's name."""

    def connect(self, timeout: timedelta) -> Store:
        """Connect to the store, after a check that its port is open: torch would retry by itself, and log each time. Raises OSError,
        RuntimeError."""
        socket.create_connection((self.host, self.port), CONNECT_S).close()
        return self.sealed(TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout))

    def sealed(self, store: Store) -> Store:
        """Return a client of the store whose entries are sealed, where this process has credentials."""
        return sealed(store, attempts_seal(self.job_id, log))

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.round_number}"

    @classmethod
    def decode(cls, text: str) -> JobStore:
        host, port, round_number = text.split()
        return cls(host, int(port), int(round_number))


def no_trouble() -> str:
    """Return that there is no known problem."""
    return ""


@contextlib.contextmanager
def log_while_waiting(waits_for: str, trouble: Callable[[], str] = no_trouble) -> Iterator[None]:
    """Log periodically what the body waits for, and its known problem; a new problem is logged as soon as it is known."""
    over = threading.Event()

    def write() -> None:
        begun_s, next_s, logged = time.monotonic(), 0.0, {""}
        while not over.wait(FIRST_LOG_S):
            why, waited_s = trouble(), time.monotonic() - begun_s
            if over.is_set() or (waited_s < next_s and why in logged):
                continue
            log.info("waiting for %s (%.0f s so far)%s", waits_for, waited_s, f"; {why}" if why else "")
            logged.add(why)
            next_s = waited_s + NEXT_LOG_S

    if not waits_for:
        yield
        return
    thread = threading.Thread(target=write, name="ttp-waiting-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()  # without a join: the thread may be waiting for DNS


class FreshStoreRendezvous(RendezvousHandler):
    """Wraps any of torch's handlers: same membership, a new store each time.

    `host` is this node's name or address as the other nodes see it. `same_keys_every_round` is True for a handler whose
    store keeps its keys from one rendezvous to the next (`static`), and does not know which nodes have joined: see `static_join`.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        host: str,
        *,
        same_keys_every_round: bool,
        waits_for: str = "",
        trouble: Callable[[], str] = no_trouble,
        join_timeout_s: float = JOIN_S,
        secret: JobSecret | None = None,
    ) -> None:
        """`waits_for`: how many nodes join, and at which endpoint, for the log; empty: nothing is logged.
        trouble: returns why the endpoint is unreachable, as far as it is known.
        join_timeout_s: how long to wait for nodes where the handler itself does not wait (`static`).
        secret: the job's; a FailoverRendezvous must have the same."""
        self._inner = inner
        self._host = host
        self._join_timeout_s = join_timeout_s
        self._collected = static_join.Collected(join_timeout_s) if same_keys_every_round else None
        self._waits_for = waits_for
        self._trouble = trouble
        self._meets_again = False
        self._next_round = 0
        self.places_taken: tuple[PlaceTaken, ...] = ()
        """On the node with rank 0, which spares take which places in this attempt."""
        self.attached: Attached | None = None
        """A spare node's connection to the job that runs; None: it takes no place while others train on."""
        self.given: PlaceGiven | None = None
        """The place in a running attempt that this node, a spare, was given; None: it has met the others."""
        self._met: tuple[str, list[int]] = ("", [])
        """On node 0: what it has answered the nodes of this attempt, and the numbers of their agents."""
        self._server: TCPStore | None = None
        self._job_store: JobStore | None = None
        self._job_secret = secret or JobSecret(inner.get_run_id())
        self._secret: Secret | None = None

    @property
    def host(self) -> str:
        """This node's name or address, as the other nodes see it."""
        return self._host

    @property
    def secret(self) -> Secret:
        """The secret of the last rendezvous' nodes: the given one, or one that node 0 has made. Raises RuntimeError before the first."""
        if self._secret is None:
            raise RuntimeError("no rendezvous yet: the nodes have no secret")
        return self._secret

    @property
    def job_store(self) -> JobStore:
        """The store of the last rendezvous. Raises RuntimeError before the first."""
        if self._job_store is None:
            raise RuntimeError("no rendezvous yet: there is no store for the workers")
        return self._job_store

    def job_store_has(self, key: str) -> bool | None:
        """Return whether the workers have written a key into their store; None: the store is lost with its node."""
        place = self.job_store
        try:
            store = place.sealed(self._server) if self._server is not None else place.connect(LOOK_TIMEOUT)
            return bool(store.check([key]))
        except (OSError, RuntimeError):  # torch's DistError
            return None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next rendezvous round; called by the agent before each attempt, after the last one's workers have ended. Raises
        RendezvousError when the nodes do not meet in time, or the job is over; ConfigError when they cannot in any attempt."""
        while True:
            self.given = self._wait_as_spare(self._inner) if isinstance(self._inner, FailoverRendezvous) else None
            if self.given is not None:
                return self._enter(self.given)
            self._job_secret.read()
            try:
                with log_while_waiting(self._waits_for, self._trouble):
                    return self._meet()
            except WasReplaced as replaced:
                log.warning("%s, which waits as a spare node", replaced)
                self.become_spare()

    def _wait_as_spare(self, inner: FailoverRendezvous) -> PlaceGiven | None:
        given = None
        try:
            given = inner.wait_as_spare(self.attached)
            return given
        finally:
            if given is None and self.attached is not None:
                self.attached.close()  # else the caller does, once its workers run

    def _enter(self, given: PlaceGiven) -> RendezvousInfo:
        """Take a lost node's place in the attempt that runs: torch's agent finds in the store which ranks it has, as the lost node's did."""
        self._meets_again, self.places_taken = False, ()
        self._job_store, self._secret = self.decode(given.job)
        self._next_round = given.job.start + 1
        store, nodes = HashStore(), given.job.nodes
        store.set(f"{_ASSIGNED}/{given.number}", json.dumps(nodes[given.number].assigned))
        return RendezvousInfo(
            store, given.number, len(nodes), RendezvousStoreInfo(self._job_store.host, self._job_store.port)
        )

    def become_spare(self) -> None:
        """Another node has this one's place: wait as a spare node, and let torch's agent begin anew without counting."""
        if isinstance(self._inner, FailoverRendezvous):
            self._inner.become_spare()
            self._meets_again = True

    def publish_running(self, store: Store | None, local_world_size: int) -> None:
        """Publish what runs, for spare nodes, once torch's agents have assigned the ranks in this store. Node 0's does."""
        answer, agents = self._met
        if store is None or not agents or not isinstance(self._inner, FailoverRendezvous):
            return
        keys = [f"{_ASSIGNED}/{node}" for node in range(len(agents))]

        def read() -> list[tuple[int, ...]]:
            if store.check(keys[:1]):
                return [tuple(json.loads(entry)) for entry in store.multi_get(keys)]
            size = local_world_size * len(agents)  # TORCH_ELASTIC_WORKER_IDENTICAL
            return [(local_world_size * node, size) * 2 for node in range(len(agents))]

        reading = BoundedCall(read)
        if not (reading.wait(CLOSE_S) and reading.succeeded):
            log.warning(
                "a lost node of this attempt is replaced by a restart only: the rendezvous store does not answer"
            )
            return
        nodes = tuple(map(RunningNode, agents, reading.result()))
        self._inner.publish_running(RunningJob(answer, self.job_store.round_number, self._inner.epoch, nodes))

    def decode(self, job: RunningJob) -> tuple[JobStore, Secret]:
        """Return the store and the secret of an attempt that runs. Raises ValueError, ConfigError."""
        job_store, secret = self._decode(job.answer)
        return replace(job_store, job_id=start_name(self.get_run_id(), job_store.round_number)), secret

    def _meet(self) -> RendezvousInfo:
        self._met = ("", [])
        joined = self._join()
        self._meets_again, self.places_taken = False, ()
        job_store, secret = self._agree(joined)
        job_id = start_name(self.get_run_id(), job_store.round_number)
        store = joined.store
        if self._collected is not None:
            store = PrefixStore(f"ttp/start/{job_store.round_number}", store)  # torch's agents keep their old keys too
        store = sealed(store, self._job_secret.seal(job_id, secret=secret))
        self._job_store, self._secret = replace(job_store, job_id=job_id), secret
        self._next_round = job_store.round_number + 1
        if isinstance(self._inner, FailoverRendezvous):
            self._inner.met(job_store.round_number, joined.world_size)
        address = RendezvousStoreInfo(job_store.host, job_store.port)
        return RendezvousInfo(store, joined.rank, joined.world_size, address)

    def _agree(self, joined: RendezvousInfo) -> tuple[JobStore, Secret]:
        """Return the store of the attempt that all nodes have joined, and their secret; node 0's agent makes the store, and closes the last
        attempt's. Each node has a ticket of its own, so that an answer of another attempt is not read."""
        if not isinstance(self._inner, FailoverRendezvous):  # which compares by itself, before it joins
            self._compare(joined)
        store = self._job_secret.sealed(joined.store, "meeting")
        if self._collected is not None:
            return self._agree_by_ticket(store, joined, self._collected)
        self._server = None
        taken, agent = (
            (self._inner.took_place, self._inner.agent_number)
            if isinstance(self._inner, FailoverRendezvous)
            else (None, 0)
        )
        ticket = uuid.uuid4().hex
        known = [ticket, self._next_round, agent, *(astuple(taken) if taken is not None else ())]
        store.set(f"{_KEY}/next_round/{joined.rank}", json.dumps(known))
        if joined.rank != 0:
            return self._decode(store.get(f"{_KEY}/{ticket}").decode())
        # Rank 0 may be a node that has just joined: the others know the attempt's number.
        reported = [json.loads(store.get(f"{_KEY}/next_round/{node}")) for node in range(joined.world_size)]
        self.places_taken = tuple(PlaceTaken(*names) for _, _, _, *names in reported if names)
        job_store, secret, answer = self._begin(max(number for _, number, *_ in reported), joined.world_size)
        for ticket, *_ in reported[1:]:
            store.set(f"{_KEY}/{ticket}", answer)
        self._met = (answer, [number for _, _, number, *_ in reported])
        return job_store, secret

    def _agree_by_ticket(
        self, store: Store, joined: RendezvousInfo, collected: static_join.Collected
    ) -> tuple[JobStore, Secret]:
        if joined.rank != 0:
            info = joined.bootstrap_store_info
            place = f"{info.master_addr}:{info.master_port}" if info is not None else "node 0"
            return self._decode(static_join.hand_in(store, joined.rank, self._join_timeout_s, place))
        # The last attempt's store is kept until all have joined: an agent whose workers have succeeded reads there that this node restarts,
        # and only then joins.
        handed_in = collected.collect(store, joined.world_size, self._failed_for_good)
        self._server = None
        job_store, secret, answer = self._begin(self._next_round, joined.world_size)
        static_join.answer(store, handed_in, answer)
        return job_store, secret

    def _begin(self, number: int, nodes: int) -> tuple[JobStore, Secret, str]:
        """Make an attempt's store, and its secret where none was given; return what the other nodes read."""
        host = LOOPBACK if nodes == 1 else self._host
        self._server = self._serve(host)
        job_store = JobStore(host, self._server.port, number)
        secret, published = self._job_secret.choose()
        return job_store, secret, f"{job_store.encode()} {published}"

    def _decode(self, answer: str) -> tuple[JobStore, Secret]:
        place, _, published = answer.rpartition(" ")
        return JobStore.decode(place), self._job_secret.take(published)

    def _compare(self, joined: RendezvousInfo) -> None:
        if joined.world_size > 1 and not self._job_secret.met:
            with contextlib.suppress(
                RuntimeError
            ):  # etcd's store lacks the operation; one that is lost is lost in the next call too
                self._job_secret.compare(joined.store)
                self._job_secret.met = True

    def _failed_for_good(self) -> str:
        """Return why another node cannot restart, from the last attempt's store; empty: it can, as far as is known."""
        if self._server is None or self._job_store is None:
            return ""
        return departures.failed_for_good(self._job_store.sealed(self._server))

    def _serve(self, host: str) -> TCPStore:
        """Make the workers' store. Raises ConfigError before the first attempt: an invalid address is not retryable, unlike a lost node."""
        try:
            return serve(host, 0, address_of(host))
        except (OSError, DistError) as error:
            text = (
                f"this node has rank 0 and cannot reach its own workers' store under its host name {host!r} ({error})."
                " Set --local-addr to an address of this node"
            )
            if self._job_store is None:
                raise ConfigError(text) from error
            raise StoreNotReached(text) from error

    def _join(self) -> RendezvousInfo:
        """Run the wrapped handler without a store of its own; the workers do not inherit the variable for that."""
        before = os.environ.get(_NO_SHARED_STORE)
        os.environ[_NO_SHARED_STORE] = "1"
        try:
            return self._inner.next_rendezvous()
        except RendezvousTimeoutError as error:
            raise error if str(error) else RendezvousTimeoutError(self._not_met()) from None
        except DistError as error:
            if self._collected is None:
                raise
            raise RendezvousConnectionError(self._not_met()) from error  # node 0's store: without it there is no job
        finally:
            if before is None:
                del os.environ[_NO_SHARED_STORE]
            else:
                os.environ[_NO_SHARED_STORE] = before

    def _not_met(self) -> str:
        why = self._trouble()
        return (
            f"the rendezvous timed out: this node waited for {self._waits_for or 'itself'}{f' ({why})' if why else ''}"
        )

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting() or int(self._meets_again)

    def meet_again(self) -> None:
        """Report a waiting node until the next rendezvous: a node is lost, and torch's agent then restarts without counting."""
        self._meets_again = True

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def saw_departure(self) -> bool:
        """Return whether another node has left since the last call."""
        return isinstance(self._inner, FailoverRendezvous) and self._inner.saw_departure()

    def failed_elsewhere(self) -> str:
        """Return why another node has ended the job; empty: none has, or the handler does not support it."""
        return self._inner.failed_elsewhere() if isinstance(self._inner, FailoverRendezvous) else ""

    def take_excluded(self) -> list[departures.Excluded]:
        """Return the nodes that were excluded since the last call, as far as they are known here."""
        return self._inner.take_excluded() if isinstance(self._inner, FailoverRendezvous) else []

    def exclude(self, reason: str) -> str:
        """Leave because this node is sick, and keep the rendezvous open for the other nodes; return the name by which they learn of it; empty: the
        handler cannot publish it."""
        self._server = None
        if not isinstance(self._inner, FailoverRendezvous):
            return ""
        self._inner.exclude(reason)
        return self._inner.node

    @property
    def drain(self) -> str:
        """Why this node shall leave at a step boundary; empty: it was not asked to, or the handler does not support it."""
        return self._inner.drain if isinstance(self._inner, FailoverRendezvous) else ""

    def announce_leave(self, why: str) -> None:
        """Publish why this node will leave, where the handler supports it. `leave` must follow."""
        if isinstance(self._inner, FailoverRendezvous):
            self._inner.announce_leave(why)

    def leave(self, why: str) -> None:
        """Leave, and keep the rendezvous open for the other nodes; publish why where the handler supports it."""
        self._server = None
        if isinstance(self._inner, FailoverRendezvous):
            self._inner.leave(why)

    def shutdown(self, why: str = "") -> bool:
        """Close the rendezvous for all nodes: the job is over. Publish why it failed, where the handler supports it."""
        self._server = None
        return self._inner.shutdown(why) if isinstance(self._inner, FailoverRendezvous) else self._inner.shutdown()
