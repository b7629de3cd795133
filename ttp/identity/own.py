"""This process's own credentials, which every connection to a controller uses.

One per process, as a process is one rank, one controller or one agent. Without any the connections are plain, and stay on this host. Owns where
they come from: the agent (`issuer.py`), this agent itself, or the site's files.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ttp.errors import ConfigError, ControllerError
from ttp.fork_server import frames
from ttp.identity.credentials import Credentials, Renewed
from ttp.identity.role import Identity
from ttp.inputs.input_file import read_text

ANSWER_S = 10.0
"""The agent's time to answer; it waits until it knows its workers."""
BUSY_S = 0.02
SITE_READ_S = 3600.0
"""The site's files are read again after so long: they may have been renewed."""
_MOST_PEM = 1 << 20
_CREDENTIALS = struct.Struct("3i")

Obtain = Callable[[], Credentials]
_obtain: Obtain | None = None


def use(obtain: Obtain | None) -> None:
    """Set where this process's credentials come from; None: it has none. `obtain()` raises OSError, ValueError."""
    global _obtain
    _obtain = obtain


def credentials() -> Credentials | None:
    """Return what this process shows and believes now. None: its connections are plain. Raises ControllerError."""
    try:
        return _obtain() if _obtain is not None else None
    except (OSError, ValueError) as error:
        raise ControllerError(f"this process has no certificate: {error}") from error


def use_agents(path: str, peer: Identity) -> None:
    """Ask the agent for them, and again when they are old. `path`: its socket (TTP_IDENTITY); empty: there is none, and connections are plain."""
    use(Renewed(partial(ask, path, peer)) if path else None)


def ask(path: str, peer: Identity) -> Credentials:
    """Ask the agent of this node for the credentials of this process. Raises OSError, ValueError: it refuses, and why."""
    request = {"role": peer.role.value, "job_id": peer.job_id, "ranks": list(peer.ranks), "term": peer.term}
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(ANSWER_S)
            _connect(channel, socket_name(path))
            pid, uid = process_behind(channel)
            if uid != os.geteuid():
                raise ValueError(
                    f"the process behind {path} (pid {pid}) is of user {uid}, expected an agent of user {os.geteuid()}"
                )
            frames.send(channel, request)
            answer, _ = frames.receive(channel)
    except EOFError as error:
        raise OSError(f"the agent did not answer: {error}") from error
    if "credentials" not in answer:
        raise ValueError(str(answer.get("error")))
    return Credentials.decode(answer["credentials"])


def socket_name(address: str) -> str:
    """Return an address as the kernel has it: `@name` is one of its abstract names, without a file."""
    return f"\0{address[1:]}" if address.startswith("@") else address


def process_behind(channel: socket.socket) -> tuple[int, int]:
    """Return pid and user of the process at the other end, as the kernel knows them. Raises OSError."""
    pid, uid, _ = _CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _connect(channel: socket.socket, path: str) -> None:
    """Connect, also where many others do at this moment: the kernel refuses one more (EAGAIN) than it can queue. Raises OSError."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            channel.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(BUSY_S)


def use_site(paths: Sequence[str], host: str) -> None:
    """Use the certificate of the site's own authority. `paths`: certificate, key and authority, PEM each. `host`: this node, as its certificate names it. Raises ConfigError."""
    obtain = Renewed(partial(_read_site, paths, host))
    try:
        obtain()
    except (OSError, ValueError) as error:
        raise ConfigError(f"invalid TTP_TLS_CERT, TTP_TLS_KEY, TTP_TLS_CA: {error}, expected three PEM files") from None
    use(obtain)


def _read_site(paths: Sequence[str], host: str) -> Credentials:
    shown, own_key, believed = map(_read_pem, paths)
    return Credentials(own_key, shown, believed, renew_unix_s=time.time() + SITE_READ_S, site_host=host)


def _read_pem(path: str) -> bytes:
    content = read_text(Path(path), _MOST_PEM).encode()
    if b"-----BEGIN " not in content:
        raise ValueError(f"{path!r} has no PEM block")
    return content
