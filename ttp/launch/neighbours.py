"""What the launchers of one start tell each other while it goes on, through the workers' store: that they are there, when the
fault began, and how their workers have ended.

    ttp/nodes/alive/<node>   a number that grows while that node's launcher lives
    ttp/nodes/told           how often something below was written: what to look at each time
    ttp/nodes/fault          how many seconds ago the fault had begun when the first launcher told of it
    ttp/nodes/lost           the node of which the store's launcher has heard nothing for LOST_S
    ttp/nodes/restarts       a node whose workers have failed, and that starts them again
    ttp/nodes/failed         a node on which the job has failed for good
    ttp/nodes/succeeded      on how many nodes all workers have succeeded
    ttp/nodes/seen           on how many nodes that is known of all

The store is a start's own, so that nothing in it is about another one. Ages, not times, are told: the nodes' clocks may
differ. Owns the keys and one thread, as a call to a store behind a pulled cable may never return. Decides nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ttp.launch.rendezvous import JobStore

log = logging.getLogger("ttp.launch")

LOOK_S = 1.0
"""Between two looks into the store."""
LOST_S = 30.0
"""A node of which nothing was heard for so long is lost."""
CONNECT_S = 3.0
FLUSH_S = 2.0
"""How long the end of a start waits for what is still to be told."""

_TOLD = "ttp/nodes/told"
_FAULT = "ttp/nodes/fault"
_LOST = "ttp/nodes/lost"
_RESTARTS = "ttp/nodes/restarts"
_FAILED = "ttp/nodes/failed"
_SUCCEEDED = "ttp/nodes/succeeded"
_SEEN = "ttp/nodes/seen"


class Neighbours:
    """One launcher's way to the others, for one start. All but the thread's own calls return at once."""

    def __init__(
        self,
        place: JobStore,
        node: int,
        nodes: int,
        *,
        look_s: float | None = None,
        lost_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`node`: this launcher's number (group rank) of so many; the one with 0 has the store. Times: see LOOK_S, LOST_S."""
        self._clock = clock
        self._place = place
        self._node = node
        self._nodes = nodes
        self._look_s = LOOK_S if look_s is None else look_s
        self._lost_s = LOST_S if lost_s is None else lost_s
        self._lock = threading.Lock()  # guards all below
        self._to_tell: dict[str, str] = {}
        self._fault_begun_s: float | None = None
        self._heard: dict[str, str] = {}
        self._has_succeeded = self._counted = False
        self._succeeded = 0
        self._seen = 0
        self._answered_s = self._asked_s = clock()
        self._store_gone = ""
        """Why the store cannot be asked any more: its launcher has ended, or its node is lost."""
        self._out_of_reach = False
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-neighbours", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let what is to be told go out, and end the thread; one whose call hangs is left to itself."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(FLUSH_S)

    # --- telling ---

    def tell_fault(self, begun_monotonic_s: float) -> None:
        """Say that a fault has begun here; what another node has told before stays."""
        with self._lock:
            if _FAULT in self._heard:
                return
            self._to_tell[_FAULT] = str(begun_monotonic_s)
        self._wake.set()

    def tell_restart(self, words: str) -> None:
        """Say that workers here have failed, and are started again."""
        self._tell(_RESTARTS, words)

    def tell_failed(self, words: str) -> None:
        """Say that workers here have failed, and are not started again."""
        self._tell(_FAILED, words)

    def tell_succeeded(self) -> None:
        """Say that all workers here have succeeded; said again, it counts once."""
        with self._lock:
            self._has_succeeded = not self._counted
        self._wake.set()

    def _tell(self, key: str, words: str) -> None:
        with self._lock:
            self._to_tell[key] = words
        self._wake.set()

    # --- hearing ---

    @property
    def fault_begun_monotonic_s(self) -> float | None:
        """When the start's fault began by another node's word, on this process's clock; None: none has told of one."""
        with self._lock:
            return self._fault_begun_s

    @property
    def restarts(self) -> str:
        """Say which node starts its workers again, as they have failed; empty: none has said so."""
        with self._lock:
            return self._heard.get(_RESTARTS, "")

    @property
    def over(self) -> str:
        """Say why nothing more is to come from the others: the job has failed on a node, or the store cannot be asked."""
        with self._lock:
            return self._heard.get(_FAILED, "") or self._store_gone or self._silent_store()

    @property
    def all_have_succeeded(self) -> bool:
        """Say whether the workers of all nodes have succeeded, and every launcher that asks this one's store knows it."""
        with self._lock:
            return self._succeeded == self._nodes and (self._node != 0 or self._seen >= self._nodes)

    @property
    def lost(self) -> str:
        """Say which node is lost: nothing was heard of it for LOST_S. A launcher that has ended and said goodbye is not."""
        with self._lock:
            return self._heard.get(_LOST, "") or (self._store_gone if self._out_of_reach else self._silent_store())

    def _silent_store(self) -> str:
        now = self._clock()
        if now - self._asked_s > self._lost_s / 2:  # this launcher was stopped, or had no time to ask: it knows nothing
            self._answered_s = now
        self._asked_s = now
        silent_s = now - self._answered_s
        if silent_s < self._lost_s:
            return ""
        return f"node 0 (the workers' store at {self._place.host}:{self._place.port}) has not answered for {silent_s:.0f} s"

    # --- the thread ---

    def _run(self) -> None:
        try:
            limit = timedelta(seconds=self._lost_s)
            store = TCPStore(self._place.host, self._place.port, is_master=False, wait_for_workers=False, timeout=limit)
            presence = _Presence(store, self._nodes, self._lost_s) if self._node == 0 else None
            known = 0
            while True:
                last = self._stopping.is_set()
                self._wake.clear()
                store.add(_alive(self._node), 1)
                if presence is not None and not last and (words := presence.missing()):
                    self._tell(_LOST, words)
                self._say(store)
                if (told := int(store.add(_TOLD, 0))) != known:
                    known = told
                    self._hear(store)
                with self._lock:
                    self._answered_s = self._clock()
                if last:
                    return
                self._wake.wait(self._look_s)
        except Exception as error:  # torch's DistError, as a rule; whatever it is, the job goes on
            if not self._stopping.is_set():
                self._lose((str(error) or type(error).__name__).splitlines()[0])

    def _say(self, store: Store) -> None:
        with self._lock:
            to_tell, self._to_tell = self._to_tell, {}
            succeeded, self._has_succeeded = self._has_succeeded, False
            self._counted = self._counted or succeeded
        for key, text in to_tell.items():
            if key == _FAULT:
                text = f"{self._node} {self._clock() - float(text):.3f}"
            store.compare_set(key, "", text)
        if succeeded:
            store.add(_SUCCEEDED, 1)
        if to_tell or succeeded:
            store.add(_TOLD, 1)

    def _hear(self, store: Store) -> None:
        """Read what was told. Nobody looks at the counters but those whose workers have succeeded: they are two."""
        heard = {}
        for key in (_FAULT, _LOST, _RESTARTS, _FAILED):
            if store.check([key]):
                heard[key] = store.get(key).decode()
        succeeded = int(store.add(_SUCCEEDED, 0))
        seen = 0
        with self._lock:
            news = succeeded == self._nodes != self._succeeded
        if news:
            store.add(_SEEN, 1)
            store.add(_TOLD, 1)
        if succeeded == self._nodes:
            seen = int(store.add(_SEEN, 0))
        with self._lock:
            self._heard, self._succeeded, self._seen = heard, succeeded, seen
            if _FAULT in heard and self._fault_begun_s is None:
                node, age = heard[_FAULT].split()
                if int(node) != self._node:
                    self._fault_begun_s = self._clock() - float(age)

    def _lose(self, why: str) -> None:
        """Find out whether the launcher with the store has ended, or cannot be reached."""
        out_of_reach = False
        try:
            socket.create_connection((self._place.host, self._place.port), CONNECT_S).close()
        except ConnectionRefusedError:
            pass
        except OSError:
            out_of_reach = True
        with self._lock:
            self._out_of_reach = out_of_reach
            self._store_gone = f"node 0 {'cannot be reached' if out_of_reach else 'has left'} ({why})"


