"""An attempt that has not resumed from where a fault before it, or an earlier job, had left off.

Pure: reports and a few facts in, what is trained again out.
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
    """Steps that are trained again."""

    first_step: int
    """The first that the attempt has finished."""
    kept_step: int
    """What a fault had left whole, or an earlier job in a checkpoint that is broken."""
    steps: int
    skipped: str = ""
    """The checkpoint of that step, if the ranks found it broken; empty: they have not reported it."""

    def text(self, first_step: int) -> str:
        """Say it, for people."""
        why = (
            f"as {self.skipped} was skipped" if self.skipped else f"though a fault had left step {self.kept_step} whole"
        )
        return (
            f"went on with step {first_step}, {why}: {counted(self.steps, 'step')} to train again; what its ranks have logged as they"
            " began may say why"
        )


def gone_back(
    reports: Sequence[Report], start: int, first_step: int, progressed: Collection[int], skipped: str = ""
) -> GoneBack | None:
    """Compare an attempt's first finished step with what the faults before it had left whole; None: it has resumed from there, or that is
    not known.

    progressed: attempts that have finished a step. Behind the newest of those, no fault has changed what there is to resume from.
    skipped: the newest checkpoint that the ranks found broken. Before any attempt of the job has finished a step, an earlier job had
    come so far; later it may be the same one again.
    """
    since = max(progressed, default=-1)
    known = (
        step_of_directory(Path(each.incident.goes_on_from)) for each in reversed(reports) if since <= each.start < start
    )
    kept = next((step for step in known if step is not None), 0)
    broken = step_of_directory(Path(skipped)) or 0
    if not progressed:
        kept = max(kept, broken)
    if first_step > kept:
        return None
    why = skipped if broken == kept else ""
    return GoneBack(first_step=first_step, kept_step=kept, steps=kept - first_step + 1, skipped=why)
