"""Attempts that resumed from an older step than the fault before them, or an earlier job, had kept.

Pure: reports and a few facts in, the repeated steps out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint.format.durable import step_of_directory
from ttp.launch.report.incident import Report
from ttp.text.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneBack:
    """Steps that are repeated."""

    first_step: int
    """The first that the attempt has completed."""
    kept_step: int
    """What a fault had kept, or an earlier job in a broken checkpoint."""
    steps: int
    skipped: str = ""
    """The checkpoint of that step, if the ranks reported it as broken; empty: they have not."""

    def text(self, first_step: int) -> str:
        """Return it as text, for people."""
        why = f"because {self.skipped} was skipped" if self.skipped else f"although step {self.kept_step} was saved"
        return f"resumed at step {first_step}, {why}: {counted(self.steps, 'step')} to repeat; the ranks' log of that attempt may show why"


def gone_back(
    reports: Sequence[Report], attempt: int, first_step: int, progressed: Collection[int], skipped: str = ""
) -> GoneBack | None:
    """Compare an attempt's first completed step with what the faults before it had kept; None: it has resumed from there, or that is not known.

    progressed: attempts that have completed a step. No fault before the newest of those affects where to resume from.
    skipped: the newest checkpoint that the ranks found broken. It is an earlier job's if no attempt of this job has completed a step; later it
    may be the same one again.
    """
    since = max(progressed, default=-1)
    known = (
        step_of_directory(Path(each.incident.goes_on_from))
        for each in reversed(reports)
        if since <= each.start < attempt
    )
    kept = next((step for step in known if step is not None), 0)
    broken = step_of_directory(Path(skipped)) or 0
    if not progressed:
        kept = max(kept, broken)
    if first_step > kept:
        return None
    why = skipped if broken == kept else ""
    return GoneBack(first_step=first_step, kept_step=kept, steps=kept - first_step + 1, skipped=why)
