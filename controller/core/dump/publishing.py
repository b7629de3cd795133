"""Making a written staging directory visible, by one rank at a time in each place (PURE).

Owns the choice of the publishers. A *place* is what sees a directory: all ranks together when it is shared, the ranks of
one node when every node has its own; then a step is published when every node that holds files of it has published them.
Two publishers of one staging directory do no harm: the rename is exclusive, and a valid checkpoint of that step that is there
already is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ttp.proto.frozen import replace
from ttp.proto.incident import Saved
from ttp.proto.messages import Published, PublishOrder, StepFailed

from ..facts.coverage import named
from ..facts.events import Effect, Fields, Journal, Send
from ..facts.incident import stage_ended
from ..facts.state import (
    MOST_KEPT,
    ControllerState,
    Ordered,
    Publishing,
    StateAt,
    Writing,
    goto,
)
from .finish import learn_checkpoint
from .freeze import cause_fields, half_of_the_rest, next_round, root_cause
from .regroup import regroup_or_leave
from .roll_forward import is_holder, mark_stuck
from .writing import next_directory, results, tmp_name


def start_publishing(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
    """Everything is written and durable: order the publish."""
    dump, fault = state.at.dump, state.at.fault
    cause = root_cause(fault.causes)
    assert cause is not None, "a plan is made for a fault with a cause"
    order = PublishOrder(
        freeze_id=state.freeze_id,
        step=dump.decision.step,
        directory=dump.directories[dump.attempt],
        tmp_name=tmp_name(state),
        results=results(dump),
        cause=cause,
        record=dump.decision.record,
        term=state.settings.term,
    )
    return _advance(goto(state, Publishing(fault, replace(dump, order=order))), now, out)


def _advance(state: StateAt[Ordered], now: float, out: list[Effect]) -> ControllerState:
    """Have every place published, or change the plan when a place is lost with what was written there. No rank publishes
    before all places are known to be able to."""
    dump = state.at.dump
    alive = [rank for rank in range(state.settings.world_size) if is_holder(state, rank)]
    candidates: list[list[int]] = []
    for place in _places(state):
        here = [rank for rank in alive if _place_of(state, rank) == place]
        if not here:
            where = f"node {place} was lost with what it had written" if place else "no rank remains that can publish"
            return next_round(state, where, now, out)
        if place in dump.published_places or any(rank in dump.publishers for rank in here):
            continue
        able = [rank for rank in here if rank not in dump.failed_publishers]
        if not able and place:
            return _without_node(state, place, here, now, out)
        if not able:
            return next_directory(goto(state, Writing(state.at.fault, dump)), now, out)
        candidates.append(able)
    for able in candidates:
        state = _order_publish(state, able, now, out)
    return state


def _without_node(
    state: StateAt[Ordered], place: str, ranks: list[int], now: float, out: list[Effect]
) -> ControllerState:
    """What a node wrote in this directory cannot be published there. A rank without the step, which could not publish in any, has shown nothing of it: it may
    write another step there."""
    dump = state.at.dump
    last = dump.errors[-1] if dump.errors else f"{dump.directories[dump.attempt]}: no answer"
    return _written_anew(state, dump.able.intersection(ranks), f"node {place} could not publish: {last}", now, out)


def _torn(state: StateAt[Publishing], writers: Set[int], why: str, now: float, out: list[Effect]) -> ControllerState:
    """Write anew what these ranks wrote: their files ended short, and no rank contradicts that."""
    return _written_anew(state, writers, f"files of {named('rank', sorted(writers))} ended short: {why}", now, out)


def _written_anew(
    state: StateAt[Ordered], unfit: Iterable[int], why: str, now: float, out: list[Effect]
) -> ControllerState:
    """These ranks write in this directory no more, and all is written anew.

    One bad rank or node never vetoes a directory. Where a rank or node is indispensable, the next directory is tried.
    """
    dump, fault = state.at.dump, state.at.fault
    directory = dump.directories[dump.attempt]
    pairs = fault.unfit.union((directory, rank) for rank in unfit)
    fault = replace(fault, unfit=pairs, errors=(*fault.errors, *dump.errors)[-MOST_KEPT:])
    return next_round(state.with_fault(fault), why, now, out)


def _places(state: StateAt[Ordered]) -> tuple[str, ...]:
    """Return where the files of this staging directory are: somewhere at least, because every shard was written."""
    return tuple(sorted({_place_of(state, rank) for rank in _writers(state)})) or ("",)


def _writers(state: StateAt[Ordered]) -> tuple[int, ...]:
    """Return the ranks that wrote something of this staging directory, dead ones included."""
    return state.at.dump.work.ranks(lambda work: bool(work.results))


def _place_of(state: ControllerState, rank: int) -> str:
    if not state.settings.local_dirs:
        return ""
    registration = state.members.table[rank].registration
    return registration.host if registration is not None else ""


def _order_publish(state: StateAt[Ordered], able: list[int], now: float, out: list[Effect]) -> StateAt[Ordered]:
    """Order it from the lowest of these ranks that has the step.

    A rank whose disk failed it comes after those, and a rank without the step last: the shards are written, so it needs no
    optimizer state any more. It does need the host state of that step, and fails the order when it does not have it.
    """
    dump = state.at.dump
    assert dump.order is not None
    rank = min(able, key=lambda candidate: (candidate not in dump.able, candidate in dump.failed_here, candidate))
    out.append(Send((rank,), dump.order))
    fields: Fields = {"rank": rank, "step": dump.order.step, "tmp_name": dump.order.tmp_name}
    out.append(Journal("publish_sent", {**fields, **cause_fields(dump.order.cause)}))
    ordered = replace(
        dump,
        publishers=dump.publishers | {rank},
        asked=dump.asked | {(rank, dump.order.tmp_name)},
        progress_by=now + state.settings.progress_timeout_s,
        patience_until=half_of_the_rest(state, now),
    )
    return state.with_dump(ordered)


def published(
    state: StateAt[Writing | Publishing], answer: Published, now: float, out: list[Effect]
) -> ControllerState:
    """A place's checkpoint is visible; it does not matter which publisher says so. After the last, the ranks may leave.

    Where each node has its own directories, another write's part would list other files; but there each write attempt has a
    freeze of its own, and words of an older one never come here.
    """
    dump, fault = state.at.dump, state.at.fault
    if answer.step != dump.decision.step:
        return state
    place = _place_of(state, answer.rank)
    here = {rank for rank in dump.publishers if _place_of(state, rank) == place}
    done = dump.published_places | {place}
    state = state.with_dump(replace(dump, publishers=dump.publishers - here, published_places=done))
    milliseconds = round(1000 * (now - fault.began), 3)
    fields: Fields = {"rank": answer.rank, "step": answer.step, "path": answer.path, "ms": milliseconds}
    if not done.issuperset(_places(state)):
        out.append(Journal("place_published", {**fields, "host": place}))
        return _advance(state, now, out)
    out.append(Journal("published", fields))
    nbytes = sum(file.nbytes for result in results(dump) for file in result.files)
    saved = Saved(step=answer.step, path=answer.path, bytes=nbytes, ranks=_writers(state))
    state = learn_checkpoint(stage_ended(state, "published", now), answer.path)
    return regroup_or_leave(state, saved, now, out)


def publish_failed(state: StateAt[Publishing], answer: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """The publisher could not: the next rank tries, unless it would find the same torn files."""
    dump, rank = state.at.dump, answer.rank
    if answer.stage != "publish" or rank not in dump.publishers or answer.tmp_name != tmp_name(state):
        return state
    torn = frozenset(answer.torn).intersection(_writers(state))
    fields: Fields = {"rank": rank, "tmp_name": answer.tmp_name, "error": answer.error}
    out.append(Journal("publish_failed", {**fields, "torn": tuple(sorted(torn))} if torn else fields))
    errors = (*dump.errors[1 - MOST_KEPT :], f"{dump.directories[dump.attempt]}: rank {rank}: {answer.error}")
    proven = torn if not others_to_publish(state, rank) else torn & dump.doubted
    state = state.with_dump(replace(dump, errors=errors, doubted=dump.doubted | torn))
    if proven:
        return _torn(state, proven, answer.error, now, out)
    return replace_publishers(state, {rank}, now, out)


def others_to_publish(state: StateAt[Ordered], rank: int) -> tuple[int, ...]:
    """Return the ranks that may publish in a publisher's place when it does not."""
    dump = state.at.dump
    tried, place = dump.failed_publishers | {rank}, _place_of(state, rank)
    holders = (other for other in range(state.settings.world_size) if is_holder(state, other))
    return tuple(other for other in holders if other not in tried and _place_of(state, other) == place)


