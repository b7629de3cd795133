"""Judges a job under faults against its baseline run: equal bit for bit, and the fault's time line.

Pure functions over what the jobs wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
STAGES = ("death_seen", "frozen", "decided", "written", "published")


@dataclass(frozen=True, slots=True)
class RunComparison:
    """`differences` is empty when every step's loss and grad norm and the final weights are the same bits."""

    steps: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.steps > 0 and not self.differences


@dataclass(frozen=True, slots=True)
class FaultTimeline:
    """Milliseconds since the kill, None where the stage did not happen."""

    death_seen: float | None
    frozen: float | None
    decided: float | None
    written: float | None
    published: float | None
    first_new_step: float | None
    step: int | None
    """The step that was published."""
    path: str
    refused: str
    """Why nothing was published, or empty."""


def by_step(metrics: Sequence[Line]) -> dict[int, Line]:
    """Return the line of each step; where a step was trained twice, the later line."""
    return {int(line["step"]): line for line in metrics if "loss" in line}


def compare(
    faulted: Sequence[Line], baseline: Sequence[Line], faulted_final: Line, baseline_final: Line
) -> RunComparison:
    """Compare loss and grad norm of every step, in every line (a step trained twice must agree with itself too), and the
    final weights."""
    reference = by_step(baseline)
    differences = []
    for line in faulted:
        if "loss" not in line:
            continue
        step = int(line["step"])
        for name in ("loss", "grad_norm"):
            expected = reference[step][name] if step in reference else "no such step"
            if line[name] != expected:
                differences.append(f"step {step}: {name} {line[name]}, the baseline run has {expected}")
    missing = sorted(set(reference) - set(by_step(faulted)))
    if missing:
        differences.append(f"steps {missing} are missing")
    for name in ("step", "weights_sha256"):
        if faulted_final[name] != baseline_final[name]:
            differences.append(f"final {name} {faulted_final[name]}, the baseline run has {baseline_final[name]}")
    return RunComparison(len(reference), tuple(differences))


def timeline(journal: Sequence[Line], metrics: Sequence[Line], killed_unix_s: float) -> FaultTimeline:
    """Build the time line of the fault at `killed_unix_s` from its controller's journal and the resumed run's metrics."""

    def since(event: str) -> float | None:
        times = [float(line["unix_s"]) for line in journal if line.get("event") == event]
        times = [t for t in times if t >= killed_unix_s]
        reached = max if event == "written" else min  # every writer reports; the stage is over with the last
        return (reached(times) - killed_unix_s) * 1e3 if times else None

    published = next((line for line in journal if line.get("event") == "published"), None)
    refused = next((line for line in journal if line.get("event") == "refused"), None)
    step = int(published["step"]) if published else None
    first = [
        float(line["unix_s"])
        for line in metrics
        if "loss" in line and not line.get("recovered") and step is not None and int(line["step"]) == step + 1
    ]
    return FaultTimeline(
        **{stage: since(stage) for stage in STAGES},
        first_new_step=(max(first) - killed_unix_s) * 1e3 if first else None,
        step=step,
        path=str(published["path"]) if published else "",
        refused=str(refused["reason"]) if refused else "",
    )


def lost_steps(timeline: FaultTimeline, committed_before: int) -> int | None:
    """Return how many steps that were committed before the kill have to be trained again (None: nothing published)."""
    return None if timeline.step is None else max(0, committed_before - timeline.step)


def known_to_the_dead_alone(journal: Sequence[Line], published: int) -> bool:
    """True when no survivor of the fault had a commit record after that of the published step. What the dead rank had printed after
    no other rank could prove ("The dead rank's step does not count", docs/proof.md); trained again, it gives the same bits.
    """
    frozen = [line for line in journal if line.get("event") == "frozen"]
    records = frozen[-1]["records"] if frozen else ()
    return bool(records) and max(records) <= published
