"""How long this rank's own steps take, kept so that a controller that takes over need not learn it afresh (PURE).

Owns the measuring only: what a standstill is, the controller decides. Frozen and paused time is nobody's step.
"""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import replace

from .events import Tick
from .state import ProcessorState, Standing

_TRAINING = Standing.TRAINING  # found faster than an attribute of an enumeration

KEPT = 32
"""Step times told: enough to know the slow ones, and 256 bytes of a registration."""


def watch(state: ProcessorState, event: Tick, now: float) -> ProcessorState:
    """Note the step that the training thread is in; a step's time is shared over all that were begun since the last look."""
    if state.standing is not _TRAINING or event.paused:
        return state if state.step_at == -inf else replace(state, step_at=-inf)
    if event.step <= state.step and state.step_at > -inf:
        return state
    times = state.step_times_s
    if state.step_at > -inf:
        times = (*times, (now - state.step_at) / (event.step - state.step))[-KEPT:]
    elif event.step == state.step:
        return state  # in the middle of the step in which it was frozen or paused: the next one is measured
    return replace(state, step=event.step, step_at=now, step_times_s=times)
