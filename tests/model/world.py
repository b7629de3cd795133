"""The exhaustive model's world: every component a small number, every step of a component worked out once.

A world is a tuple of numbers: (faults left, controller, agent's news, ranks, wires, disk). `World` owns the tables behind
the numbers and the successor function. A second controller is a second head with wires of its own: one more number for
the head and one more wire a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from tests.model import controller as control
from tests.model import rank as ranks
from tests.model import wires
from tests.model.controller import Head
from tests.model.disk import Disk, published_wrong
from tests.model.rank import Moved, Node
from tests.model.wires import Wire
from tests.simulation.training import Layout, Training
from ttp.controller import events as ev
from ttp.controller.rounds import has_culprit
from ttp.controller.state import ControllerState, Stage
from ttp.errors import ProtocolError
from ttp.processor.transitions import give_up_at
from ttp.proto.messages import CauseKind, FaultReport, Phase, Registration, StateReport, WorkerExit

T = TypeVar("T", bound=Hashable)

KINDS = ("kill", "exception", "stream break", "write failure", "publish failure", "slow")

State = tuple[int, ...]
Step = tuple[tuple[Any, ...], State]
"""(what was done, the state after it)."""


@dataclass(frozen=True)
class Limits:
    """How much of the space is searched."""

    layout: Layout
    steps: int = 2
    faults: int = 1
    kinds: tuple[str, ...] = KINDS[:5]
    first_kinds: tuple[str, ...] = KINDS[:5]
    """Of the first fault."""
    first_ranks: tuple[int, ...] = ()
    """Whom the first fault befalls; empty: any rank."""
    later_from_freeze: bool = False
    """Every fault after the first comes from the freeze on."""
    agents: bool = True
    """The launcher tells of every process's end."""
    hints: int = 3
    """How many ranks' collectives fail with an error after a death; the others' hang."""
    turns: bool = True
    """Partial-order reduction: see `World.turn`. False only to test that it leaves nothing out."""


