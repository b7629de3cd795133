"""Looks at the job again and again, and leaves the answers of each look for the server.

Owns how often: every PERIOD_S, and less often where a look takes much of a core, so that neither clients nor ten thousand ranks decide how often a controller is
asked. A look that fails leaves the answers of the one before, until they are older than MOST_PAUSES pauses: then there are none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttp.errors import ConfigError
from ttp.status.answer import JobView
from ttp.status.look import shortened
from ttp.status_page import prometheus
from ttp.status_page.curve import PaceCurve
from ttp.status_page.html import page_response
from ttp.status_page.http_server import Response

PERIOD_S = 2.0
MOST_PAUSES = 5
MOST_SHARE = 0.1
"""Of a core, for looks."""


class Looks:
    """`answers` may be called from any thread; `run` never returns."""

    def __init__(
        self,
        look: Callable[[], JobView],
        wait: Callable[[float], object] = time.sleep,
        busy_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        curve_file: Path | None = None,
    ) -> None:
        """`look()`: with all ranks and all faults. Raises ConfigError. `busy_s()`: the processor time so far, which a look may not take much of.
        `curve_file`: where the curve is kept for the next page; None: nowhere."""
        self._look = look
        self._wait = wait
        self._busy_s = busy_s
        self._clock = clock
        self._curve = PaceCurve(curve_file)
        self._pause_s = PERIOD_S
        self._failed = False
        self._answers: tuple[float, Mapping[str, Response]] = (clock(), {"/": page_response()})
        """When the look was, and what it left."""

    def answers(self) -> Mapping[str, Response]:
        """Return what each path answers: the page alone, which shows that nothing is known, where the last look is too old."""
        at, answers = self._answers
        if self._clock() - at > MOST_PAUSES * self._pause_s:
            return {"/": answers["/"]}
        return answers

    def start(self) -> None:
        threading.Thread(target=self.run, name="ttp-looks", daemon=True).start()

    def run(self) -> None:
        while True:
            began = self._busy_s()
            try:
                self.look_once()
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    print(f"ttp-status-page: the job cannot be looked at: {what}", file=sys.stderr)
            self._pause_s = pause_s(self._busy_s() - began)
            self._wait(self._pause_s)

    def look_once(self) -> None:
        try:
            view = self._look()
        except ConfigError:
            return
        self._curve.add(view)
        answers = {
            "/": page_response(),
            "/status.json": Response("application/json", json.dumps(self._fields(view), allow_nan=False).encode()),
            "/metrics": Response(prometheus.CONTENT_TYPE, prometheus.exposition(view)),
        }
        self._answers = (self._clock(), answers)

    def _fields(self, view: JobView) -> dict[str, Any]:
        return {**asdict(shortened(view)), "curve": self._curve.fields()}


def pause_s(busy_s: float) -> float:
    """Return how long to wait after a look that took so much of a core."""
    return max(PERIOD_S, busy_s / MOST_SHARE)
