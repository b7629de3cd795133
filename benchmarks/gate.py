"""What update tracking costs the training thread: `begin_update` + `end_update`, and a whole step's four calls.

Prints the median and the spread over many runs; nothing is sent, nothing is logged. Exit status 1 when the median of
begin + end is above the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord

LIMIT_US = 3.0


def measure(pair: Callable[[int], None], runs: int, calls: int) -> list[float]:
    """Return microseconds per call, one number a run."""
    results = []
    step = 0
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(calls):
            step += 1
            pair(step)
        results.append((time.perf_counter() - start) / calls * 1e6)
    return results


def describe(name: str, results: list[float]) -> str:
    cuts = statistics.quantiles(results, n=20)
    return (
        f"{name}: median {statistics.median(results):.3f} us, 5%..95% {cuts[0]:.3f}..{cuts[-1]:.3f} us,"
        f" worst run {max(results):.3f} us"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--calls", type=int, default=5000)
    options = parser.parse_args()
    gate = Gate(0)
    record = CommitRecord(1, 1.0, 1.0, False, 1.0, (1e-3,), ())

    def update(step: int) -> None:
        gate.begin_update(step, record)
        gate.end_update(step)

    def whole_step(step: int) -> None:
        gate.computing(step)
        gate.ready(step)
        gate.begin_update(step, record)
        gate.end_update(step)

    updates = measure(update, options.runs, options.calls)
    print(describe("begin_update + end_update", updates))
    print(describe("computing + ready + begin_update + end_update", measure(whole_step, options.runs, options.calls)))
    if statistics.median(updates) > LIMIT_US:
        print(f"gate.py: the median is above {LIMIT_US} us", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
