"""Carries out one fault: signals from outside, orders to a rank's hook, what is done to controllers, launchers, disks,
checkpoints and nodes.

Owns the acts and what has to be undone later (a stopped process goes on, a cable is put back); never waits for a job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ttp.chaos.faults.control_socket import Peer
from ttp.chaos.faults.inject import Injection
from ttp.chaos.faults.rank_hook import NOW, FaultOrder
from ttp.chaos.faults.scenario import KINDS, FaultSpec
from ttp.chaos.nodes.namespaces import Node, NodesError
from ttp.chaos.observed.recorder import Key, Record
from ttp.chaos.observed.target import Target
from ttp.chaos.observed.training_job import marked
from ttp.chaos.verdict.fault_outcome import Firing
from ttp.checkpoint.find import list_checkpoints

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
}
"""What is done from outside when no point is named."""
BALLAST = "ballast"
FLIPPED_BYTES = 64


class Injector:
    """Hits one run. Use as a context manager: leaving it undoes what was to be undone."""

    def __init__(self, target: Target, rng: random.Random) -> None:
        self._target = target
        self._rng = rng
        self._order_count = 0
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._places: dict[int, int] = {}
        """The node of each rank."""
        self.key: Key = (0, 0)
        """The attempt that is hit."""

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo(float("inf"))

    def undo(self, now_monotonic_s: float) -> None:
        """Put back what is due."""
        due = [act for moment, act in self._undo if moment <= now_monotonic_s]
        self._undo = [entry for entry in self._undo if entry[0] > now_monotonic_s]
        for act in due:
            act()

    def met(self, peer: Peer) -> None:
        """Note on which node a rank runs, while it lives."""
        for index, node in enumerate(self._target.nodes):
            if node.holds(peer.pid):
                self._places[peer.rank] = index

    def later(self, after_s: float, act: Callable[[], object]) -> None:
        self._undo.append((time.monotonic() + after_s, act))

    # --- ranks ---

    def by_order(self, fault: FaultSpec) -> bool:
        """Say whether the rank does it itself: at a point, or because nothing else can."""
        place = KINDS[fault.kind].place
        if place == "disk":
            return not self._target.mounted
        return place == "dump" or (place == "rank" and (fault.point != NOW or fault.kind not in SIGNALS))

    def order(self, fault: FaultSpec, rank: int, step: int) -> FaultOrder:
        """Make the order for a rank; in a dump or while ranks start the step does not count. Where no small disk could be mounted, its writes
        fail as if it were full."""
        self._order_count += 1
        if fault.kind == "fill_disk":
            return FaultOrder(self._order_count, Injection("enospc", rank, 0, "write"))
        fields = {"call": fault.call, "call_name": fault.call_name, "times": fault.times, "mib": fault.mib}
        return FaultOrder(
            self._order_count,
            Injection(fault.kind, rank, step, fault.point, for_s=fault.for_s, **fields),  # type: ignore[arg-type]
        )

    def signal_rank(self, fault: FaultSpec, peer: Peer, step: int) -> list[Firing]:
        """Hit a rank from outside. Empty: it had left."""
        if peer.lost:
            return []
        whom = f"rank {peer.rank} (pid {peer.pid})"
        firing = Firing(fault.kind, whom, time.time(), "", step, self.key, (peer.rank,))
        if not self._send(peer.pid, SIGNALS[fault.kind]):
            return []
        if fault.kind == "stop" and fault.for_s:
            self.go_on_later(peer.pid, fault.for_s)
        return [firing]

    def go_on_later(self, pid: int, after_s: float) -> None:
        """A process that was stopped goes on after a while."""
        self.later(after_s, lambda: self._send(pid, signal.SIGCONT))

    # --- everything else ---

    def elsewhere(self, fault: FaultSpec, record: Record) -> list[Firing]:
        """Hit what is no rank. Empty: there was nothing to hit."""
        match KINDS[fault.kind].place:
            case "controller":
                return self._controller(fault, record)
            case "agent":
                return self._agent(fault, record)
            case "disk":
                return [self._fill(fault, record)]
            case "checkpoint":
                return self._corrupt(fault, record)
            case _:
                return [self._node(fault, record)]

    def node_of(self, firing: Firing) -> int:
        """Return the index of the node or launcher that was hit."""
        return int(firing.whom.split("#")[1].split()[0]) if "#" in firing.whom else 0

    def _controller(self, fault: FaultSpec, record: Record) -> list[Firing]:
        running = self._target.controllers()
        hello_s = max((moment for moment, key, _, _ in record.hellos if key == self.key), default=0.0)
        lines = record.lines(0.0, "took_over", "assembled")
        led = [int(line["controller"]) for line in lines if line["unix_s"] >= hello_s]
        active = led[-1] if led and led[-1] in running else min(running, default=-1)
        if active not in running:
            return []
        pid = running[active]
        firing = Firing(fault.kind, f"controller {active} (pid {pid})", time.time(), "", record.newest_step, self.key)
        if not self._send(pid, signal.SIGKILL if fault.kind == "kill_controller" else signal.SIGSTOP):
            return []
        if fault.kind == "stop_controller":
            self.go_on_later(pid, fault.for_s)
        return [firing]

    def _agent(self, fault: FaultSpec, record: Record) -> list[Firing]:
        index = self._index(fault)
        launcher = self._target.launchers[index]
        if launcher.poll() is not None:  # its number may be another process's by now
            return []
        pid = launcher.pid
        ranks = self._ranks_on(index) if self._target.nodes else tuple(range(record.world_size))
        firing = Firing(fault.kind, f"launcher #{index} (pid {pid})", time.time(), "", 0, self.key, ranks)
        self._send(pid, signal.SIGKILL)
        return [firing]

    def _index(self, fault: FaultSpec) -> int:
        """Return which node is meant: the one that is named, that of a rank, or any."""
        nodes = self._target.nodes
        if fault.ranks and nodes:
            rank = fault.ranks[0]
            if rank not in self._places:
                raise NodesError(
                    f"{fault.text}: rank {rank} runs on none of the {len(nodes)} nodes; does the command start it elsewhere?"
                )
            return self._places[rank]
        return fault.node if fault.node is not None else self._rng.randrange(max(1, len(nodes)))

    def _ranks_on(self, index: int) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, place in self._places.items() if place == index))

    def _fill(self, fault: FaultSpec, record: Record) -> Firing:
        """Fill the small disk."""
        firing = Firing(fault.kind, f"{self._target.disk}", time.time(), "", record.newest_step, self.key)
        ballast = self._target.disk / BALLAST
        _fill_file(ballast)
        self.later(fault.for_s, lambda: ballast.unlink(missing_ok=True))
        return firing

    def _corrupt(self, fault: FaultSpec, record: Record) -> list[Firing]:
        """Flip bits in the middle of the newest checkpoint's largest file."""
        newest = next(iter(list_checkpoints(record.save_dirs)), None)
        if newest is None:
            return []
        file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
        flip_bits(file)
        return [Firing(fault.kind, f"{newest.name}/{file.name}", time.time(), "", record.newest_step, self.key)]

    def _node(self, fault: FaultSpec, record: Record) -> Firing:
        index = self._index(fault)
        node: Node = self._target.nodes[index]
        lost = fault.kind == "lose_node"  # of a cable, either side may be cut off from the controller
        ranks = self._ranks_on(index) if lost else tuple(range(record.world_size))
        firing = Firing(fault.kind, f"{node.name} #{index}", time.time(), "", 0, self.key, ranks)
        match fault.kind:
            case "partition":
                node.unplug()
                self.later(fault.for_s, node.plug)
            case "delay":
                node.delay(fault.ms)
                self.later(fault.for_s, node.clear)
            case _:
                node.power_off()
        return firing

    def _send(self, pid: int, signum: int) -> bool:
        """Send a signal; say whether there was a process to take it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            return True
        return False

    def gone(self) -> bool:
        """Say whether nothing of the run remains."""
        return next(iter(marked(self._target.mark)), None) is None


def flip_bits(file: Path) -> None:
    """Invert some bytes in the middle of a file."""
    with open(file, "r+b") as stream:
        stream.seek(max(0, file.stat().st_size // 2 - FLIPPED_BYTES))
        content = stream.read(FLIPPED_BYTES)
        stream.seek(-len(content), os.SEEK_CUR)
        stream.write(bytes(byte ^ 0xFF for byte in content))


def _fill_file(path: Path) -> None:
    """Write until there is no room."""
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
