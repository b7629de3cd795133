"""The cells of the matrix that need several nodes: every fault of a node, while training and at each stage of a dump, to the node
with rank 0 (the controller, the publisher) and to the other one.

Two nodes with two ranks each. Owns the cells; running them is `matrix.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from ttp.chaos.cell import MatrixCase, labelled
from ttp.chaos.faults.scenario import FaultSpec, Moment

NODES, RANKS_PER_NODE = 2, 2
ROLES = {"first": (0, 1), "last": (3, 2)}
"""A rank whose node is hit, and its neighbour on that node, which dies first where a dump is expected: the other node has a holder
of every shard."""
EVENTS = ("freeze_sent", "frozen", "decided", "write_sent", "publish_sent", "published")
FIELDS: dict[str, dict[str, float]] = {
    "lose_node": {},
    "partition": {"for_s": 8.0},
    "delay": {"for_s": 4.0, "ms": 20.0},
    "kill_agent": {},
}


def node_cells() -> tuple[MatrixCase, ...]:
    """Return every cell of two nodes."""
    return labelled((*_in_training(), *_in_dump()))


def _in_training() -> Iterator[MatrixCase]:
    for kind, fields in FIELDS.items():
        for role, (rank, _) in ROLES.items():
            fault = FaultSpec(kind=kind, ranks=(rank,), moment=Moment(after_steps=(3, 7)), **fields)  # type: ignore[arg-type]
            yield MatrixCase(kind, "training", role, fault)


def _in_dump() -> Iterator[MatrixCase]:
    for kind, fields in FIELDS.items():
        for event in EVENTS:
            for role, (rank, neighbour) in ROLES.items():
                second = FaultSpec(kind=kind, ranks=(rank,), moment=Moment(event=event), **fields)  # type: ignore[arg-type]
                first = FaultSpec(
                    kind="kill",
                    ranks=(neighbour,),
                    moment=Moment(after_steps=(3, 7)),
                    point="now",
                    then=(second,),
                    expect=("saved",),
                )
                yield MatrixCase(f"{kind} in a dump", event, role, first)
