"""The agent's side of its processes' identities: a socket at which each asks for its certificate.

The kernel says which process asks (SO_PEERCRED): a rank's certificate goes to that rank's worker or a process below it, a controller's for one
term to one process. Owns the socket, of Linux's abstract names: nothing of it remains on a disk however this process ends. The authority's key
never leaves this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

from ttp.fork_server import frames
from ttp.identity.authority import Authority
from ttp.identity.own import process_behind, socket_name
from ttp.identity.role import Identity, Role
from ttp.inputs import checked

log = logging.getLogger("ttp.launch")

WORKERS_S = 8.0
"""A worker may ask before the agent knows which processes its workers are."""
REQUEST_S = 2.0
RETRY_S = 0.05
BACKLOG = 1024
"""A node's processes may all ask at once."""
_MOST_ANCESTORS = 64


class Refused(Exception):
    """A process does not get what it asks for; its text is the reason."""


class Issuer:
    """Answers until `close`. `begin` and `workers` for each attempt."""

    def __init__(self, node: str) -> None:
        """`node`: this host. Raises OSError: no socket can be made."""
        self._node = node
        self.address = f"@ttp-{secrets.token_hex(16)}"
        """What processes of this node are to have as TTP_IDENTITY."""
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(socket_name(self.address))
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._known = threading.Condition()  # guards all below
        self._authority: Authority | None = None
        self._terms = range(0)
        self._pids: Mapping[int, int] | None = None
        self._controllers: dict[int, int] = {}
        """The process that has a term's certificate."""
        self._refusals: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ttp-issuer", daemon=True)
        self._thread.start()

    def begin(self, authority: Authority, terms: range) -> None:
        """Issue for another attempt from now on. `terms`: those that its controllers can have."""
        with self._known:
            self._authority, self._terms, self._pids, self._controllers = authority, terms, None, {}

    def workers(self, pids: Mapping[int, int] | None) -> None:
        """Say which processes this attempt's workers are (rank -> pid); None: that is known soon."""
        with self._known:
            self._pids = dict(pids) if pids is not None else None
            self._known.notify_all()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(REQUEST_S)
        self._listener.close()

    def _serve(self) -> None:
        """Take requests until `close`: one that cannot be taken, as descriptors or threads are used up, does not end it."""
        while not self._closing.is_set():
            try:
                channel, _ = self._listener.accept()
                pid, uid = process_behind(channel)
            except OSError as error:
                if not self._closing.wait(RETRY_S):
                    self._log(f"a request for a certificate could not be taken: {error}")
                continue
            if uid != os.geteuid():
                channel.close()
                self._log(
                    f"process {pid} of user {uid} asked for a certificate and was refused: expected user {os.geteuid()}"
                )
                continue
            try:
                threading.Thread(target=self._answer, args=(channel, pid), name="ttp-issue", daemon=True).start()
            except RuntimeError as error:
                channel.close()
                self._log(f"a request for a certificate could not be answered: {error}")

    def _answer(self, channel: socket.socket, pid: int) -> None:
        with channel, contextlib.suppress(EOFError, OSError):
            channel.settimeout(REQUEST_S)
            try:
                request, descriptors = frames.receive(channel)
                for descriptor in descriptors:
                    os.close(descriptor)
                answer: dict[str, Any] = {"credentials": self._issue(request, pid)}
            except (Refused, ValueError) as error:
                self._log(f"process {pid} asked for a certificate and was refused: {error}")
                answer = {"error": str(error)}
            frames.send(channel, answer)

    def _issue(self, request: object, pid: int) -> dict[str, Any]:
        fields = checked.mapping(request, "request")
        role = Role(checked.string(*checked.field(fields, "role", "")))
        job_id = checked.string(*checked.field(fields, "job_id", ""))
        ranks = checked.integers(*checked.field(fields, "ranks", ""))
        term = checked.integer(*checked.field(fields, "term", ""))
        with self._known:
            if self._authority is None or self._authority.job_id != job_id:
                current = self._authority.job_id if self._authority is not None else "none"
                raise Refused(f"got attempt {job_id!r}, expected the one that runs, {current!r}")
            authority = self._authority
            if role is Role.RANK:
                self._check_rank(ranks, pid)
            elif role is Role.CONTROLLER:
                self._check_controller(term, pid)
            elif role in (Role.AGENT, Role.KEEPER):
                raise Refused(f"got role {role.value!r}, which is not given at this socket")
        peer = Identity(
            job_id, role, ranks if role is Role.RANK else (), term if role is Role.CONTROLLER else 0, self._node
        )
        return authority.issue(peer).encode()

    def _check_rank(self, ranks: tuple[int, ...], pid: int) -> None:
        self._known.wait_for(lambda: self._pids is not None, WORKERS_S)
        workers = self._pids or {}
        if len(ranks) != 1 or ranks[0] not in workers:
            raise Refused(f"got ranks {list(ranks)}, expected one of this node's {sorted(workers)}")
        if not belongs_to(pid, workers[ranks[0]]):
            raise Refused(
                f"process {pid} is not rank {ranks[0]}'s worker (process {workers[ranks[0]]}), nor started by it, nor in its session. Start the"
                " rank below its worker, or set TTP_TLS=False on a network that is closed to others"
            )

    def _check_controller(self, term: int, pid: int) -> None:
        if term not in self._terms:
            raise Refused(f"got term {term}, expected {self._terms.start} to {self._terms.stop - 1}")
        owner = self._controllers.get(term, pid)
        if owner != pid and os.path.exists(f"/proc/{owner}"):
            raise Refused(f"process {owner} is the controller of term {term}")
        self._controllers[term] = pid

    def _log(self, text: str) -> None:
        with self._known:
            new = text not in self._refusals and len(self._refusals) < 1000
            self._refusals.add(text)
        if new:
            log.warning("%s", text)


def belongs_to(pid: int, worker: int) -> bool:
    """Say whether a process is a worker's: itself, below it, or in its session."""
    with contextlib.suppress(OSError):
        if os.getsid(pid) == worker:
            return True
    for _ in range(_MOST_ANCESTORS):
        if pid == worker:
            return True
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
        if pid <= 1:
            return False
    return False
