"""How soon a worker's death is known: the controller's verdict beside waitpid and the closing of a socket, for small and big workers.

Kills real processes that hold so much memory of their own, 200 of each size unless that takes too long. Each has the death watch and
the line to a real controller (a process of its own) that the launcher would have, and a fresh controller each, as a death ends an attempt
of the job. Two are made ready at a time; nothing else runs while one is killed. Prints median, 99th percentile
and worst of the time from SIGKILL until: the death watch reports; the controller has judged (its journal's line); the Freeze is at
another rank; the worker's peer sees its socket close; waitpid returns. Then what watching costs in processor time. Several intervals
(`--poll 0.002 0.01`) take turns, kill by kill.
Linux. Wall times. Exit status 1 when the verdict's 99th percentile is above the limit for any size.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ttp.controller.agent_link import AgentLink
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.journal import read_events
from ttp.controller.process import start_controller
from ttp.launch.watch.death_watch import POLL_S, Death, DeathWatch
from ttp.proto.codec import DownwardParcel
from ttp.proto.messages import Freeze, Registration, ShardGroup, Welcome
from ttp.proto.stream import ControlStream

LIMIT_MS = 15.0
WAIT_S = 60.0
HOUR_S = 3600.0
SPARE_MIB = 6 << 10
"""Memory that must be left on the machine while a worker holds its own."""
KILLS = 200
MINUTES = 5.0
COST_ROUNDS = 5
COST_S = 1.0
TOGETHER = 2
"""Workers that are made ready at a time, on machines of two cores and more."""
HOLD = """
import mmap, socket, sys
if nbytes := int(sys.argv[1]):  # pages of its own, all touched, by the kernel: twice as fast as by writing them
    x = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, 'MAP_POPULATE', 0x8000))
line = socket.create_connection(('127.0.0.1', int(sys.argv[2])))
line.sendall(b'.')
sys.stdin.read()
"""
NAMES = {
    "watch": "death watch",
    "verdict": "controller's verdict",
    "freeze": "Freeze at another rank",
    "socket": "socket closed",
    "waitpid": "waitpid",
}


class Worker:
    """A process that has touched so many bytes and has a connection to this one."""

    def __init__(self, nbytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            arguments = [str(nbytes), str(server.getsockname()[1])]
            self.child = subprocess.Popen([sys.executable, "-c", HOLD, *arguments], stdin=subprocess.PIPE)
            self.line, _ = server.accept()
        self.line.recv(1)

    @property
    def pid(self) -> int:
        return self.child.pid

    def until_closed(self) -> None:
        with self.line:
            self.line.recv(1)

    def until_waitable(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        with self.child as child:
            child.kill()


class Ranks:
    """The two ranks of a job, on one stream: 0 lives, 1 is the worker."""

    def __init__(self, address: str, worker_pid: int) -> None:
        self.welcomed, self.frozen = threading.Event(), threading.Event()
        self.frozen_at = 0.0
        self._pids = (os.getpid(), worker_pid)
        self.stream = ControlStream(address, "bench", self)
        self.stream.start()

    def stream_opened(self, stream: ControlStream) -> None:
        groups = (ShardGroup("g", "shard 0 of 1", 1),)
        stream.send(
            *(Registration(r, 2, "host", pid, groups, 0, ("/nowhere",), "{}") for r, pid in enumerate(self._pids))
        )

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        match parcel.message:
            case Welcome():
                self.welcomed.set()
            case Freeze() if parcel.ranks:
                self.frozen_at = time.monotonic()
                self.frozen.set()

    def stream_closed(self, stream: ControlStream, reason: str) -> None: ...


class Victim:
    """A worker of so many bytes with its controller, the launcher's line to it and the job's other rank: all but its death."""

    def __init__(self, nbytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.journal = Path(self._folder.name) / "journal.jsonl"
        settings = ControllerSettings("bench", 1, 2, heartbeat_s=HOUR_S, lease_s=3 * HOUR_S, freeze_timeout_s=WAIT_S)
        self._controller = start_controller(settings, self.journal)
        self.worker = Worker(nbytes)
        self.link = AgentLink(self._controller.address, "bench", "host", (1,), (self.worker.pid,))
        self.ranks = Ranks(self._controller.address, self.worker.pid)
        _demand(self.ranks.welcomed, "the welcome")
        _until(lambda: self.link.attached, "the launcher's line")

    def close(self) -> None:
        self.worker.end()
        self.link.close(0.0)
        self.ranks.stream.close()
        self._controller.process.kill()
        self._controller.wait(WAIT_S)
        self._folder.cleanup()


def one_kill(victim: Victim, poll_s: float) -> dict[str, float]:
    """Kill a worker; return seconds until each sign of it."""
    worker = victim.worker
    times: dict[str, float] = {}
    threads = [_timed(times, "socket", worker.until_closed), _timed(times, "waitpid", worker.until_waitable)]
    reported = threading.Event()

    def report(death: Death) -> None:
        times.setdefault("watch", time.monotonic())
        victim.link.worker_exit(death.rank, death.pid, death.text)
        reported.set()

    watch = DeathWatch({1: worker.pid}, report, poll_s=poll_s)
    try:
        watch.start()
        time.sleep(
            0.05 + random.uniform(0.0, poll_s)
        )  # the watch runs, and nothing else does; at any moment between two looks
        begin = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        _demand(reported, "the death watch's report")
        _demand(victim.ranks.frozen, "the freeze")
        times["freeze"] = victim.ranks.frozen_at
        _until(lambda: _verdict(victim.journal) > 0, "the controller's verdict")
        times["verdict"] = _verdict(victim.journal)
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        watch.stop()
    return {name: at - begin for name, at in times.items()}


def many_kills(
    nbytes: int, kills: int, polls_s: Sequence[float], minutes: float
) -> dict[float, list[dict[str, float]]]:
    """Kill so many workers of a size for each interval, or as many as go into the time (one at least)."""
    together = TOGETHER if available_mib() >= (TOGETHER * nbytes >> 20) + SPARE_MIB else 1
    until_s = time.monotonic() + 60.0 * minutes
    found: dict[float, list[dict[str, float]]] = {poll_s: [] for poll_s in polls_s}
    turns = itertools.cycle(polls_s)
    done = 0
    with ThreadPoolExecutor(together) as pool:
        while done < kills * len(polls_s) and (done < len(polls_s) or time.monotonic() < until_s):
            victims = list(pool.map(Victim, [nbytes] * min(together, kills * len(polls_s) - done)))
            with contextlib.ExitStack() as stack:
                for victim in victims:
                    stack.callback(victim.close)
                for victim in victims:
                    poll_s = next(turns)
                    found[poll_s].append(one_kill(victim, poll_s))
            done += len(victims)
    return found


def _timed(times: dict[str, float], name: str, wait: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        wait()
        times[name] = time.monotonic()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _verdict(journal: Path) -> float:
    return next((line.monotonic_s for line in read_events(journal) if line.event == "death_seen"), 0.0)


def _demand(event: threading.Event, what: str) -> None:
    if not event.wait(WAIT_S):
        raise TimeoutError(f"waited {WAIT_S} s in vain for {what}")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S} s in vain for {what}")
        time.sleep(0.005)


def summary(name: str, seconds: Sequence[float]) -> str:
    ms = sorted(1e3 * value for value in seconds)
    return (
        f"{name:24} median {statistics.median(ms):8.2f} ms, p99 {percentile(ms, 0.99):8.2f} ms, worst {ms[-1]:8.2f} ms"
    )


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least `fraction` of them do not exceed."""
    return ordered[math.ceil(fraction * len(ordered)) - 1]


