"""How soon a worker's death is known: the death watch beside waitpid, for small and big processes; and what looking costs.

Kills real processes that hold so much memory, and prints median and 99th percentile of the time from SIGKILL until the
watch reports the rank and until the parent's wait returns. Then the processor time of watching so many workers.
Linux. Exit status 1 when the watch's 99th percentile is above the limit.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

from ttp.launch.deathwatch import POLL_S, Death, DeathWatch

LIMIT_MS = 50.0
HOLD = "import sys; x = bytearray(b'x') * int(sys.argv[1]); print(flush=True); sys.stdin.read()"


def start(nbytes: int) -> subprocess.Popen[bytes]:
    """Start a process that has touched so many bytes, and return when it has."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def one_kill(nbytes: int, poll_s: float) -> tuple[float, float]:
    """Kill one process; return seconds until the watch's report and until waitpid."""
    child = start(nbytes)
    reported = threading.Event()
    times: dict[str, float] = {}

    def report(death: Death) -> None:
        times.setdefault("watch", time.perf_counter())
        reported.set()

    def reap() -> None:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        times["wait"] = time.perf_counter()

    waiter = threading.Thread(target=reap)
    waiter.start()
    watch = DeathWatch({0: child.pid}, report, poll_s=poll_s)
    watch.start()
    begin = time.perf_counter()
    os.kill(child.pid, signal.SIGKILL)
    reported.wait()
    waiter.join()
    watch.stop()
    with child:
        child.wait()
    return times["watch"] - begin, times["wait"] - begin


def summary(name: str, seconds: list[float]) -> str:
    ms = sorted(1e3 * value for value in seconds)
    return f"{name}: median {statistics.median(ms):7.2f} ms, p99 {percentile(ms, 0.99):7.2f} ms, worst {ms[-1]:7.2f} ms"


def percentile(ordered: list[float], fraction: float) -> float:
    """Return the smallest value that at least `fraction` of them do not exceed."""
    return ordered[math.ceil(fraction * len(ordered)) - 1]


def watching_cost(workers: int, poll_s: float, duration_s: float) -> float:
    """Return the part of one core that watching so many idle workers takes."""
    children = [start(0) for _ in range(workers)]
    watch = DeathWatch({rank: child.pid for rank, child in enumerate(children)}, lambda death: None, poll_s=poll_s)
    before = time.process_time()
    watch.start()
    time.sleep(duration_s)
    used = time.process_time() - before
    watch.stop()
    for child in children:
        with child:
            child.kill()
    return used / duration_s


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50, help="processes to kill for each size")
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 512], help="resident sizes")
    parser.add_argument("--poll", type=float, default=POLL_S, help="seconds between two looks")
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS)
    options = parser.parse_args(arguments)
    worst_ms = 0.0
    for mib in options.mib:
        pairs = [one_kill(mib << 20, options.poll) for _ in range(options.kills)]
        watched = [pair[0] for pair in pairs]
        worst_ms = max(worst_ms, percentile(sorted(1e3 * value for value in watched), 0.99))
        print(f"{options.kills} kills at {mib} MiB resident")
        print("  " + summary("death watch", watched))
        print("  " + summary("waitpid    ", [pair[1] for pair in pairs]))
    for workers in (1, 8):
        print(f"watching {workers} workers takes {100 * watching_cost(workers, options.poll, 5.0):.2f} % of a core")
    if worst_ms > options.limit_ms:
        print(f"death watch: p99 {worst_ms:.1f} ms is above the limit of {options.limit_ms:.1f} ms")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
