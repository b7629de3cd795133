"""Addresses of this host: which ones are its own, to which of them a name leads, and sockets that listen there.

Owns the choice of the address to listen on. Never connects to anything.
"""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this host, or where its name leads to; empty: on all addresses, of both versions where the host has both. Raises
    OSError, UnicodeError."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family, *_, place = socket.getaddrinfo(address or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family)


def is_own_address(address: str) -> bool:
    """Return whether an address or name belongs to this host: a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(place)
                return True
        except OSError:
            continue
    return False


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
