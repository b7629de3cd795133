"""Making a written attempt visible, by one rank at a time (PURE).

Owns the choice of the publisher. Two publishers of one attempt do no harm: the rename is exclusive, and a valid
checkpoint of that step that is there already is kept.
"""

from __future__ import annotations

from ttp.proto.frozen import replace
from ttp.proto.messages import Published, PublishOrder

from .events import Effect, Fields, Journal, Send
from .leaving import leave
from .rolling import is_holder
from .rounds import cause_fields, next_round, root_cause
from .state import ControllerState, Stage
from .writing import next_directory, results, tmp_name


def start_publishing(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Everything is written and durable: order the publish."""
    dump, fault = state.dump, state.fault
    assert dump is not None and fault is not None
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
    )
    state = replace(state, stage=Stage.PUBLISHING, dump=replace(dump, order=order))
    return _order_publish(state, now, out)


def _order_publish(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Order it from the lowest live rank that has the step.

    A rank whose disk failed it comes after those, and a rank without the step last: the shards are written, so it needs no
    optimizer state any more. It does need the host state of that step, and fails the order when it does not have it.
    """
    dump = state.dump
    assert dump is not None and dump.order is not None
    alive = [rank for rank in range(state.settings.world_size) if is_holder(state, rank)]
    able = [rank for rank in alive if rank not in dump.failed_publishers]
    if not able:
        state = replace(state, stage=Stage.WRITING)
        return next_directory(state, now, out) if alive else next_round(state, "no rank is left to publish", now, out)
    rank = min(able, key=lambda candidate: (candidate not in dump.able, candidate in dump.failed_here, candidate))
    out.append(Send((rank,), dump.order))
    fields: Fields = {"rank": rank, "step": dump.order.step, "tmp_name": dump.order.tmp_name}
    out.append(Journal("publish_sent", {**fields, **cause_fields(dump.order.cause)}))
    progress_by = now + state.settings.progress_timeout_s
    return replace(state, dump=replace(dump, publisher=rank, progress_by=progress_by))


def published(state: ControllerState, answer: Published, now: float, out: list[Effect]) -> ControllerState:
    """The checkpoint is visible: the ranks may leave. It does not matter which publisher says so."""
    dump, fault = state.dump, state.fault
    assert dump is not None and fault is not None
    if answer.step != dump.decision.step:
        return state
    milliseconds = round(1000 * (now - fault.began), 3)
    fields: Fields = {"rank": answer.rank, "step": answer.step, "path": answer.path, "ms": milliseconds}
    out.append(Journal("published", fields))
    return leave(state, f"step {answer.step} is saved in {answer.path}", now, out)


def publish_failed(
    state: ControllerState, rank: int, name: str, error: str, now: float, out: list[Effect]
) -> ControllerState:
    """The publisher could not: the next rank tries."""
    dump = state.dump
    assert dump is not None
    if rank != dump.publisher or name != tmp_name(state):
        return state
    out.append(Journal("publish_failed", {"rank": rank, "tmp_name": name, "error": error}))
    errors = (*dump.errors, f"{dump.directories[dump.attempt]}: rank {rank}: {error}")
    return next_publisher(replace(state, dump=replace(dump, errors=errors)), now, out)


def silent_while_publishing(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """The publisher did not answer for too long."""
    assert state.dump is not None and state.fault is not None
    rank = state.dump.publisher
    out.append(Journal("stuck", {"ranks": (rank,), "stage": "publish"}))
    state = replace(state, fault=replace(state.fault, stuck=state.fault.stuck | {rank}))
    return next_publisher(state, now, out)


def next_publisher(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """The publisher died, failed or is stuck."""
    dump = state.dump
    assert dump is not None
    failed = dump.failed_publishers | {dump.publisher}
    return _order_publish(replace(state, dump=replace(dump, failed_publishers=failed)), now, out)
