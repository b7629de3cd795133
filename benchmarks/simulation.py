"""How many complete simulated fault runs one core does in a second: of the jobs that `make soak` draws, and of worlds of 8 ranks.

A run is a whole job: start, training, faults, dump, end, and the check of every invariant. The clock is the process's own
processor time, so that what else the machine does counts little. Exit status 1 when the median of drawn jobs is below the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from tests.simulation.checks import violations
from tests.simulation.garbage import seldom_collected
from tests.simulation.scenario import build
from tests.simulation.training import Layout, even, pipeline

LIMIT_PER_S = 150.0
"""Of drawn jobs: a million of them take two hours of one core."""
LAYOUTS = (None, even(8), pipeline(8, 2))


def measure(layout: Layout | None, first: int, count: int) -> float:
    """Return runs a second over these seeds; None: the seed's own layout. Raises AssertionError with the seed when an invariant is violated."""
    began = time.process_time()
    with seldom_collected():
        for seed in range(first, first + count):
            scenario = build(seed, layout)
            found = violations(scenario)
            assert not found, f"seed {seed}, {_name(layout)}: {found}"
            scenario.job.dismantle()
    return count / (time.process_time() - began)


def _name(layout: Layout | None) -> str:
    return "drawn jobs" if layout is None else layout.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10, help="of each layout")
    parser.add_argument("--runs", type=int, default=100, help="in a batch")
    options = parser.parse_args()
    medians = []
    for layout in LAYOUTS:
        measure(layout, 0, options.runs)  # warm
        rates = [measure(layout, batch * options.runs, options.runs) for batch in range(options.batches)]
        medians.append(statistics.median(rates))
        print(
            f"{_name(layout)}: median {medians[-1]:.0f} fault runs a second on one core, {min(rates):.0f} to {max(rates):.0f}"
            f" in {options.batches} batches of {options.runs} seeds"
        )
    if medians[0] < LIMIT_PER_S:
        print(f"simulation.py: the median of drawn jobs is below {LIMIT_PER_S:.0f} runs a second", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
