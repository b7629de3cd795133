"""What a rank does when it is frozen, when its gate has closed, and when it is thawed (PURE)."""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import replace
from ttp.proto.messages import CauseKind, Freeze, Thaw

from .events import CloseGate, Effect, GateClosed, Log, OpenGate, SaveStacks, Send
from .refusals import why_no_thaw
from .state import LinkState, ProcessorState, RankMode


def freeze(state: ProcessorState, message: Freeze, now: float, out: list[Effect]) -> ProcessorState:
    """Close the gate, or ask again what stands behind the closed gate: the answer is always fresh.

    Freezes are numbered upwards from one controller to the next, so what an earlier one had ordered is over now.
    """
    if message.freeze_id < state.freeze_id:
        return state
    if state.standing is RankMode.TRAINING:
        out.append(Log(f"freeze {message.freeze_id}: {message.cause.kind.value}: {message.cause.text}"))
        if message.cause.kind is CauseKind.HUNG:
            out.append(SaveStacks(message.cause.text))
    if state.regrouping is not None and message.freeze_id > state.freeze_id:
        out.append(
            SaveStacks(f"the regroup of freeze {state.regrouping.freeze_id} was given up before this rank had done it")
        )
    freeze_id, orders = message.freeze_id, state.orders if state.freeze_id == message.freeze_id else ()
    out.append(CloseGate(freeze_id))
    return replace(
        state, standing=RankMode.FROZEN, freeze_id=freeze_id, gate_id=freeze_id, orders=orders, answer_by=inf
    )


def gate_closed(state: ProcessorState, event: GateClosed, now: float, out: list[Effect]) -> ProcessorState:
    """Report what this rank holds; once more when an update that had kept the gate from closing has ended."""
    report = event.report
    if report.freeze_id != state.freeze_id:
        return state  # asked again meanwhile, under a newer number
    if state.applying is not None:
        return state  # taken before the roll-forward's end: its end asks again
    if report.closed:
        state = replace(state, closed=True, torn=report.torn, state_step=report.state_step, records=report.records)
    if state.link is LinkState.UP:
        final = report.final or bool(state.ordered or why_no_thaw(state))
        out.append(Send(replace(report, final=final)))
    return state


def thaw(state: ProcessorState, message: Thaw, now: float, out: list[Effect]) -> ProcessorState:
    """Open the gate: a false alarm, or all ranks have regrouped. A thaw also ends every older freeze, whose own thaw was lost."""
    if message.freeze_id < state.freeze_id:
        return state
    if why := why_no_thaw(state):
        out.append(Log(f"thaw {message.freeze_id} ignored: this rank {why}, so its gate stays closed"))
        return state
    regrouped = state.regrouped == state.freeze_id
    why = "all ranks have regrouped" if regrouped else f"freeze {state.freeze_id} was a false alarm"
    out += [OpenGate(state.gate_id), Log(f"{why}, training continues")]
    answer_by = inf
    if state.faults:  # no controller that knows of them thaws this rank: the report was lost, or is under way
        out.extend(Send(fault) for fault in state.faults)
        answer_by = now + state.settings.controller_lost_s
    return replace(
        state, standing=RankMode.TRAINING, closed=False, torn=False, orders=(), ordered=0, answer_by=answer_by
    )
