"""The agent's client of the job's controller: finds its address in a file or in the workers' store, and reports the exits of processes.

Rank 0 starts the controller and publishes `host:port pid` under `ttp/controller/<attempt>`. The first rank of each node writes the same
to a file for its agent (`ttp.exchange.controller_file`), for when the store is slow or lost. Owns two threads per attempt, one for each source,
so that neither the death watch nor the agent's loop waits for a store or a connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.exchange import controller_file
from ttp.exchange.discovery import controller_key, log_dir_key, process_key
from ttp.exchange.first_step import progress_key
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.watch.death_watch import Death
from ttp.proto.messages import CauseKind
from ttp.runtime.standby import listed

log = logging.getLogger("ttp.launch")

SEARCH_S = 0.05
"""Between two reads while no controller is known."""
RECHECK_S = 1.0
"""Between two reads once one is known, and between two connections to the store."""
CALL = timedelta(seconds=30)
NEWS_S = 3.0
"""An answer of the store is out of date after so long."""


@dataclass(frozen=True, slots=True)
class ControllerEntry:
    """What is known of the attempt's first controller. `pid` counts on the host of rank 0 only."""

    address: str
    pid: int

    @classmethod
    def decode(cls, text: str) -> ControllerEntry:
        """Raises ValueError for anything but `host:port pid`."""
        address, pid = text.split()
        return cls(address, int(pid))


class ControllerLink(Protocol):
    """An open connection to a controller (`ttp.controller.agent_link.AgentLink`); no call but `given_up` blocks."""

    @property
    def attached(self) -> bool:
        """Return whether an active controller is connected now."""

    @property
    def sent_away_monotonic_s(self) -> float | None:
        """When the controller's order to exit was received; None: it was not."""

    @property
    def lease_s(self) -> float:
        """How long the controller may be silent; 0: that is not known yet."""

    @property
    def frozen_by(self) -> CauseKind | None:
        """The cause of the newest freeze; None: there was none."""

    @property
    def leader(self) -> str:
        """Return the address of the controller that is connected, or was last; empty: it is not known."""

    def worker_exit(self, rank: int, pid: int, text: str) -> None: ...

    def replaced(self, rank: int, pid: int) -> None:
        """Process `pid` has the place of this rank's: nothing is reported any more of the one before."""

    def replace_failed(self, rank: int, freeze_id: int, error: str) -> None:
        """No process has taken this rank's place as it was ordered, or that process has ended."""

    def add_controllers(self, addresses: Sequence[str]) -> None:
        """Add standbys: where to connect when the controller is lost."""

    def given_up(self) -> frozenset[int] | None:
        """Ask the controller which ranks it has declared dead because they were silent, once it has ordered the others to exit;
        None: it has not, or does not answer. Takes `agent_link.ASK_S` at most."""

    def close(self) -> None: ...


OpenLink = Callable[[str, Mapping[int, int]], ControllerLink]
"""`open_link(address, pids)`: connect to a controller as the agent of these workers (rank -> pid)."""

WatchLogDir = Callable[[Path], bool]
"""`watch_log_dir(path)`: read the journals there; called until it returns True. Must not raise."""

ProcessesKnown = Callable[[Mapping[int, str]], None]
"""`processes_known(published)`: this node's ranks have published their processes (`ttp.exchange.discovery.process_text`). Must not raise."""


