"""What a job that runs is, as node 0's agent publishes it for the spare nodes: the attempt's store, and which ranks each of its nodes has.

    ttp/running/<run id>   the newest attempt, as JSON; written once its nodes have met

Owns that entry. A spare node that reads an older one waits for a controller that has ended.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.inputs import checked
from ttp.launch.rendezvous import departures
from ttp.launch.rendezvous.spare_nodes import JOINING, RUNNING, SPARE, Agent, Silence, read_agents

log = logging.getLogger("ttp.launch")


@dataclass(frozen=True, slots=True)
class RunningNode:
    """One node of the attempt, at the place of its number in the group."""

    agent: int
    """The number of its agent's entry (`spare_nodes.py`)."""
    assigned: tuple[int, ...]
    """What torch's agents have under `torchelastic/assigned_ranks/<node>`: its first rank, the world's size, and both of its role."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """The newest attempt."""

    answer: str
    """What node 0 has answered each node: the workers' store, the attempt's number, and what is published of the secret (`fresh_store.py`)."""
    start: int
    """The attempt's number."""
    epoch: int
    """The epoch of the rendezvous store under which they have met."""
    nodes: tuple[RunningNode, ...]

    def number_of(self, ranks: Sequence[int]) -> int | None:
        """Return the number in the group of the node that has these ranks; None: none has."""
        return next(
            (number for number, node in enumerate(self.nodes) if ranks and node.assigned[0] == min(ranks)), None
        )


class WasReplaced(Exception):
    """This node was lost while the others trained on, and another one has its place."""


def has_all_nodes(store: Store, run_id: str, silence: Silence, most: int) -> bool:
    """Return whether a job runs with `most` nodes. torch's rendezvous may lack one whose place another has, and let a newcomer in, for which the others
    would make room. `silence`: the caller's own. Where one does, publish that this node waits for a place."""
    if (job := read(store, run_id)) is None:
        return False
    agents = read_agents(store, run_id)
    lost = silence.of(agents, time.monotonic())
    here = [
        agent for agent in agents if agent.number not in lost and (agent.state, agent.start) == (RUNNING, job.start)
    ]
    if len(here) >= most:
        departures.publish_wait(store, run_id)
    return len(here) >= most


def publish_end(store: Store, run_id: str, own: Agent, why: str) -> bool:
    """Publish that the job is over, for all: it has failed, or (`why` is empty) succeeded on the node of agent `own`. Return whether other nodes wait, which have to
    read it."""
    if why:
        departures.publish_over(store, run_id, why)
    else:
        departures.publish_success(store, run_id, own.node)
    others = (agent for agent in read_agents(store, run_id) if agent.number != own.number)
    waits = any(agent.state in (SPARE, JOINING) for agent in others)
    return waits or departures.has_waited(store, run_id)


def publish(store: Store, run_id: str, job: RunningJob) -> None:
    nodes = [[node.agent, *node.assigned] for node in job.nodes]
    store.set(_key(run_id), json.dumps({"answer": job.answer, "start": job.start, "epoch": job.epoch, "nodes": nodes}))


def read(store: Store, run_id: str) -> RunningJob | None:
    """Return the newest attempt; None: none is published, or another program has written there."""
    key = _key(run_id)
    return _decoded(store.get(key)) if store.check([key]) else None


def _decoded(entry: bytes) -> RunningJob | None:
    try:
        fields = checked.mapping(json.loads(entry), "entry")
        nodes = []
        for value, path in checked.items(*checked.field(fields, "nodes", "")):
            agent, *assigned = checked.integers(value, path)
            if len(assigned) != 4:
                raise ValueError(f"{path}: got {len(assigned)} numbers of a node, expected 4")
            nodes.append(RunningNode(agent, tuple(assigned)))
        answer = checked.string(*checked.field(fields, "answer", ""))
        start, epoch = (checked.integer(*checked.field(fields, name, "")) for name in ("start", "epoch"))
        return RunningJob(answer, start, epoch, tuple(nodes))
    except (ValueError, RecursionError) as error:
        log.debug("the entry of the running job in the rendezvous store cannot be read: %s", error)
        return None


def _key(run_id: str) -> str:
    return f"ttp/running/{run_id}"
