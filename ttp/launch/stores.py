"""Where the agents of a job meet: one of several rendezvous stores, so that the loss of its node does not end the job.

`--rdzv-endpoint node-a:29400,node-b:29400` names the places in order. The agent on a named node keeps a store there as
long as it lives; all are empty but the one in use, which carries a number (its *epoch*). When that one is gone, the agents
that are left open the first one that they can reach, under a higher number; whoever looks for the job takes the highest. A
place may be a machine that does not train: `python -m ttp.launch.stores --port 29400` keeps a store and nothing else.

What a store holds is soft: the agents bring all of it to the next one. Owns the choice of the store only; torch's handler
does the rendezvous. A store's calls can hang when a cable is cut, so none is made on the agent's own thread without a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ttp.errors import ConfigError
from ttp.launch import partings
from ttp.launch.rank_table import is_own_address

log = logging.getLogger("ttp.launch")

DEFAULT_PORT = 29400
"""torch's, for c10d."""
EPOCH_KEY = "ttp/store_epoch"
CONNECT_S = 3.0
"""How long a place has to take a connection."""
ANSWER_S = 30.0
"""How long a place that takes connections has to answer: a client looks its own name up first, and a name server that does
not answer costs it five seconds, again and again."""
LOST_LOOKS = 3
"""So many looks in a row without an answer: the place is lost."""
ROUND_S = 1.0
"""Between two looks at all places while a rendezvous waits."""
FIRST_PATIENCE_S = 30.0
"""How long the first place of the list is waited for, at a job's start, before another one is opened."""
CLOSE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A place for a store, as every node reaches it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Parse `host[:port],host[:port],...`. Raises ConfigError."""
    found = []
    for part in text.split(","):
        try:
            if not part.strip():
                raise ValueError("empty")
            found.append(Endpoint(*parse_rendezvous_endpoint(part, DEFAULT_PORT)))
        except ValueError as error:
            raise ConfigError(
                f"--rdzv-endpoint is {text!r}: wanted host[:port], or several with commas, got {part!r} ({error})"
            ) from None
    if len(set(found)) != len(found):
        raise ConfigError(f"--rdzv-endpoint is {text!r}: wanted each place once")
    return tuple(found)


class Stores:
    """The job's places for a store, seen from one agent."""

    def __init__(self, endpoints: Sequence[Endpoint], *, hosting: bool = True) -> None:
        """`hosting`: keep a store at the places that are here."""
        self.endpoints = tuple(endpoints)
        self.epoch = 0
        """The highest number that this agent has met under; 0: none yet."""
        self._hosting = hosting
        self._servers: dict[Endpoint, TCPStore] = {}
        self._serve()
        self._windows = {place: _Window(place) for place in self.endpoints}

    def find(self, patient: bool) -> Endpoint | None:
        """Return where the job meets, opening a place if none is in use; None: look again later.

        `patient`: where nothing is in use, wait for the first place of the list.
        """
        epochs = {place: epoch for place in self.endpoints if (epoch := self.look(place)) is not None}
        in_use = [place for place, epoch in epochs.items() if epoch >= max(1, self.epoch)]
        if in_use:
            chosen = min(in_use, key=lambda place: (-epochs[place], self.endpoints.index(place)))
            self.epoch = epochs[chosen]
            return chosen
        reachable = [place for place in self.endpoints if place in epochs]
        if patient or not reachable:
            self._serve()  # a name server may know this machine's name later than this agent begins
        if not reachable or (patient and reachable[0] != self.endpoints[0]):
            return None
        opened = self._windows[reachable[0]].open(epochs[reachable[0]], self.epoch + 1)
        if opened is not None:
            self.epoch = opened
        return reachable[0] if opened is not None else None

    def _serve(self) -> None:
        """Keep a store at the places that are here, where there is none yet."""
        for place in self.endpoints if self._hosting else ():
            if place not in self._servers and (server := _serve(place)) is not None:
                self._servers[place] = server

    def look(self, place: Endpoint) -> int | None:
        """Return a place's number, 0 where it is not in use, None where no store answers."""
        return self._windows[place].look()

    def ask(self, place: Endpoint, question: Callable[[TCPStore], T]) -> T | None:
        """Ask the store at a place anything; None where it does not answer."""
        return self._windows[place].ask(question)

    def linger(self, place: Endpoint) -> None:
        """Where the store is this agent's own, keep it until the others have looked: what they are told goes with it."""
        if place in self._servers:
            time.sleep(3 * ROUND_S)

    def newer_than(self, place: Endpoint) -> Endpoint | None:
        """Return a place that the job meets in rather than in `place`, if there is one."""
        mine = (self.epoch, -self.endpoints.index(place))
        for number, other in enumerate(self.endpoints):
            if other != place and (epoch := self.look(other)) and (epoch, -number) > mine:
                return other
        return None

    def close(self) -> None:
        self._servers.clear()