def available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    raise ValueError("no MemAvailable in /proc/meminfo")


def watching_costs(workers: int, polls_s: Sequence[float]) -> dict[float, list[float]]:
    """Return the part of one core that watching so many idle workers takes, for each interval, which take turns."""
    held = [Worker(0) for _ in range(workers)]
    pids = {rank: worker.pid for rank, worker in enumerate(held)}
    found: dict[float, list[float]] = {poll_s: [] for poll_s in polls_s}
    for poll_s in list(polls_s) * COST_ROUNDS:
        watch = DeathWatch(pids, lambda death: None, poll_s=poll_s)
        before, began = time.process_time(), time.monotonic()
        watch.start()
        time.sleep(COST_S)
        found[poll_s].append((time.process_time() - before) / (time.monotonic() - began))
        watch.stop()
    for worker in held:
        worker.line.close()
        worker.end()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 1024, 8192], help="resident sizes")
    parser.add_argument(
        "--kills", type=int, nargs="+", default=[KILLS], help=f"processes to kill for each size (default: {KILLS})"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"bound for each size: fewer kills then (default: {MINUTES:g})"
    )
    parser.add_argument("--poll", type=float, nargs="+", default=[POLL_S], help="seconds between two looks")
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS)
    options = parser.parse_args(arguments)
    if len(options.kills) == 1:
        options.kills *= len(options.mib)
    if len(options.kills) != len(options.mib):
        parser.error(
            f"{len(options.mib)} sizes and {len(options.kills)} numbers of kills: expected one number for all, or for each size"
        )
    logging.getLogger("ttp.launch").setLevel(logging.ERROR)  # what the controller reports to the launcher
    worst_ms = 0.0
    for mib, kills in zip(options.mib, options.kills, strict=True):
        if (free := available_mib()) < mib + SPARE_MIB:
            print(f"{mib} MiB resident: left out, {free} MiB are available, expected {mib + SPARE_MIB}", flush=True)
            continue
        for poll_s, found in many_kills(mib << 20, kills, options.poll, options.minutes).items():
            early = f" (of {kills}: {options.minutes:g} minutes have passed)" if len(found) < kills else ""
            print(
                f"{len(found)} kills{early} at {mib} MiB resident, a look every {1e3 * poll_s:g} ms, load average"
                f" {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            )
            for name, text in NAMES.items():
                print("  " + summary(text, [times[name] for times in found]), flush=True)
            worst_ms = max(worst_ms, percentile(sorted(1e3 * times["verdict"] for times in found), 0.99))
    for workers in (1, 8):
        for poll_s, parts in watching_costs(workers, options.poll).items():
            print(
                f"watching {workers} workers every {1e3 * poll_s:g} ms takes {100 * statistics.median(parts):.2f} % of a core"
                f" ({100 * min(parts):.2f} to {100 * max(parts):.2f})"
            )
    if worst_ms > options.limit_ms:
        print(f"controller's verdict: p99 {worst_ms:.1f} ms is above the limit of {options.limit_ms:.1f} ms")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
