"""Which answers a controller accepts: those to its own freezes and orders (PURE).

Owns the check that comes before an answer is taken. An answer of an older freeze, or to an order that was answered or taken
back since, is late: it may have been under way. One that no order of this controller has asked for is refused. Never decides
what an answer means.
"""

from __future__ import annotations

from ttp.errors import ProtocolError
from ttp.proto.messages import Progress, Published, Regrouped, RolledForward, StateReport, StepFailed, Upward, Written

from .state import ControllerState, Dump, Freezing, Ordered, Over

Answer = StateReport | Progress | RolledForward | Regrouped | Written | Published | StepFailed
_TO_ORDERS = (RolledForward, Regrouped, Written, Published, StepFailed)
_NUMBERED = (StateReport, Progress, *_TO_ORDERS)


def is_late(state: ControllerState, message: object) -> bool:
    """Say whether this answers an older freeze: it may have been under way, and means nothing any more."""
    return isinstance(message, _NUMBERED) and message.freeze_id < state.freeze_id


def check_answer(state: ControllerState, message: Upward) -> None:
    """Raise ProtocolError for the answer to a freeze or an order that this controller has not sent to that rank."""
    at = state.at
    if not isinstance(message, _NUMBERED) or message.freeze_id < state.freeze_id or isinstance(at, Over):
        return
    if message.freeze_id > state.freeze_id:
        raise _unasked(state, message, f"expected freeze {state.freeze_id} at most")
    if isinstance(message, _TO_ORDERS) and isinstance(at, Freezing):
        raise _unasked(state, message, f"expected no answer: freeze {state.freeze_id} has given no order yet")
    if isinstance(message, _TO_ORDERS) and isinstance(at, Ordered) and (error := _not_ordered(at.dump, message)):
        raise _unasked(state, message, error)


def _not_ordered(dump: Dump, answer: RolledForward | Regrouped | Written | Published | StepFailed) -> str:
    """Say what was ordered instead; empty: the answer fits an order, open or not."""
    rank = answer.rank
    given = dump.work[rank].given
    match answer:
        case RolledForward() | StepFailed(stage="roll_forward"):
            return "" if dump.decision.rolls(rank) else f"expected ranks {list(dump.decision.roll_forward)}"
        case Regrouped() | StepFailed(stage="regroup"):
            return "" if dump.regroup is not None else "expected no answer: no rank was ordered to regroup"
        case Written(tmp_name=name, parts=parts):
            if not any((order.tmp_name, order.parts) == (name, parts) for order in given):
                return f"expected one of this rank's {len(given)} write orders"
            fits = all(file.rank == rank for file in answer.result.files)
            return "" if fits else "expected files of this rank alone"
        case StepFailed(stage="write", tmp_name=name):
            fits = any(order.tmp_name == name for order in given)
            return "" if fits else f"expected one of this rank's {len(given)} write orders"
        case Published(step=step):
            fits = step == dump.decision.step and any(asked == rank for asked, _ in dump.asked)
            return "" if fits else _publishers(dump)
        case StepFailed(stage="publish", tmp_name=name):
            return "" if (rank, name) in dump.asked else _publishers(dump)
        case StepFailed(stage=stage):
            return f"expected the stage roll_forward, regroup, write or publish, got {stage!r}"


def _publishers(dump: Dump) -> str:
    asked = sorted({rank for rank, _ in dump.asked})
    return f"expected step {dump.decision.step} from a rank that was ordered to publish, one of {asked}"


def _unasked(state: ControllerState, message: Answer, expected: str) -> ProtocolError:
    return ProtocolError(
        f"job {state.settings.job_id}, stage {state.stage.value}: unexpected answer of rank {message.rank}: got "
        f"{message!r}, {expected}. Nothing was changed; check that all ranks run the same version"
    )
