"""What a node that goes tells those that stay, through the rendezvous' store: why it leaves, or why the job is over.

    ttp/left/<run id>        how many have left so far
    ttp/left/<run id>/<n>    `node-b: ...`, the n-th one's words
    ttp/over/<run id>        the words of the node that has closed the rendezvous for all

and, in the workers' store of a start, where a static job's node 0 looks before it waits for the others once more:

    ttp/nodes/failed         the words of a node that cannot start again

Owns the keys. Every call may wait for the store, and raises RuntimeError when it is gone: the caller sees to that.
"""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]

FAILED = "ttp/nodes/failed"


def failed_for_good(job_store: Store) -> str:
    """Return what a node has said that cannot start again; empty if none has."""
    return str(job_store.get(FAILED).decode()) if job_store.check([FAILED]) else ""


def tell_left(store: Store, run_id: str, words: str) -> int:
    """Say that this node leaves, the others may go on; return how many have left so far."""
    number = int(store.add(_left(run_id), 1))
    store.set(f"{_left(run_id)}/{number}", words)
    return number


def left_after(store: Store, run_id: str, number: int) -> tuple[str, ...]:
    """Return the words of those that have left after the `number`-th, in order; one that is still speaking is left out, and so
    are those behind it."""
    found: list[str] = []
    while store.check([key := f"{_left(run_id)}/{number + len(found) + 1}"]):
        found.append(store.get(key).decode())
    return tuple(found)


def tell_over(store: Store, run_id: str, words: str) -> None:
    """Say why the job is over, before the rendezvous is closed; the first one's words stay."""
    store.compare_set(_over(run_id), "", words)


def over(store: Store, run_id: str) -> str:
    """Return why the job is over; empty if nobody has said so."""
    return str(store.get(_over(run_id)).decode()) if store.check([_over(run_id)]) else ""


def _left(run_id: str) -> str:
    return f"ttp/left/{run_id}"


def _over(run_id: str) -> str:
    return f"ttp/over/{run_id}"
