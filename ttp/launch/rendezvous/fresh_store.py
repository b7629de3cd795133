"""The workers' store: a fresh one for every start of the job, in the launcher of the node that has rank 0.

torch's own handler makes one store and gives it to every restart. The workers then read the addresses that their dead
forerunners left in it, and a node that joins later waits for a key that nobody writes again: with torch 2.13 every
restart of a gloo job fails. Here each rendezvous ends with a new, empty store, whose address travels in the
rendezvous' own. It is never hosted by a worker, so that it outlives rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from ttp.errors import ConfigError
from ttp.launch.rendezvous import departures, static_join
from ttp.launch.rendezvous.store_failover import MovingRendezvous

log = logging.getLogger("ttp.launch")

_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_KEY = "ttp/job_store"
LOOK_TIMEOUT = timedelta(seconds=5)
"""How long a look into another node's store may take: the node may be gone."""


JOIN_S = 900.0
"""torchrun's time for all nodes of a static job to join."""

FIRST_WORD_S = 5.0
NEXT_WORD_S = 60.0
"""A rendezvous that takes so long says what it waits for, first and then again."""


class StoreNotReached(RuntimeError):
    """A later start's store is not reached from the launcher that has made it: this node's name has changed its meaning."""


@dataclass(frozen=True, slots=True)
class JobStore:
    """Where the workers of one start find their store (MASTER_ADDR, MASTER_PORT), and which start it is."""

    host: str
    port: int
    round_number: int
    """0 for the job's first start; higher at each later one, the same on all nodes."""

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.round_number}"

    @classmethod
    def decode(cls, text: str) -> JobStore:
        host, port, round_number = text.split()
        return cls(host, int(port), int(round_number))


def no_trouble() -> str:
    """Say that nothing is known to be wrong."""
    return ""


