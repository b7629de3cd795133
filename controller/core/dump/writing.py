"""Write orders: every shard once, by live holders, in one directory (PURE).

Owns the staging directory: its name, who owes which parts, and what was written. A writer that dies, fails or falls silent is
replaced for the parts that it had not finished; a directory that no rank can write to is given up for the next.
"""

from __future__ import annotations

from ttp.proto.frozen import replace
from ttp.proto.messages import Part, ShareResult, StepFailed, WriteOrder, Written
from ttp.proto.names import StagingName

from ..facts.decision import Refusal
from ..facts.events import Effect, Fields, Journal, Send
from ..facts.incident import stage_ended
from ..facts.per_rank import PerRank
from ..facts.planning import Plan, hand_over, share_out
from ..facts.state import (
    MOST_KEPT,
    ControllerState,
    Dump,
    Ordered,
    StateAt,
    Work,
    Writing,
)
from .finish import refuse
from .freeze import awaited, next_round, quarter_of_the_rest
from .roll_forward import able_holders, holders, mark_stuck

SLOW_DISK_BYTES_PER_S = 50e6
"""A writer is not given up for stuck before its share could have gone to a disk as slow as this."""


def tmp_name(state: StateAt[Ordered]) -> str:
    """Return the staging directory's name: no other write attempt of any controller has it."""
    step, attempt = state.at.dump.decision.step, state.at.dump.attempt + 1
    return str(StagingName(step, state.settings.term, state.freeze_id, attempt))


