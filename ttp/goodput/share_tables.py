"""The model's answers as people read them, and as JSON (PURE).

Owns the words and the keys. Computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ttp.goodput.cluster import HOUR, KINDS, Cluster, Strategy
from ttp.goodput.measured import Measured
from ttp.goodput.policy import Policy, Split
from ttp.goodput.published import PublishedRun, ranges
from ttp.goodput.simulate import Simulated


@dataclass(frozen=True, slots=True)
class ModelledShare:
    """One strategy on one cluster."""

    strategy: Strategy
    split: Split
    simulated: Simulated | None


def shown_run(run: PublishedRun, answers: Sequence[ModelledShare]) -> RenderableType:
    """Return a published run: inputs, the model's share beside the published one, the range of what is not published, and the strategies on its cluster."""
    more = "more than " if run.at_least else ""
    verdict = "reproduced" if run.reproduced else "NOT reproduced"
    inputs = _table("input", Column("value", overflow="fold"), Column("source", overflow="fold"))
    for each in run.inputs:
        inputs.add_row(
            each.name, each.value, Text(each.source if each.published else f"not published of this run. {each.source}")
        )
    lines = [f"published   {more}{100 * run.share:.0f} %", f"model       {100 * run.modelled:.1f} %: {verdict} within five points", f"free        {run.free}"]  # fmt: skip
    lines += [f"            {each.given}: {each.found}" for each in ranges(run)]
    return Group(
        Text(f"--- {run.title} ---"),
        *map(Text, lines),
        "",
        inputs,
        "",
        "Strategies on that cluster:",
        strategy_table(answers),
    )


def shown_cluster(cluster: Cluster, answers: Sequence[ModelledShare], measured: dict[str, Measured]) -> RenderableType:
    """Return a cluster of the user's and the strategies on it."""
    return Group(*map(Text, _cluster_lines(cluster, measured)), "", strategy_table(answers))


def _cluster_lines(cluster: Cluster, measured: dict[str, Measured]) -> Iterator[str]:
    between = cluster.mean_time_between_s
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    yield f"{cluster.ranks:,} ranks on {nodes}, a fault {'never' if math.isinf(between) else f'every {between / HOUR:.3g} h'}"
    yield "faults per device-hour: " + ", ".join(f"{kind} {rate:.3g}" for kind, rate in cluster.per_device_hour.items())
    yield "times in s: " + ", ".join(
        f"{name.removesuffix('_s')} {seconds:.3g}" for name, seconds in asdict(cluster.times).items()
    )
    if measured:
        yield "measured in the job: " + ", ".join(
            f"{name.removesuffix('_s')} ({each.count})" for name, each in measured.items()
        )


def strategy_table(answers: Sequence[ModelledShare]) -> Table:
    right = [Column(name, justify="right") for name in ("new steps", "saves", "done again", "down", "saved every")]
    simulated = [Column("simulated, 95 %", justify="right")] if any(each.simulated for each in answers) else []
    table = _table("strategy", *right, *simulated, Column("what it assumes", overflow="fold"))
    for each in answers:
        shares = [
            f"{100 * share:.2f} %" for share in (each.split.steps, each.split.saves, each.split.again, each.split.down)
        ]
        drawn = [_interval(each.simulated)] if each.simulated else [""] * len(simulated)
        built = "" if each.strategy.built else "(no system of today) "
        table.add_row(
            Text(each.strategy.policy.name),
            *shares,
            _every(each.strategy.policy),
            *drawn,
            Text(built + each.strategy.assumes),
        )
    return table


def _interval(simulated: Simulated | None) -> str:
    if simulated is None:
        return ""
    low, high = simulated.interval()
    return f"{100 * low:.2f} to {100 * high:.2f} %"


def _every(policy: Policy) -> str:
    return "never" if policy.held_count is None else f"{policy.interval_s:,.0f} s"


def _table(*columns: Column | str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


# --- JSON ---


def answer_json(answer: ModelledShare) -> dict[str, Any]:
    policy, drawn = answer.strategy.policy, answer.simulated
    return {
        "name": policy.name, "assumes": answer.strategy.assumes, "built": answer.strategy.built, **asdict(answer.split),
        "saved_every_s": None if policy.held_count is None else policy.interval_s, "held_every_s": policy.held_s,
        "simulated": None if drawn is None else {**asdict(drawn.split), "interval": drawn.interval(), "runs": drawn.runs, "faults": drawn.faults},
    }  # fmt: skip


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    between = cluster.mean_time_between_s
    return {
        "ranks": cluster.ranks, "nodes": cluster.nodes, "lease_s": cluster.lease_s, "per_device_hour": dict(cluster.per_device_hour), "times": asdict(cluster.times), "slowdown": cluster.slowdown,
        "mean_time_between_s": None if math.isinf(between) else between,
    }  # fmt: skip


def run_json(run: PublishedRun, answers: Sequence[ModelledShare]) -> dict[str, Any]:
    return {
        "name": run.name, "title": run.title, "published": run.share, "at_least": run.at_least, "modelled": run.modelled, "reproduced": run.reproduced,
        "inputs": [asdict(each) for each in run.inputs], "free": run.free, "ranges": [asdict(each) for each in ranges(run)],
        "cluster": cluster_json(run.cluster), "strategies": [answer_json(each) for each in answers],
    }  # fmt: skip


def kinds_text() -> str:
    """Return the kinds of faults, for --help."""
    return "\n".join(f"  {kind:<8} {text}" for kind, text in KINDS.items())
