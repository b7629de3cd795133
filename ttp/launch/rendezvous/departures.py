"""What a departing node publishes for the others in the rendezvous store: why it leaves, or why the job is over.

    ttp/left/<run id>        how many have left so far
    ttp/left/<run id>/<n>    `node-b: ...`, the n-th node's reason
    ttp/over/<run id>        the reason of the node that has closed the rendezvous for all
    ttp/succeeded/<run id>   a node on which the job has succeeded
    ttp/waits/<run id>       set by a node that waits for a place
    ttp/sick/<run id>        how many nodes have been excluded so far, because their health checks failed
    ttp/sick/<run id>/<n>    the n-th of them as JSON: its name, and the reason
    ttp/drain/<run id>/<n>   why the agent with the n-th entry (`spare_nodes.py`) shall leave at a step boundary

and, in the workers' store of an attempt, which a static job's node 0 reads before it waits for the others again:

    ttp/nodes/failed         the reason of a node that cannot restart

The counts have no seal (`sealed_store.py`): where another program has changed one, a node's reason is written where it is not read, and its
departure is found out as that of a node that was lost. Owns the keys. Every call may wait for the store, and raises RuntimeError when it is lost. Never handles that: the caller does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.inputs import checked

FAILED = "ttp/nodes/failed"


@dataclass(frozen=True, slots=True)
class Excluded:
    """A node that takes no part in the job any more, and why."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


def failed_for_good(job_store: Store) -> str:
    """Return the reason of a node that cannot restart; empty: there is none."""
    return str(job_store.get(FAILED).decode(errors="replace")) if job_store.check([FAILED]) else ""


def publish_departure(store: Store, run_id: str, why: str) -> int:
    """Publish that this node leaves and the others may continue; return how many have left so far."""
    number = int(store.add(_left(run_id), 1))
    store.set(f"{_left(run_id)}/{number}", why)
    return number


def departures_after(store: Store, run_id: str, number: int) -> tuple[str, ...]:
    """Return the reasons of the nodes that left after the `number`-th, in order, up to the first that is not written yet."""
    found: list[str] = []
    while store.check([key := f"{_left(run_id)}/{number + len(found) + 1}"]):
        found.append(store.get(key).decode(errors="replace"))
    return tuple(found)


def publish_excluded(store: Store, run_id: str, excluded: Excluded) -> None:
    """Publish that this node is sick, and why: the others do without it."""
    number = int(store.add(_sick(run_id), 1))
    store.set(f"{_sick(run_id)}/{number}", json.dumps(asdict(excluded)))


def excluded_after(store: Store, run_id: str, number: int) -> tuple[Excluded, ...]:
    """Return the nodes that were excluded after the `number`-th, in order, up to the first that is not written yet."""
    found: list[Excluded] = []
    while store.check([key := f"{_sick(run_id)}/{number + len(found) + 1}"]):
        found.append(_decoded(store.get(key)))
    return tuple(found)


def ask_to_leave(store: Store, run_id: str, number: int, why: str) -> None:
    """Ask the agent with that entry to leave at the next step boundary."""
    store.set(_drain(run_id, number), why)


def asked_to_leave(store: Store, run_id: str, number: int) -> str:
    """Return why the agent with that entry was asked to leave; empty: it was not."""
    key = _drain(run_id, number)
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def _decoded(entry: bytes) -> Excluded:
    """Return an entry; of one that another program has written, that much: those after it must be found."""
    try:
        fields = checked.mapping(json.loads(entry), "entry")
        return Excluded(*(checked.string(*checked.field(fields, name, "")) for name in ("node", "reason")))
    except (ValueError, RecursionError):
        return Excluded("a node", "its entry in the rendezvous store cannot be read")


def publish_over(store: Store, run_id: str, why: str) -> None:
    """Publish why the job is over, before the rendezvous is closed; the first reason is kept."""
    store.compare_set(_over(run_id), "", why)


def over(store: Store, run_id: str) -> str:
    """Return why the job is over; empty if no node has published it."""
    return str(store.get(_over(run_id)).decode(errors="replace")) if store.check([_over(run_id)]) else ""


def publish_success(store: Store, run_id: str, node: str) -> None:
    """Publish that the job has succeeded on this node: nodes that wait as spares are not needed any more."""
    store.set(_succeeded(run_id), node)


def succeeded(store: Store, run_id: str) -> bool:
    """Return whether the job has succeeded on a node."""
    return bool(store.check([_succeeded(run_id)]))


def end(store: Store, run_id: str) -> tuple[str, bool]:
    """Return why the job is over, empty if no node has published it, and whether it has succeeded on a node. Success is read first: a failure that was
    published before it is then there."""
    success = succeeded(store, run_id)
    return over(store, run_id), success


def publish_wait(store: Store, run_id: str) -> None:
    """Publish that a node waits for a place: it has to read the job's end."""
    store.set(_waits(run_id), "1")


def has_waited(store: Store, run_id: str) -> bool:
    """Return whether a node waits for a place, or has done so."""
    return bool(store.check([_waits(run_id)]))


def _left(run_id: str) -> str:
    return f"ttp/left/{run_id}"


def _drain(run_id: str, number: int) -> str:
    return f"ttp/drain/{run_id}/{number}"


def _sick(run_id: str) -> str:
    return f"ttp/sick/{run_id}"


def _over(run_id: str) -> str:
    return f"ttp/over/{run_id}"


def _succeeded(run_id: str) -> str:
    return f"ttp/succeeded/{run_id}"


def _waits(run_id: str) -> str:
    return f"ttp/waits/{run_id}"
