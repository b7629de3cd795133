"""What the launchers of one start tell each other while it goes on, through the workers' store: that they are there, when the
fault began, and how their workers have ended.

    ttp/nodes/alive/<node>   a number that grows while that node's launcher lives
    ttp/nodes/told           how often something below was written: what to look at each time
    ttp/nodes/fault          how many seconds ago the fault had begun when the first launcher told of it
    ttp/nodes/lost           the nodes of which the store's launcher has heard nothing for LOST_S; empty when they are heard again
    ttp/nodes/restarts       a node whose workers have failed, and that starts them again
    ttp/nodes/failed         a node on which the job has failed for good, or that cannot start again
    ttp/nodes/succeeded/<node>   that all workers there have succeeded
    ttp/nodes/seen/<node>        that it is known there of all nodes

The store is a start's own, so that nothing in it is about another one. Ages, not times, are told: the nodes' clocks may
differ. Every key may be written again: a call that has failed is made once more over a new connection. Owns the keys and one
thread, as a call to a store behind a pulled cable may never return. Decides nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ttp.launch.rendezvous.departures import FAILED
from ttp.launch.rendezvous.fresh_store import JobStore

log = logging.getLogger("ttp.launch")

LOOK_S = 1.0
"""Between two looks into the store."""
LOST_S = 30.0
"""A node of which nothing was heard for so long is lost."""
CONNECT_S = 3.0
FLUSH_S = 2.0
"""How long the end of a start waits for what is still to be told."""
READ_S = 3.0
"""How long whoever keeps the store then waits for the others to read it."""

_TOLD = "ttp/nodes/told"
_FAULT = "ttp/nodes/fault"
_LOST = "ttp/nodes/lost"
_RESTARTS = "ttp/nodes/restarts"
_SUCCEEDED = "ttp/nodes/succeeded"
_SEEN = "ttp/nodes/seen"


class PeerAgents:
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
        self._has_succeeded = False
        self._succeeded = self._seen = False
        """All nodes' workers, and: all nodes know it."""
        self._answered_s = self._asked_s = self._begun_s = clock()
        self._reached = False
        self._trouble = ""
        """What the last call to the store has failed with."""
        self._store_gone = ""
        """Why the store cannot be asked any more: its launcher has ended it."""
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
            self._thread.join(FLUSH_S + READ_S)

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
        self._tell(FAILED, words)

    def tell_succeeded(self) -> None:
        """Say that all workers here have succeeded; said again, it counts once."""
        with self._lock:
            self._has_succeeded = True
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
    def failure(self) -> str:
        """Say what ended this start on a node, in the words of its launcher, or which one was lost; empty: nobody has told."""
        with self._lock:
            return next((words for key in (_RESTARTS, FAILED, _LOST) if (words := self._heard.get(key, ""))), "")

    @property
    def failed(self) -> str:
        """Say on which node the job has failed for good, in the words of its launcher; empty: on none."""
        with self._lock:
            return self._heard.get(FAILED, "")

    @property
    def over(self) -> str:
        """Say why nothing more is to come from the others: the job has failed on a node, or the store cannot be asked."""
        with self._lock:
            return self._heard.get(FAILED, "") or self._store_gone or self._silent_store()

    @property
    def all_have_succeeded(self) -> bool:
        """Say whether the workers of all nodes have succeeded, and every launcher that asks this one's store knows it."""
        with self._lock:
            return self._succeeded and (self._node != 0 or self._seen)

    @property
    def lost(self) -> str:
        """Say which node is lost: nothing was heard of it for LOST_S. A launcher that has ended and said goodbye is not."""
        with self._lock:
            return self._heard.get(_LOST, "") or ("" if self._store_gone else self._silent_store())

    @property
    def unreached(self) -> str:
        """Say that node 0's store has not answered here once, and with what error; empty: it has, or the start is young."""
        with self._lock:
            if self._reached or self._clock() - self._begun_s < self._lost_s / 2:
                return ""
            error = f" ({self._trouble})" if self._trouble else ""
            return f"the workers' store on node 0, {self._place.host}:{self._place.port}, was never reached from here{error}"

    def _silent_store(self) -> str:
        now = self._clock()
        if now - self._asked_s > self._lost_s / 2:  # this launcher was stopped, or had no time to ask: it knows nothing
            self._answered_s = now
        self._asked_s = now
        silent_s = now - self._answered_s
        if silent_s < self._lost_s:
            return ""
        error = f" ({self._trouble})" if self._trouble else ""
        where = f"{self._place.host}:{self._place.port}"
        return f"node 0 (the workers' store at {where}) has not answered for {silent_s:.0f} s{error}"

    # --- the thread ---

    def _run(self) -> None:
        """Look until told to stop, over a new connection where one has failed: a lost answer is not yet a lost node."""
        presence = _Presence(self._nodes, self._lost_s) if self._node == 0 else None
        while True:
            try:
                self._look(self._connect(), presence)
                return
            except Exception as error:  # torch's DistError, as a rule; whatever it is, the job goes on
                if self._stopping.is_set():
                    return
                with self._lock:
                    self._trouble = (str(error) or type(error).__name__).splitlines()[0]
                    if isinstance(error, ConnectionRefusedError) and self._reached:
                        self._store_gone = f"node 0 has left ({self._place.host}:{self._place.port} was closed)"
                        return
            self._stopping.wait(self._look_s)

    def _connect(self) -> Store:
        """Look first whether the place takes connections: torch would try again and again by itself, and log each time."""
        place = self._place
        socket.create_connection((place.host, place.port), CONNECT_S).close()
        limit = timedelta(seconds=self._lost_s)
        return TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=limit)

    def _look(self, store: Store, presence: _Presence | None) -> None:
        known = None
        while True:
            last = self._stopping.is_set()
            self._wake.clear()
            store.add(_alive(self._node), 1)
            if presence is not None and not last and (words := presence.news(store)) is not None:
                self._tell(_LOST, words)
            self._say(store)
            if (told := int(store.add(_TOLD, 0))) != known:
                known = told
                self._hear(store)
            with self._lock:
                self._answered_s, self._reached, self._trouble = self._clock(), True, ""
            if last:
                if presence is not None and store.check([FAILED]):
                    self._until_read(store)
                return
            self._wake.wait(self._look_s)

    def _until_read(self, store: Store) -> None:
        """Keep the store until the others have looked into it, if they do within READ_S: it ends with this launcher."""
        others = [_alive(node) for node in range(self._nodes) if node != self._node]
        for key in others:
            store.add(key, 0)  # what is read must be there
        before, until_s = store.multi_get(others), time.monotonic() + READ_S
        while time.monotonic() < until_s:
            # One look may have been half done.
            if all(int(now) >= int(then) + 2 for now, then in zip(store.multi_get(others), before, strict=True)):
                return
            time.sleep(self._look_s / 10)

    def _say(self, store: Store) -> None:
        """Write what is to be told; it stays to be told until all of it is written."""
        with self._lock:
            to_tell, succeeded = dict(self._to_tell), self._has_succeeded
        for key, text in to_tell.items():
            if key == _LOST:  # the only one that changes, and written by one node only
                store.set(key, text)
                continue
            if key == _FAULT:
                text = f"{self._node} {self._clock() - float(text):.3f}"
            store.compare_set(key, "", text)
        if succeeded:
            store.set(f"{_SUCCEEDED}/{self._node}", "1")
        if to_tell or succeeded:
            store.add(_TOLD, 1)
        with self._lock:
            self._to_tell = {key: text for key, text in self._to_tell.items() if to_tell.get(key) != text}
            self._has_succeeded = self._has_succeeded and not succeeded

    def _hear(self, store: Store) -> None:
        """Read what was told. Nobody looks at the successes but those whose workers have succeeded."""
        heard = {}
        for key in (_FAULT, _LOST, _RESTARTS, FAILED):
            if store.check([key]):
                heard[key] = store.get(key).decode()
        succeeded = self._all_have(store, _SUCCEEDED)
        with self._lock:
            news = succeeded and not self._succeeded
            self._succeeded = succeeded  # known before it is said to be: the store may end right after
        if news:
            store.set(f"{_SEEN}/{self._node}", "1")
            store.add(_TOLD, 1)
        seen = succeeded and self._all_have(store, _SEEN)
        with self._lock:
            self._heard, self._seen = heard, seen
            if _FAULT in heard and self._fault_begun_s is None:
                node, age = heard[_FAULT].split()
                if int(node) != self._node:
                    self._fault_begun_s = self._clock() - float(age)

    def _all_have(self, store: Store, key: str) -> bool:
        return store.check([f"{key}/{node}" for node in range(self._nodes)])