def start_writing(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
    """Order every part of every shard group from the able ranks; called when no order is outstanding yet."""
    dump = state.at.dump
    if not dump.directories:
        return refuse(state, Refusal("the ranks registered no directory to save in"), now, out)
    able = able_holders(state)
    lacking = next((group for group in state.coverage.groups if able.isdisjoint(group.holders)), None)
    if lacking is not None:
        return next_round(state, f"{lacking.label}: no holder remains that has step {dump.decision.step}", now, out)
    directory = dump.directories[dump.attempt]
    if unfit := failing_here(state):
        able -= unfit
        if any(able.isdisjoint(group.holders) for group in state.coverage.groups):
            return next_directory(state, now, out)
    plan, largest = share_out(state.coverage.groups, able)
    fields: Fields = {"step": dump.decision.step, "directory": directory, "tmp_name": tmp_name(state)}
    out.append(Journal("write_sent", {**fields, "ranks": tuple(plan), "parts": tuple(map(len, plan.values()))}))
    return _order(state, plan, largest, now, out)


def _order(state: StateAt[Writing], plan: Plan, largest: float, now: float, out: list[Effect]) -> ControllerState:
    """`largest`: bytes of the largest share. A slow disk may take so long for it: a rank answers only when all of its order is durable."""
    dump = state.at.dump
    directory, name = dump.directories[dump.attempt], tmp_name(state)
    freeze_id, step, work = state.freeze_id, dump.decision.step, list(dump.work)
    for rank, parts in plan.items():  # plain: this runs for every rank between the last report and the orders
        order = WriteOrder(freeze_id, step, directory, name, parts)
        out.append(Send((rank,), order))
        mine, added = work[rank], (order,)
        work[rank] = Work(mine.orders + added, mine.results, mine.given + added)
    progress_by = max(dump.progress_by, now + state.settings.progress_timeout_s + largest / SLOW_DISK_BYTES_PER_S)
    dump = replace(dump, work=PerRank.of(work), pending=dump.pending + len(plan), progress_by=progress_by, prompt=None)
    return state.with_dump(replace(dump, patience_until=quarter_of_the_rest(state, now)))


def _largest(state: ControllerState, plan: Plan) -> float:
    """Return the bytes of the largest share of a plan."""
    nbytes = {group.group_id: group.nbytes for group in state.coverage.groups}
    return max((sum(nbytes[part.group_id] / part.count for part in parts) for parts in plan.values()), default=0.0)


def written(state: StateAt[Writing], answer: Written, now: float, out: list[Effect]) -> ControllerState:
    """A writer is done with an order. Answers to orders that were taken from it since are dropped: each part counts once."""
    dump = state.at.dump
    mine = dump.work[answer.rank]
    open_orders = [order for order in mine.orders if (order.tmp_name, order.parts) == (answer.tmp_name, answer.parts)]
    if not open_orders:
        return state
    left = tuple(order for order in mine.orders if order is not open_orders[0])
    nbytes = sum(file.nbytes for file in answer.result.files)
    out.append(Journal("written", {"rank": answer.rank, "parts": len(answer.parts), "bytes": nbytes}))
    dump = replace(
        dump,
        work=dump.work.put(answer.rank, Work(left, (*mine.results, answer.result), mine.given)),
        pending=dump.pending - 1,
        progress_by=max(dump.progress_by, now + state.settings.progress_timeout_s),
    )
    return stage_ended(state, "written", now).with_dump(dump)


def write_failed(state: StateAt[Writing], answer: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """A writer's disk failed it: it writes no more into this staging directory."""
    dump, rank, name = state.at.dump, answer.rank, tmp_name(state)
    if (answer.stage, answer.tmp_name) != ("write", name) or not dump.work[rank].orders:
        return state
    out.append(Journal("write_failed", {"rank": rank, "tmp_name": name, "error": answer.error}))
    errors = (*dump.errors[1 - MOST_KEPT :], f"{dump.directories[dump.attempt]}: rank {rank}: {answer.error}")
    state = state.with_dump(replace(dump, failed_here=dump.failed_here | {rank}, errors=errors))
    return replace_writers(state, (rank,), now, out)


def on_timeout_writing(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
    """No writer answered for too long: all that owe something are stuck."""
    late = state.at.dump.work.ranks(lambda work: bool(work.orders))
    out.append(Journal("stuck", {"ranks": late, "stage": "write"}))
    return replace_writers(mark_stuck(state, late), late, now, out)


def on_rank_lost_writing(state: StateAt[Writing], rank: int, now: float, out: list[Effect]) -> ControllerState:
    """A rank died."""
    return replace_writers(state, (rank,), now, out)


def replace_writers(state: StateAt[Writing], lost: tuple[int, ...], now: float, out: list[Effect]) -> ControllerState:
    """Give the unfinished parts of lost writers to other holders, or change the plan when a part has none."""
    dump = state.at.dump
    parts: list[Part] = []
    pending = dump.pending
    for rank in lost:
        parts += [part for order in dump.work[rank].orders for part in order.parts]
        pending -= len(dump.work[rank].orders)
    work = dump.work.put_all({rank: replace(dump.work[rank], orders=()) for rank in lost})
    groups, group_ids = state.coverage.groups, {part.group_id for part in parts}
    state = state.with_dump(replace(dump, work=work, pending=pending))
    if not parts:
        return state
    capable = {group.group_id: holders(state, group) for group in groups if group.group_id in group_ids}
    failed = failing_here(state)
    able_here = {key: tuple(r for r in ranks if r not in failed) for key, ranks in capable.items()}
    loads = {rank: len(work[rank].orders) for ranks in able_here.values() for rank in ranks}
    plan = hand_over(parts, able_here, loads)
    if plan is not None:
        out.append(Journal("write_moved", {"from": lost, "ranks": tuple(plan), "parts": len(parts)}))
        return _order(state, plan, _largest(state, plan), now, out)
    if all(capable.values()):
        return next_directory(state, now, out)
    return next_round(state, "a shard lost its last writer", now, out)


def failing_here(state: StateAt[Ordered]) -> frozenset[int]:
    """Return the ranks that are given nothing to write in this staging directory."""
    dump, fault = state.at.dump, state.at.fault
    directory = dump.directories[dump.attempt]
    return dump.failed_here.union(rank for where, rank in fault.unfit if where == directory)


def next_directory(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
    """Start again in the next directory of the list."""
    dump = state.at.dump
    if dump.attempt + 1 >= len(dump.directories):
        return _no_directory(state, dump, now, out)
    dump = replace(
        dump,
        attempt=dump.attempt + 1,
        failed_here=frozenset(),
        failed_publishers=frozenset(),
        doubted=frozenset(),
        work=_taken_back(dump.work),
        pending=0,
    )
    return start_writing(state.with_dump(dump), now, out)


def _taken_back(work: PerRank[Work]) -> PerRank[Work]:
    """Nothing that was written counts, and no order is open: what was given is all that is known of it."""
    return work.put_all({rank: Work(given=work[rank].given) for rank in work.ranks(lambda mine: bool(mine.given))})


def _no_directory(state: StateAt[Writing], dump: Dump, now: float, out: list[Effect]) -> ControllerState:
    """No directory took the step. A rank that was not asked may have come to it since. An older one with local copies is better
    than none; else refuse."""
    fault = state.at.fault
    errors = (*fault.errors, *dump.errors)[-MOST_KEPT:]
    reason = f"none of {len(dump.directories)} directories could be written: {'; '.join(errors[-4:])}"
    step = dump.decision.step
    tried = dump.able.union(*(who for known, who in fault.unwritable if known == step))
    if not dump.decision.copies and not _not_asked(state, tried):
        return refuse(state, Refusal(reason), now, out)
    unwritable = (*(pair for pair in fault.unwritable if pair[0] != step), (step, tried))
    fault = replace(fault, unwritable=unwritable, errors=errors)
    return next_round(state.with_fault(fault), reason, now, out)


def _not_asked(state: StateAt[Ordered], tried: frozenset[int]) -> bool:
    """True when some living rank, whose state is whole, was not asked to write the step: it may have come to it since."""
    reports = state.at.fault.reports
    return any(rank not in tried and not ((it := reports[rank]) and it.torn) for rank in awaited(state, state.at.fault))


def results(dump: Dump) -> tuple[ShareResult, ...]:
    """Return all that was written in this staging directory, by rank."""
    return tuple(result for work in dump.work for result in work.results)
