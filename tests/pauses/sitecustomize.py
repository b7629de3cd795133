"""Lines of ttp, or of its tests, that pause, so that what code or a test takes for granted of the order of threads and processes fails in one run of a few, not of a hundred.

Python imports this file at the start of every process whose PYTHONPATH has its folder: `python -m tests.flaky --pauses 0.03` sees to that. Where PAUSES is
set (a seed, a share of the lines, and whose they are: `ttp` or `tests`), each thread pauses the first time in a test that it comes to one of the chosen
lines. Seed, test and rank choose them. The thread that runs the tests pauses at lines of tests alone. Noise in the scheduling, for the same end: Edelstein et al. 2002, IBM Systems Journal
41 (1), doi 10.1147/sj.411.0111.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import os
import sys
import threading
from pathlib import Path
from time import sleep  # tests replace `time.sleep`
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 0.1
"""Of one pause."""


class Pauses:
    """Of one process."""

    def __init__(self, seed: str, share: float, *, of_tests: bool) -> None:
        self._seed, self._share, self._of_tests = seed, share, of_tests
        self._test = ""
        self._passed: set[tuple[str, int, int]] = set()
        """File, line and thread that have been there in this test."""
        self._ours: dict[str, bool] = {}
        self._over = False
        """The interpreter is ending: what this module has imported goes, while threads run on."""

    def start(self, *, here: bool) -> None:
        """Have all threads pause that begin from now on; `here`: this one too."""
        atexit.register(self.end)
        threading.settrace(self.trace_calls)
        if here:
            sys.settrace(self.trace_calls)

    def end(self) -> None:
        self._over = True

    def trace_calls(self, frame: FrameType, event: str, given: Any) -> Any:
        """As `sys.settrace` calls it for every function: follow the chosen ones, line by line."""
        if self._over:
            return None
        file = frame.f_code.co_filename
        if (ours := self._ours.get(file)) is None:
            ours = self._ours[file] = self.pauses_in(Path(file).resolve())
        if not ours or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or a class
            return None
        if (test := os.environ.get("PYTEST_CURRENT_TEST", "")) != self._test:
            self._test, self._passed = test, set()
        return self.trace_lines

    def pauses_in(self, file: Path) -> bool:
        if not file.is_relative_to(ROOT) or file == Path(__file__).resolve():
            return False
        parts = file.relative_to(ROOT).parts
        return not {".venv", "build"} & set(parts) and ("tests" in parts) is self._of_tests

    def trace_lines(self, frame: FrameType, event: str, given: Any) -> Any:
        if event == "line" and not self._over:
            place = (frame.f_code.co_filename, frame.f_lineno, threading.get_ident())
            if place not in self._passed:
                self._passed.add(place)
                sleep(self.pause_s(f"{Path(place[0]).name}:{place[1]}"))
        return self.trace_lines

    def pause_s(self, line: str) -> float:
        """Return how long a thread pauses at this line."""
        chosen_by = f"{self._seed} {self._test} {os.environ.get('RANK', '')} {line}"
        drawn = int.from_bytes(hashlib.blake2b(chosen_by.encode(), digest_size=8).digest(), "big") / 2**64
        return LONGEST_S * drawn / self._share if drawn < self._share else 0.0


if "PAUSES" in os.environ:
    _seed, _share, _whose = os.environ["PAUSES"].split()
    _started_by_a_test = "PYTEST_CURRENT_TEST" in os.environ
    Pauses(_seed, float(_share), of_tests=_whose == "tests").start(here=_started_by_a_test or _whose == "tests")