class _Presence:
    """Knows which nodes' numbers still grow. In the launcher that has the store."""

    def __init__(self, nodes: int, lost_s: float) -> None:
        self._keys = [_alive(node) for node in range(nodes)]
        self._lost_s = lost_s
        self._told: str | None = None
        self._values: list[bytes] = [b""] * nodes
        self._changed_s = [time.monotonic()] * nodes
        self._looked_s = time.monotonic()

    def news(self, store: Store) -> str | None:
        """Name the nodes that are lost (empty: none), when it has changed; looks now and then only."""
        now = time.monotonic()
        absent_s, wanted_s = now - self._looked_s, self._lost_s / 10
        if absent_s < wanted_s:
            return None
        if self._told is None:
            for key in self._keys:
                store.add(key, 0)  # what is read must be there
            self._told = ""
        values = store.multi_get(self._keys)
        self._looked_s = now
        late = absent_s > self._lost_s / 2  # this launcher itself was stopped: it knows nothing of the others
        for node, value in enumerate(values):
            if late or value != self._values[node]:
                self._values[node], self._changed_s[node] = value, now
        lost = [node for node, since in enumerate(self._changed_s) if now - since >= self._lost_s]
        words = ""
        if lost:
            names = f"node{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            words = f"nothing was heard of {names} of {len(self._keys)} for {self._lost_s:.0f} s"
        if words == self._told:
            return None
        self._told = words
        return words


def _alive(node: int) -> str:
    return f"ttp/nodes/alive/{node}"