class ControllerClient:
    """Reports every death to the controller, also those before it was found. `report` may be called from any thread."""

    def __init__(
        self,
        job_store: JobStore,
        pids: Mapping[int, int],
        open_link: OpenLink,
        *,
        attempt_dir: Path | None = None,
        watch_log_dir: WatchLogDir | None = None,
        processes_known: ProcessesKnown = lambda pids: None,
        search_s: float = SEARCH_S,
        recheck_s: float = RECHECK_S,
        lost_store_level: int = logging.WARNING,
    ) -> None:
        """`attempt_dir`: where the first rank on this node writes the controllers' file; None: there is only the store. `lost_store_level`: of the
        log line which says that the workers' store is lost: on a spare node that is the end of an attempt, as a rule."""
        self._job_store = job_store
        self._attempt_dir = attempt_dir
        self._pids = dict(pids)
        self._open_link = open_link
        self._watch_log_dir = watch_log_dir
        self._processes_known: ProcessesKnown | None = processes_known
        self._search_s = search_s
        self._recheck_s = recheck_s
        self._lost_store_level = lost_store_level
        self._lock = threading.Condition()  # guards all below
        self._link: ControllerLink | None = None
        self._entry: ControllerEntry | None = None
        self._standbys: tuple[str, ...] = ()
        self._log_dir: Path | None = None
        self._first_step: int | None = None
        self._skipped = ""
        self._reported: list[Death] = []
        self._replaced: set[int] = set()
        """Ranks whose process is not their first."""
        self._begun = self._done = 0
        """The number of the last read of the store that has begun, and of the last one that was answered."""
        self._file_begun = self._file_done = 0
        """The same for the file."""
        self._in_store: ControllerEntry | None = None
        self._in_file: controller_file.Controllers | None = None
        """What the last read found there."""
        self._refused = ""
        self._answered_s = self._asked_s = float("-inf")
        self._trouble = ""
        """The error of the last call to the store."""
        self._gone = False
        """The store is closed: its agent has exited."""
        self._closed = False
        """A link that a delayed thread still opens is closed at once."""
        self._wake, self._file_wake = threading.Event(), threading.Event()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="ttp-controller-search", daemon=True)]
        if attempt_dir is not None:
            follow = threading.Thread(target=self._follow, args=(attempt_dir,), name="ttp-controller-file", daemon=True)
            self._threads.append(follow)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def entry(self) -> ControllerEntry | None:
        """The controller that was last found, if any."""
        with self._lock:
            return self._entry

    @property
    def log_dir(self) -> Path | None:
        """Where this attempt's journals are: from the file of the first rank here, or else from rank 0's entry in the store."""
        with self._lock:
            return self._log_dir

    @property
    def first_step(self) -> int | None:
        """The first step that this attempt's ranks have completed; None: they have reported none."""
        with self._lock:
            return self._first_step

    @property
    def skipped(self) -> str:
        """The newest checkpoint that this attempt's ranks found broken before that step; empty: they have reported none."""
        with self._lock:
            return self._skipped

    @property
    def connected(self) -> bool:
        """Return whether an active controller is connected now."""
        with self._lock:
            return self._link is not None and self._link.attached

    @property
    def lease_s(self) -> float:
        """How long the controller that was found may be silent; 0: that is not known yet."""
        with self._lock:
            return self._link.lease_s if self._link is not None else 0.0

    @property
    def leader(self) -> str:
        """The address of the controller that leads the job, as far as is known here; after a takeover it is not the one that was found first."""
        with self._lock:
            return self._link.leader if self._link is not None else ""

    @property
    def sent_away_monotonic_s(self) -> float | None:
        """When the controller's order to exit was received; None: it was not."""
        with self._lock:
            return self._link.sent_away_monotonic_s if self._link is not None else None

    @property
    def frozen_by(self) -> CauseKind | None:
        """Why the ranks were frozen last, as their controller reported it; None: it is not known."""
        with self._lock:
            return self._link.frozen_by if self._link is not None else None

    @property
    def unanswered(self) -> str:
        """Why the ranks' entries are not known: the store has not answered lately. Empty: it has."""
        with self._lock:
            if self._answered_s >= time.monotonic() - NEWS_S and not self._gone:
                return ""
            error = f" ({self._trouble})" if self._trouble else ""
            return f"the workers' store at {self._job_store.host}:{self._job_store.port} does not answer{error}"

    def look_now(self, timeout_s: float) -> None:
        """Read the file and the store once more, and wait so long at most: the ranks may have just written something."""
        with self._lock:
            asked, read = self._begun + 1, self._file_begun + (self._attempt_dir is not None)
            self._wake.set()
            self._file_wake.set()
            self._lock.wait_for(lambda: self._file_done >= read and (self._done >= asked or self._gone), timeout_s)

    def report(self, death: Death) -> None:
        """Report a death to the controller, now or as soon as there is one; not that of a process that was replaced."""
        with self._lock:
            if death.rank in self._replaced and death.pid != self._pids[death.rank]:
                return
            self._reported.append(death)
            if self._link is not None:
                self._send(self._link, death)

    def replaced(self, rank: int, pid: int) -> None:
        """Process `pid` has the place of this rank's. The death of the one before is reported to no later controller."""
        with self._lock:
            self._pids[rank] = pid
            self._replaced.add(rank)
            self._reported = [death for death in self._reported if death.rank != rank]
            if self._link is not None:
                self._link.replaced(rank, pid)

    def replace_failed(self, rank: int, freeze_id: int, error: str) -> None:
        """Report to the connected controller, if there is one, that no process has taken this rank's place."""
        with self._lock:
            if self._link is not None:
                self._link.replace_failed(rank, freeze_id, error)

    def given_up(self) -> frozenset[int] | None:
        """Ask the connected controller, if there is one, which ranks were silent for too long; see ControllerLink."""
        with self._lock:
            link = self._link
        return link.given_up() if link is not None else None

    def close(self, timeout_s: float = 2.0) -> None:
        """Read the file and the store once more, then end the threads and the link. A store that does not answer is lost with its node, as a rule:
        its thread is abandoned."""
        with self._lock:
            waits = self._begun > self._done and time.monotonic() - self._asked_s >= NEWS_S
            silent = waits or bool(self._trouble)
        self._stopping.set()
        self._wake.set()
        self._file_wake.set()
        for thread in reversed(self._threads):
            thread.join(0.0 if silent and thread is self._threads[0] else timeout_s)
        with self._lock:
            link, self._link, self._closed = self._link, None, True
        if link is not None:
            link.close()

    def _run(self) -> None:
        """Read until stopped, over a new connection where one has failed: a lost answer does not mean a lost store."""
        reached = False
        while not self._gone:
            last = self._stopping.is_set()
            try:
                store = self._connect()
                reached = True
                self._attend(store)
                return
            except (RuntimeError, OSError) as error:  # torch's DistError
                if last:
                    return
                self._note(error, gone=reached and isinstance(error, ConnectionRefusedError))
            self._pause(self._recheck_s)

    def _note(self, error: Exception, gone: bool) -> None:
        """Keep the error, and log it once: a new controller is not found meanwhile."""
        with self._lock:
            text = (str(error) or type(error).__name__).splitlines()[0]
            new = gone or (not self._trouble and not self._stopping.is_set())
            self._trouble, self._gone = text, gone
            self._lock.notify_all()
        if new:
            what = "a new controller will not be found" if gone else "reconnecting"
            where = f"{self._job_store.host}:{self._job_store.port}"
            log.log(self._lost_store_level, "lost the workers' store at %s (%s); %s", where, text, what)

    def _connect(self) -> Store:
        return self._job_store.connect(CALL)

    def _attend(self, store: Store) -> None:
        """Read repeatedly: a standby may replace the active controller under the same key."""
        while True:
            last = self._stopping.is_set()
            with self._lock:
                self._begun, self._asked_s = self._begun + 1, time.monotonic()
            self._look(store, open_link=not last)
            self._look_for_standbys(store)
            self._look_for_log_dir(store)
            self._look_for_processes(store)
            self._look_for_first_step(store)
            with self._lock:
                self._done, self._answered_s, self._trouble = self._begun, time.monotonic(), ""
                self._lock.notify_all()
            if last:
                return
            self._pause(self._search_s if self.entry is None else self._recheck_s)

    def _pause(self, pause_s: float) -> None:
        self._wake.wait(pause_s)
        self._wake.clear()

    def _look(self, store: Store, open_link: bool) -> None:
        key = controller_key(self._job_store.round_number)
        if not store.check([key]):
            return
        text = store.get(key).decode()
        try:
            entry = ControllerEntry.decode(text)
        except ValueError:
            log.error("invalid store entry %s: got %r, expected `host:port pid`. Deaths cannot be reported", key, text)
            return
        if entry != self._in_store:
            self._in_store = entry
            self._take(entry, open_link)

    def _take(self, entry: ControllerEntry, open_link: bool) -> None:
        """Connect to a controller, unless it is the known one; `entry` is set before the connection is up."""
        with self._lock:
            if self._entry is not None and self._entry.address == entry.address:
                self._entry = entry if entry.pid else self._entry
                return
            old, self._link, self._entry = self._link, None, entry
        if old is not None:
            old.close()
        link = self._call(entry) if open_link else None
        with self._lock:
            superseded = self._closed or self._entry.address != entry.address
            if link is not None and not superseded:
                self._link = link
                if self._standbys:
                    link.add_controllers(self._standbys)
                for rank in self._replaced:  # it may have been opened with the process before
                    link.replaced(rank, self._pids[rank])
                for death in self._reported:
                    self._send(link, death)
        if link is not None and superseded:
            link.close()

    def _learn_standbys(self, standbys: Sequence[str]) -> None:
        with self._lock:
            self._standbys += tuple(address for address in standbys if address not in self._standbys)
            if self._link is not None and standbys:
                self._link.add_controllers(standbys)

    def _look_for_standbys(self, store: Store) -> None:
        self._learn_standbys(listed(store, self._job_store.round_number))

    def _look_for_log_dir(self, store: Store) -> None:
        key = log_dir_key(self._job_store.round_number)
        if self.log_dir is None and store.check([key]):
            found = Path(store.get(key).decode())
            with self._lock:
                self._log_dir = self._log_dir or found
        found_dir = self.log_dir
        if found_dir is not None and self._watch_log_dir is not None and self._watch_log_dir(found_dir):
            self._watch_log_dir = None

    def _look_for_processes(self, store: Store) -> None:
        """Read the processes of this node's ranks, until all have published theirs."""
        keys = {rank: process_key(self._job_store.round_number, rank) for rank in self._pids}
        if self._processes_known is None or not keys or not store.check(list(keys.values())):
            return
        known, self._processes_known = self._processes_known, None
        known({rank: store.get(key).decode() for rank, key in keys.items()})

    def _look_for_first_step(self, store: Store) -> None:
        key = progress_key(self._job_store.round_number)
        if self.first_step is None and store.check([key]):
            step, _, skipped = store.get(key).decode().partition(" ")
            with self._lock:
                self._first_step, self._skipped = (int(step), skipped) if step.isdecimal() else (None, "")

    # --- the file of this node's ranks ---

    def _follow(self, attempt_dir: Path) -> None:
        """Read it repeatedly: it is written before the ranks train, and again with the standbys."""
        while True:
            last = self._stopping.is_set()
            with self._lock:
                self._file_begun += 1
            self._read(attempt_dir, open_link=not last)
            with self._lock:
                self._file_done = self._file_begun
                self._lock.notify_all()
            if last:
                return
            self._file_wake.wait(self._search_s if self._in_file is None else self._recheck_s)
            self._file_wake.clear()

    def _read(self, attempt_dir: Path, open_link: bool) -> None:
        try:
            known = controller_file.read(attempt_dir)
        except (OSError, ValueError) as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("invalid controllers' file in %s: %s. Only the workers' store is read", attempt_dir, error)
            return
        if known is None or known == self._in_file:
            return
        self._in_file = known
        with self._lock:
            self._log_dir = Path(known.log_dir)
        self._learn_standbys(known.addresses[1:])
        if known.addresses:
            self._take(ControllerEntry(known.addresses[0], known.pid), open_link)

    # --- the link ---

    def _call(self, entry: ControllerEntry) -> ControllerLink | None:
        try:
            return self._open_link(entry.address, self._pids)
        except Exception as error:  # the job continues: broken streams and leases still show deaths
            log.error("the agent cannot reach the controller at %s: %s", entry.address, error)
            return None

    def _send(self, link: ControllerLink, death: Death) -> None:
        try:
            link.worker_exit(death.rank, death.pid, death.text)
        except Exception as error:  # as above
            log.error("cannot report the exit of rank %d to the controller: %s", death.rank, error)
