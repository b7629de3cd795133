"""Stores that listen on one address of this host, where it is known which one the other nodes use.

torch's own listen on all addresses. Owns the choice of the address, and the socket that torch is given. Never connects to anything.
"""

from __future__ import annotations

import ipaddress
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ttp.launch.hosts.rank_table import is_own_address

LOOPBACK = "127.0.0.1"


def serve(host: str, port: int, address: str) -> TCPStore:
    """Return a store that listens on one address, all of them if it is empty, and whose own client reaches it as `host`. Raises OSError,
    RuntimeError."""
    if not address:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port, descriptor = listener.getsockname()[1], listener.detach()  # torch closes it
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def address_of(host: str) -> str:
    """Return the address of this host to which a name leads the other nodes; empty: it is not known. The name may lead to several, to none of this
    host's (a container's published port), or to the loopback interface here and to another one elsewhere."""
    if host == "localhost":
        return LOOPBACK
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return ""
    meant = _is_address(host)
    own = [each for each in found if is_own_address(each) and (meant or not ipaddress.ip_address(each).is_loopback)]
    return own[0] if len(own) == 1 else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False
