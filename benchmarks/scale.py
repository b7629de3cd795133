"""The control plane at scale: the real controller process over real gRPC with 1,000 and 10,000 ranks that exist in name only.

A few client processes play the nodes; the streams of a node's eight ranks come in one connection, as its relay carries them. For each
world: the controller's processor time and memory under heartbeats at 1 Hz (a node's together), the time to assemble, and, for
several faults (a fresh controller each), from the death report to the Freeze at all ranks, from the last state reply to the
write orders, from the write answers to the publish order, to the Exit at all. Then the pure cores alone, to 100,000 ranks.

What the clients take is in the times: two cores for all processes show a controller that waits for its clients. Each limit is
reported as kept or missed: of the time from the last state reply to the plan, of the controller's processor time for the orders and
for the write answers, and of the pure cores' plan. Exit status 1 when one is missed, as with 10,000 ranks on a slower
machine than that of docs/decisions/0053.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import _scale_core
from benchmarks._scale_world import World
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.journal import read_events
from ttp.controller.process import ControllerProcess, start_controller
from ttp.inputs.options import whole

LIMITS_MS = {"plan_made": 100.0, "plan_cpu_ms": 400.0, "answers_cpu_ms": 1000.0}
"""At most, the median of faults in which no rank rolls forward; by keys of LABELS."""
CORE_PLAN_LIMIT_S = 1.0
WAIT_S = 180.0
CALM_ANSWER_S = 0.1
CALM_ANSWERS = 3
"""So many answers in a row, each within that time, mean that nothing else waits to be received."""
WINDOWS = 5
HERE = Path(__file__).resolve().parent


class ClientProcess:
    """One client process; `say` gives it a command, `receive` waits for an event's line."""

    def __init__(self, address: str, world: World, environ: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks._scale_client", address, *world.flags()]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
            env={**os.environ, **environ},
        )
        self._events: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()  # guards _events
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _queue(self, event: str) -> queue.SimpleQueue[dict[str, Any]]:
        with self._lock:
            return self._events.setdefault(event, queue.SimpleQueue())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self._queue(said["event"]).put(said)

    def say(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def receive(self, event: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Raises TimeoutError when it does not come in time, RuntimeError when the client has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._queue(event).get(timeout=0.5)
            if (status := self._process.poll()) is not None:
                raise RuntimeError(f"a client process ended with status {status} before it reported {event!r}")
        raise TimeoutError(f"a client process did not tell {event!r} within {timeout_s:.0f} s")

    def received(self, event: str) -> dict[str, Any] | None:
        return None if self._queue(event).empty() else self._queue(event).get()

    def end(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()


class Usage:
    """A process's processor time and memory."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) makes it

    def cpu_s(self) -> float:
        """Return what all its threads have used, those that have ended included."""
        seconds: float = time.clock_gettime(self._clock)
        return seconds

    def mib(self, name: str = "VmRSS") -> float:
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) / 1024
        raise ValueError(f"no {name} for pid {self._pid}")

    def shared_out_mib(self) -> float:
        """Return its proportional set size: pages that it shares count by its part."""
        for line in Path(f"/proc/{self._pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
        raise ValueError(f"no Pss for pid {self._pid}")


def settle(players: Sequence[ClientProcess]) -> None:
    """Return when the controller has come to everything that was said: it answers at once, several times in a row."""
    deadline, calm = time.monotonic() + WAIT_S, 0
    while calm < CALM_ANSWERS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the controller was still busy after {WAIT_S} s")
        calm += 1
        for player in players:
            player.say("ping")
            asked = player.receive("pinged")["at"]
            if player.receive("ponged")["at"] - asked > CALM_ANSWER_S:
                calm = 0
        time.sleep(0.02)


@contextlib.contextmanager
def job(
    world: World, clients: int, environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[ControllerProcess, list[ClientProcess], Path]]:
    """A controller with all streams attached, and its journal. `environ`: more variables of the client processes."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        settings = ControllerSettings(
            world.job_id, 1, world.size, heartbeat_s=world.heartbeat_s, lease_s=60.0,
            # A machine that others load as well: what is measured must not be cut short by a deadline.
            total_timeout_s=600.0, register_timeout_s=300.0, freeze_timeout_s=120.0, progress_timeout_s=120.0,
        )  # fmt: skip
        controller = start_controller(settings, journal)
        players: list[ClientProcess] = []
        try:
            players = [ClientProcess(controller.address, world, environ) for _ in range(clients)]
            per_client = -(-world.size // clients // world.ranks_per_node) * world.ranks_per_node
            for number, player in enumerate(players):
                first = number * per_client
                player.say("attach", first=first, count=min(per_client, world.size - first))
            for player in players:
                player.receive("attached")
            yield controller, players, journal
        finally:
            for player in players:
                player.end()
            controller.terminate()
            if controller.wait(10.0) is None:
                controller.process.kill()
                controller.wait(10.0)


def assemble(players: Sequence[ClientProcess]) -> float:
    """Register every rank; return ms from the first registration sent to the last welcome received."""
    for player in players:
        player.say("register")
    first: float = min(player.receive("registering")["at"] for player in players)
    last: float = max(player.receive("welcomed")["at"] for player in players)
    for player in players:
        player.say("beat")
    return 1e3 * (last - first)


def last_of(players: Sequence[ClientProcess], event: str) -> tuple[float, float]:
    """Return when the first and the last rank had the message."""
    lines = [player.receive(event) for player in players]
    return min(line["first"] for line in lines), max(line["at"] for line in lines)


def one_fault(
    world: World, clients: int, dead: int, environ: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """Start a job, kill one rank of it, see it through to the end; return what took how many ms, and the sizes."""
    found: dict[str, float] = {}
    with job(world, clients, environ) as (controller, players, journal):
        usage = Usage(controller.pid)
        found["assemble"] = assemble(players)
        for number, player in enumerate(players):
            player.say("arm", dead=dead, holds=number == len(players) - 1)
        for player in players:
            player.receive("armed")
        settle(players)
        cpu = usage.cpu_s()
        players[0].say("die", rank=dead)
        died = players[0].receive("died")["at"]
        found["freeze_first"], found["freeze_all"] = (1e3 * (at - died) for at in last_of(players, "frozen"))
        found["freeze_cpu_ms"] = 1e3 * (usage.cpu_s() - cpu)
        settle(players)
        cpu_before = usage.cpu_s()
        players[-1].say("last")
        replied = players[-1].receive("last_reply")["at"]
        if world.ready_every:
            found["roll_first"], found["roll_all"] = (1e3 * (at - replied) for at in last_of(players, "rolling"))
        found["plan_first"], found["plan_all"] = (1e3 * (at - replied) for at in last_of(players, "ordered"))
        found["plan_cpu_ms"] = 1e3 * (usage.cpu_s() - cpu_before)
        settle(players)
        found["plan_made"] = 1e3 * (moment_of(journal, "write_sent") - replied)
        cpu_before = usage.cpu_s()
        for player in players:
            player.say("write")
        writing = [player.receive("writing") for player in players]
        order = first_event(players, "publish_order")
        found["answers_to_publish"] = 1e3 * (order["at"] - min(line["at"] for line in writing))
        found["answers_cpu_ms"] = 1e3 * (usage.cpu_s() - cpu_before)
        found["written_MB"] = sum(line["bytes"] for line in writing) / 1e6
        found["publish_MB"] = order["bytes"] / 1e6
        found["errors"] = errors(players)  # before the controller's end, which ends streams
        for player in players:
            player.say("published")
        published = first_event(players, "publishing")["at"]
        found["exit_all"] = 1e3 * (last_of(players, "exited")[1] - published)
        found["cpu_ms"] = 1e3 * (usage.cpu_s() - cpu)
        found["peak_MiB"] = usage.mib("VmHWM")
    return found


def errors(players: Sequence[ClientProcess]) -> int:
    """Return how many streams broke, before their greeting or after it."""
    for player in players:
        player.say("count")
    return sum(line["retries"] + line["broken"] for line in (player.receive("counted") for player in players))


def moment_of(journal: Path, event: str) -> float:
    """Return when the controller first recorded an event in its journal, by the clock that all processes share."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:  # its lines are written by a thread of their own
        for line in read_events(journal):
            if line.event == event:
                return line.monotonic_s
        time.sleep(0.05)
    raise TimeoutError(f"no {event} in {journal} within {WAIT_S} s")


def first_event(players: Sequence[ClientProcess], event: str) -> dict[str, Any]:
    """Wait for an event that one of the clients reports."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for player in players:
            if (line := player.received(event)) is not None:
                return line
        time.sleep(0.005)
    raise TimeoutError(f"no client reported {event} within {WAIT_S} s")


def shares_of_a_core(pid: int, seconds: float) -> list[float]:
    """Return a process's processor time in each of WINDOWS windows."""
    usage, shares = Usage(pid), []
    for _ in range(WINDOWS):
        before, began = usage.cpu_s(), time.monotonic()
        time.sleep(seconds / WINDOWS)
        shares.append((usage.cpu_s() - before) / (time.monotonic() - began))
    return shares


def heartbeats(world: World, clients: int, seconds: float) -> str:
    """Measure a calm job."""
    with job(world, clients) as (controller, players, _):
        usage = Usage(controller.pid)
        alone = f"{usage.mib():.0f} MiB resident, {usage.shared_out_mib():.0f} MiB proportional"
        assemble(players)
        settle(players)
        shares = shares_of_a_core(controller.pid, seconds)
        connections = -(-world.size // world.ranks_per_node)
        return (
            f"{world.size:,} ranks on {connections:,} connections, heartbeats every {world.heartbeat_s} s: {spread(shares, 100)} % of a core; "
            f"{usage.mib():.0f} MiB resident, {usage.shared_out_mib():.0f} proportional (streams open, no rank registered:  "
            f"{alone})"
        )


def spread(values: Sequence[float], unit: float = 1.0) -> str:
    """Return median and range."""
    ordered = sorted(unit * value for value in values)
    return f"median {statistics.median(ordered):.0f} ({ordered[0]:.0f} to {ordered[-1]:.0f})"


def standby_memory() -> str:
    """Measure what a controller's process takes while no rank attaches to it, and a bare interpreter beside it."""
    with tempfile.TemporaryDirectory() as folder:
        standby = start_controller(ControllerSettings("bench", 2, 8, standby=1), Path(folder) / "standby.jsonl")
        bare = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert bare.stdout is not None
            bare.stdout.readline()
            time.sleep(1.0)  # what it does at its start is not what it keeps
            sizes = [(usage.mib(), usage.shared_out_mib()) for usage in (Usage(standby.pid), Usage(bare.pid))]
        finally:
            standby.terminate()
            standby.wait(10.0)
            with bare:
                bare.kill()
    (resident, own), (bare_resident, bare_own) = sizes
    return (
        f"an idle standby: {resident:.0f} MiB resident, {own:.0f} MiB proportional "
        f"(a bare Python: {bare_resident:.0f} and {bare_own:.0f})"
    )


LABELS = {
    "assemble": "first registration to last welcome",
    "freeze_first": "death report to the first rank's Freeze",
    "freeze_all": "death report to the last rank's Freeze",
    "freeze_cpu_ms": "controller's processor time for the Freeze",
    "roll_first": "last state reply to the first RollForward",
    "roll_all": "last state reply to the last RollForward",
    "plan_made": "last state reply to the plan (its journal line)",
    "plan_first": "last state reply to the first WriteOrder",
    "plan_all": "last state reply to the last WriteOrder",
    "plan_cpu_ms": "controller's processor time, last reply to last order",
    "answers_to_publish": "first write answer sent to PublishOrder",
    "answers_cpu_ms": "controller's processor time, first answer to order",
    "exit_all": "Published sent to the last rank's Exit",
    "cpu_ms": "controller's processor time, death to exit",
    "peak_MiB": "controller's peak memory",
    "written_MB": "write answers, all together",
    "publish_MB": "the publish order",
    "errors": "streams that broke",
}
UNITS = {"errors": "  ", "peak_MiB": "MiB", "written_MB": "MB", "publish_MB": "MB"}


def show(faults: Sequence[dict[str, float]]) -> None:
    for key, label in LABELS.items():
        values = sorted(fault[key] for fault in faults if key in fault)
        if values:
            unit = UNITS.get(key, "ms")
            print(f"  {label:54} median {statistics.median(values):9.1f} {unit}  ({values[0]:.1f} to {values[-1]:.1f})")


def verdict(what: str, took: float, limit: float, unit: str = "ms") -> str:
    """Return a line about a limit, which ends with `kept` or `missed`."""
    return f"{what}: {took:{'.0f' if unit == 'ms' else '.2f'}} {unit}, limit {limit:g}: {'missed' if took > limit else 'kept'}"


def verdicts(size: int, faults: Sequence[dict[str, float]]) -> list[str]:
    """Return a line for each limit of a world, by the medians of its faults."""
    medians = {key: statistics.median(fault[key] for fault in faults) for key in LIMITS_MS}
    return [verdict(f"{size:,} ranks: {LABELS[key]}", medians[key], limit) for key, limit in LIMITS_MS.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1000, 10000], help="worlds over gRPC")
    parser.add_argument(
        "--core-ranks", type=int, nargs="*", default=[1000, 10000, 100000], help="worlds in the pure core"
    )
    parser.add_argument("--faults", type=int, default=4, help="faults for each world, a fresh controller each")
    parser.add_argument(
        "--rolling-faults", type=int, default=1, help="of those in which every second rank rolls forward"
    )
    parser.add_argument("--clients", type=whole(1), default=2, help="client processes")
    parser.add_argument("--ranks-per-node", type=whole(1), default=8, help="1: there are no relays")
    parser.add_argument("--heartbeat-s", type=whole(1), default=1, help="seconds between two heartbeats of a stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats")
    options = parser.parse_args(arguments)
    judged = []
    print(standby_memory(), flush=True)
    for size in options.ranks:
        calm = World(size, options.ranks_per_node, heartbeat_s=options.heartbeat_s)
        print(heartbeats(calm, options.clients, options.seconds), flush=True)
        for ready_every, text, count in (
            (0, "no rank rolls forward", options.faults),
            (2, "every second rank rolls forward", options.rolling_faults),
        ):
            world = World(size, options.ranks_per_node, ready_every, options.heartbeat_s)
            faults = [one_fault(world, options.clients, dead=7 * number + 3) for number in range(count)]
            if faults:
                print(
                    f"{size:,} ranks, {count} faults, {text}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
                )
            show(faults)
            sys.stdout.flush()
            if not ready_every and faults:
                judged += verdicts(size, faults)
    for size in options.core_ranks:
        plan_s = _scale_core.measure(size)
        judged.append(verdict(f"pure core, {size:,} ranks: decision and plan", plan_s, CORE_PLAN_LIMIT_S, "s"))
    missed = [line for line in judged if line.endswith("missed")]
    for line in judged:
        print(line, file=sys.stderr if line in missed else sys.stdout)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