class Table(Generic[T]):
    """Values as numbers."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class Flags(NamedTuple):
    left: int
    """Faults that may still come."""
    used: int
    harmless: bool
    """Nothing has happened yet that may cost the job its run."""
    hints: int
    """Ranks whose collective may still fail with an error."""


class Facts(NamedTuple):
    """What the search must know of a rank, worked out once per node."""

    alive: bool
    wants: str
    step: int
    barred: bool
    normed: int
    """The last step whose norm collective it has entered."""
    gathered: int
    news: bool
    work: bool
    disk: str
    down: bool
    waits: bool
    """It is inside a collective: a dead member may make it raise."""
    can_raise: bool
    committed: int
    give_up_s: float
    beats: bool
    updating: bool
    task: str


class Done(NamedTuple):
    """One action of a rank, worked out: numbers instead of values."""

    node: int
    up: tuple[int, ...]
    disk: int
    left: bool
    broken: str


class Told(NamedTuple):
    head: int
    sends: tuple[tuple[int, int], ...]
    over: bool
    broken: str


_TOLD_AS = {"killed": "signal SIGKILL", "left": "exit code 75", "gave up": "exit code 1"}
FLAGS, HEAD, AGENT, FIRST = 0, 1, 2, 3


@dataclass
class World:
    limits: Limits
    flags: Table[Flags] = field(default_factory=Table)
    heads: Table[Head] = field(default_factory=Table)
    agents: Table[tuple[int, ...]] = field(default_factory=Table)
    nodes: Table[Node] = field(default_factory=Table)
    wires: Table[Wire] = field(default_factory=Table)
    disks: Table[Disk] = field(default_factory=Table)
    messages: Table[Any] = field(default_factory=Table)

    def __post_init__(self) -> None:
        self.training = Training(self.limits.layout, self.limits.steps, local_copy=False)
        self.size = self.limits.layout.world_size
        self._wires_at, self._disk_at = FIRST + self.size, FIRST + 2 * self.size
        self._facts: dict[int, Facts] = {}
        self._done: dict[tuple[Any, ...], Done] = {}
        self._told: dict[tuple[Any, ...], Told] = {}
        self._calm: dict[int, bool] = {}
        self._disk_wrong: dict[int, str] = {}
        self.violations: list[tuple[State, tuple[Any, ...], str]] = []

    # --- the beginning ---

    @cached_property
    def first(self) -> State:
        """Processes have begun and nobody has connected."""
        nodes = [self.nodes.number(ranks.start(self.training, rank)) for rank in range(self.size)]
        nothing = self.wires.number(Wire())
        flags = Flags(self.limits.faults, 0, True, self.limits.hints)
        return (
            self.flags.number(flags), self.heads.number(control.start(self.training)), self.agents.number(()), *nodes,
            *(nothing for _ in nodes), self.disks.number(Disk()),
        )  # fmt: skip

    # --- one component's step, worked out once ---

    def facts(self, number: int) -> Facts:
        found = self._facts.get(number)
        if found is None:
            found = self._facts[number] = self._look_at(self.nodes.values[number])
        return found

    def _look_at(self, node: Node) -> Facts:
        alive = node.machine is not None
        passed = node.phase is not Phase.COMPUTE
        training = node.main == "training" and not node.torn
        task = type(node.tasks[0]).__name__ if node.tasks else ""
        return Facts(
            alive=alive,
            wants=ranks.wants(node),
            step=node.step,
            barred=node.barred,
            normed=node.step if passed else node.step - 1,
            gathered=node.gathered,
            news=bool(node.news),
            work=ranks.can_work(node),
            disk=ranks.touches_disk(node),
            down=ranks.is_down(node),
            waits=training and not node.barred and node.phase in (Phase.READY, Phase.DONE),
            can_raise=training and not (node.final and node.phase is Phase.UPDATING),
            committed=node.records[-1] if node.records else 0,
            give_up_s=inf if node.machine is None else give_up_at(node.machine),
            beats=node.machine is not None and node.machine.heartbeat_at < inf and ranks.is_connected(node),
            updating=ranks.busy(node),
            task=task,
        )

    def act(self, node: int, name: str, argument: int = -1, disk: int = -1) -> Done:
        """Return what comes of a rank's action; `argument`: a message's number."""
        key = (node, name, argument, disk)
        found = self._done.get(key)
        if found is None:
            found = self._done[key] = self._act(self.nodes.values[node], name, argument, disk)
        return found

    def _act(self, node: Node, name: str, argument: int, disk: int) -> Done:
        training = self.training
        actions: dict[str, Callable[[], Moved]] = {
            "gets": lambda: ranks.receive(node, self.messages.values[argument], training),
            "thinks": lambda: ranks.think(node, training),
            "connects": lambda: ranks.connect(node, training),
            "loses its stream": lambda: ranks.lose_stream(node, training),
            "trains": lambda: ranks.go_on(node, training),
            "raises": lambda: ranks.raise_out(node, CauseKind.EXCEPTION),
            "fails with its peers": lambda: ranks.raise_out(node, CauseKind.PEER_ERROR),
            "works": lambda: ranks.work(node, self.disks.values[disk], training, False),
            "fails to write": lambda: ranks.work(node, self.disks.values[disk], training, True),
            "is killed": lambda: Moved(ranks.end(node, "killed")),
            "waits": lambda: ranks.wait(node, argument / 2, training),
        }
        try:
            moved = actions[name]()
        except (ProtocolError, AssertionError, KeyError, IndexError) as error:
            return Done(self.nodes.number(node), (), -1, False, f"raised: rank {node.rank}: {error}")
        up = tuple(self.messages.number(ev.Received(message)) for message in moved.up)
        left = node.machine is not None and moved.node.machine is None
        number = -1 if moved.disk is None else self.disks.number(moved.disk)
        return Done(self.nodes.number(moved.node), up, number, left, moved.broken)

    def tell(self, head: int, message: int) -> Told:
        """Return what comes of an event that the controller takes."""
        key = (head, message)
        found = self._told.get(key)
        if found is None:
            found = self._told[key] = self._note(control.hear(self.heads.values[head], self.messages.values[message]))
        return found

    def _note(self, heard: control.Heard) -> Told:
        sends = tuple((rank, self.messages.number(message)) for rank, message in heard.sends)
        over = heard.head.state.stage is Stage.OVER
        return Told(self.heads.number(heard.head), sends, over, heard.broken)

    # --- the successor function ---

    def successors(self, state: State) -> list[Step]:
        """Return every step from here, or a part that is enough: see docs/model.md, `turns`."""
        facts = [self.facts(number) for number in state[FIRST : self._wires_at]]
        if self.limits.turns:
            step = self._no_news(state)
            if step is not None:
                return [step]
            for rank in range(self.size):
                if self._has_turn(state, facts, rank):
                    own = (self._rank_steps, self._peer_errors, self._rank_faults)
                    return [step for part in own for step in part(state, facts, rank)]
        steps: list[Step] = []
        for rank in range(self.size):
            steps += self._rank_steps(state, facts, rank)
        steps += self._controller_steps(state)
        if not steps or "slow" in self.limits.kinds:
            steps += self._time_steps(state, facts, free=not steps)
        if not steps:
            wrong = self._end_is_wrong(state)
            if wrong:
                self.violations.append((state, ("the end",), wrong))
        for rank in range(self.size):
            steps += self._peer_errors(state, facts, rank)
            steps += self._rank_faults(state, facts, rank)
        return steps

    def _has_turn(self, state: State, facts: list[Facts], rank: int) -> bool:
        """This rank's next action is one of those enabled now, whatever the others do before it, and commutes with that."""
        mine = facts[rank]
        wire = self.wires.values[state[self._wires_at + rank]]
        if not mine.alive or wire.closing or not (wire.down or mine.news):
            return False
        if mine.task == "PublishCheckpoint":
            return False
        flags = self.flags.values[state[FLAGS]]
        if "slow" in self.limits.kinds and (flags.left or mine.disk != "nothing"):
            return False
        if not mine.barred and not self._ready(facts, rank) and self._will_be_ready(facts, rank):
            return False
        dead = any(not other.alive for other in facts)
        return not mine.waits or dead or not flags.left or not flags.hints

    def _ready(self, facts: list[Facts], rank: int) -> bool:
        """Nothing holds the training thread up."""
        mine = facts[rank]
        match mine.wants:
            case "nothing":
                return True
            case "gate":
                return not mine.barred
            case "norm":
                return not mine.barred and all(other.normed >= mine.step for other in facts)
            case "gather":
                return not mine.barred and all(other.gathered >= mine.step for other in facts)
        return False

    def _will_be_ready(self, facts: list[Facts], rank: int) -> bool:
        """Others may yet let the training thread go on: nobody whom its collective lacks is gone from training."""
        mine = facts[rank]
        match mine.wants:
            case "norm":
                return not any(other.wants == "never" and other.normed < mine.step for other in facts)
            case "gather":
                return not any(other.wants == "never" and other.gathered < mine.step for other in facts)
        return False

    def _rank_steps(self, state: State, facts: list[Facts], rank: int) -> list[Step]:
        """Everything that a rank does sooner or later, by itself or with what has arrived."""
        mine, steps = facts[rank], []
        if not mine.alive:
            return []
        number = state[FIRST + rank]
        wire = self.wires.values[state[self._wires_at + rank]]
        if wire.down:
            message, rest = wire.down[0], wire._replace(down=wire.down[1:])
            done = self.act(number, "gets", message)
            steps.append(self._moved(state, rank, done, rest, ("gets", rank, message)))
        if wire.cut or (wire.closing and not wire.down):
            done = self.act(number, "loses its stream")
            steps.append(self._moved(state, rank, done, wires.rank_leaves(wire), ("loses its stream", rank)))
        if mine.down and self.heads.values[state[HEAD]].state.stage is not Stage.OVER:
            done = self.act(number, "connects")
            steps.append(self._moved(state, rank, done, wires.open_stream(wire), ("connects", rank)))
        if mine.news:
            steps.append(self._moved(state, rank, self.act(number, "thinks"), wire, ("thinks", rank)))
        if self._ready(facts, rank):
            steps.append(self._moved(state, rank, self.act(number, "trains"), wire, ("trains", rank)))
        if mine.work:
            disk = state[self._disk_at] if mine.disk != "nothing" else -1
            steps.append(self._moved(state, rank, self.act(number, "works", -1, disk), wire, ("works", rank)))
        return steps

    def _moved(self, state: State, rank: int, done: Done, wire: Wire, label: tuple[Any, ...], flags: int = -1) -> Step:
        wire = wires.say(wire, done.up)
        after = list(state)
        if flags >= 0:
            after[FLAGS] = flags
        after[FIRST + rank] = done.node
        if done.left:
            wire = wires.rank_leaves(wire)
            if self.limits.agents and not self._is_over(state):
                news = (*self.agents.values[state[AGENT]], rank)
                after[AGENT] = self.agents.number(tuple(sorted(news)))
        after[self._wires_at + rank] = self.wires.number(wire)
        if done.disk >= 0:
            after[self._disk_at] = done.disk
            wrong = self._disk_is_wrong(done.disk) or self._step_is_wrong(after)
            if wrong:
                self.violations.append((state, label, wrong))
        if done.broken:
            self.violations.append((state, label, done.broken))
        return label, tuple(after)

    def _is_over(self, state: State) -> bool:
        return self.heads.values[state[HEAD]].state.stage is Stage.OVER

    def _disk_is_wrong(self, disk: int) -> str:
        if disk not in self._disk_wrong:
            self._disk_wrong[disk] = published_wrong(self.disks.values[disk], self.training)
        return self._disk_wrong[disk]

    def _step_is_wrong(self, state: list[int]) -> str:
        """I6: what is visible is of the last committed step, or of the one before."""
        committed = max(self.facts(number).committed for number in state[FIRST : self._wires_at])
        for _, step, _ in self.disks.values[state[self._disk_at]].published:
            if step not in (committed - 1, committed):
                return f"I6: step {step} was published, step {committed} was the last that was committed"
        return ""

    def _end_is_wrong(self, state: State) -> str:
        """I9, I11: nothing more happens by itself; is that an end that may be?"""
        flags, head = self.flags.values[state[FLAGS]], self.heads.values[state[HEAD]]
        nodes = [self.nodes.values[number] for number in state[FIRST : self._wires_at]]
        running = [node.rank for node in nodes if node.machine is not None]
        if head.state.stage is not Stage.OVER or running:
            return f"I11: the job hangs; controller {head.state.stage.value}, alive {running}"
        outcomes = head.outcomes
        if "finished" in outcomes:
            late = [node.rank for node in nodes if node.state_step != self.limits.steps]
            return f"I11: finished, but ranks {late} are not at the last step" if late else ""
        if flags.harmless:
            return f"I7: a false alarm cost the job its run: {outcomes}"
        if "published" in outcomes:
            return "" if self.disks.values[state[self._disk_at]].tracker else "I4: published without a tracker"
        sound = {node.rank for node in nodes if node.ended == "left" and not node.torn}
        if "refused for want of a step" in outcomes:
            sound = {rank for rank in sound if nodes[rank].state_step > 0}
        covered = all(sound.intersection(holders) for holders in self.limits.layout.holders)
        if covered and any(node.state_step > 0 for node in nodes):
            return f"I9: covered by sound ranks {sorted(sound)}, yet {outcomes or 'nothing was said'}"
        return ""

    # --- the controller ---

    def _controller_steps(self, state: State) -> list[Step]:
        """Take the next event of any stream, see a stream's end, or hear of a process's end."""
        if self._is_over(state):
            return []
        steps: list[Step] = []
        for step in self._arrivals(state):
            steps.append(step)
            if self._leaves_calmly(state[HEAD]):
                break
        return steps

    def _no_news(self, state: State) -> Step | None:
        """Return the taking of something that tells the controller nothing, now or ever: see docs/model.md."""
        head = self.heads.values[state[HEAD]].state
        if head.stage in (Stage.ASSEMBLING, Stage.EXITING, Stage.OVER) or "slow" in self.limits.kinds:
            return None
        for rank in self.agents.values[state[AGENT]]:
            member = head.members.table[rank]
            if member.dead is not None and not member.attached:
                return self._agent_tells(state, rank)
        for rank in range(self.size):
            wire = self.wires.values[state[self._wires_at + rank]]
            if not wire.streams:
                continue
            stream, member = wire.streams[0], head.members.table[rank]
            if stream.up:
                if wire.route == 0 and self._tells_nothing(head, self.messages.values[stream.up[0]].message):
                    return self._take(state, rank, wire, 0)
            elif stream.ended and member.dead is not None and not member.attached:
                return self._see_end(state, rank, wire, 0)
        return None

    def _tells_nothing(self, head: ControllerState, message: object) -> bool:
        member = head.members.table[message.rank]
        if member.suspect and member.attached:
            return False
        match message:
            case StateReport(freeze_id=number):
                return number < head.freeze_id
            case FaultReport(cause=cause):
                known = head.fault is not None and has_culprit(head.fault.causes)
                return known and cause.kind is CauseKind.PEER_ERROR
        return False

    def _arrivals(self, state: State) -> Iterator[Step]:
        for rank in self.agents.values[state[AGENT]]:
            yield self._agent_tells(state, rank)
        for rank in range(self.size):
            wire = self.wires.values[state[self._wires_at + rank]]
            for index, stream in enumerate(wire.streams):
                if stream.up:
                    yield self._take(state, rank, wire, index)
                if stream.ended:
                    yield self._see_end(state, rank, wire, index)

    def _agent_tells(self, state: State, rank: int) -> Step:
        left = list(self.agents.values[state[AGENT]])
        left.remove(rank)
        after = list(state)
        after[AGENT] = self.agents.number(tuple(left))
        text = _TOLD_AS[self.nodes.values[state[FIRST + rank]].ended]
        event = self.messages.number(ev.Received(WorkerExit(rank, 100 + rank, text, 0.0)))
        return self._heard(state, after, event, ("agent tells of", rank))

    def _see_end(self, state: State, rank: int, wire: Wire, index: int) -> Step:
        left, was_route = wires.see_end(wire, index)
        after = list(state)
        after[self._wires_at + rank] = self.wires.number(left)
        label = ("sees the end of", rank, index)
        if not was_route:
            return label, tuple(after)
        return self._heard(state, after, self.messages.number(ev.StreamClosed((rank,))), label)

    def _take(self, state: State, rank: int, wire: Wire, index: int) -> Step:
        left, event = wires.take(wire, index)
        what = self.messages.values[event].message
        if isinstance(what, Registration):
            left = wires.routed(left, index)
        after = list(state)
        after[self._wires_at + rank] = self.wires.number(left)
        return self._heard(state, after, event, ("hears", rank, event))

    def _leaves_calmly(self, head: int) -> bool:
        """EXITING: what is still to be heard may be heard in any one order, see docs/model.md."""
        if head not in self._calm:
            self._calm[head] = self.limits.turns and self.heads.values[head].state.stage is Stage.EXITING
        return self._calm[head]

    def _heard(self, state: State, after: list[int], event: int, label: tuple[Any, ...]) -> Step:
        told = self.tell(state[HEAD], event)
        return self._announce(state, after, told, label)

    def _announce(self, state: State, after: list[int], told: Told, label: tuple[Any, ...]) -> Step:
        after[HEAD] = told.head
        for rank, message in told.sends:
            at = self._wires_at + rank
            after[at] = self.wires.number(wires.tell(self.wires.values[after[at]], message))
        if told.over:
            after[AGENT] = self.agents.number(())
            for at in range(self._wires_at, self._disk_at):
                after[at] = self.wires.number(wires.controller_leaves(self.wires.values[after[at]]))
        if told.broken:
            self.violations.append((state, label, told.broken))
        return label, tuple(after)

    # --- time ---

    def _time_steps(self, state: State, facts: list[Facts], free: bool) -> list[Step]:
        """Time passes until the next deadline: freely when nothing else can happen, else as a fault (slowness)."""
        flags = self.flags.values[state[FLAGS]]
        if not free and (not flags.left or flags.used and self._too_early(state)):
            return []
        head = self.heads.values[state[HEAD]]
        seconds = min([control.deadline(head), *(mine.give_up_s for mine in facts if mine.alive)])
        if seconds == inf:
            return []
        after = list(state)
        if not free:
            after[FLAGS] = self.flags.number(Flags(flags.left - 1, flags.used + 1, False, flags.hints))
        label = ("time passes", seconds)
        beating = tuple(
            rank
            for rank, mine in enumerate(facts)
            if mine.beats and self.wires.values[state[self._wires_at + rank]].route >= 0
        )
        told = self._told.get((state[HEAD], seconds, beating))
        if told is None:
            told = self._note(control.let_time_pass(head, seconds, beating))
            self._told[state[HEAD], seconds, beating] = told
        for rank, mine in enumerate(facts):
            if mine.alive:
                done = self.act(state[FIRST + rank], "waits", round(2 * seconds))
                wire = self.wires.values[after[self._wires_at + rank]]
                _, moved = self._moved(tuple(after), rank, done, wire, label)
                after = list(moved)
        step = self._announce(state, after, told, label)
        return [] if step[1] == state else [step]

    def _too_early(self, state: State) -> bool:
        return self.limits.later_from_freeze and self.heads.values[state[HEAD]].state.stage in (
            Stage.ASSEMBLING, Stage.RUNNING, Stage.EXITING, Stage.OVER,
        )  # fmt: skip

    # --- what goes wrong ---

    def _peer_errors(self, state: State, facts: list[Facts], rank: int) -> list[Step]:
        """A dead member makes a collective raise, or hang."""
        mine, flags = facts[rank], self.flags.values[state[FLAGS]]
        if not (flags.hints and mine.alive and mine.waits and any(not other.alive for other in facts)):
            return []
        done = self.act(state[FIRST + rank], "fails with its peers")
        wire = self.wires.values[state[self._wires_at + rank]]
        cost = self.flags.number(flags._replace(hints=flags.hints - 1))
        return [self._moved(state, rank, done, wire, ("fails with its peers", rank), cost)]

    def _rank_faults(self, state: State, facts: list[Facts], rank: int) -> list[Step]:
        flags, mine = self.flags.values[state[FLAGS]], facts[rank]
        kinds = self.limits.kinds if flags.used else self.limits.first_kinds
        if not flags.left or not mine.alive or (flags.used and self._too_early(state)):
            return []
        if not flags.used and self.limits.first_ranks and rank not in self.limits.first_ranks:
            return []
        number, wire = state[FIRST + rank], self.wires.values[state[self._wires_at + rank]]
        harm = self.flags.number(Flags(flags.left - 1, flags.used + 1, False, flags.hints))
        steps = []

        def add(name: str, done: Done, after: Wire, cost: int = harm) -> None:
            steps.append(self._moved(state, rank, done, after, (name, rank), cost))

        if "kill" in kinds:
            add("is killed", self.act(number, "is killed"), wire)
        if "exception" in kinds and mine.can_raise:
            add("raises", self.act(number, "raises"), wire)
        if "stream break" in kinds and wire.current and not wire.cut:
            cost = self.flags.number(flags._replace(left=flags.left - 1, used=flags.used + 1))
            add("stream breaks", Done(number, (), -1, False, ""), wires.break_stream(wire), cost)
        if mine.work and (mine.disk == "write" and "write failure" in kinds or mine.disk == "publish" and "publish failure" in kinds):
            add("fails to write", self.act(number, "fails to write", -1, state[self._disk_at]), wire)
        return steps
