"""Several rendezvous endpoints, one of them in use, so that the loss of its node does not end the job.

`--rdzv-endpoint node-a:29400,node-b:29400` lists the endpoints in order. The agent on a listed node serves a store there while it runs. All are
empty but the one in use, which has a number for this job (its *epoch*). When that one is lost, the remaining agents open the first one that they reach, with
a higher epoch; a joining node uses the highest. An endpoint may be a host that does not train: `python -m ttp.launch.stores --port 29400`
serves a store only.

A store's content is soft state: the agents publish all of it again in the next one (`store_failover.py`). Owns the choice of the store. Never
calls a store on the agent's own thread without a time limit: such a call can hang when the network breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ttp.addresses import LOOPBACK, address_of, is_own_address
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.options import whole
from ttp.launch.hosts.listening import serve
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.rendezvous.job_secret import JobSecret, OtherSecret

log = logging.getLogger("ttp.launch")

DEFAULT_PORT = 29400
"""torch's, for c10d."""
CONNECT_S = 3.0
"""How long an endpoint has to accept a connection."""
ANSWER_S = 30.0
"""How long an endpoint that accepts connections has to answer: a client looks up its own name first, and each DNS timeout takes five seconds."""
LEAST_S = 1.0
"""The least time for a call, however little remains."""
ROUND_S = 1.0
"""Between two polls of all endpoints while a rendezvous waits."""
BACK_S = 0.1
"""How long an endpoint that gave no answer last time is waited for: one that is back answers within milliseconds, in this look or in the next."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a store, as every node reaches it."""

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
                f"invalid --rdzv-endpoint: got {checked.shown(part)} in {checked.shown(text)} ({_briefly(error)}), expected host[:port], or several separated by commas"
            ) from None
    if len(set(found)) != len(found):
        raise ConfigError(f"invalid --rdzv-endpoint: got {checked.shown(text)}, expected each endpoint once")
    return tuple(found)


def read_epoch(store: Store, key: str) -> int:
    """Return a store's epoch; 0: it is not in use. Raises RuntimeError where another program has written there."""
    if not store.check([key]):
        return 0
    entry = bytes(store.get(key))
    if not entry.isdigit() or len(entry) > 18:
        raise RuntimeError(f"the store's entry {key!r} is not an epoch: got {checked.shown(entry)}, expected a number")
    return int(entry)


def _briefly(error: ValueError) -> str:
    """Return torch's own words, which have the host's name in them."""
    return " ".join(str(error).encode("ascii", "backslashreplace").decode().split())[:300]


