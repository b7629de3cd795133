"""How ranks of the model regroup: agents start processes in the place of others, training threads leave their step, meet in new groups, are
filled, and stand in front of their training until the gate opens. What must be so then is looked at here (I17, I18, I20).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.model import controller as controllers
from tests.model import rank as ranks
from tests.model.gate import Gate, State
from tests.model.rank import Out, Rank, Turn, first, gathered
from tests.model.shape import Shape
from tests.model.situation import Draft
from ttp.processor.core import events as ev
from ttp.proto.frozen import replace
from ttp.proto.messages import CauseKind, ReplaceFailed

if TYPE_CHECKING:
    from tests.model.world import World


# --- one rank ---


def replacement(shape: Shape, old: Rank, freeze_id: int, place: int) -> Rank:
    """Return the process that an agent starts in the place of another: it goes to the controller that ordered it."""
    came = old.came if old.generation < freeze_id else old.left
    return replace(
        first(shape, old.number, f"c{place}", freeze_id), main="vacant", gate=Gate().vacate(freeze_id), acknowledged=freeze_id,
        pid=old.pid + 1, began_in=freeze_id, generation=freeze_id, left=came, unsound=True,
        spared=old.spared or (old.alive and not old.unsound), broken=old.broken,
    )  # fmt: skip


def filled(shape: Shape, rank: Rank, state: State) -> tuple[Rank, tuple[Out, ...]]:
    """A replacement has `state` from its sources; the others keep theirs."""
    order = rank.regroup
    assert order is not None
    gate = replace(rank.gate, state=state) if rank.number in order.replaced else rank.gate
    return replace(rank, main="filled", met=2, gate=gate), ()


def regroup_done(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    """All have been filled: this rank stands in front of its training, and waits for the gate."""
    order = rank.regroup
    assert order is not None
    gate = rank.gate.regrouped((order.step, rank.gate.state[1] and rank.gate.state[0] == order.step), order.record)
    unsound = rank.unsound and rank.number not in order.replaced
    came = (order.step, order.step)
    turn = Turn(shape, replace(rank, main="again", gate=gate, regroup=None, unsound=unsound, came=came))
    turn.take(ev.RegroupDone(order))
    return turn.ended()


def again(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    """The gate has opened: it enters its training."""
    return gathered(shape, replace(rank, spared=False, met=0))


def failed(shape: Shape, rank: Rank, kind: CauseKind) -> tuple[Rank, tuple[Out, ...]]:
    """The training thread raises while its groups are made, or while all are filled."""
    order = rank.regroup
    assert order is not None
    turn = Turn(shape, replace(rank, main="raised", regroup=None))
    turn.take(ev.WorkFailed(order.freeze_id, "regroup", "", kind.value))
    return turn.ended()


def stuck(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    return replace(rank, stuck=True), ()


# --- the job ---


def order_replacement(world: World, draft: Draft, place: int, order: Any) -> None:
    """A controller has ordered an agent to start a process in a rank's place."""
    draft.replaces.add((place, order.rank, order.pid, order.freeze_id))


def may_replace(world: World, draft: Draft, place: int) -> bool:
    """True for a controller that may still order agents to replace processes: of some rank it does not know that it is gone."""
    size, places = world.shape.world_size, len(draft.controllers)
    known = world.controller(draft, place).streams or any(draft.up[rank * places + place] for rank in range(size))
    return world.shape.in_place_s > 0 and bool(known)


def raises(world: World, draft: Draft, rank: int, kind: CauseKind) -> None:
    """The training thread raises, in its training or while it regroups."""
    meets = world.views[draft.ranks[rank]].meets
    world._on_rank(draft, rank, failed if meets else ranks.raised, kind)


def begins_update(world: World, draft: Draft, rank: int) -> None:
    """I17: all that live train in one generation, and none in an older one than others have entered."""
    it = world.rank(draft, rank)
    views = map(world.views.__getitem__, draft.ranks)
    behind = [other for other, its in enumerate(views) if its.alive and its.generation != it.generation]
    if behind or it.generation < draft.opened:
        broken = f"I17: rank {rank} begins an update in generation {it.generation}, others train in {draft.opened}"
        world._on_rank(draft, rank, ranks.found_broken, f"{broken}; in another are ranks {behind}")


def replace_process(world: World, draft: Draft, place: int, rank: int, pid: int, freeze_id: int) -> None:
    """An agent ends a process, if it has not ended, and starts another one. It reports nothing of the first any more."""
    draft.replaces.discard((place, rank, pid, freeze_id))
    old = world.rank(draft, rank)
    if old.alive and ranks.pid_of(old) != pid:
        _say_failed(world, draft, place, rank, freeze_id)
        return
    if old.alive:
        world._gone(draft, rank, (old.link, "replaced"))
    draft.exits = {(to, other) for to, other in draft.exits if other != rank}
    draft.ranks[rank] = world._rank_number(replacement(world.shape, old, freeze_id, place))
    world._on_rank(draft, rank, ranks.tick)


def cannot_replace(world: World, draft: Draft, place: int, rank: int, pid: int, freeze_id: int) -> None:
    draft.faults_left -= 1
    draft.replaces.discard((place, rank, pid, freeze_id))
    _say_failed(world, draft, place, rank, freeze_id)


def _say_failed(world: World, draft: Draft, place: int, rank: int, freeze_id: int) -> None:
    if world.controller(draft, place).running:
        failed = ReplaceFailed(ranks.host_of(rank), rank, freeze_id, "")
        world._on_controller(draft, place, controllers.receive_from_agent, failed)


def fill(world: World, draft: Draft, rank: int) -> None:
    """A replacement takes what it is to hold from those that hold it, and that must stand still."""
    order = world.rank(draft, rank).regroup
    assert order is not None
    contents = [world.rank(draft, source).gate.content for source in world.sources_of(draft, rank)]
    if world.lacks_a_source(draft, rank) or any(step != order.step for step, _ in contents):
        broken = f"I18: rank {rank} is filled with {contents}, expected all its shards of step {order.step}"
        world._on_rank(draft, rank, ranks.found_broken, broken)
    world._on_rank(draft, rank, filled, (order.step, all(sound for _, sound in contents)))


def enter(world: World, draft: Draft, rank: int) -> None:
    """I18: when the first rank enters its training in a new generation, all that live have the same sound state; I20: which is on disk by then where
    it is published first."""
    it = world.rank(draft, rank)
    if it.generation > draft.opened:
        draft.opened = it.generation
        step = it.gate.state[0]
        if world.shape.publish_first and step not in [published for _, published in world.disk(draft).published]:
            world._on_rank(
                draft,
                rank,
                ranks.found_broken,
                f"I20: rank {rank} enters its training at step {step}, which is not published",
            )
        for other in range(world.shape.world_size):
            its = world.rank(draft, other)
            if its.alive and (its.generation, its.gate.content) != (it.generation, (it.gate.state[0], True)):
                broken = f"I18: rank {rank} enters generation {it.generation}, rank {other} has {its.gate.content} in {its.generation}"
                world._on_rank(draft, rank, ranks.found_broken, broken)
    world._on_rank(draft, rank, again)
