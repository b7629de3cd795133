"""The agent's part in copies: it owns their memory, has a keeper where a rank asks for one, and has a step saved of copies before an attempt.

All agents of the job take the same decision: they exchange what their keepers have, in the attempt's store, and all apply `rules.choose`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.copies.memory import NoRoom, Owner, of_save, own
from ttp.copies.rules import Choice, Offer, choose
from ttp.fork_server import frames
from ttp.fork_server.client import ForkServer, Program
from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.kill import kill_and_wait
from ttp.fork_server.request import NotForked
from ttp.identity.authority import Authority
from ttp.identity.credentials import Credentials, Renewed
from ttp.identity.own import socket_name
from ttp.identity.role import Identity, Role
from ttp.identity.secret import Secret
from ttp.proto.messages import CauseKind
from ttp.runtime.standby import last_term_of
from ttp.text.wording import counted

log = logging.getLogger("ttp.launch")

ORDER_S = 600.0
"""A node's time to write what it has of a step, and another node's to wait for that."""
BACKLOG = 1024
OFFERS_S = 60.0
"""Until all nodes have listed their copies: it takes no disk. A node that is lost meanwhile is found when the workers start."""
LOOK_S = 0.01
ARGUMENTS = ("-u", "-m", "ttp.copies")


@dataclass(frozen=True, slots=True)
class SavedCopies:
    """A checkpoint that was made of copies."""

    step: int
    path: str
    nodes: int
    took_s: float

    def __str__(self) -> str:
        where = counted(self.nodes, "node")
        return f"saved step {self.step} from copies in the memory of {where} as {self.path}, in {self.took_s:.2f} s"


class KeeperLost(Exception):
    """The keeper has ended; its text is the reason."""


class Copies:
    """One node's. Used on the agent's main thread; memory is given on a thread of its own."""

    def __init__(self) -> None:
        """Raises OSError: no socket can be made."""
        self.address = f"@ttp-copies-{secrets.token_hex(16)}"
        """What the ranks are to have as TTP_COPIES."""
        self._ranks = socket.socket(socket.AF_UNIX)
        self._ranks.bind(socket_name(self.address))
        self._ranks.listen(BACKLOG)
        self._owner = Owner()
        self._process: subprocess.Popen[bytes] | ForkedChild | None = None
        self._orders: socket.socket | None = None
        self._begins = False
        """The keeper was ordered to begin, and its answer was not read yet."""
        self._attempt: dict[str, Any] = {}
        """What the keeper gets when it begins, beside its certificate."""
        self._credentials: Renewed | None = None
        """None: transfers are plain, or there are none."""
        self._given: Credentials | None = None
        """What the keeper has of them."""
        self._attempt_store: Store | None = None
        self._node, self._nodes = 0, 1
        self._placed: tuple[int, int, tuple[int, ...]] | None = None
        """This node, of how many, and its ranks, in the last attempt."""
        self._peer = ""
        self._port = 0
        """Where this node's keepers listen for the others."""
        self._unpublished = ""
        """That address, until the attempt's store has it."""

    def has_memory(self, rank: int) -> bool:
        """Return whether a rank of this node has copies here, or saves without waiting. From any thread."""
        return not {own(rank), of_save(rank)}.isdisjoint(self._owner.all())

    # --- the keeper ---

    def look(self, server: ForkServer | None) -> None:
        """Start a keeper when a rank asks for memory and there is none; learn the next node's address when it is known."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("the copy keeper (process %d) has ended; its copies are kept", self._process.pid)
            self._forget()
        if self._process is None and frames.readable(self._ranks, 0.0):
            self._start(server)
        if self._orders is not None and self._begins:
            if not frames.readable(self._orders, 0.0):
                return
            with contextlib.suppress(EOFError, OSError):  # its end is seen above
                self._has_begun(self._orders)
        if self._unpublished:
            self._publish_address()
        self._renew_credentials()
        if self._orders is not None and self._nodes > 1 and not self._peer:
            with contextlib.suppress(RuntimeError, OSError, KeeperLost):
                key = f"ttp/copies/address/{(self._node + 1) % self._nodes}"
                if self._attempt_store is not None and self._attempt_store.check([key]):
                    self._peer = self._attempt_store.get(key).decode()
                    self._order({"do": "peer", "address": self._peer})

    def _start(self, server: ForkServer | None) -> None:
        try:
            self._orders, theirs = socket.socketpair()
            with theirs:
                memory, theirs_memory = socket.socketpair()
                with theirs_memory:
                    giving = threading.Thread(target=self._give_memory, args=(memory,), name="ttp-copies", daemon=True)
                    try:
                        giving.start()
                    except RuntimeError:
                        memory.close()
                        raise
                    self._process = self._run(server, theirs)
                    self._orders.settimeout(ORDER_S)
                    frames.send(self._orders, {"do": "start"}, [theirs_memory.fileno(), self._ranks.fileno()])
            self._begin_keeper(self._orders)
        except (OSError, RuntimeError) as error:  # no thread can be started
            log.error("a copy keeper cannot be started: %s; ranks are without copies", error)
            self._forget()

    @staticmethod
    def _run(server: ForkServer | None, channel: socket.socket) -> subprocess.Popen[bytes] | ForkedChild:
        argv = (sys.executable, *ARGUMENTS)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if server is not None:
            with contextlib.suppress(NotForked):
                server.prepare(argv, environ)
                return server.fork([Program(argv, environ, (channel.fileno(), 1, 2))])[0]
        return subprocess.Popen(argv, stdin=channel.fileno(), env=environ, start_new_session=True)

    def _give_memory(self, channel: socket.socket) -> None:
        with channel, contextlib.suppress(EOFError, OSError):
            while True:
                request, _ = frames.receive(channel)
                if request["do"] == "all":
                    frames.send(channel, {"memories": {name: size for name, (_, size) in self._owner.all().items()}})
                    continue
                try:
                    descriptor = self._owner.obtain(request["name"], request["nbytes"], request["written"])
                    with open(descriptor, "rb", buffering=0):
                        frames.send(channel, {}, [descriptor])
                except (NoRoom, OSError) as error:
                    frames.send(channel, {"error": str(error)})

    def _order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have the keeper carry out an order; return its answer. Raises KeeperLost."""
        if self._orders is None:
            raise KeeperLost("there is no copy keeper")
        try:
            if self._begins:
                self._has_begun(self._orders)
            frames.send(self._orders, dict(order))
            return frames.receive(self._orders)[0]
        except (EOFError, OSError) as error:
            self._forget()
            raise KeeperLost(f"the copy keeper was lost: {error}") from error

    def _order_again(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have the keeper carry out an order; where it ends meanwhile, another one, once: an order that was carried out in part may be given again. Not
        where it gave no answer in time: other nodes do not wait for longer. Raises KeeperLost."""
        if self._orders is None:
            self._start(None)  # the keeper was lost, its copies are here
        try:
            return self._order(order)
        except KeeperLost as error:
            if isinstance(error.__cause__, TimeoutError):
                raise
            log.warning("%s; starting another one", error)
        self._start(None)
        return self._order(order)

    def _forget(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            kill_and_wait("the copy keeper", [self._process])
        self._orders = self._process = None
        self._begins = False
        self._peer = self._unpublished = ""

    def _begin_keeper(self, orders: socket.socket) -> None:
        """Order it to begin the attempt. Its answer is not waited for: a new one imports torch first, and the ranks need their agent meanwhile.
        Raises OSError."""
        self._given = self._credentials() if self._credentials is not None else None
        credentials = self._given.encode() if self._given is not None else None
        frames.send(orders, {"do": "begin", "port": self._port, "credentials": credentials, **self._attempt})
        self._begins = True

    def _renew_credentials(self) -> None:
        """Give the keeper its next certificate once there is one: in an attempt of days it connects to other nodes' keepers again and again."""
        if self._orders is None or self._credentials is None or (new := self._credentials()) is self._given:
            return
        with contextlib.suppress(KeeperLost):  # the next one begins with it
            if "error" not in self._order({"do": "credentials", "credentials": new.encode()}):
                self._given = new

    def _has_begun(self, orders: socket.socket) -> None:
        """Read its answer. Raises EOFError, OSError."""
        self._begins = False
        answer, _ = frames.receive(orders)
        if error := answer.get("error"):
            log.error(
                "the copy keeper could not begin attempt %d: %s; no copy leaves this node",
                self._attempt["attempt"],
                error,
            )
        if address := answer.get("address", ""):
            self._port = int(address.rpartition(":")[2])
            self._unpublished = address
            self._publish_address()

    def _publish_address(self) -> None:
        """Where the store is away, later: each look tries again."""
        with contextlib.suppress(RuntimeError, OSError):
            if self._attempt_store is not None:
                self._attempt_store.set(f"ttp/copies/address/{self._node}", self._unpublished)
            self._unpublished = ""

    # --- attempts ---

    def begin(
        self,
        job_id: str,
        number: int,
        store: Store,
        node: int,
        nodes: int,
        host: str,
        secret: Secret | None,
        ranks: Sequence[int],
    ) -> SavedCopies | None:
        """Begin an attempt, before its workers start: have the newest step saved of copies where no checkpoint has it.

        store: the attempt's; node, nodes: this node's place. host: this node's address for the others. secret: the job's; None: transfers are
        plain. ranks: of this node. Returns what was saved; None: nothing was to be.
        """
        self._node, self._nodes, self._attempt_store, self._peer = node, nodes, store, ""
        before, self._placed = self._placed, (node, nodes, tuple(ranks))
        saved, settled = self._recover(number, store, before == self._placed) if number else (None, True)
        self._credentials = None
        if secret is not None and nodes > 1:
            peer = Identity(job_id, Role.KEEPER, node=host)
            self._credentials = Renewed(partial(Authority(secret, job_id).issue, peer))
        self._attempt = {"attempt": number, "job_id": job_id, "host": host if nodes > 1 else ""}
        if settled:
            self._owner.drop({name for name in self._owner.all() if name not in {own(rank) for rank in ranks}})
        if self._orders is not None:
            with contextlib.suppress(OSError, EOFError):  # its end is seen when it is looked for
                self._begin_keeper(self._orders)
                self._has_begun(self._orders)
        return saved

    def _recover(self, number: int, store: Store, fits: bool) -> tuple[SavedCopies | None, bool]:
        """Return what was saved, and whether the nodes came to an end: else a node was lost, or a step that copies have could not be saved, and the
        copies are needed in the next attempt. `fits`: this attempt's copies need the same memory. Where they need other memory, copies that could not be
        saved take no room from them."""
        begun = time.monotonic()
        mine: dict[str, Any] = {"offers": [], "groups": {}, "directories": [], "newest": 0}
        if self._orders is not None or self._owner.all():
            with contextlib.suppress(KeeperLost):
                mine = self._order_again({"do": "offers"})
        try:
            everyone = self._exchange(store, "offers", mine, OFFERS_S)
            names = {offer: name for node, said in enumerate(everyone) for offer, name in _offers(node, said)}
            attempt = max((offer.attempt for offer in names), default=-1)
            groups = frozenset(group for said in everyone for group in said["groups"].get(str(attempt), ()))
            newest = max(said["newest"] for said in everyone)
            directories: list[str] = next((said["directories"] for said in everyone if said["directories"]), [])
            damaged: set[Offer] = set()
            for turn in range(len(names) + 1):
                choice = choose([offer for offer in names if offer not in damaged], groups, newest)
                if choice is None:
                    return None, True
                path, bad = self._save(store, f"{number}.{turn}", choice, names, directories)
                if path:
                    nodes = len({offer.node for offer in choice.sources})
                    return SavedCopies(choice.step, path, nodes, time.monotonic() - begun), True
                if not bad:
                    break
                damaged |= bad
        except (OSError, RuntimeError, ValueError) as error:  # torch's DistError
            log.error("copies in memory could not be saved before this attempt: %s", error)
            return None, False
        return None, not fits

    def _save(
        self, store: Store, turn: str, choice: Choice, names: Mapping[Offer, str], directories: Sequence[str]
    ) -> tuple[str, set[Offer]]:
        """Save a step in the first directory that takes it; return its path, or the copies that turned out damaged."""
        for number, directory in enumerate(directories):
            place = {
                "directory": directory,
                "tmp_name": f"iter_{choice.step:07d}_tmp_copies_{turn}_{number}",
                "step": choice.step,
            }
            mine = {offer: groups for offer, groups in choice.sources.items() if offer.node == self._node}
            sources = [{"name": names[o], "slot": o.slot, "groups": sorted(groups)} for o, groups in mine.items()]
            answer: dict[str, Any] = {"files": []}
            if sources:
                answer = self._carry_out({"do": "write", "sources": sources, **place})
            everyone = self._exchange(store, f"{turn}/{number}/written", answer)
            errors = [f"{said['error']}" for said in everyone if "error" in said]
            damaged = {o for o in choice.sources if everyone[o.node].get("damaged") == names[o]}
            path = ""
            if not errors:
                first = next(iter(choice.sources))
                published: dict[str, Any] = {}
                if first.node == self._node:
                    published = self._carry_out(
                        {
                            "do": "publish", "name": names[first], "slot": first.slot, "cause": CauseKind.EXITED.value, "ranks": [],
                            "text": "saved from copies in memory after the ranks had ended", "term": last_term_of(choice.attempt),
                            "files": [file for said in everyone for file in said["files"]], **place,
                        }
                    )  # fmt: skip
                said = self._exchange(store, f"{turn}/{number}/published", published)[first.node]
                path, errors = said.get("path", ""), [said["error"]] if "error" in said else []
            if path:
                return path, set()
            if self._node == min(offer.node for offer in choice.sources):
                log.error("step %d could not be saved from copies in %s: %s", choice.step, directory, "; ".join(errors))
                self._carry_out({"do": "discard", **place})
            if damaged:
                return "", damaged
        return "", set()

    def _carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._order_again(order)
        except KeeperLost as error:
            return {"error": str(error), "damaged": ""}

    def _exchange(
        self, store: Store, what: str, mine: Mapping[str, Any], within_s: float = ORDER_S
    ) -> list[dict[str, Any]]:
        """Return every node's table. Raises RuntimeError (torch's DistError), ValueError."""
        store.set(f"ttp/copies/{what}/{self._node}", json.dumps(dict(mine)))
        until_s = time.monotonic() + within_s
        keys = [f"ttp/copies/{what}/{node}" for node in range(self._nodes)]
        while not store.check(keys):
            if time.monotonic() > until_s:
                raise RuntimeError(f"another node gave no answer within {within_s:.0f} s ({what})")
            time.sleep(LOOK_S)
        return [json.loads(store.get(key)) for key in keys]

    def close(self) -> None:
        self._ranks.close()
        self._forget()
        self._owner.drop(set(self._owner.all()))


def _offers(node: int, said: Mapping[str, Any]) -> list[tuple[Offer, str]]:
    return [
        (
            Offer(
                node, offer["rank"], offer["attempt"], offer["step"], offer["slot"], frozenset(offer["groups"]),
                received=offer["name"] != f"rank {offer['rank']}",
            ),
            str(offer["name"]),
        )
        for offer in said["offers"]
    ]  # fmt: skip
