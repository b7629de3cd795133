"""Reassign work from slow ranks when another replica holder can finish before the deadline (PURE).

Owns the moments at which that is checked: half of the fault's time that remains after an order, and half of each rest.
Only ranks that finished their own share in a quarter of that time write again: they have twice as long for as much again,
beside a disk that is still written to. Where all are slow, no rank is passed over: the first to finish is not much faster
than the last, and new work would be late. Where no other holder can, all are asked again if others have come to cover the
step since. At the second check, local copies may cover the step before. Else the rank is waited for until the fault's total
time is over. The stages themselves give up silent ranks much sooner.
"""

from __future__ import annotations

from collections.abc import Collection

from ttp.proto.frozen import replace

from ..facts.coverage import named
from ..facts.decision import Refusal
from ..facts.events import Effect, Journal
from ..facts.stage_table import table_of
from ..facts.state import ControllerState, Dump, Ordered, Publishing, Rolling, StateAt, Writing
from .finish import step_of
from .freeze import half_of_the_rest, next_round
from .publishing import others_to_publish, replace_publishers
from .roll_forward import able_holders, drop_roll_forwards, mark_stuck, verdict_of
from .writing import failing_here, replace_writers


def pass_over(state: StateAt[Ordered], now: float, out: list[Effect]) -> ControllerState:
    """Half of the time is over: give what is not done to ranks that have nothing left to do, and look again later."""
    dump = state.at.dump
    if isinstance(state.at, Writing) and dump.prompt is None:
        return _note_prompt(state, dump, now)
    state = state.with_dump(replace(dump, patience_until=half_of_the_rest(state, now), looked=True))
    after = table_of(state).slow(state, now, out)
    return _decided_anew(state, dump.looked, now, out) if after is state else after


def _note_prompt(state: StateAt[Ordered], dump: Dump, now: float) -> ControllerState:
    """A quarter of the time is over: who is done now is fast enough to do others' work. The same time again is waited."""
    rest_s = state.at.fault.began + state.settings.total_timeout_s - now
    prompt = able_holders(state) - frozenset(dump.work.ranks(lambda work: bool(work.orders)))
    return state.with_dump(replace(dump, prompt=prompt, patience_until=now + rest_s / 3))


def _decided_anew(state: StateAt[Ordered], again: bool, now: float, out: list[Effect]) -> ControllerState:
    """A rank that this plan cannot do without may be dispensable in another: where a rank has reported since that its update has
    ended, or, at a second check, at the step before, of which local copies remain."""
    dump, fault = state.at.dump, state.at.fault
    step, owing = dump.decision.step, dump.work.ranks(lambda work: bool(work.orders))
    late = dump.publishers.union(dump.rolling.ranks(bool), owing)
    # A rank that took too long for its own share will not finish another's in the remaining time.
    writing = again and isinstance(state.at, Writing) and dump.prompt is not None
    slow = able_holders(state) - (dump.prompt or frozenset()) if writing else frozenset[int]()
    for without in (late, late | slow):
        verdict = verdict_of(state, replace(fault, stuck=fault.stuck | without))
        if isinstance(verdict, Refusal):
            continue
        others = verdict.step == step and not dump.able.issuperset(verdict.able)
        newer = verdict.step > step_of(state.checkpoint)
        before = verdict.step == step - 1 and dump.decision.copies and again and newer
        if others or before:
            passed = _note(state, without, out)
            why = f"{named('rank', passed)} did not finish with step {step}; step {verdict.step} can be written without"
            return next_round(mark_stuck(state, passed), why, now, out)
    return state


def slow_roll_forwards(state: StateAt[Rolling], now: float, out: list[Effect]) -> ControllerState:
    """Who holds no shard that others have not got at the decided step is not needed."""
    late = frozenset(state.at.dump.rolling.ranks(bool))
    done = able_holders(state) - late
    needed = {rank for group in state.coverage.groups if done.isdisjoint(group.holders) for rank in group.holders}
    passed = _note(state, late - needed, out)
    return drop_roll_forwards(state, passed, now) if passed else state


def slow_writers(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
    """Whose every part has another holder that was soon done with its own writing is replaced."""
    dump = state.at.dump
    late = dump.work.ranks(lambda work: bool(work.orders))
    free = (able_holders(state) & (dump.prompt or frozenset())) - failing_here(state) - frozenset(late)
    others = {group.group_id: not free.isdisjoint(group.holders) for group in state.coverage.groups}
    replaceable = {
        rank for rank in late if all(others[part.group_id] for order in dump.work[rank].orders for part in order.parts)
    }
    passed = _note(state, replaceable, out)
    return replace_writers(mark_stuck(state, passed), passed, now, out) if passed else state


def slow_publishers(state: StateAt[Publishing], now: float, out: list[Effect]) -> ControllerState:
    """Another rank publishes beside one that goes on; where there is no other, its node is done without if that can be."""
    dump = state.at.dump
    alone = frozenset(rank for rank in dump.publishers if not others_to_publish(state, rank))
    left = able_holders(state) - alone
    if any(left.isdisjoint(group.holders) for group in state.coverage.groups):
        passed, alone = _note(state, dump.publishers - alone, out), frozenset[int]()
    else:
        passed = _note(state, dump.publishers, out)
    return replace_publishers(mark_stuck(state, alone), frozenset(passed), now, out) if passed else state


def _note(state: ControllerState, ranks: Collection[int], out: list[Effect]) -> tuple[int, ...]:
    passed = tuple(sorted(ranks))
    if passed:
        out.append(Journal("passed_over", {"ranks": passed, "stage": state.stage.value}))
    return passed
