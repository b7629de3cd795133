"""A job's status as Prometheus reads it.

Owns the names of the metrics, which docs/metrics.md lists. However many ranks a job has, the number of series is bounded: of ranks there are counts,
and the worst of each figure. What is not known has no series. Never asks anything.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from ttp.launch.report.time_use import PARTS
from ttp.proto.messages import CauseKind, Phase
from ttp.status.answer import FaultRow, JobView
from ttp.status.history import FALSE_ALARM, IN_PLACE
from ttp.status.look import BETWEEN, ENDED, PAUSED, PHASES, STANDSTILL, UNKNOWN

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PHASE_NAMES = tuple(dict.fromkeys([*PHASES.values(), STANDSTILL, PAUSED, BETWEEN, ENDED, UNKNOWN]))
RANK_STATES = (
    "missing",
    "dead",
    "detached",
    "suspect",
    "finished",
    "paused",
    "unknown",
    "ended",
    *(phase.name.lower() for phase in Phase),
)
OUTCOMES = ("saved", IN_PLACE, "not saved", FALSE_ALARM, "unknown")
OTHER = "other"
KINDS = (*(kind.value for kind in CauseKind), OTHER)
MOST_STRAGGLERS = 16
"""Series of single ranks."""
NOW = "now"
"""The outcome of the fault that is handled now."""


def exposition(view: JobView) -> bytes:
    """Return the metrics of one look at a job, of all its ranks and faults, in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Job(view))
    return generate_latest(registry)


