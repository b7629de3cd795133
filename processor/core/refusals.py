"""What a rank executes of what its controller orders, and what it refuses (PURE).

Owns the checks that need nothing but the rank's own memory: its directories, its shard groups, the records that it holds, and
the ranges of numbers. A refused order is answered with the reason, so that the controller finds another way at once. Never
looks at a disk or at the optimizer: its holder does.
"""

from __future__ import annotations

from ttp.proto.messages import EXIT_CODE_PERSISTED, CommitRecord, Exit, PublishOrder, Regroup, WriteOrder
from ttp.proto.names import staging_name_of

from .state import ProcessorState


def why_no_exit(message: Exit) -> str:
    """Say why this rank does not leave on these terms; empty: it does. The status of a preempted rank is its own choice."""
    if message.code == EXIT_CODE_PERSISTED:
        return ""
    return f"invalid exit status: got {message.code}, expected {EXIT_CODE_PERSISTED}, the only one that a controller orders"


def why_no_roll_forward(state: ProcessorState, record: CommitRecord) -> str:
    """Say why no update is done with this record; empty: it may be a record of that step. A rank that did not have the collective's
    result cannot know more of it than the ranges; learning rates and loss scale it never takes from a record."""
    same = next((held for held in state.records if held.step == record.step), None)
    if same is not None and repr(same) != repr(record):  # as strings: the norm of a skipped step is NaN
        return f"invalid record of step {record.step}: got {record}, expected {same}, which this rank holds"
    if not 0 <= record.clip_factor <= 1:
        return f"invalid record of step {record.step}: got clip factor {record.clip_factor}, expected 0 to 1"
    if record.grad_norm < 0:
        return f"invalid record of step {record.step}: got gradient norm {record.grad_norm}, expected 0 or more"
    return ""


def why_no_regroup(state: ProcessorState, order: Regroup) -> str:
    """Say why this rank does not leave its groups; empty: it does."""
    replaced = state.settings.rank in order.replaced
    if replaced is not state.vacant:
        return f"invalid order: got replaced ranks {list(order.replaced)}, expected this one to be {'' if state.vacant else 'not '}among them"
    writes = state.ordered not in (0, order.freeze_id) or any(known.answer is None for known in state.orders)
    if writes or state.applying is not None or state.finished or state.alone:
        return "this rank writes, rolls forward or has finished: its training cannot be entered again"
    if order.record is not None and order.record.step != order.step:
        return f"invalid record: got step {order.record.step}, expected step {order.step}"
    same = next((held for held in state.records if held.step == order.step), None)
    if same is not None and order.record is not None and repr(same) != repr(order.record):
        return f"invalid record of step {order.step}: got {order.record}, expected {same}, which this rank holds"
    if not state.vacant and (not state.closed or state.torn or state.state_step != order.step):
        return f"the state: got step {state.state_step}, closed {state.closed}, torn {state.torn}, expected step {order.step}"
    return ""


def why_no_thaw(state: ProcessorState) -> str:
    """Say why this gate does not open; empty: it does."""
    if state.rolled:
        return "was rolled forward"
    return "has not regrouped" if state.regrouping is not None or state.vacant else ""


def why_no_order(state: ProcessorState, order: WriteOrder | PublishOrder) -> str:
    """Say why an order to write or to publish is not carried out; empty: its directory, its names and its parts are this rank's."""
    if state.vacant:
        return "this process was started in another's place, and holds no shard yet"
    if order.directory not in state.save_dirs:
        return f"invalid directory: got {order.directory!r}, expected one of this rank's, {list(state.save_dirs)}"
    name = staging_name_of(order.tmp_name)
    if name is None or (name.step, name.freeze_id) != (order.step, order.freeze_id):
        return (
            f"invalid staging directory: got {order.tmp_name!r}, expected iter_{order.step:07d}_tmp_TERM_"
            f"{order.freeze_id}_ATTEMPT for step {order.step} and freeze {order.freeze_id}"
        )
    if isinstance(order, PublishOrder):
        if order.record is not None and order.record.step != order.step:
            return f"invalid record: got step {order.record.step}, expected step {order.step}, which is to be published"
        return ""
    for part in order.parts:
        if part.group_id not in state.group_ids:
            return f"invalid part: got shard group {part.group_id!r}, expected one that this rank holds"
    return ""
