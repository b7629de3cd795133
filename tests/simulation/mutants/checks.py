"""What a mutant is tried on: the protocol's unit tests and the scripts, and then simulated jobs.

Owns the collecting: pytest finds the tests once, and each is run by itself in whatever process asks for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from _pytest.runner import runtestprotocol

from tests.simulation.checks import run_and_check
from tests.simulation.mutants.changes import ROOT
from tests.simulation.mutants.trial import Check
from tests.simulation.scenario import build

TESTS = tuple(
    f"tests/{name}"
    for name in (
        "unit/protocol",
        "unit/runtime/test_gate.py",
        "unit/runtime/test_gate_moments.py",
        "unit/runtime/test_starting.py",
        "simulation/test_scenarios.py",
        "simulation/test_hangs.py",
        "simulation/test_failover.py",
    )
)


def with_checks(tests: Sequence[str], seeds: int, work: Callable[[list[Check]], None]) -> None:
    """Collect the tests of these files or folders, add the simulated jobs of so many seeds, and do the work with them."""
    if not tests:
        work(_jobs(seeds))
        return
    plugin = _Collected(seeds, work)
    quiet = ["-qq", "-s", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    status = pytest.main([*quiet, *(str(ROOT / name) for name in tests)], plugins=[plugin])
    if plugin.error is not None:
        raise plugin.error
    if status:
        raise RuntimeError(f"pytest could not collect {', '.join(tests)}: status {status}")


class _Collected:
    """A pytest plugin that takes the place of the loop over the collected tests."""

    def __init__(self, seeds: int, work: Callable[[list[Check]], None]) -> None:
        self._seeds = seeds
        self._work = work
        self.error: RuntimeError | None = None
        """What the work raised: pytest would tell it as an error of its own."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        checks = [Check(item.nodeid.removeprefix("tests/"), partial(_passes, item)) for item in session.items]
        checks += _jobs(self._seeds)
        gc.freeze()  # what is here now stays: the forked processes need not look through it
        try:
            self._work(checks)
        except RuntimeError as error:
            self.error = error
        return True


def _jobs(seeds: int) -> list[Check]:
    return [Check(f"seed {seed}", partial(_job_is_right, seed)) for seed in range(seeds)]


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _job_is_right(seed: int) -> bool:
    scenario = build(seed)
    found = run_and_check(scenario)
    scenario.job.dismantle()
    return not found
