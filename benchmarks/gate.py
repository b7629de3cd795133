"""What update tracking costs the training thread: `begin_update` + `end_update`, and a whole step's four calls.

Prints the median and the spread over many runs, beside the same calls on a tracker that tracks nothing and beside taking and
giving back a bare lock, in processor time (and once in wall time); nothing is sent, nothing is logged. Exit status 1 when
the median of begin + end is above the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable

from ttp.interfaces.update_tracker import NullTracker, UpdateTracker
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord

LIMIT_US = 3.0
RECORD = CommitRecord(1, 1.0, 1.0, False, 1.0, (1e-3,), ())


def measure(
    pair: Callable[[int], None], runs: int, calls: int, clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """Return microseconds per call, one number a run; `clock`: processor time, as other processes use the machine too."""
    results = []
    step = 0
    for _ in range(runs):
        start = clock()
        for _ in range(calls):
            step += 1
            pair(step)
        results.append((clock() - start) / calls * 1e6)
    return results


def update_of(tracker: UpdateTracker) -> Callable[[int], None]:
    """Return the two calls of an update."""

    def update(step: int) -> None:
        tracker.begin_update(step, RECORD)
        tracker.end_update(step)

    return update


def step_of(tracker: UpdateTracker) -> Callable[[int], None]:
    """Return the four calls of a whole step."""

    def step_calls(step: int) -> None:
        tracker.computing(step)
        tracker.ready(step)
        tracker.begin_update(step, RECORD)
        tracker.end_update(step)

    return step_calls


def bare_lock() -> Callable[[int], None]:
    """Return the least that guarding an update can cost."""
    lock = threading.Lock()

    def pass_through(step: int) -> None:
        lock.acquire()
        lock.release()

    return pass_through


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
    updates = measure(update_of(gate), options.runs, options.calls)
    print(describe("begin_update + end_update", updates))
    by_the_wall = measure(update_of(gate), options.runs, options.calls, time.perf_counter)
    print(describe("  the same, wall time", by_the_wall))
    print(
        describe("  with a tracker that tracks nothing", measure(update_of(NullTracker()), options.runs, options.calls))
    )
    print(describe("  a bare lock, taken and given back", measure(bare_lock(), options.runs, options.calls)))
    steps = measure(step_of(gate), options.runs, options.calls)
    print(describe("computing + ready + begin_update + end_update", steps))
    print(
        describe("  with a tracker that tracks nothing", measure(step_of(NullTracker()), options.runs, options.calls))
    )
    if statistics.median(updates) > LIMIT_US:
        print(f"gate.py: the median is above {LIMIT_US} us", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
