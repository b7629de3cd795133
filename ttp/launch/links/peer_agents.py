"""What the agents of one attempt exchange through the workers' store: heartbeats, when the fault began, and how their workers ended.

    ttp/nodes/alive/<node>   a counter that grows while that node's agent runs
    ttp/nodes/changes        how often a key below was written: the one to poll
    ttp/nodes/fault          the fault's age in seconds when the first agent published it
    ttp/nodes/lost           the nodes without a heartbeat for LOST_S; empty when they are back
    ttp/nodes/restarts       a node whose workers have failed, and that restarts them
    ttp/nodes/failed         a node on which the job has failed for good, or that cannot restart
    ttp/nodes/succeeded/<node>   all workers there have succeeded
    ttp/nodes/seen/<node>        that node knows that the workers of all nodes have succeeded
    ttp/nodes/seat/<node>        which agent has taken that node's place, after it was lost

Each attempt has its own store, so that no key is another attempt's. Ages are published instead of times: the nodes' clocks may differ. Every
key may be written twice: a call that failed is repeated over a new connection. The two counters have no seal (`sealed_store.py`). One that another
program counts up hides that a node is lost, or has the agents read once more; one that it holds back has a node taken for lost, or delays news.
Owns the keys, and one thread: a call to a store behind a broken network may never return. Never decides anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.exchange.sealed_store import unsealed
from ttp.launch.rendezvous.departures import FAILED
from ttp.launch.rendezvous.fresh_store import JobStore

log = logging.getLogger("ttp.launch")

LOOK_S = 1.0
"""Between two reads of the store."""
LOST_S = 30.0
"""A node without a heartbeat for so long is lost."""
FLUSH_S = 2.0
"""How long the end of an attempt waits for unpublished keys."""
SILENT_S = 3.0
"""A store without an answer for so long is lost with its node, as a rule: the end of an attempt that is followed by another does not wait for it."""
READ_S = 3.0
"""How long the store's agent then waits for the others to read them."""

NODE_REPLACED = "this node was lost, and another one has its place"

_CHANGES = "ttp/nodes/changes"
_FAULT = "ttp/nodes/fault"
_LOST = "ttp/nodes/lost"
_RESTARTS = "ttp/nodes/restarts"
_SUCCEEDED = "ttp/nodes/succeeded"
_SEEN = "ttp/nodes/seen"


