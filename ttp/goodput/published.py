"""Published runs, and what the model says of them from published inputs alone (PURE).

Owns the inputs and where each is from; what is not published is named, with the range that gives the published share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ttp.goodput.closed_form import split
from ttp.goodput.cluster import HANG, HOUR, LOST, NODE, PROCESS, Cluster, Times, strategies
from ttp.goodput.policy import FaultRate, Policy, daly

LLAMA, BYTEROBUST = "llama3", "byterobust"
POINTS = 0.05
"""The model reproduces a run when it is at most so far from the published share."""
_LLAMA = "Llama 3, arXiv 2407.21783"
_ROBUST = "ByteRobust, arXiv 2509.16293"
_BYTECHECKPOINT = "ByteCheckpoint, arXiv 2407.20143, table 8: 405B on 8,960 GPUs"
_MEGASCALE = "MegaScale, arXiv 2402.15627, section 6.3"


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a run."""

    name: str
    value: str
    source: str
    published: bool = True
    """Of this very run; False: of another one, or an assumption."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published run. The times of `cluster` are those with which other systems are modelled there: where the run's own share leaves time that no
    published input explains, it is in them, so that no system is modelled on better hardware than the run had."""

    name: str
    title: str
    share: float
    at_least: bool
    """The publication says `higher than`."""
    days: float
    cluster: Cluster
    """Its ranks and faults, and the times with which this system is modelled there."""
    policy: Policy
    """The run's own strategy."""
    inputs: tuple[Input, ...]
    free: str
    """What is not published."""

    @property
    def modelled(self) -> float:
        return split(self.policy).steps

    @property
    def off(self) -> float:
        """Return how far the model is from the published share, above or below it."""
        return abs(self.share - self.modelled)

    @property
    def reproduced(self) -> bool:
        return self.off <= POINTS


# --- Llama 3 ---

_LLAMA_DAYS, _LLAMA_RANKS = 54.0, 16_384
_LLAMA_COUNTS: Mapping[str, float] = {PROCESS: 103.0, NODE: 350.0 * 0.99, HANG: 7.0, LOST: 6.0 + 350.0 * 0.01}
"""Of 466: software bugs (54), dependencies (2) and planned stops (47) leave the node good; 7 NCCL watchdog timeouts; 6 silent corruptions; of the rest one in a
hundred takes all holders of a shard."""
_LLAMA_STATE_BYTES = 405e9 * 12.0
_LLAMA_TIMES = Times(
    save_s=_LLAMA_STATE_BYTES / 2e12, detect_s=0.0, hang_s=0.0, restart_s=600.0 + 30.0, load_s=129.49, copy_s=0.2,
    dump_s=_LLAMA_STATE_BYTES / 2e12, regroup_s=30.0, step_s=6.0 * 405e9 * 16e6 / (16_384 * 400e12),
)  # fmt: skip


def _rates(counts: Mapping[str, float], days: float, ranks: int) -> dict[str, float]:
    return {kind: count / (days * 24.0 * ranks) for kind, count in counts.items()}


def llama3() -> PublishedRun:
    cluster = Cluster(
        ranks=_LLAMA_RANKS, per_device_hour=_rates(_LLAMA_COUNTS, _LLAMA_DAYS, _LLAMA_RANKS), times=_LLAMA_TIMES
    )
    inputs = (
        Input("GPUs", "16,384", f"{_LLAMA}, sections 3.3.1 and 3.3.4"),
        Input("interruptions", "466 in 54 days: 419 unexpected, 47 planned", f"{_LLAMA}, section 3.3.4"),
        Input("kinds", "103 process, 346.5 node, 7 hang, 9.5 lost", f"{_LLAMA}, table 5 (which kind a row is: our reading); 1 % of node faults lost: {_ROBUST}, table 5"),
        Input("save", "2.4 s: 405e9 parameters x 12 bytes at 2 TB/s", f"{_LLAMA}, sections 3.2 and 3.3.1; that training waits for all of it: assumed", False),
        Input("interval", "Daly's", "assumed: the interval is not published", False),
        Input("detect, diagnose", "600 s, a bound", f"{_MEGASCALE}: `less than 10 minutes` on more than 10,000 GPUs", False),
        Input("start of all processes", "30 s, a bound", "MegaScale, section 3.5: groups of more than 10,000 GPUs", False),
        Input("load", "129 s", _BYTECHECKPOINT, False),
        Input("step", "5.9 s: 6 x 405e9 x 16e6 tokens at 400 TFLOP/s a GPU", f"{_LLAMA}, section 3.4.1 and table 4"),
    )  # fmt: skip
    return PublishedRun(LLAMA, "Llama 3 405B, 16,384 GPUs, 54 days", 0.90, True, _LLAMA_DAYS, cluster, strategies(cluster)[0].policy, inputs,
               "how long a save held training up, its interval, and how long a restart took")  # fmt: skip


# --- ByteRobust ---

_ROBUST_DAYS, _ROBUST_RANKS = 90.0, 9_600
_ROBUST_COUNTS: Mapping[str, float] = {PROCESS: 20.0, NODE: 128.0 * 0.99 + 12.0, HANG: 15.0, LOST: 128.0 * 0.01}
_EVICTED_S, _UPDATED_S, _SCHEDULED_S = 93.0, 57.0, 600.0
_CODE_S, _OVERHEAD = 3000.0, 0.009