def on_timeout_publishing(state: StateAt[Publishing], now: float, out: list[Effect]) -> ControllerState:
    """The publishers did not answer for too long."""
    late = state.at.dump.publishers
    out.append(Journal("stuck", {"ranks": tuple(sorted(late)), "stage": "publish"}))
    return _unanswered(mark_stuck(state, late), late, now, out)


def on_rank_lost_publishing(state: StateAt[Publishing], rank: int, now: float, out: list[Effect]) -> ControllerState:
    """A rank died: it may have been a publisher, or the last one of its node."""
    return _unanswered(state, {rank}, now, out)


def _unanswered(state: StateAt[Publishing], ranks: Set[int], now: float, out: list[Effect]) -> ControllerState:
    """These ranks answer no more. Where the last that could look again at doubtful files is among them, the doubt stands."""
    dump = state.at.dump
    for rank in sorted(dump.publishers & ranks):
        doubted = {writer for writer in dump.doubted if _place_of(state, writer) == _place_of(state, rank)}
        if doubted and not others_to_publish(state, rank):
            return _torn(state, doubted, "no other rank can check them", now, out)
    return replace_publishers(state, ranks, now, out)


def replace_publishers(state: StateAt[Publishing], ranks: Set[int], now: float, out: list[Effect]) -> ControllerState:
    """Others publish where these ranks do not."""
    dump = state.at.dump
    failed = dump.failed_publishers | (dump.publishers & ranks)
    dump = replace(dump, publishers=dump.publishers - ranks, failed_publishers=failed)
    return _advance(state.with_dump(dump), now, out)
