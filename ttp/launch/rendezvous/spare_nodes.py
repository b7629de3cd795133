"""Spare nodes: agents that wait outside the rendezvous and take the place of a node that the job has lost.

Every agent has an entry in the rendezvous store, renewed each second:

    ttp/agents/<run id>        how many agents have had an entry so far
    ttp/agents/<run id>/<n>    the n-th agent's entry, as JSON

The count has no seal (`sealed_store.py`): one that another program has set costs time to read entries that are not there, or has agents enter anew.

A spare takes a place when a node of the last attempt waits for the others, and another one has left or has been silent for LOST_S: while the job
runs it never disturbs it. Several spares take places in the order of their entries. A place is a lost node's: an agent joins again only after it
has reaped its workers, and renews its entry until then, so that a node whose processes are still there keeps its place.

Owns the entries and that decision. torch's handler does the rendezvous itself, under a new epoch (`multi_endpoint.py`): the lost node is still a
participant of the old one. Calls to the store raise RuntimeError when it is lost.

Before that, a spare may be given the place of a lost node by the job's controller, while the other nodes' processes keep theirs
(`running_job.py`); the agent of that node learns it from `ttp/seated/<run id>/<attempt>/<number in the group>` when it is back.

A node whose health check fails has left as well. Where that is before the job's first attempt, its place is free too: no other node would come.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.inputs import checked
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores

log = logging.getLogger("ttp.launch")

LOST_S = 4.0
"""An agent whose entry has not been renewed for this long is lost. It matters only while another agent of the job waits for it."""

LOOKERS = 8
"""So many agents of a job see to it that those that are here meet at once. If all of them are lost, torch's own times apply."""

MOST_AGENTS = 10_000
"""So many entries are read: those of a job's nodes, and of the agents that were started again."""

JOINING, RUNNING, SPARE, LEFT, SICK = "joining", "running", "spare", "left", "sick"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One agent's entry."""

    node: str
    state: str = JOINING
    number: int = 0
    """Its place in the list of entries, from 1."""
    beat: int = 0
    """Grows with each renewal."""
    start: int = -1
    """The last attempt that it took part in; -1: none."""
    size: int = 0
    """Of how many nodes that was."""
    epoch: int = 0
    """The epoch of the store under which they met."""
    place: int = 0
    """The number of the agent whose place this one, a spare before, has taken; 0: none's, or it is not known."""
    serves: int = 0
    """1: the store with this entry is its own, and lost with it."""


_NUMBERS = ("number", "beat", "start", "size", "epoch", "place", "serves")


@dataclass(frozen=True, slots=True)
class PlaceTaken:
    """Which node takes the place of which."""

    spare: str
    lost: str

    def __str__(self) -> str:
        return f"{self.spare}, a spare, takes the place of {self.lost}"


class Entry:
    """This agent's own entry, in whichever store is in use."""

    def __init__(self, run_id: str, node: str, serves: Callable[[Endpoint], bool] = lambda place: False) -> None:
        """`serves(place)`: the store there is this agent's."""
        self._lock = threading.Lock()  # a look of a spare node may still be under way when it has a place
        self.agent = Agent(node=node)
        self._serves = serves
        self._key = _key(run_id)
        self._numbers: dict[Endpoint, int] = {}

    def met(self, start: int, size: int, epoch: int) -> None:
        """Note the attempt that all nodes have joined."""
        with self._lock:
            self.agent = replace(self.agent, start=start, size=size, epoch=epoch)

    def took(self, place: int) -> None:
        """Note whose place this node, a spare, has taken."""
        with self._lock:
            self.agent = replace(self.agent, place=place)

    def number_at(self, place: Endpoint) -> int:
        """Return the number of this agent's entry in the store there; 0: it has none."""
        return self._numbers.get(place, 0)

    def renew(self, store: Store, place: Endpoint, state: str) -> None:
        """Write the entry; in a store that has none of this agent's, under the next number."""
        number = self._numbers.get(place, 0)
        if not number or int(store.add(self._key, 0)) < number:  # the store may have been restarted
            number = self._numbers[place] = int(store.add(self._key, 1))
        serves = int(self._serves(place))
        with self._lock:
            agent = self.agent = replace(
                self.agent, state=state, number=number, beat=self.agent.beat + 1, serves=serves
            )
        store.set(f"{self._key}/{number}", json.dumps(asdict(agent)))


def read_agents(store: Store, run_id: str) -> list[Agent]:
    """Return all entries, in order. What is not an agent's entry is left out: another program has written it."""
    key = _key(run_id)
    count = min(MOST_AGENTS, int(store.add(key, 0)))
    keys = (f"{key}/{number}" for number in range(1, count + 1))
    found = (_decoded(store.get(key)) for key in keys if store.check([key]))
    return [agent for agent in found if agent is not None]


