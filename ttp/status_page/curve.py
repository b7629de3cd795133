"""The job's pace and loss over time, as the page's process has seen them.

Owns the number of points: when there are MOST of them every second one goes, and from then on half as many are taken.
"""

from __future__ import annotations

from typing import Any

from ttp.status.answer import JobView

MOST = 600


class PaceCurve:
    """Points of (time, step, median of the newest steps' times, loss). A loss that is not known, or not finite, is None: a gap."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int, float, float | None]] = []
        self._every = 1
        self._looks = 0

    def add(self, view: JobView) -> None:
        """Take a look at the job; one in which no step's time is known has no point."""
        if view.source != "controller" or view.step is None or view.step_s is None:
            return
        self._looks += 1
        if self._looks % self._every:
            return
        self._points.append((view.unix_s, view.step, view.step_s, view.loss))
        if len(self._points) >= MOST:
            self._points = self._points[1::2]
            self._every *= 2

    def fields(self) -> dict[str, Any]:
        """Return one list for each figure: `unix_s`, `step`, `step_s`, `loss`."""
        names = ("unix_s", "step", "step_s", "loss")
        return {name: [point[place] for point in self._points] for place, name in enumerate(names)}
