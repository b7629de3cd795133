"""How the ranks of an attempt find their controller: through the store that they met in.

Owns the store's keys and the waiting. Rank 0 publishes the controller's address, or why there is none, so that no rank waits
for what will not come.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.errors import ConfigError, ControllerError, NotWritable

NAME_S = 30.0
"""How long the name of the controller's node may take to be known: a name server may learn of it after the ranks have begun."""
_REFUSALS = (ConfigError, NotWritable)
"""Errors of rank 0 that are every rank's; any other is a ControllerError for them."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 1.0
"""Between two looks into the store, doubled from the first to the longest: ten thousand ranks look, too."""


def controller_key(round_number: int) -> str:
    """Return the store's key for the controller of an attempt; `ttprun` looks there too. Value: `host:port pid`."""
    return f"ttp/controller/{round_number}"


def failure_key(round_number: int) -> str:
    """Return the store's key for the reason why there is no controller."""
    return f"ttp/controller_failed/{round_number}"


def folder_key(round_number: int) -> str:
    """Return the store's key under which rank 0 notes that what an earlier launch has left of an attempt is out of its folder."""
    return f"ttp/folder/{round_number}"


def log_dir_key(round_number: int) -> str:
    """Return the store's key for the folder of an attempt's journals on rank 0's node; `ttprun` reads them there."""
    return f"ttp/log_dir/{round_number}"


def process_key(round_number: int, rank: int) -> str:
    """Return the store's key under which a rank records which process it is; `ttprun` may have started a shell that started it.
    Value: `process_text` of it."""
    return f"ttp/process/{round_number}/{rank}"


def process_text(pid: int | str = "self") -> str:
    """Name a process so that no other one is taken for it, now or later: its number, and when it was started. Empty if it is
    gone, or there is no `/proc`."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            number, _, rest = file.read().partition(b" (")
    except OSError:
        return ""
    return f"{int(number)} {int(rest.rpartition(b')')[2].split()[19])}"


def publish(store: Store, round_number: int, address: str, pid: int) -> None:
    """Tell all ranks of this attempt where the controller listens (rank 0)."""
    store.set(controller_key(round_number), f"{address} {pid}")


def publish_failure(store: Store, round_number: int, error: Exception) -> None:
    """Publish that there will be no controller in this attempt (rank 0): all ranks raise the same error."""
    kind = next((kind for kind in _REFUSALS if isinstance(error, kind)), ControllerError)
    store.set(failure_key(round_number), f"{kind.__name__} {error}")


def publish_folder(store: Store, round_number: int) -> None:
    """Have the standbys of this attempt begin their journals: the folder holds none of an earlier launch any more (rank 0)."""
    store.set(folder_key(round_number), "1")


def find(
    store: Store,
    round_number: int,
    rank: int,
    timeout_s: float,
    *,
    key: Callable[[int], str] = controller_key,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait for the controller's address, or for another entry of rank 0, and return its first word (every rank but 0). A signal ends the
    wait at once: the store's own would not.

    Raises rank 0's error with its reason (ConfigError, NotWritable, ControllerError), ControllerError after `timeout_s`.
    """
    deadline, pause_s = clock() + timeout_s, FIRST_LOOK_S
    while not store.check([key(round_number)]):
        if store.check([failure_key(round_number)]):
            name, _, reason = store.get(failure_key(round_number)).decode().partition(" ")
            kind = next((kind for kind in _REFUSALS if kind.__name__ == name), ControllerError)
            raise kind(f"rank {rank}: rank 0 could not start the controller: {reason}")
        if clock() >= deadline:
            raise ControllerError(
                f"rank {rank}: rank 0 did not publish a controller within {timeout_s:.0f} s; look into rank 0's log"
            )
        sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)
    first: str = store.get(key(round_number)).decode().split()[0]
    return first


def check_name(
    address: str,
    rank: int,
    *,
    resolve: Callable[[str, None], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """See that the name in the controller's address leads anywhere from this node. Raises ControllerError."""
    host = address.rpartition(":")[0].strip("[]")
    if error := why_unknown(host, NAME_S, resolve=resolve, clock=clock, sleep=sleep):
        raise ControllerError(
            f"invalid controller address on rank {rank}: got {address}, whose host does not resolve on this node ({error})"
            f" within {NAME_S:.0f} s, expected a name or address that all nodes know. Set TTP_HOST on the"
            " controller's node"
        )


def why_unknown(
    host: str,
    within_s: float,
    *,
    resolve: Callable[[str, None], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return why a node's name leads nowhere from here, empty as soon as it does lead somewhere; asked for so long."""
    deadline = clock() + within_s
    while True:
        try:
            (resolve or socket.getaddrinfo)(host, None)
            return ""
        except (OSError, UnicodeError) as error:
            if clock() >= deadline:
                return str(error)
        sleep(LONGEST_LOOK_S)