def _decoded(entry: bytes) -> Agent | None:
    try:
        fields = checked.mapping(json.loads(entry), "entry")
        return Agent(
            node=checked.string(*checked.field(fields, "node", "")),
            state=checked.string(*checked.field(fields, "state", "")),
            **{name: checked.integer(*checked.field(fields, name, ""), least=-1) for name in _NUMBERS},
        )
    except (ValueError, RecursionError) as error:
        log.debug("an entry of a node in the rendezvous store cannot be read: %s", error)
        return None


def _key(run_id: str) -> str:
    return f"ttp/agents/{run_id}"


def seated(store: Store, run_id: str, start: int, number: int) -> str:
    """Return the number of the agent's entry that has a lost node's place in an attempt; empty: none has. `number`: the node's, in the group."""
    key = _seat(run_id, start, number)
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def sit_down(store: Store, run_id: str, start: int, number: int, before: str, own: int) -> None:
    """Note who has that place now, unless another agent has taken it since `before` was read."""
    store.compare_set(_seat(run_id, start, number), before, str(own))


def _seat(run_id: str, start: int, number: int) -> str:
    return f"ttp/seated/{run_id}/{start}/{number}"


class Silence:
    """Which agents are lost: those that have left, and those that have not renewed their entries for `lost_s`, by this agent's own clock."""

    def __init__(self, lost_s: float) -> None:
        self._lost_s = lost_s
        self._renewed: dict[int, tuple[int, float]] = {}

    def of(self, agents: Sequence[Agent], now_s: float) -> set[int]:
        lost = set()
        for agent in agents:
            beat, since_s = self._renewed.get(agent.number, (-1, now_s))
            if beat != agent.beat:
                since_s = now_s
            self._renewed[agent.number] = (agent.beat, since_s)
            if agent.state in (LEFT, SICK) or now_s - since_s >= self._lost_s:
                lost.add(agent.number)
        return lost


def place_to_take(
    agents: Sequence[Agent],
    lost: Collection[int],
    own: int,
    max_nodes: int = MOST_AGENTS,
    gone_with_store: str | None = None,
) -> Agent | None:
    """Return the node whose place the spare with number `own` takes, with what the others know of their last attempt (PURE); None: no place is free
    for it. `max_nodes`: of the job. `gone_with_store`: the agents have moved from a store that is lost, and some may not have come yet. That of the
    named node is lost with it, empty: none is known to be; None: all have had the time to come."""
    here = [agent for agent in agents if agent.state in (JOINING, RUNNING) and agent.number not in lost]
    latest = max(here, key=lambda agent: agent.start, default=None)
    spares = [agent.number for agent in agents if agent.state == SPARE and agent.number not in lost]
    if latest is None or latest.start < 0:  # before the first attempt, and when none of the job's nodes remains
        places = {agent.place for agent in agents if agent.number not in lost}
        # A scheduler may have started a sick node again: by its name it has one place, and none is free while it is here.
        taken = {agent.node for agent in here} | {agent.node for agent in agents if agent.number in places}
        seated = [agent for agent in agents if agent.state == SICK and agent.start < 0 and not agent.place]
        free = list({agent.node: agent for agent in seated if agent.node not in taken}.values())
        free = free[: max(0, max_nodes - len(here))]
        return next((sick for sick, spare in zip(free, spares, strict=False) if spare == own and here), None)
    if not any(agent.state == JOINING and agent.start == latest.start for agent in here):
        return None  # the job runs
    missing = latest.size - len(here)  # a node that was started again is here too
    if gone_with_store is not None:
        missing = min(missing, int(bool(gone_with_store) and all(agent.node != gone_with_store for agent in here)))
    if own not in spares or (turn := spares.index(own)) >= missing:
        return None
    gone = [agent for agent in agents if agent.start == latest.start and agent.number in lost][-missing:]
    name, number = (gone[turn].node, gone[turn].number) if turn < len(gone) else (gone_with_store or "a lost node", 0)
    return replace(latest, node=name, number=number)