class Stores:
    """The job's endpoints, seen from one agent."""

    def __init__(
        self, endpoints: Sequence[Endpoint], *, hosting: bool | None = None, secret: JobSecret | None = None
    ) -> None:
        """`secret`: the job's (None: entries are plain). `hosting`: serve a store at the endpoints with this host's address (None), at the first one as well whatever its address (True), or
        at none (False)."""
        self.endpoints = tuple(endpoints)
        self.epoch = 0
        """The highest epoch that this agent has joined; 0: none yet."""
        self._hosting = hosting
        self._servers: dict[Endpoint, TCPStore] = {}
        self._refused: set[Endpoint] = set()
        """Where this agent cannot serve a store, which is logged once."""
        self._serve()
        self.secret = secret or JobSecret("")
        self._windows = {place: self.window(place) for place in self.endpoints}
        self._looks = _Looks(self)
        self._used: Endpoint | None = None
        """The one that was chosen last."""

    def window(self, place: Endpoint) -> Window:
        """Return another client of the store at an endpoint, for another thread."""
        return Window(place, self.secret)

    def find(self, patient: bool, within_s: float = math.inf) -> Endpoint | None:
        """Return the endpoint in use, after opening one if there is none; None: try again later. Raises OtherSecret.

        `patient`: where none is in use, wait for the first one of the list. within_s: the time limit.
        """
        until_s = time.monotonic() + within_s
        epochs = self._look_at_all(until_s)
        if (chosen := self._choose(epochs)) is not None:
            return chosen
        reachable = [place for place in self.endpoints if place in epochs]
        if patient or not reachable:
            self._serve()  # DNS may learn this host's name after this agent has begun
        if not reachable or (patient and reachable[0] != self.endpoints[0]):
            return None
        opened = self._windows[reachable[0]].open(epochs[reachable[0]], self.epoch + 1)
        if opened is not None:
            self.epoch, self._used = opened, reachable[0]
        return reachable[0] if opened is not None else None

    def serves(self, place: Endpoint) -> bool:
        """Return whether the store at an endpoint is this agent's: it is lost with it."""
        return place in self._servers

    def gave_no_answer(self, place: Endpoint) -> None:
        """Note that the store at an endpoint was asked elsewhere, and has not answered: the next look does not wait for it."""
        self._looks.silent.add(place)

    def accepts_connections(self, place: Endpoint) -> bool:
        """Return whether an endpoint accepted a connection when it was last looked at: its store is slow at worst, and not lost with its agent."""
        return self._looks.windows[place].connected

    def find_in_use(self) -> Endpoint | None:
        """Return the endpoint in use; None: there is none. Opens none. Raises OtherSecret."""
        return self._choose(self._look_at_all())

    def begin_anew(self, place: Endpoint, epoch: int, meeting: str = "") -> None:
        """Have all nodes meet again at `place`, under the next epoch, unless it has another one than `epoch` already. `meeting`: what
        `meeting_of` returns for that epoch, unless another agent was faster."""
        if (opened := self._windows[place].open(epoch, epoch + 1, meeting)) is not None:
            self.epoch = opened

    def meeting_of(self, place: Endpoint, epoch: int) -> str:
        """Return what was published about the meeting under an epoch; empty: nothing."""
        return self._windows[place].meeting_of(epoch)

    def _look_at_all(self, until_s: float = math.inf) -> dict[Endpoint, int]:
        """Return the epochs of the endpoints that answer; 0 where one is not in use. The one that was used last comes first: while it is in use, one that
        does not answer holds up nothing, and is looked at again in the next round."""
        places = sorted(self.endpoints, key=lambda place: place != self._used)
        in_use = self.epoch if self._used is not None else math.inf
        return self._looks.epochs(places, until_s - time.monotonic(), enough=lambda epoch: epoch >= in_use)

    def _choose(self, epochs: Mapping[Endpoint, int]) -> Endpoint | None:
        """Return the endpoint with the highest epoch, the first of several, and take over its epoch; None: all are older than this agent's."""
        in_use = [place for place, epoch in epochs.items() if epoch >= max(1, self.epoch)]
        if not in_use:
            return None
        chosen = min(in_use, key=lambda place: (-epochs[place], self.endpoints.index(place)))
        self.epoch, self._used = epochs[chosen], chosen
        return chosen

    def _serve(self) -> None:
        """Serve a store at this host's endpoints where there is none yet."""
        for place in self.endpoints if self._hosting is not False else ():
            forced = bool(self._hosting) and place == self.endpoints[0]
            own = is_own_address(place.host)
            if place in self._servers or not (forced or own):
                continue
            try:
                # The endpoint of a store that is forced may not be this host's address: it leads here all the same.
                host, address = (place.host, address_of(place.host)) if own else (LOOPBACK, "")
                self._servers[place] = serve(host, place.port, address)
            except (OSError, RuntimeError) as error:
                if place not in self._refused:
                    self._refused.add(place)
                    why = str(error).splitlines()[0]
                    log.info("this agent cannot serve a store at %s (%s); it uses another agent's", place, why)

    def look(self, place: Endpoint, within_s: float = math.inf) -> int | None:
        """Return an endpoint's epoch, 0 where it is not in use, None where no store answers in time."""
        return self._windows[place].look(within_s)

    def ask(self, place: Endpoint, question: Callable[[Store], T], within_s: float = math.inf) -> T | None:
        """Call the store at an endpoint; None where it does not answer in time. Raises OtherSecret."""
        return self._windows[place].ask(question, within_s)

    def hangs(self, place: Endpoint) -> bool:
        """Return whether the last call there had no answer, though the endpoint accepts connections."""
        return self._windows[place].hangs

    def trouble(self) -> str:
        """Return which endpoints do not answer, and why; empty when all do, or none was called yet."""
        troubles = {place: self._trouble(place) for place in self.endpoints}
        return "; ".join(f"{place}: {trouble}" for place, trouble in troubles.items() if trouble)

    def _trouble(self, place: Endpoint) -> str:
        return max(self._windows[place], self._looks.windows[place], key=lambda window: window.asked_s).trouble

    def linger(self, place: Endpoint) -> None:
        """Where the store is this agent's own, wait until the others have read it: its content is lost with it."""
        if place in self._servers:
            time.sleep(3 * ROUND_S)

    def newer_than(self, place: Endpoint, within_s: float = math.inf) -> Endpoint | None:
        """Return the endpoint that the job uses instead of `place`, if there is one. One that does not answer at once is looked at again in the next
        round."""
        mine = (self.epoch, -self.endpoints.index(place))
        epochs = self._looks.epochs([other for other in self.endpoints if other != place], within_s, BACK_S)
        for number, other in enumerate(self.endpoints):
            if (epoch := epochs.get(other, 0)) and (epoch, -number) > mine:
                return other
        return None

    def go_back(self, place: Endpoint, epoch: int) -> None:
        """Use the store in which the job is under way again: this agent was cut off. What it has opened elsewhere meanwhile would draw others there."""
        for other in [other for other in self._servers if other != place]:
            del self._servers[other]
        self._serve()
        self.epoch, self._used = epoch, place

    def close(self) -> None:
        self._servers.clear()


