"""How the job's ranks leave: refused, published, never assembled, or finished (PURE).

Owns the ends of a job and of a fault. Never judges whether an end is due.
"""

from __future__ import annotations

from ttp.proto.frozen import replace
from ttp.proto.incident import Saved
from ttp.proto.messages import EXIT_CODE_PERSISTED, Exit, Release

from ..facts.decision import Refusal
from ..facts.events import Effect, Fields, Finish, Journal, Send
from ..facts.incident import Outcome, report
from ..facts.membership import reachable, was_only_silent
from ..facts.state import EXIT_WAIT_S, ControllerState, Exiting, Over, S, goto

_MOST_DIGITS = 19
"""Of a step in a checkpoint's name."""


def leave(
    state: ControllerState, reason: str, now: float, out: list[Effect], outcome: Outcome | None = None
) -> ControllerState:
    """Order every rank with a stream to exit, silent ones included, and wait for the streams to close. `outcome`: of the fault that ends
    so; None: nothing was decided, for that reason."""
    members = state.members
    recipients = reachable(members)
    unattached = members.table.ranks(lambda m: m.dead is None and not m.attached)  # late starters, and broken streams
    if recipients or state.agents:  # the agents receive it too: they report why when no rank remains that could
        out.append(Send(recipients, Exit(EXIT_CODE_PERSISTED, reason)))
    out.append(Journal("exit_sent", {"code": EXIT_CODE_PERSISTED, "reason": reason, "ranks": recipients}))
    state = report(state, outcome or Outcome(not_saved=reason), now, out)
    return goto(state, Exiting(state.fault, now + EXIT_WAIT_S, reason, frozenset(unattached)))


def leave_saved(state: ControllerState, saved: Saved, now: float, out: list[Effect]) -> ControllerState:
    """The step is published: the job restarts from it."""
    reason = f"step {saved.step} is saved in {saved.path}"
    return leave(state, reason, now, out, _with_saved(state, saved))


def _with_saved(state: ControllerState, saved: Saved) -> Outcome:
    """Return the end of a fault that has published a step. A later one may be on disk: of a publisher that has not answered, for an earlier controller."""
    newest = state.checkpoint if step_of(state.checkpoint) > saved.step else saved.path
    return Outcome(saved, "", newest, max(saved.step, step_of(newest)))


def refuse(state: ControllerState, refusal: Refusal, now: float, out: list[Effect]) -> ControllerState:
    """Write nothing, say why, and have the job restart from what there is: from what this fault has published, if it has."""
    if state.dump is not None and state.dump.saved is not None:
        return leave_saved(state, state.dump.saved, now, out)
    fields: Fields = {"reason": refusal.reason, "missing": refusal.missing, "freeze_id": state.freeze_id}
    outcome = _without_saved(state, refusal.reason)
    newest = outcome.goes_on_from
    out.append(Journal("refused", {**fields, "goes_on_from": newest}))
    after = f"the job goes on from {newest}" if newest else "no rank has reported an older checkpoint"
    if outcome.kept_step is None:
        after = "the job goes on from the trainer's newest checkpoint, if it has one"
    return leave(state, f"no dying-gasp checkpoint: {refusal.reason}; {after}", now, out, outcome)


def _without_saved(state: ControllerState, reason: str) -> Outcome:
    """Return the end of a fault that has published nothing. Where the trainer writes checkpoints of its own, a newer one than is known may be on disk."""
    registrations = (member.registration for member in state.members.table)
    own = any(registration is not None and registration.own_checkpoints for registration in registrations)
    return Outcome(None, reason, state.checkpoint, None if own else max(0, step_of(state.checkpoint)))


def learn_checkpoint(state: S, path: str) -> S:
    """Keep the newest checkpoint that any rank has reported to this controller, or that it has had published; whoever knew of it may die."""
    return replace(state, checkpoint=path) if step_of(path) > step_of(state.checkpoint) else state


def step_of(path: str) -> int:
    """Return the step that a checkpoint's path names, `.../iter_0000042`; -1: none."""
    number = path.rpartition("/iter_")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS else -1


def finish_job(state: ControllerState, out: list[Effect]) -> ControllerState:
    """Every rank's `train` has returned: let all go."""
    recipients = reachable(state.members)
    if recipients:
        out.append(Send(recipients, Release()))
    out.append(Journal("finished", {"ranks": state.members.finished}))
    return over(state, "all ranks have finished", out)


def orphaned(state: ControllerState, reason: str, now: float, out: list[Effect]) -> ControllerState:
    """End, as no live rank can receive an order; a fault in progress ends without a checkpoint, or with the one that it has published. A process that was to be replaced, and was not, has
    its stream still: it exits."""
    if recipients := state.members.table.ranks(lambda member: member.attached and not was_only_silent(member)):
        out.append(Send(recipients, Exit(EXIT_CODE_PERSISTED, reason)))
    if state.dump is not None and (saved := state.dump.saved) is not None:
        state = report(state, _with_saved(state, saved), now, out)
    elif state.fault is not None:
        out.append(Journal("refused", {"reason": reason, "missing": (), "freeze_id": state.freeze_id}))
        state = report(state, _without_saved(state, reason), now, out)
    return over(state, reason, out)


def over(state: ControllerState, reason: str, out: list[Effect]) -> ControllerState:
    """End the controller's own work."""
    out.append(Finish(reason))
    return goto(state, Over(reason))
