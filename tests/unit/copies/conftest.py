"""Keepers of the tests, in their process or in processes of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from ttp.copies.keeper import Keeper
from ttp.identity.authority import Authority
from ttp.identity.role import Identity, Role
from ttp.identity.secret import Secret
from ttp.launch.attempts.copies import Copies

HOST = "127.0.0.1"
SECRET = Secret(b"a secret of the tests")


def credentials(job_id: str = "job/1", role: Role = Role.KEEPER) -> dict[str, Any]:
    ranks, term = ((0,) if role is Role.RANK else ()), (1 if role is Role.CONTROLLER else 0)
    return Authority(SECRET, job_id).issue(Identity(job_id, role, ranks, term, "host")).encode()


@contextlib.contextmanager
def keeper(secured: bool = False, attempt: int = 1) -> Iterator[tuple[Keeper, str]]:
    """A keeper in this process, with an agent's memory, and its address."""
    agent = Copies()
    ours, theirs = socket.socketpair()
    giving = threading.Thread(target=agent._give_memory, args=(ours,))
    giving.start()
    of = Keeper(theirs)
    begun = of._begin(
        {
            "attempt": attempt, "job_id": f"job/{attempt}", "host": HOST, "port": 0,
            "credentials": credentials(f"job/{attempt}") if secured else None,
        }
    )  # fmt: skip
    try:
        yield of, begun["address"]
    finally:
        assert of._listener is not None
        of._listener.shutdown(socket.SHUT_RDWR)
        of._listener.close()
        theirs.close()
        giving.join()
        agent.close()
