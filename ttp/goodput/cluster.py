"""A cluster: how many ranks, which faults come how often, and how long things take there; and the strategies to survive them that are compared (PURE).

Owns the kinds of faults, what each costs under which system, and the defaults with their sources (docs/goodput.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ttp.config import Settings
from ttp.goodput.policy import FaultRate, Policy, daly

PROCESS, NODE, HANG, LOST = "process", "node", "hang", "lost"
KINDS: Mapping[str, str] = {
    PROCESS: "a process ends and its node is good: a crash, a stop that was planned",
    NODE: "a device or a node is replaced, or the program is changed: survivors hold the state",
    HANG: "no rank progresses: found after `hang_s`",
    LOST: "no survivor covers it: all holders of a shard are gone, or the state is wrong",
}
HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """In seconds."""

    save_s: float
    """Training waits so long for a persistent checkpoint."""
    detect_s: float
    """From a fault until it is certain."""
    hang_s: float
    """The same for a hang."""
    restart_s: float
    """Diagnosis, replacement, start of all processes, until they can load."""
    load_s: float
    """Load a checkpoint from storage."""
    copy_s: float
    """Training waits so long for a copy into the memory of other nodes."""
    dump_s: float
    """Survivors write the state at the fault, into the same storage."""
    regroup_s: float
    """Survivors make their groups again with the new process, in place."""
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    ranks: int
    per_device_hour: Mapping[str, float]
    """Faults of each of KINDS for one rank."""
    times: Times
    slowdown: float = 0.0
    """Of every step under this system."""
    interval_s: float | None = None
    """Between periodic checkpoints; None: Daly's."""
    ranks_per_node: int = 8

    @property
    def per_s(self) -> dict[str, float]:
        return {kind: self.ranks * rate / HOUR for kind, rate in self.per_device_hour.items() if rate > 0.0}

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def lease_s(self) -> float:
        """Return the lease of a job of so many ranks that sets none: a lost node is certain after it."""
        return Settings.from_env({"WORLD_SIZE": str(self.ranks), "TTP_LAUNCHED": "1"}).lease_s

    @property
    def mean_time_between_s(self) -> float:
        rate = sum(self.per_s.values())
        return 1.0 / rate if rate else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A policy with what it assumes, in a line."""

    policy: Policy
    assumes: str
    built: bool = field(default=True)
    """False: no system of today does this; it is a bound."""


def strategies(cluster: Cluster) -> list[Strategy]:
    """Return the strategies that are compared on a cluster, the baselines first."""
    times, rates = cluster.times, cluster.per_s
    back_s = times.restart_s + times.load_s
    detect = {kind: times.hang_s if kind == HANG else times.detect_s for kind in rates}
    periodic = [FaultRate(kind, rate, detect[kind] + back_s, False) for kind, rate in rates.items()]
    own = [
        FaultRate(kind, rate, detect[kind] + (0.0 if kind == LOST else times.dump_s) + back_s, kind != LOST)
        for kind, rate in rates.items()
    ]
    memory = [
        FaultRate(kind, rate, detect[kind] + times.restart_s + (times.load_s if kind == LOST else 0.0), kind != LOST)
        for kind, rate in rates.items()
    ]
    in_place = [_regrouped(fault, times, detect) if fault.kind == PROCESS else fault for fault in own]
    spare = [part for fault in in_place for part in (_seated(fault, cluster) if fault.kind == NODE else (fault,))]
    bound = [_regrouped(fault, times, detect) if fault.covered else fault for fault in own]
    slow = cluster.slowdown
    return [
        Strategy(policy=_periodic(cluster, periodic), assumes=f"every fault loses the work since the last checkpoint ({_interval_source(cluster)})"),
        Strategy(policy=_two_levels("copies in memory", cluster, memory, times.copy_s, 0.0), assumes="as Gemini: copies to other nodes at Daly's interval; a restart loads from memory"),
        Strategy(policy=_two_levels("this system: restart", cluster, own, 0.0, slow), assumes="survivors write the step in flight, all restart from it"),
        Strategy(policy=_two_levels("this system: in place", cluster, in_place, 0.0, slow), assumes="where the node is good one process is replaced; else as above. Built for one node or several; on accelerators only when asked for"),
        Strategy(policy=_two_levels("this system: in place, with a spare node", cluster, spare, 0.0, slow), assumes="as above, and a spare that is always ready has the ranks of a lost node, but for rank 0's. At most so much: every node fault counts as one that loses the node whole"),
        Strategy(policy=_two_levels("bound: all in place", cluster, bound, 0.0, slow), assumes="every fault that survivors cover, as if a spare were ready and nothing had to be diagnosed", built=False),
    ]  # fmt: skip


def _regrouped(fault: FaultRate, times: Times, detect: Mapping[str, float]) -> FaultRate:
    return FaultRate(fault.kind, fault.per_s, detect[fault.kind] + times.regroup_s, True)


def _seated(fault: FaultRate, cluster: Cluster) -> tuple[FaultRate, ...]:
    """Return the faults of a node of which a spare has the ranks, and those of rank 0's node, which end in a restart."""
    found_s = max(cluster.times.detect_s, cluster.lease_s)
    seated = FaultRate(
        fault.kind, fault.per_s * (1.0 - 1.0 / cluster.nodes), found_s + cluster.times.regroup_s, covered=True
    )
    return (*((seated,) if cluster.nodes > 1 else ()), replace(fault, per_s=fault.per_s / cluster.nodes))


def _interval_source(cluster: Cluster) -> str:
    return "Daly's interval" if cluster.interval_s is None else f"every {cluster.interval_s:g} s, as given"


def _periodic(cluster: Cluster, faults: list[FaultRate]) -> Policy:
    interval = cluster.interval_s or daly(cluster.times.save_s, cluster.mean_time_between_s)
    count = None if math.isinf(interval) else 1
    held = cluster.times.step_s if count is None else interval
    return Policy(
        name="periodic checkpoints", faults=tuple(faults), held_s=held, held_count=count, save_s=cluster.times.save_s
    )


def _two_levels(name: str, cluster: Cluster, faults: list[FaultRate], hold_s: float, slowdown: float) -> Policy:
    """Held moments for what survivors cover, and persistent checkpoints for what they do not, both as often as is best."""
    covered = sum(fault.per_s for fault in faults if fault.covered)
    uncovered = sum(fault.per_s for fault in faults) - covered
    step_s = cluster.times.step_s
    held = max(step_s, daly(hold_s, 1.0 / covered)) if hold_s and covered else step_s
    interval = cluster.interval_s or (daly(cluster.times.save_s, 1.0 / uncovered) if uncovered > 0.0 else math.inf)
    count = None if math.isinf(interval) else max(1, round(interval / held))
    return Policy(
        name=name, faults=tuple(faults), held_s=held, hold_s=hold_s, held_count=count, save_s=cluster.times.save_s, slowdown=slowdown
    )  # fmt: skip
