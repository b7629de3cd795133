"""Stores that listen on one address of this host, where it is known which one the other nodes use.

torch's own listen on all addresses. Owns the socket that torch is given. Never connects to anything.
"""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ttp.addresses import listen


def serve(host: str, port: int, address: str) -> TCPStore:
    """Return a store that listens on one address, all of them if it is empty, and whose own client reaches it as `host`. Raises OSError,
    RuntimeError."""
    if not address:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    listener = listen(address, port)
    port, descriptor = listener.getsockname()[1], listener.detach()  # torch closes it
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
