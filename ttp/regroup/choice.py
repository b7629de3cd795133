"""Whether a lost rank is replaced in place, or costs a checkpoint and a restart: decided once, as an attempt begins, by all ranks alike.

Owns that choice, and the line at the start that names it. Never changes it later: what comes up then closes the `Reentry`.
"""

from __future__ import annotations

import logging

from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.exchange.json_collectives import exchange_json
from ttp.fork_server.forked_program import is_forked
from ttp.groups.device_backends import without_abort
from ttp.groups.process_groups import GROUPS, recipes
from ttp.groups.vacancy import vacant
from ttp.inputs import checked
from ttp.interfaces.protected_optimizer import ProtectedOptimizer
from ttp.regroup.kept_result import KeptResults
from ttp.runtime.rank_runtime import show

UNREHEARSED = "unrehearsed"
"""What `in_place` says of a training function that need not be rehearsed: the trainer's own tests do."""


def check_asked(in_place: object) -> None:
    """Raise ConfigError for what `in_place` cannot be."""
    if not isinstance(in_place, bool) and in_place != UNREHEARSED:
        raise ConfigError(
            f"invalid in_place: got {checked.shown(in_place)}, expected True, False or {UNREHEARSED!r} (where your own tests have rehearsed train())"
        )


def choose(
    settings: Settings,
    optimizer: ProtectedOptimizer,
    in_place: bool | str,
    kept: KeptResults,
    *,
    rank: int,
    copies: bool,
    own_form: bool,
) -> str:
    """Return why a lost rank is not replaced in place; empty: it is (every rank calls, and gets the same). Rank 0 reports it in every job of several
    ranks that ttprun has started, and wherever the program or TTP_IN_PLACE asks for it. In a process that takes a lost one's place the others have
    chosen already."""
    why = why_not_in_place(settings, optimizer, bool(in_place), copies=copies, own_form=own_form)
    if vacant():
        return why
    if not why and rank == 0 and UNREHEARSED not in (in_place, settings.in_place):
        why = kept.why_not()
    whys = exchange_json(why, optimizer.device)
    why = next((each for each in whys if each), "")
    if why and not whys[0]:
        why = f"rank {whys.index(why)}: {why}"
    asked = bool(in_place or settings.in_place)
    if rank == 0 and settings.enable and (asked or (settings.launched and len(whys) > 1)):
        show(logging.INFO, f"a rank that dies costs a checkpoint and a restart: {why}" if why else _exposure(settings))
    return why


def _exposure(settings: Settings) -> str:
    if settings.gasp == "always":
        return "a rank that dies is replaced by a new process, and the others keep theirs, once the newest step is on disk (TTP_GASP=always)"
    return (
        f"a rank that dies is replaced by a new process, and the others keep theirs. Until it has its state, {settings.in_place_s:g} s at most, the newest step is in"
        " their memory alone: it is written only if that fails, and first where a process has stopped responding"
    )


def why_not_in_place(
    settings: Settings, optimizer: ProtectedOptimizer, asked: bool, *, copies: bool, own_form: bool
) -> str:
    """Return why this rank takes no part in a recovery without a checkpoint; empty: it does, where a rehearsal has shown that it can. `asked`: by the
    program. `copies`: of the state in the agent's memory. `own_form`: checkpoints are in a form of the trainer's own."""
    cases = (
        (settings.in_place == "off", "TTP_IN_PLACE=False"),
        (own_form or not optimizer.spans_job, "the trainer keeps its checkpoints, or its collectives, itself"),
        (not hasattr(optimizer, "fill"), "the state of this optimizer cannot be given to another process"),
        (
            not (asked or settings.in_place),
            "the program has not asked for more (in_place=True, docs/how_in_place_works.md#your-own-program)",
        ),
        (not settings.launched, "the job was not started by ttprun"),
        (
            not is_forked(),
            "this process was executed, not forked, so that no other one is started in its place (docs/warm_starts.md)",
        ),
        (not settings.shared_dirs, "TTP_SHARED_DIRS=False"),
        (
            settings.in_place_s >= settings.total_timeout_s / 2,
            f"TTP_IN_PLACE_S={settings.in_place_s:g} must be less than half of TTP_OT={settings.total_timeout_s:g}, so that time remains for writing",
        ),
        (copies, "copies='memory'"),
        (
            settings.gasp == "always" and getattr(getattr(optimizer, "on_divergence", None), "acts", False),
            "TTP_GASP=always has a step on disk before its replicas are compared, which on_divergence is to prevent (TTP_GASP=if_needed)",
        ),
        (GROUPS.meeting is not None, "this process had a session before"),
        (
            settings.launched and not GROUPS.replaceable,
            "the program has joined by torch.distributed.init_process_group (ttp.init_process_group)",
        ),
        (
            optimizer.device.type != "cpu" and settings.in_place != "cuda",
            f"on {optimizer.device.type} it is not on by itself (TTP_IN_PLACE=cuda)",
        ),
    )
    why = next((why for applies, why in cases if applies), "")
    if not why and (lacking := without_abort()):
        return f"process groups of backend {lacking[0]} cannot be aborted"
    if not why and any(recipe.device is not None for recipe in recipes()):
        return "process groups are bound to a device (init_process_group(device_id=...))"
    return why or getattr(optimizer, "why_not_filled", str)()