def to_meet(
    agents: Sequence[Agent],
    lost: Collection[int],
    own: Agent,
    *,
    epoch: int,
    min_nodes: int,
    max_nodes: int,
    elsewhere: bool,
    moved: bool,
) -> tuple[int, ...] | None:
    """Return the agents, by number, that are to meet anew and at once, as no other comes (PURE); None: torch's rendezvous goes on.

    `own`: this agent's entry. `epoch`: under which they meet now; torch waits for lost ones only under that of the last attempt. `elsewhere`: the lost ones
    may meet without these, at another endpoint. Then those that are here must be more than half of
    the last attempt's nodes, or half of them at the endpoint where all have met (not `moved`): others wait as long as torch does, and come back if they
    were only cut off.
    """
    here = [agent for agent in agents if agent.state in (JOINING, RUNNING) and agent.number not in lost]
    if own.start < 0 or own.number in lost or any(agent.state == RUNNING for agent in here):
        return None
    gone = epoch == own.epoch and any(agent.start == own.start and agent.number in lost for agent in agents)
    waits_for_spare = len(here) < own.size and any(
        agent.state == SPARE and agent.number not in lost for agent in agents
    )
    if not min_nodes <= len(here) <= max_nodes or waits_for_spare or not (gone or len(here) < max_nodes):
        return None
    known = sum(agent.start == own.start for agent in here)
    if len(here) < own.size and elsewhere and 2 * known < own.size + moved:
        return None
    return tuple(agent.number for agent in here)


class MeetingAnew:
    """Has the agents that are here meet at once, under a new epoch of the store, where no other comes: one agent's part in it.

    Such an epoch is for those agents, and for one meeting. A node that comes later waits in torch's rendezvous until the others make room for it.
    """

    def __init__(
        self, stores: Stores, run_id: str, entry: Entry, min_nodes: int, max_nodes: int, waits_for_more: bool
    ) -> None:
        """`waits_for_more`: the job has said how long it waits for more nodes than it needs."""
        self._stores = stores
        self._run_id = run_id
        self._entry = entry
        self._min_nodes = min_nodes
        self._max_nodes = max_nodes
        self._waits_for_more = waits_for_more
        self.met_at: Endpoint | None = None
        """Where this agent has met the others for the last attempt, and its number among them."""
        self.number = 0
        self._for_some = 0
        """The last epoch that was for some agents."""
        self._meeting: set[str] = set()
        """For which agents the present epoch is; empty: for all."""
        self._place: Endpoint | None = None
        self._silence, self._since_s = Silence(LOST_S), inf

    def met(self, place: Endpoint, rank: int) -> None:
        """Note where this agent has met the others, and its number among them."""
        self.met_at, self.number, self._place = place, rank, None

    def moved(self, place: Endpoint) -> bool:
        """Return whether the last attempt's nodes have met elsewhere."""
        return self.met_at not in (None, place)

    def is_over(self, place: Endpoint, epoch: int) -> bool:
        """Return whether this agent has met others there under an epoch that was for them only."""
        return self._place is None and (place, epoch) == (self.met_at, self._for_some)

    def begin(self, place: Endpoint, epoch: int, now_s: float) -> int:
        """Begin to join at an endpoint; return how many agents meet under its epoch, this one included, 0: all that the job may have. An agent for
        which it is not waits until the others make room for it."""
        if place != self._place:
            self._place, self._silence, self._since_s = place, Silence(LOST_S), inf
        self._meeting = set(self._stores.meeting_of(place, epoch).split())
        is_one = str(self._entry.agent.number) in self._meeting
        self._for_some = epoch if is_one else 0
        self.look(place, epoch, now_s)  # silence counts from now on
        return len(self._meeting) if is_one else 0

    def waits(self, place: Endpoint, now_s: float) -> bool:
        """Return whether the present epoch is for others, who have not met yet: this agent would take a place of theirs."""
        if not self._meeting or str(self._entry.agent.number) in self._meeting:
            return False
        agents = self._stores.ask(place, functools.partial(read_agents, run_id=self._run_id))
        if agents is None:
            return True
        come = {str(agent.number) for agent in agents if agent.state == JOINING}
        return bool((self._meeting & come).difference(map(str, self._silence.of(agents, now_s))))

    def look(self, place: Endpoint, epoch: int, now_s: float) -> bool:
        """Begin a new epoch for those that are here, if no other comes; return whether one has begun. Of many agents a few look, as each reads the
        entries of all."""
        if self._entry.agent.start < 0 or (self.number >= LOOKERS and not self._stores.serves(place)):
            return False
        agents = self._stores.ask(place, functools.partial(read_agents, run_id=self._run_id))
        if agents is None:
            return False
        self._since_s = min(self._since_s, now_s)
        lost, moved = self._silence.of(agents, now_s), place != self.met_at
        if moved and now_s - self._since_s < LOST_S:
            return False  # the others come here one by one
        if self._meeting and not self._meeting.intersection(map(str, lost)):
            return False  # it is under way; one that has come since waits for room
        numbers = to_meet(
            agents, lost, self._entry.agent, epoch=epoch, min_nodes=self._min_nodes, max_nodes=self._max_nodes,
            elsewhere=len(self._stores.endpoints) > 1, moved=moved,
        )  # fmt: skip
        if numbers is None or (self._waits_for_more and len(numbers) < self._max_nodes):
            return False
        self._stores.begin_anew(place, epoch, " ".join(map(str, numbers)))
        return self._stores.epoch > epoch