def epoch_key(run_id: str) -> str:
    """Return the key of a store's epoch: several jobs may share one store."""
    return f"ttp/store_epoch/{run_id}"


class _Looks:
    """Looks at the epochs of several endpoints at once, each by a thread of its own, and waits once only for one that does not answer."""

    def __init__(self, stores: Stores) -> None:
        self.windows = {place: stores.window(place) for place in stores.endpoints}
        self.silent: set[Endpoint] = set()
        """Those that gave no answer last time."""
        self._calls: dict[Endpoint, tuple[BoundedCall[int | None], float]] = {}
        """Looks without a result so far, and when each was begun."""

    def epochs(
        self,
        places: Sequence[Endpoint],
        within_s: float = math.inf,
        wait_s: float = math.inf,
        enough: Callable[[int], bool] = lambda epoch: False,
    ) -> dict[Endpoint, int]:
        """Return the epochs of the endpoints that answer in time, 0 where one is not in use. A look takes `within_s` at most, and `wait_s` of it are
        waited for. Once an endpoint has an epoch that is `enough`, others have BACK_S for their answers. Raises OtherSecret."""
        now_s, found = time.monotonic(), {}
        until_s = now_s + min(wait_s, max(LEAST_S, within_s) + LEAST_S)
        for place in places:
            earlier = self._calls.get(place)
            if earlier is None or (earlier[0].wait(0.0) and now_s - earlier[1] > ANSWER_S):  # else it is taken now
                self._calls[place] = BoundedCall(functools.partial(self.windows[place].look, within_s)), now_s
        for place in places:
            left_s = BACK_S if place in self.silent else min(until_s - time.monotonic(), CONNECT_S + ANSWER_S)
            known = self._calls[place][0].wait(max(0.0, left_s))
            epoch = self._calls.pop(place)[0].result() if known else None
            if epoch is None:
                self.silent.add(place)
                continue
            self.silent.discard(place)
            found[place] = epoch
            if enough(epoch):
                until_s = min(until_s, time.monotonic() + BACK_S)
        return found


def why_not_reached(place: Endpoint, within_s: float) -> str:
    """Try to connect to an endpoint; return why it accepts no connection, empty when it does."""
    try:
        socket.create_connection((place.host, place.port), within_s).close()
    except socket.gaierror as error:
        return f"the name {place.host!r} does not resolve ({error.strerror})"
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return f"no connection within {within_s:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:
        return f"invalid host name: {error}"
    return ""