class MovingRendezvous(RendezvousHandler):
    """Runs torch's handler on the store in use, and makes a new one on the next when that is lost."""

    def __init__(
        self, stores: Stores, make: Callable[[Endpoint], RendezvousHandler], run_id: str, *, join_timeout_s: float
    ) -> None:
        """`make(place)`: torch's handler, as a client of the store at `place`."""
        self._stores = stores
        self._make = make
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s
        self._place: Endpoint | None = None
        self._inner: RendezvousHandler | None = None
        self._waiting: _Waiting | None = None
        self._heard: dict[Endpoint, int] = {}
        """At each place, how many of the nodes that have left this one has heard; those before its own time, too."""
        self._heard_before = 0
        """The same, when it began to join: one that has left since may have been counted in."""
        self._news = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round wherever the job meets. Raises RendezvousTimeoutError, RendezvousClosedError (the job is over,
        and why)."""
        words = self._waiting.over if self._waiting is not None else ""
        self._stop_asking()
        if words:
            raise RendezvousClosedError(f"the job {self._run_id!r} is over: {words}")
        began = time.monotonic()
        while True:
            left_s = began + self._join_timeout_s - time.monotonic()
            if left_s <= 0:
                where = ", ".join(map(str, self._stores.endpoints))
                raise RendezvousTimeoutError(
                    f"too few nodes met within {self._join_timeout_s:.0f} s at {where}: are those nodes up, and can they be"
                    " reached from here?"
                )
            first = self._stores.epoch == 0
            place = self._stores.find(patient=first and time.monotonic() - began < FIRST_PATIENCE_S)
            joined = self._join(place, left_s) if place is not None else None
            if joined is not None:
                assert self._inner is not None
                assert place is not None
                self._waiting = _Waiting(self._inner, _Window(place), self._run_id, self._heard_before, self._drop)
                return joined
            time.sleep(ROUND_S)

    def _join(self, place: Endpoint, left_s: float) -> RendezvousInfo | None:
        """Try at one place; None when it is lost, or the job has moved on from it."""
        if place != self._place or self._inner is None:
            if self._place is not None:
                log.warning("the rendezvous moves from %s to %s", self._place, place)
            self._place, self._inner = place, None
        kept = self._inner
        self._hear(place)
        self._heard_before = self._heard.get(place, 0)

        def run() -> tuple[RendezvousHandler, RendezvousInfo]:
            inner = kept or self._make(place)
            return inner, inner.next_rendezvous()

        attempt = _Aside(run)
        until, unanswered = time.monotonic() + left_s, 0
        while not attempt.wait(ROUND_S):
            unanswered = unanswered + 1 if self._stores.look(place) is None else 0
            self._hear(place)
            if unanswered >= LOST_LOOKS:
                why = "is lost"
            elif (other := self._stores.newer_than(place)) is not None:
                why = f"is left: the job meets at {other}"
            elif time.monotonic() > until:
                why = "had too few nodes in time"
            else:
                continue
            log.warning("the rendezvous at %s %s", place, why)
            self._inner = None  # its calls may hang for good: they are left to themselves
            return None
        try:
            inner, joined = attempt.result()  # only here: an attempt that was left may end later, and changes nothing
            self._inner = inner
            return joined
        except RendezvousClosedError:
            words = self.failed_elsewhere() or "nobody said why"
            raise RendezvousClosedError(f"the job {self._run_id!r} is over at {place}: {words}") from None
        except (RendezvousConnectionError, RendezvousTimeoutError, RuntimeError) as error:
            log.warning("the rendezvous at %s failed: %s", place, error)
            self._inner = None
            return None

    def _drop(self, lost: RendezvousHandler) -> None:
        """Let go of a handler whose store is lost: its heartbeats, which nobody hears, end with it."""
        if self._inner is lost:
            self._inner = None

    def _hear(self, place: Endpoint) -> None:
        """Log what nodes say that have left, but for those that had done so before this one came."""
        before = self._heard.get(place)
        words = self._stores.ask(place, lambda store: partings.left_after(store, self._run_id, before or 0))
        if words is None:
            return
        self._heard[place] = (before or 0) + len(words)
        if before is not None:
            _log_left(words)
            self._news = self._news or bool(words)

    def heard_of_a_parting(self) -> bool:
        """Say whether a node has told since the last question that it leaves."""
        if self._place is not None:
            self._hear(self._place)
        news, self._news = self._news, False
        return news

    def failed_elsewhere(self) -> str:
        """Return why another node has ended the job, as far as it was heard; empty if none has."""
        if self._waiting is not None and self._waiting.over:
            return self._waiting.over
        if self._place is None:
            return ""
        return self._stores.ask(self._place, lambda store: partings.over(store, self._run_id)) or ""

    def num_nodes_waiting(self) -> int:
        """How many nodes want to join; a node that has left without its ranks' word makes the others meet again as well. 0
        while the store is lost: the workers do not need it."""
        return self._waiting.count if self._waiting is not None else 0

    def _stop_asking(self) -> None:
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

    def leave(self, why: str) -> None:
        """Tell the others, if the store can be reached, why this node goes, and leave the rendezvous open for them."""
        self._stop_asking()
        if self._place is not None:
            self._stores.ask(self._place, lambda store: partings.tell_left(store, self._run_id, why))
            self._stores.linger(self._place)
        self._inner = None

    def shutdown(self, why: str = "") -> bool:
        """Close the rendezvous for all, if its store can be reached, and say why it failed (empty: it has not); end this agent's
        own store."""
        self._stop_asking()
        inner, self._inner = self._inner, None
        closed = False
        if self._place is not None and self._stores.look(self._place) is not None:
            if why:
                self._stores.ask(self._place, lambda store: partings.tell_over(store, self._run_id, why))
            if inner is not None:
                closing = _Aside(inner.shutdown)
                closed = closing.wait(CLOSE_S) and closing.succeeded
            if why:
                self._stores.linger(self._place)
        self._stores.close()
        return closed


class _Aside(Generic[T]):
    """A call on a thread of its own, which is left to itself when it hangs."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._over = threading.Event()
        self._value: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="ttp-rendezvous", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except Exception as error:
            self._error = error
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        return self._over.wait(timeout_s)

    @property
    def succeeded(self) -> bool:
        return self._over.is_set() and self._error is None

    def result(self) -> T:
        """Return what the call returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]


def _log_left(words: Sequence[str]) -> None:
    for text in words:
        log.warning("a node has left: %s", text)


class _Waiting:
    """Asks, now and then, how many nodes want to join or have left, so that the agent need not wait for a store that is gone."""

    def __init__(
        self,
        inner: RendezvousHandler,
        window: _Window,
        run_id: str,
        heard: int,
        give_up: Callable[[RendezvousHandler], None],
    ) -> None:
        """`heard`: how many had left before this rendezvous. give_up: called once, when the handler's store is lost."""
        self.count = 0
        self.over = ""
        """Why the job is over, once another node has said so."""
        self._window = window
        self._run_id = run_id
        self._heard = heard
        self._inner: RendezvousHandler | None = inner
        self._give_up = give_up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-waiting-nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more: the handler is for one thread at a time. A question that hangs is not waited for."""
        self._stopping.set()
        self._thread.join(ROUND_S)

    def _run(self) -> None:
        """Ask until told to stop. The handler's connection is never made again, and torch writes a backtrace for each question
        on one that is broken: the window, which looks before it asks, goes first, and a loss ends the handler."""
        unanswered = 0
        while not self._stopping.wait(ROUND_S):
            left = self._left()
            unanswered = 0 if left is not None else unanswered + 1
            count = left or 0
            if self._inner is not None and unanswered == LOST_LOOKS:
                self._lose(f"no store has answered {LOST_LOOKS} times")
            elif self._inner is not None and left is not None:
                try:
                    count = self._inner.num_nodes_waiting() or left
                except (RendezvousError, RuntimeError) as error:
                    self._lose(str(error))
            self.count = count
        self._inner = None

    def _lose(self, why: str) -> None:
        """Let go of the handler, and with it of its heartbeats."""
        inner, self._inner = self._inner, None
        if inner is not None and not self._stopping.is_set():
            log.warning("the rendezvous' store is lost (%s); training goes on, the next start looks for another", why)
            self._give_up(inner)

    def _left(self) -> int | None:
        """Return how many nodes have left since the rendezvous (their ranks will not come, or not come back), and hear whether
        the job is over. None: no store answers."""
        found = self._window.ask(
            lambda store: (partings.left_after(store, self._run_id, self._heard), partings.over(store, self._run_id))
        )
        if found is None:
            return None
        self.over = self.over or found[1]
        return len(found[0])


def _serve(place: Endpoint) -> TCPStore | None:
    """Keep a store at a place of this machine; None where the place is another's, or already served from here."""
    if not is_own_address(place.host):
        return None
    try:
        return TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        log.info("no store of this agent's own at %s (%s): another one's is used", place, str(error).splitlines()[0])
        return None


