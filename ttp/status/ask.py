"""Asks the controllers of a job for its status, as an operator of it.

Owns the question of who this process is to them: the agent of a node gives each process of the job's user there a certificate that is good for
looking. So a process of the job on this node is looked for, in whose variables the agent's socket is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ttp.config import attempt_name, host_name, identity_socket, tls, tls_files
from ttp.controller.agent_link import request_status
from ttp.errors import ConfigError, ControllerError
from ttp.exchange import controller_file
from ttp.identity import own
from ttp.identity.role import Identity, Role
from ttp.proto.address import split_address
from ttp.proto.status import JobStatus
from ttp.status.find_job import KnownController

CONNECT_S = 2.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process of a job on this node, by its variables."""

    job_id: str
    """The attempt's name."""
    environ: Mapping[str, str]

    @property
    def log_dir(self) -> Path | None:
        """Where the attempt's journals are, as the ranks of this node have left it for their agent."""
        try:
            known = controller_file.read(Path(self.environ.get("TTP_ATTEMPT_DIR", "")))
        except (OSError, ValueError):
            return None
        return Path(known.log_dir) if known is not None else None


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of asking."""

    status: JobStatus | None
    error: str = ""
    """Why there is none, in one line."""


def local_processes() -> Iterator[LocalProcess]:
    """Yield one process of each attempt that has some here, of this user's or of every user's for root."""
    seen = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                content = (entry / "environ").read_bytes()
                environ = dict(
                    item.split("=", 1) for item in content.decode(errors="replace").split("\0") if "=" in item
                )
                job_id = attempt_name(environ)
            except (OSError, ConfigError):
                continue  # it has ended meanwhile, or is another user's
            place = (job_id, identity_socket(environ))
            if job_id and place not in seen:
                seen.add(place)
                yield LocalProcess(job_id, environ)


AskAt = Callable[[str, str], Reply]
"""`ask_at(address, job_id)`: ask one controller."""


def ask(controllers: Sequence[KnownController], by: AskAt | None = None) -> Reply:
    """Ask those of an attempt, the ones of later terms first, until one leads the ranks; else return a standby's answer, or why there is none."""
    errors, waiting = [], None
    for known in controllers:
        reply = (by or ask_at)(known.address, known.job_id)
        if reply.status is not None and reply.status.role == "active":
            return reply
        waiting = waiting or reply.status
        errors.append(reply.error)
    if waiting is not None:
        return Reply(waiting, next(filter(None, errors), ""))
    return Reply(None, errors[-1] if errors else "")


def ask_from_inside(address: str, job_id: str) -> Reply:
    """Ask one controller from a process that belongs to its job, with the credentials that this process has set."""
    try:
        return Reply(request_status(address, job_id=job_id, timeout_s=ANSWER_S))
    except ControllerError as error:
        return Reply(None, " ".join(str(error).split()))


def ask_at(address: str, job_id: str = "") -> Reply:
    """Ask one controller; job_id empty: of whatever job it is."""
    place = split_address(address)[0]
    if error := _why_unreachable(place):
        return Reply(None, f"the controller at {address} cannot be reached: {error}")
    try:
        if files := tls_files():
            own.use_site(files, host_name())
            return _request(address, job_id)
        if not tls():
            own.use(None)
            return _request(address, job_id)
    except ConfigError as error:
        return Reply(None, str(error))
    found = [process for process in local_processes() if job_id in ("", process.job_id)]
    replies = [_as_operator(address, process) for process in found]
    chosen = next((reply for reply in replies if reply.status is not None), replies[0] if replies else None)
    if chosen is not None:
        return chosen
    return Reply(
        None,
        f"the controller at {address} was not asked: no process of {f'job {job_id}' if job_id else 'a job'} is on this node, whose agent"
        " would give this one a certificate. Ask on one of the job's nodes as its user, or with TTP_TLS=False if the job has that",
    )


def _as_operator(address: str, process: LocalProcess) -> Reply:
    environ = process.environ
    try:
        if files := tls_files(environ):
            own.use_site(files, host_name(environ))
        elif path := identity_socket(environ):
            own.use(partial(own.ask, path, Identity(process.job_id, Role.OPERATOR, node=socket.gethostname())))
        else:
            own.use(None)
    except ConfigError as error:
        return Reply(None, str(error))
    return _request(address, process.job_id)


def _request(address: str, job_id: str) -> Reply:
    try:
        return ask_from_inside(address, job_id)
    finally:
        own.use(None)


def _why_unreachable(place: str) -> str:
    """Return why no connection can be made; empty: one can."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