class PeerAgents:
    """One agent's connection to the others, for one attempt. Only the thread's own calls block."""

    def __init__(
        self,
        place: JobStore,
        node: int,
        nodes: int,
        *,
        look_s: float | None = None,
        lost_s: float | None = None,
        seated: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`node`: this agent's number (group rank) of so many; number 0 has the store. Times: see LOOK_S, LOST_S. `seated`: this agent has the place
        of one that was lost, under this name; empty: it was there from the start."""
        self._clock = clock
        self._place = place
        self._node = node
        self._nodes = nodes
        self._look_s = LOOK_S if look_s is None else look_s
        self._lost_s = LOST_S if lost_s is None else lost_s
        self._seated = seated
        self._lock = threading.Lock()  # guards all below
        self._was_replaced = False
        self._unpublished: dict[str, str] = {}
        self._fault_begun_s: float | None = None
        self._published: dict[str, str] = {}
        """The keys of all agents, as last read."""
        self._has_succeeded = False
        self._succeeded = self._seen = False
        """All nodes' workers have, and: all nodes know it."""
        self._answered_s = self._asked_s = self._begun_s = clock()
        self._reached = False
        self._trouble = ""
        """The error of the last call to the store."""
        self._store_gone = ""
        """Why the store is closed: its agent has exited."""
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-peer-agents", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Publish what is still unpublished, and end the thread; a thread whose call hangs is abandoned. It publishes all the same, should the
        store answer after all: only an agent that then ends waits for a store that has been silent."""
        self._stopping.set()
        self._wake.set()
        with self._lock:
            silent = self._clock() - self._answered_s >= SILENT_S and FAILED not in self._unpublished
        if self._thread.ident is not None and not silent:
            self._thread.join(FLUSH_S + READ_S)

    # --- what this agent publishes ---

    def publish_fault(self, begun_monotonic_s: float) -> None:
        """Publish that a fault has begun on this node, unless another node has published it before."""
        with self._lock:
            if _FAULT in self._published:
                return
            self._unpublished[_FAULT] = str(begun_monotonic_s)
        self._wake.set()

    def publish_restart(self, text: str) -> None:
        """Publish that workers on this node have failed and will restart."""
        self._publish(_RESTARTS, text)

    def publish_failed(self, text: str) -> None:
        """Publish that workers on this node have failed and will not restart."""
        self._publish(FAILED, text)

    def publish_succeeded(self) -> None:
        """Publish that all workers on this node have succeeded; idempotent."""
        with self._lock:
            self._has_succeeded = True
        self._wake.set()

    def _publish(self, key: str, text: str) -> None:
        with self._lock:
            self._unpublished[key] = text
        self._wake.set()

    # --- what the others have published ---

    @property
    def fault_begun_monotonic_s(self) -> float | None:
        """When the attempt's fault began as another node published it, on this process's clock; None: no node has."""
        with self._lock:
            return self._fault_begun_s

    @property
    def restarts(self) -> str:
        """Which node restarts its failed workers; empty: no node has published it."""
        with self._lock:
            return self._published.get(_RESTARTS, "")

    @property
    def failure(self) -> str:
        """What ended this attempt on a node, as its agent published it, or which node was lost; empty: none is known."""
        with self._lock:
            return next((text for key in (_RESTARTS, FAILED, _LOST) if (text := self._published.get(key, ""))), "")

    @property
    def failed(self) -> str:
        """On which node the job has failed for good, as its agent published it; empty: on none."""
        with self._lock:
            return self._published.get(FAILED, "")

    @property
    def over(self) -> str:
        """Why the others will publish nothing more: the job has failed on a node, or the store is lost."""
        with self._lock:
            return self._published.get(FAILED, "") or self._store_gone or self._silent_store()

    @property
    def all_have_succeeded(self) -> bool:
        """Whether the workers of all nodes have succeeded, and every agent that reads this one's store knows it."""
        with self._lock:
            return self._succeeded and (self._node != 0 or self._seen)

    @property
    def lost(self) -> str:
        """Which node is lost: it had no heartbeat for LOST_S. An agent that has exited in order is not lost."""
        with self._lock:
            return self._published.get(_LOST, "") or ("" if self._store_gone else self._silent_store())

    @property
    def was_replaced(self) -> bool:
        """Whether another agent has taken this one's place: it was lost. It publishes nothing from then on."""
        with self._lock:
            return self._was_replaced

    @property
    def unreached(self) -> str:
        """That node 0's store has never answered this node, and with what error; empty: it has, or the attempt has just begun."""
        with self._lock:
            if self._reached or self._clock() - self._begun_s < self._lost_s / 2:
                return ""
            error = f" ({self._trouble})" if self._trouble else ""
            return (
                f"this node never reached the workers' store on node 0 ({self._place.host}:{self._place.port}){error}"
            )

    def _silent_store(self) -> str:
        now = self._clock()
        if now - self._asked_s > self._lost_s / 2:  # this agent was stopped or delayed: it cannot tell who is silent
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
        """Read and publish until stopped, over a new connection where one has failed: a lost answer does not mean a lost node."""
        presence = _Presence(self._nodes, self._lost_s) if self._node == 0 else None
        while True:
            try:
                self._look(self._place.connect(timedelta(seconds=self._lost_s)), presence)
                return
            except Exception as error:  # torch's DistError, as a rule; the job continues whatever it is
                if self._stopping.is_set():
                    return
                with self._lock:
                    self._trouble = (str(error) or type(error).__name__).splitlines()[0]
                    if isinstance(error, ConnectionRefusedError) and self._reached:
                        self._store_gone = f"node 0 has exited ({self._place.host}:{self._place.port} is closed)"
                        return
            self._stopping.wait(self._look_s)

    def _look(self, store: Store, presence: _Presence | None) -> None:
        known = None
        if self._seated and not self._reached:  # once: another agent may have the place by now
            store.set(_seat(self._node), self._seated)
            store.add(_CHANGES, 1)
        while True:
            self._wake.clear()
            last = self._stopping.is_set()  # behind it: `close` sets both
            store.add(_alive(self._node), 1)
            if presence is not None and not last and (lost := presence.news(store)) is not None:
                self._publish(_LOST, lost)
            self._write(store)
            if (changes := int(store.add(_CHANGES, 0))) != known:
                known = changes
                self._read(store)
            if self.was_replaced:
                return
            with self._lock:
                self._answered_s, self._reached, self._trouble = self._clock(), True, ""
            if last:
                if presence is not None and store.check([FAILED]):
                    self._until_read(store)
                return
            self._wake.wait(self._look_s)

    def _has_lost_its_place(self, store: Store) -> bool:
        key = _seat(self._node)
        lost = store.check([key]) and store.get(key).decode() != self._seated
        with self._lock:
            self._was_replaced = lost
        return lost

    def _until_read(self, store: Store) -> None:
        """Wait until the others have read the store, READ_S at most: it ends with this agent."""
        others, store = [_alive(node) for node in range(self._nodes) if node != self._node], unsealed(store)
        for key in others:
            store.add(key, 0)  # a key must exist to be read
        before, until_s = store.multi_get(others), time.monotonic() + READ_S
        while time.monotonic() < until_s:
            # One read may have been under way before.
            if all(int(now) >= int(then) + 2 for now, then in zip(store.multi_get(others), before, strict=True)):
                return
            time.sleep(self._look_s / 10)

    def _write(self, store: Store) -> None:
        """Write the unpublished keys; they count as unpublished until all are written."""
        with self._lock:
            unpublished, succeeded = dict(self._unpublished), self._has_succeeded
        if (unpublished or succeeded) and self._has_lost_its_place(store):
            return
        for key, text in unpublished.items():
            if key == _LOST:  # the only key that changes, written by node 0 only
                store.set(key, text)
                continue
            if key == _FAULT:
                text = f"{self._node} {self._clock() - float(text):.3f}"
            store.compare_set(key, "", text)
        if succeeded:
            store.set(f"{_SUCCEEDED}/{self._node}", "1")
        if unpublished or succeeded:
            store.add(_CHANGES, 1)
        with self._lock:
            self._unpublished = {key: text for key, text in self._unpublished.items() if unpublished.get(key) != text}
            self._has_succeeded = self._has_succeeded and not succeeded

    def _read(self, store: Store) -> None:
        """Read what all agents have published."""
        if self._has_lost_its_place(store):
            return
        published = {}
        for key in (_FAULT, _LOST, _RESTARTS, FAILED):
            if store.check([key]):
                published[key] = store.get(key).decode()
        succeeded = self._all_have(store, _SUCCEEDED)
        with self._lock:
            news = succeeded and not self._succeeded
            self._succeeded = succeeded  # before it is published as seen: the store may end right after
        if news:
            store.set(f"{_SEEN}/{self._node}", "1")
            store.add(_CHANGES, 1)
        seen = succeeded and self._all_have(store, _SEEN)
        with self._lock:
            self._published, self._seen = published, seen
            if _FAULT in published and self._fault_begun_s is None:
                node, age = published[_FAULT].split()
                if int(node) != self._node:
                    self._fault_begun_s = self._clock() - float(age)

    def _all_have(self, store: Store, key: str) -> bool:
        return store.check([f"{key}/{node}" for node in range(self._nodes)])


class _Presence:
    """Finds the nodes whose counters no longer grow. In the agent that has the store."""

    def __init__(self, nodes: int, lost_s: float) -> None:
        self._keys = [_alive(node) for node in range(nodes)]
        self._lost_s = lost_s
        self._last: str | None = None
        self._values: list[bytes] = [b""] * nodes
        self._changed_s = [time.monotonic()] * nodes
        self._looked_s = time.monotonic()

    def news(self, store: Store) -> str | None:
        """Return the nodes that are lost (empty: none), when they have changed; reads the counters ten times in LOST_S."""
        now = time.monotonic()
        elapsed_s = now - self._looked_s
        if elapsed_s < self._lost_s / 10:
            return None
        if self._last is None:
            for key in self._keys:
                store.add(key, 0)  # a key must exist to be read
            self._last = ""
        values = unsealed(store).multi_get(self._keys)
        self._looked_s = now
        late = elapsed_s > self._lost_s / 2  # this agent itself was stopped: it cannot tell who is silent
        for node, value in enumerate(values):
            if late or value != self._values[node]:
                self._values[node], self._changed_s[node] = value, now
        lost = [node for node, since in enumerate(self._changed_s) if now - since >= self._lost_s]
        text = ""
        if lost:
            names = f"node{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            text = f"no heartbeat from {names} of {len(self._keys)} for {self._lost_s:.0f} s"
        if text == self._last:
            return None
        self._last = text
        return text


def _seat(node: int) -> str:
    return f"ttp/nodes/seat/{node}"


def _alive(node: int) -> str:
    return f"ttp/nodes/alive/{node}"