class _Presence:
    """Knows which nodes' numbers still grow. In the launcher that has the store."""

    def __init__(self, store: Store, nodes: int, lost_s: float) -> None:
        self._table = store
        self._keys = [_alive(node) for node in range(nodes)]
        self._lost_s = lost_s
        for key in self._keys:
            store.add(key, 0)
        self._values: list[bytes] = [b""] * nodes
        self._changed_s = [time.monotonic()] * nodes
        self._looked_s = time.monotonic()

    def missing(self) -> str:
        """Name the nodes that are lost; looks now and then only."""
        now = time.monotonic()
        absent_s, wanted_s = now - self._looked_s, self._lost_s / 10
        if absent_s < wanted_s:
            return ""
        self._looked_s = now
        values = self._table.multi_get(self._keys)
        late = absent_s > self._lost_s / 2  # this launcher itself was stopped: it knows nothing of the others
        for node, value in enumerate(values):
            if late or value != self._values[node]:
                self._values[node], self._changed_s[node] = value, now
        lost = [node for node, since in enumerate(self._changed_s) if now - since >= self._lost_s]
        if not lost:
            return ""
        names = f"node{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
        return f"nothing was heard of {names} of {len(self._keys)} for {self._lost_s:.0f} s"


def _alive(node: int) -> str:
    return f"ttp/nodes/alive/{node}"