class Window:
    """A client of one endpoint, over a connection that is kept. Used by one thread."""

    def __init__(self, place: Endpoint, secret: JobSecret) -> None:
        self._place = place
        self._secret = secret
        self._epoch_key = epoch_key(secret.run_id)
        self._client: TCPStore | None = None
        self.connected = True
        """Whether the endpoint accepted a connection in the last call, or none was made: its store is slow, not lost."""
        self.hangs = False
        """Whether the last call had no answer, though the endpoint accepted a connection."""
        self.trouble = ""
        """Why the last call had no answer; empty when it had one."""
        self.asked_s = -math.inf
        """When the last call ended."""

    def look(self, within_s: float = math.inf) -> int | None:
        """Return the endpoint's epoch, 0 where it is not in use, None where no store answers."""
        return self.ask(self.epoch_in, within_s)

    def epoch_in(self, store: Store) -> int:
        """Return a store's epoch; 0: it is not in use."""
        return read_epoch(store, self._epoch_key)

    def open(self, before: int, epoch: int, meeting: str = "") -> int | None:
        """Set the endpoint's epoch; return the one that it has now: another agent may have been faster. `meeting`: see `Stores.begin_anew`."""
        expected = str(before) if before else ""

        def change(store: Store) -> int:
            if meeting:  # before the epoch: whoever reads that finds it
                store.compare_set(f"{self._epoch_key}/{epoch}", "", meeting)
            return int(store.compare_set(self._epoch_key, expected, str(epoch)))

        return self.ask(change)

    def meeting_of(self, epoch: int) -> str:
        """Return what was published for the meeting under that epoch; empty: nothing, or no store answers."""
        key = f"{self._epoch_key}/{epoch}"
        return self.ask(lambda store: str(store.get(key).decode(errors="replace")) if store.check([key]) else "") or ""

    def ask(self, question: Callable[[Store], T], within_s: float = math.inf) -> T | None:
        """Call the store; None where none answers. A call that hangs is abandoned. Raises OtherSecret."""
        try:
            return self._ask(question, within_s)
        finally:
            self.asked_s = time.monotonic()

    def _ask(self, question: Callable[[Store], T], within_s: float) -> T | None:
        answer_s = max(LEAST_S, min(ANSWER_S, within_s))
        self.hangs = False
        trouble = why_not_reached(self._place, min(CONNECT_S, answer_s))
        self.connected = not trouble
        if trouble:
            self._client, self.trouble = None, trouble
            return None
        kept = self._client
        asked = BoundedCall(lambda: self._answer(kept, question, answer_s))
        if asked.wait(answer_s) and (asked.succeeded or asked.raised(OtherSecret)):
            (self._client, answer), self.trouble = asked.result(), ""
            return answer
        self.hangs = not asked.trouble
        silence = f"it accepts connections, but no store answered within {answer_s:.0f} s"
        self._client, self.trouble = None, asked.trouble or silence
        return None

    def _answer(self, kept: TCPStore | None, question: Callable[[Store], T], within_s: float) -> tuple[TCPStore, T]:
        """Call over the kept connection, or over a new one: the store may have been restarted."""
        if kept is not None:
            with contextlib.suppress(RuntimeError):
                return kept, question(self._secret.sealed(kept, str(self._place)))
        timeout = timedelta(seconds=within_s)
        store = TCPStore(self._place.host, self._place.port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._secret.compare(store)
        return store, question(self._secret.sealed(store, str(self._place)))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a rendezvous store at a port until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m ttp.launch.stores", description=main.__doc__)
    parser.add_argument("--port", type=whole(most=65535), default=DEFAULT_PORT)
    parser.add_argument("--host", default="", help="listen on this address of the host only (default: on all of them)")
    arguments = parser.parse_args(argv)
    ended, _wakeup = _end_asked()
    try:
        server = serve(arguments.host or "0.0.0.0", arguments.port, arguments.host)
    except (OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        say = f"cannot listen on port {arguments.port}: {why}; name another one with --port, or another address with --host"
        print(say, file=sys.stderr)
        return 1
    print(f"rendezvous store on port {server.port}", flush=True)
    ended.recv(1)
    signal.set_wakeup_fd(-1)
    return 0


def _end_asked() -> tuple[socket.socket, socket.socket]:
    """Return a socket that has a byte to read after SIGTERM or SIGINT, whichever thread of the process the signal is delivered to, and the one that the
    interpreter writes to. Main thread only."""
    ended, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    for end in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end, lambda *_: None)  # until the process has ended: a second one changes nothing
    return ended, wakeup


if __name__ == "__main__":
    sys.exit(main())
