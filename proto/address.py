"""Addresses of controllers: `host:port/term` (PURE).

The certificate of the process there must be that term's, which only an agent can issue (`ttp.identity`). So an address may come from anywhere: whoever
has written a wrong one has led its reader to a process that is refused.
"""

from __future__ import annotations

from ttp.errors import ControllerError

MOST_DIGITS = 19


def join_address(host: str, port: int, term: int = 0) -> str:
    """Return `host:port/term`, with brackets around an IPv6 host; without a term, `host:port`."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{place}/{term}" if term else place


def split_address(address: str) -> tuple[str, int]:
    """Return `host:port` and the term, 0 where the address has none. Raises ControllerError."""
    place, _, term = address.partition("/")
    if term and not (term.isascii() and term.isdigit() and len(term) <= MOST_DIGITS):
        raise ControllerError(f"invalid controller address: got {address!r}, expected host:port/term")
    return place, int(term or "0")