class _Window:
    """Looks at one place, through a connection that is kept. Used by one thread."""

    def __init__(self, place: Endpoint) -> None:
        self._place = place
        self._client: TCPStore | None = None

    def look(self) -> int | None:
        """Return the place's number, 0 where it is not in use, None where no store answers."""
        return self.ask(lambda store: int(store.get(EPOCH_KEY)) if store.check([EPOCH_KEY]) else 0)

    def open(self, before: int, epoch: int) -> int | None:
        """Take the place into use under a number; return the number that it has now: another agent may have been faster."""
        return self.ask(lambda store: int(store.compare_set(EPOCH_KEY, str(before) if before else "", str(epoch))))

    def ask(self, question: Callable[[TCPStore], T]) -> T | None:
        """Ask the store; None where none answers. A question that hangs is left to itself."""
        try:
            socket.create_connection((self._place.host, self._place.port), CONNECT_S).close()
        except OSError:
            self._client = None
            return None
        kept = self._client
        asked = _Aside(lambda: self._answer(kept, question))
        if asked.wait(ANSWER_S) and asked.succeeded:
            self._client, answer = asked.result()
            return answer
        self._client = None
        return None

    def _answer(self, kept: TCPStore | None, question: Callable[[TCPStore], T]) -> tuple[TCPStore, T]:
        """Ask through the kept connection, or through a new one: the store may have been started again."""
        if kept is not None:
            with contextlib.suppress(RuntimeError):
                return kept, question(kept)
        timeout = timedelta(seconds=ANSWER_S)
        store = TCPStore(self._place.host, self._place.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return store, question(store)


def main(argv: Sequence[str] | None = None) -> int:
    """Keep a store at a port until told to end."""
    parser = argparse.ArgumentParser(prog="python -m ttp.launch.stores", description=main.__doc__)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    arguments = parser.parse_args(argv)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in the store's own threads too
    try:
        server = TCPStore("0.0.0.0", arguments.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        print(f"cannot listen on port {arguments.port}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(f"rendezvous store on port {server.port}", flush=True)
    signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
