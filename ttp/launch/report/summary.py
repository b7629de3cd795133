"""The job's summary at its end, and what it has lost.

Pure: facts in, lines out. Never reports that nothing was lost unless the job was protected and its last step is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttp.exchange.last_step import LastStep
from ttp.launch.report.render import NAMED, labelled
from ttp.launch.report.time_use import TimeUse, use_text
from ttp.text.wording import counted, ranks_text

NOT_PROTECTED = "not protected: no rank called ttp.start()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The entire job, as this node's agent and those before it have reported it."""

    result: str
    starts: int
    faults: int
    """Preemption notices, and those that the ranks recovered from without a restart, included."""
    notices: int
    false_alarms: int
    saved_steps: tuple[int, ...]
    """Steps of the emergency checkpoints."""
    steps_lost: int
    """`steps_again` included."""
    unknown_losses: int
    """Faults after which it is not known how many steps were lost."""
    lost_s: float
    """From each fault's first sign until all ranks were registered again, or until the job's end."""
    lasted_s: float
    untold_starts: tuple[int, ...] = ()
    """Attempts whose end is not known on this node: another node's agent was to report them."""
    why: str = ""
    """Why the job failed, where `result` does not say it."""
    lasted_since: int = 0
    """The attempt with which `lasted_s` begins: this agent did not run before, and there is no report."""
    protected: bool = True
    """A rank has called `ttp.start` in some attempt."""
    steps_again: int = 0
    """Steps that an attempt repeated although there was a checkpoint of them: it was broken, or not used."""
    ended_in_fault: bool
    """The last attempt ended in a fault or a notice."""
    last: LastStep | None
    """Where the last attempt's training ended, unless in a fault, if rank 0 has reported it."""
    mirror: str = ""
    """How far the mirror has come on this node; empty: there is none."""
    recovered: int = 0
    """Faults after which the ranks trained on in the same attempt."""
    excluded: tuple[str, ...] = ()
    """Nodes whose health checks failed, each with the reason."""
    time_use: TimeUse | None = None
    """Where the job's time went; None: its beginning is not known, or nothing was protected."""


def summary_lines(summary: Summary) -> list[str]:
    """Return the summary as labelled lines, under a heading."""
    faults = counted(summary.faults - summary.notices, "fault")
    if summary.recovered:
        faults += f" ({summary.recovered} recovered without a restart)"
    if summary.notices:
        faults += f", {counted(summary.notices, 'preemption notice')}"
    if summary.false_alarms:
        faults += f", {counted(summary.false_alarms, 'false alarm')}"
    if summary.untold_starts:
        faults += f"; the end of {_attempts(summary.untold_starts)} is not known on this node"
    saved = ", ".join(map(str, summary.saved_steps[-NAMED:]))
    more = "..., " if len(summary.saved_steps) > NAMED else ""
    lasted = f" in {_seconds(summary.lasted_s)}"
    if summary.lasted_since:
        lasted = f"; {_seconds(summary.lasted_s)} since attempt {summary.lasted_since}"
    found = [
        ("result", summary.result),
        ("why", summary.why),
        ("ran", counted(summary.starts, "attempt") + lasted),
        ("time", use_text(summary.time_use) if summary.time_use is not None else ""),
        ("faults", faults),
        ("saved", f"step{'s' if len(summary.saved_steps) > 1 else ''} {more}{saved}" if saved else ""),
        ("lost", lost_text(summary)),
        ("mirror", summary.mirror),
        *(("sick", each) for each in summary.excluded),
    ]
    return ["--- the job has ended ---", *labelled(found)]


def lag_text(fields: Mapping[str, Any]) -> str:
    """Return how far the mirror was behind the directories at one of its reports."""
    if not fields["behind_steps"]:
        return "nothing behind"
    return f"{counted(fields['behind_steps'], 'step')} and {fields['behind_s']:.0f} s behind"


def mirror_text(fields: Mapping[str, Any]) -> str:
    """Return the newest step in the mirror, what is missing there, and why."""
    text = f"step {fields['step']}, {lag_text(fields)}" if fields["step"] else f"no checkpoint, {lag_text(fields)}"
    return f"{text}: {fields['error']}" if "error" in fields else text


def lost_text(known: Summary) -> str:
    """Return what was lost: `nothing`, `3 steps`, `not protected`, `no checkpoint on disk`, `unknown`, or a combination."""
    if not known.protected:
        return NOT_PROTECTED
    if known.untold_starts:
        return f"unknown: the end of {_attempts(known.untold_starts)} is not known on this node"
    end = "" if known.ended_in_fault else _end(known.last)
    own = "" if known.ended_in_fault else _saves_itself(known.last)
    certain = not (known.unknown_losses or end or own)
    counts = [_steps(known)] if known.steps_lost or (known.faults and certain) else []
    if known.unknown_losses:
        which = "fault" if known.faults > known.notices else "notice"
        counts.append(f"unknown after {counted(known.unknown_losses, which)}")
    text = ", and ".join([*counts, *([end] if end else [])]) or ("no step at a fault" if own else "nothing")
    text = f"{text}; {own}" if own else text
    return f"{text}; {_seconds(known.lost_s)} without training" if known.faults else text


def _steps(known: Summary) -> str:
    again = f" ({known.steps_again:,} repeated: their checkpoint was broken or not used)"
    return counted(known.steps_lost, "step") + (again if known.steps_again else "")


def _end(last: LastStep | None) -> str:
    """Return why the last step may be lost though the job ended without a fault; empty: it is on disk."""
    if last is None:
        return "unknown: no rank has reported its last step"
    if last.saved_step is None or last.saved_step >= last.step:
        return ""
    missing = counted(last.step - last.saved_step, "step")
    newest = f"the newest is of step {last.saved_step}" if last.saved_step else "TTP wrote none"
    return f"no checkpoint on disk of the last {missing}, up to step {last.step} ({newest})"


def _saves_itself(last: LastStep | None) -> str:
    """Name the last step of a trainer that saves its own checkpoints; empty: TTP saves them."""
    if last is None or last.saved_step is not None:
        return ""
    return f"the trainer saves its own checkpoints, its last step is {last.step}"


def _attempts(numbers: Sequence[int]) -> str:
    return ranks_text(numbers).replace("rank", "attempt", 1)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