@contextlib.contextmanager
def telling(waits_for: str, trouble: Callable[[], str] = no_trouble) -> Iterator[None]:
    """Say now and then that what goes on within takes long, what it waits for, and what is known to be wrong; a new trouble is
    told as soon as it is known."""
    over = threading.Event()

    def tell() -> None:
        begun_s, next_s, told = time.monotonic(), 0.0, {""}
        while not over.wait(FIRST_WORD_S):
            why, waited_s = trouble(), time.monotonic() - begun_s
            if over.is_set() or (waited_s < next_s and why in told):
                continue
            log.info("waiting for %s (%.0f s so far)%s", waits_for, waited_s, f"; {why}" if why else "")
            told.add(why)
            next_s = waited_s + NEXT_WORD_S

    if not waits_for:
        yield
        return
    thread = threading.Thread(target=tell, name="ttp-waiting-words", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()  # the thread is not waited for: it may be asking a name server


class FreshStoreRendezvous(RendezvousHandler):
    """Wraps any of torch's handlers: same membership, a new store each time.

    `host` is this node's name or address as the other nodes see it. `same_keys_every_round` is True for a handler whose
    store keeps its keys from one rendezvous to the next (`static`), and does not know who has joined: see `tickets`.
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
    ) -> None:
        """`waits_for`: how many nodes meet, and where, in words for one who wonders why nothing happens; empty: not told.
        trouble: says why the place is not reached, as far as it is known.
        join_timeout_s: how long nodes are waited for where the handler itself does not wait (`static`)."""
        self._inner = inner
        self._host = host
        self._join_timeout_s = join_timeout_s
        self._collected = static_join.Collected(join_timeout_s) if same_keys_every_round else None
        self._waits_for = waits_for
        self._trouble = trouble
        self._meets_again = False
        self._next_round = 0
        self._server: TCPStore | None = None
        self._job_store: JobStore | None = None

    @property
    def job_store(self) -> JobStore:
        """The store of the last rendezvous. Raises RuntimeError before the first."""
        if self._job_store is None:
            raise RuntimeError("no rendezvous yet: there is no store for the workers")
        return self._job_store

    def job_store_has(self, key: str) -> bool | None:
        """Say whether the workers have written a key into their store; None when the store is gone with its node."""
        place = self.job_store
        try:
            store = self._server or TCPStore(
                place.host, place.port, is_master=False, wait_for_workers=False, timeout=LOOK_TIMEOUT
            )
            return bool(store.check([key]))
        except RuntimeError:  # torch's DistError
            return None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; called by the agent at every start of the workers, when those of the last are dead. Raises
        RendezvousError when this node does not meet the others: in too long a time, or as the job is over."""
        with telling(self._waits_for, self._trouble):
            return self._meet()

    def _meet(self) -> RendezvousInfo:
        joined = self._join()
        self._meets_again = False
        store, job_store = joined.store, self._agree(joined)
        if self._collected is not None:
            store = PrefixStore(f"ttp/start/{job_store.round_number}", store)  # the agents' own keys are old ones, too
        self._job_store, self._next_round = job_store, job_store.round_number + 1
        address = RendezvousStoreInfo(job_store.host, job_store.port)
        return RendezvousInfo(store, joined.rank, joined.world_size, address)

    def _agree(self, joined: RendezvousInfo) -> JobStore:
        """Return the store of the start that all nodes have joined; node 0's launcher makes it, and closes the last start's."""
        if self._collected is not None:
            return self._agree_by_ticket(joined, self._collected)
        self._server = None
        joined.store.set(f"{_KEY}/next_round/{joined.rank}", str(self._next_round))
        if joined.rank == 0:
            # A node that has just joined may be the one with rank 0: the others know how often the job was started.
            known = [int(joined.store.get(f"{_KEY}/next_round/{node}")) for node in range(joined.world_size)]
            self._server = self._serve()
            joined.store.set(_KEY, JobStore(self._host, self._server.port, max(known)).encode())
        return JobStore.decode(joined.store.get(_KEY).decode())

    def _agree_by_ticket(self, joined: RendezvousInfo, collected: static_join.Collected) -> JobStore:
        if joined.rank != 0:
            info = joined.bootstrap_store_info
            place = f"{info.master_addr}:{info.master_port}" if info is not None else "node 0"
            return JobStore.decode(static_join.hand_in(joined.store, joined.rank, self._join_timeout_s, place))
        # The last start's store is kept until all have joined: a launcher whose workers have succeeded hears there that this one
        # starts again, and only then does it join.
        handed_in = collected.collect(joined.store, joined.world_size, self._failed_for_good)
        self._server = None
        self._server = self._serve()
        job_store = JobStore(self._host, self._server.port, static_join.count_start(joined.store))
        static_join.answer(joined.store, handed_in, job_store.encode())
        return job_store

    def _failed_for_good(self) -> str:
        """Return what another node has said in the last start's store, if it cannot start again."""
        return departures.failed_for_good(self._server) if self._server is not None else ""

    def _serve(self) -> TCPStore:
        """Make the workers' store. Raises ConfigError before the first start: unlike a lost node, a wrong address stays wrong."""
        try:
            return TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        except DistError as error:
            words = (
                f"this node has rank 0 and cannot reach the workers' store that it has made, under its own name"
                f" {self._host!r} ({error}); name an address of this node with --local-addr"
            )
            if self._job_store is None:
                raise ConfigError(words) from error
            raise StoreNotReached(words) from error

    def _join(self) -> RendezvousInfo:
        """Run the wrapped handler, told not to make its own store; the workers do not inherit the variable."""
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
        return f"this node waited for {self._waits_for or 'itself'}, and they have not met in time{': ' if why else ''}{why}"

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting() or int(self._meets_again)

    def meet_again(self) -> None:
        """Act as if a node waited until the next rendezvous: one is lost, and torch's agent then starts again uncounted."""
        self._meets_again = True

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def heard_of_a_parting(self) -> bool:
        """Say whether another node has told since the last question that it leaves."""
        return isinstance(self._inner, MovingRendezvous) and self._inner.heard_of_a_parting()

    def failed_elsewhere(self) -> str:
        """Return why another node has ended the job; empty if none has, or there is no way to hear of it."""
        return self._inner.failed_elsewhere() if isinstance(self._inner, MovingRendezvous) else ""

    def leave(self, why: str) -> None:
        """Go, and leave the rendezvous open for the other nodes; they are told why where there is a way to."""
        self._server = None
        if isinstance(self._inner, MovingRendezvous):
            self._inner.leave(why)

    def shutdown(self, why: str = "") -> bool:
        """Close the rendezvous for all nodes: the job is over. They are told why it failed, where there is a way to."""
        self._server = None
        return self._inner.shutdown(why) if isinstance(self._inner, MovingRendezvous) else self._inner.shutdown()