class _Job(Collector):
    def __init__(self, view: JobView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view
        yield _gauge("ttp_look_timestamp_seconds", "When these metrics were made, in seconds since 1970.", time.time())
        yield from _of_the_controller(view)
        yield from _of_the_pace(view)
        yield from _of_the_time(view)
        yield from _of_the_ranks(view)
        yield from _of_the_copies(view)
        yield from _of_the_faults(view.faults, view.steps_lost)
        yield from _of_the_checkpoints(view)


def _of_the_controller(view: JobView) -> Iterator[Metric]:
    run = view.job.rpartition("/")[0] or view.job
    leader = view.leader.host if view.leader is not None else ""
    info = GaugeMetricFamily(
        "ttp_job_info", "The job and the node of the controller that leads it; always 1.", labels=("run", "leader")
    )
    info.add_metric((run, leader), 1)
    yield info
    yield _gauge(
        "ttp_controller_answers",
        "1: the controller that leads the ranks has answered.",
        int(view.source == "controller"),
    )
    yield _gauge("ttp_attempt", "The attempt's number, 0 for the first.", view.attempt)
    yield _labelled("ttp_phase", "What the job does now: 1 for its phase, 0 for the others.", "phase",
                    {phase: int(phase == view.phase) for phase in PHASE_NAMES})  # fmt: skip
    yield _gauge("ttp_standbys", "Standby controllers that can take over.", len(view.standbys))
    sick = {each.partition(": ")[0] for each in view.excluded}
    yield _gauge("ttp_sick_nodes", "Nodes that were excluded, as their health checks failed.", len(sick))


def _of_the_pace(view: JobView) -> Iterator[Metric]:
    yield _gauge("ttp_step", "The newest finished step.", view.step)
    median_s = view.step_s if view.source == "controller" else None
    yield _gauge("ttp_step_duration_median_seconds", "The median of the newest 64 steps' times.", median_s)
    yield _gauge("ttp_step_duration_p90_seconds", "The 90 % quantile of the newest 64 steps' times.", view.slow_step_s)
    yield _gauge(
        "ttp_standstill_seconds", "Since a rank was last seen to progress; only while the job trains.", view.still_s
    )
    yield _gauge("ttp_hang_limit_seconds", "A longer standstill is a hang.", view.hang_limit_s)
    yield _gauge("ttp_goodput_ratio", "The share of the job's time in which new steps were trained.", view.goodput)
    loss = math.nan if view.loss_finite is False else view.loss
    yield _gauge("ttp_loss", "The newest loss that the program has reported; NaN: it is not finite.", loss)


def _of_the_time(view: JobView) -> Iterator[Metric]:
    use = view.time_use
    if use is not None:
        yield _gauge(
            "ttp_goodput_ratio_max", "At most this share of the job's time was new steps; where all is known, exactly so much.", use.share
        )  # fmt: skip
    parts = {part: use.rank_s[part] for part in PARTS} if use is not None else {}
    yield _labelled("ttp_rank_time_seconds", "Where the time of all ranks went so far, by part.", "part", parts)


def _of_the_ranks(view: JobView) -> Iterator[Metric]:
    yield _gauge("ttp_world_size", "Ranks of the job.", view.world_size or None)
    count = Counter(rank.state for rank in view.ranks)
    yield _labelled("ttp_ranks", "Ranks in each state.", "state", {state: count[state] for state in RANK_STATES})
    ages = [rank.heartbeat_age_s for rank in view.ranks if rank.heartbeat_age_s is not None]
    yield _gauge(
        "ttp_heartbeat_age_max_seconds",
        "Since the controller received anything of the rank that is silent longest.",
        max(ages, default=None),
    )
    times = [(rank.step_s, rank.rank) for rank in view.ranks if rank.step_s is not None]
    slowest = max(times, default=(None, None))
    yield _gauge("ttp_rank_step_duration_max_seconds", "The newest step's time of the slowest rank.", slowest[0])
    yield _gauge("ttp_slowest_rank", "Which rank that is.", slowest[1])
    own = sorted(rank.own_s for rank in view.ranks if rank.own_s is not None)
    yield _gauge(
        "ttp_rank_own_step_seconds_max", "Own time of a step, of the rank that takes longest.", own[-1] if own else None
    )
    yield _gauge(
        "ttp_rank_own_step_seconds_median", "The same of the rank in the middle.", own[len(own) // 2] if own else None
    )
    waits = [rank.waited_s for rank in view.ranks if rank.waited_s is not None]
    yield _gauge(
        "ttp_rank_wait_seconds_max",
        "Wait for other ranks in a step, of the rank that waits longest.",
        max(waits, default=None),
    )
    yield _gauge(
        "ttp_stragglers",
        "Ranks that are named as slower than the others that do the same work.",
        len(view.stragglers) if view.stragglers or view.stragglers_compared else None,
    )
    named = GaugeMetricFamily(
        "ttp_straggler_ratio",
        "Own time of a step of those ranks, the slowest first, over the others' median.",
        labels=("rank", "node"),
    )
    for row in view.stragglers[:MOST_STRAGGLERS]:
        named.add_metric((str(row.rank), row.node), row.ratio)
    yield named
    steps = [rank.step for rank in view.ranks if rank.pid and view.source == "controller"]
    yield _gauge(
        "ttp_rank_steps_behind_max",
        "Steps between the first and the last rank.",
        max(steps) - min(steps) if steps else None,
    )


def _of_the_copies(view: JobView) -> Iterator[Metric]:
    coverage = view.coverage
    yield _gauge("ttp_shards", "Shards of the optimizer state.", coverage.shards if coverage is not None else None)
    yield _gauge(
        "ttp_shard_live_holders_min",
        "Live ranks that hold the shard that the fewest hold.",
        coverage.least_holders if coverage is not None else None,
    )
    yield _gauge(
        "ttp_shards_without_holder",
        "Shards that no live rank holds.",
        coverage.uncovered if coverage is not None else None,
    )
    yield _gauge(
        "ttp_fatal_ranks",
        "Ranks whose death alone would cost steps now.",
        coverage.fatal_rank_count if coverage is not None else None,
    )
    yield _gauge(
        "ttp_fatal_nodes",
        "Nodes whose loss alone would cost steps now.",
        coverage.fatal_node_count if coverage is not None else None,
    )


def _of_the_faults(faults: Iterable[FaultRow], steps_lost: int) -> Iterator[Metric]:
    over = [fault for fault in faults if fault.outcome != NOW]
    current = [fault for fault in faults if fault.outcome == NOW]
    real = [fault for fault in over if fault.outcome != FALSE_ALARM]
    outcomes = Counter(fault.outcome if fault.outcome in OUTCOMES else "unknown" for fault in over)
    kinds = Counter(fault.kind if fault.kind in KINDS else OTHER for fault in real)
    yield _counters(
        "ttp_faults",
        "Faults of the job that are over.",
        "outcome",
        {_label(outcome): outcomes[outcome] for outcome in OUTCOMES},
    )
    yield _counters(
        "ttp_fault_causes",
        "The same by the kind of cause, without false alarms.",
        "kind",
        {kind: kinds[kind] for kind in KINDS},
    )
    yield CounterMetricFamily("ttp_fault_seconds", "From the first sign of each of them until the ranks were ordered to exit or to continue.",
                              sum(fault.took_s or 0.0 for fault in over))  # fmt: skip
    yield CounterMetricFamily(
        "ttp_steps_lost",
        "Finished steps that were trained again, or have to be, as far as it is known.",
        steps_lost,
    )
    yield _gauge("ttp_fault_in_progress", "1: a fault is handled now.", int(bool(current)))
    yield _gauge(
        "ttp_fault_age_seconds",
        "Since the first sign of the fault that is handled now.",
        current[0].took_s if current else None,
    )


def _of_the_checkpoints(view: JobView) -> Iterator[Metric]:
    newest = max(view.checkpoints, key=lambda row: row.step, default=None)
    written = newest.written_unix_s if newest is not None else None
    yield _gauge(
        "ttp_checkpoint_step",
        "The step of the newest checkpoint in any directory.",
        newest.step if newest is not None else None,
    )
    yield _gauge(
        "ttp_checkpoint_age_seconds",
        "Since it was written.",
        None if written is None else max(0.0, view.unix_s - written),
    )
    yield _gauge("ttp_checkpoint_bytes", "Its size.", newest.bytes if newest is not None else None)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Return a gauge, without a sample where its value is not known."""
    return GaugeMetricFamily(name, text, value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _label(outcome: str) -> str:
    return outcome.replace(" ", "_")
