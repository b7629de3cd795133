"""The job's pace and loss over time, as the pages of this launch have seen them.

Owns the number of points: when there are MOST of them every second one goes, and from then on half as many are taken. They outlive the page's process, which
ends with every attempt and every controller, in a file beside the journals.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_json
from ttp.status.answer import JobView

MOST = 600
FILE_NAME = "status_curve.json"
_NAMES = ("unix_s", "step", "step_s", "loss")

Point = tuple[float, int, float, float | None]
"""Time, step, median of the newest steps' times, loss. A loss that is not known, or not finite, is None: a gap."""


class PaceCurve:
    """Points of an earlier page are in it where `file` has some that can be read."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._points: list[Point] = []
        self._every = 1
        self._looks = 0
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._every, self._points = _read(file)

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
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk: the next page begins with what is there
                files.replace(self._file, json.dumps({"every": self._every, **self.fields()}, allow_nan=False))

    def fields(self) -> dict[str, Any]:
        """Return one list for each figure: `unix_s`, `step`, `step_s`, `loss`."""
        return {name: [point[place] for point in self._points] for place, name in enumerate(_NAMES)}


def _read(file: Path) -> tuple[int, list[Point]]:
    """Return of how many looks one is taken, and the points. Raises OSError, and ValueError for a file that no page has written."""
    table = checked.mapping(read_json(file), "curve")
    every = checked.integer(*checked.field(table, "every", ""), least=1)
    columns = [list(checked.items(*checked.field(table, name, ""))) for name in _NAMES]
    if len({len(column) for column in columns}) != 1 or len(columns[0]) >= MOST:
        raise ValueError("expected as many values of each figure")
    points = [
        (
            checked.number(*unix_s),
            checked.integer(*step),
            checked.number(*step_s),
            None if loss[0] is None else checked.number(*loss),
        )
        for unix_s, step, step_s, loss in zip(*columns, strict=True)
    ]
    return every, points