def _robust_policy(more_s: float = 0.0, overhead: float = _OVERHEAD) -> Policy:
    """`more_s`: that every incident takes longer."""
    per_s = 1.0 / (_ROBUST_DAYS * 24.0 * HOUR)
    faults = (
        FaultRate("evicted", 128.0 * per_s, 30.0 + _EVICTED_S + more_s, True),
        FaultRate("analysed", 15.0 * per_s, _SCHEDULED_S + _EVICTED_S + more_s, True),
        FaultRate("rolled back", 12.0 * per_s, _CODE_S + more_s, True),
        FaultRate("updated", 20.0 * per_s, _UPDATED_S + more_s, True),
    )
    return Policy(name="ByteRobust", faults=faults, held_s=10.0, slowdown=overhead)


def byterobust() -> PublishedRun:
    back_s = _mean_down(_OVERHEAD, 0.97) - 30.0
    times = Times(
        save_s=13.0, detect_s=30.0, hang_s=30.0, restart_s=back_s, load_s=0.0, copy_s=0.2, dump_s=13.0, regroup_s=30.0, step_s=10.0
    )  # fmt: skip
    cluster = Cluster(
        ranks=_ROBUST_RANKS, per_device_hour=_rates(_ROBUST_COUNTS, _ROBUST_DAYS, _ROBUST_RANKS), times=times
    )
    inputs = (
        Input("GPUs", "9,600", f"{_ROBUST}, section 8.1"),
        Input("time", "90 days", f"{_ROBUST}, section 8.1: three months"),
        Input("incidents", "175: 128 evictions, 15 hangs and slow nodes, 12 rollbacks of code, 20 changes by hand", f"{_ROBUST}, table 4, dense job"),
        Input("detect", "30 s; hangs 600 s", f"{_ROBUST}, table 3 (2 to 60 s) and section 4.1 (no RDMA traffic within 10 minutes)"),
        Input("resolve", "93 s; changes of code 57 s", f"{_ROBUST}, table 6: CUDA errors; from localization to a successful restart"),
        Input("rollbacks", "3,000 s each, a bound", f"{_ROBUST}, section 8.1.3: at most 50 minutes without training"),
        Input("copies in memory", "every step, 0.9 % slower steps, a bound", f"{_ROBUST}, section 1: less than 0.9 %"),
        Input("step", "10 s", "assumed: a fault loses half of one", False),
    )  # fmt: skip
    return PublishedRun(BYTEROBUST, "ByteRobust's dense job, 9,600 GPUs, three months", 0.97, False, _ROBUST_DAYS, cluster, _robust_policy(), inputs,
               "how long training stood still for each incident, from the fault to the next step")  # fmt: skip


RUNS = {LLAMA: llama3, BYTEROBUST: byterobust}


# --- what is not published ---


@dataclass(frozen=True, slots=True)
class Range:
    """One line of the range of what is not published: this much of it gives the published share."""

    given: str
    found: str


def ranges(run: PublishedRun) -> Sequence[Range]:
    """Return which values of what is not published give the published share."""
    if run.name == LLAMA:
        saves = (
            ("0.59 s, asynchronous", 0.59),
            ("2.4 s", _LLAMA_TIMES.save_s),
            ("10 s", 10.0),
            ("33 s, 4 GB a GPU", 4e9 * _LLAMA_RANKS / 2e12),
        )
        return [Range(f"a save holds training up for {text}", _longest_back(run, save_s)) for text, save_s in saves]
    return [
        Range(
            f"steps are {100 * overhead:g} % slower",
            f"{_mean_down(overhead, run.share):,.0f} s without training for each incident, on average, give {100 * run.share:.0f} %",
        )
        for overhead in (_OVERHEAD, 0.0)
    ]


def _mean_down(overhead: float, share: float) -> float:
    """Return how long an incident takes, on average, where so large a share of the time is new steps."""
    more = _solve(
        lambda more_s: split(_robust_policy(more_s=more_s, overhead=overhead)).steps - share, -20_000.0, 20_000.0
    )
    policy = _robust_policy(more_s=more, overhead=overhead)
    return sum(fault.per_s * fault.down_s for fault in policy.faults) / policy.fault_rate


def _longest_back(run: PublishedRun, save_s: float) -> str:
    def off(back_s: float) -> float:
        rate = run.cluster.mean_time_between_s
        fault = FaultRate("any", 1.0 / rate, back_s, False)
        policy = Policy(name="", faults=(fault,), held_s=daly(save_s, rate), held_count=1, save_s=save_s)
        return split(policy).steps - run.share

    if off(0.0) < 0.0:
        return f"never {100 * run.share:.0f} %, however short a restart is"
    return f"{100 * run.share:.0f} % or more if training is back within {_solve(off, 0.0, 20_000.0):,.0f} s of a fault"


def _solve(off: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function is 0."""
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if off(middle) > 0.0 else (low, middle)
    return low


def like(name: str) -> Cluster:
    """Return the cluster of a published run."""
    return replace(RUNS[name]().cluster)
