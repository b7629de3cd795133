"""The command line of `python -m ttp.goodput`.

Owns options, defaults and exit statuses. Bad input is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttp.errors import ConfigError
from ttp.goodput import plot, share_tables
from ttp.goodput.closed_form import split
from ttp.goodput.cluster import HOUR, KINDS, Cluster, Times, strategies
from ttp.goodput.published import LLAMA, RUNS, like
from ttp.goodput.share_tables import ModelledShare
from ttp.goodput.simulate import simulate
from ttp.inputs import checked
from ttp.inputs.options import whole
from ttp.text.console import open_console

if TYPE_CHECKING:
    from ttp.goodput.measured import Measured

USAGE = 2
MOST_RANKS, MOST_SECONDS, MOST_RATE, MOST_FAULTS = 10_000_000, 1e9, 1e3, 2e5
LEAST_SECONDS = 1e-6
"""Of what there cannot be none of."""
_TIMES = {
    "save": "training waits so long for a persistent checkpoint",
    "detect": "from a fault until it is certain",
    "hang": "the same for a hang",
    "restart": "diagnosis, replacement and start of all processes",
    "load": "load a checkpoint",
    "copy": "training waits so long for a copy into other nodes' memory",
    "dump": "survivors write the state at the fault",
    "regroup": "survivors make their groups again, in place",
    "step": "a step",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Exits with 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m ttp.goodput",
        description="How much of a cluster's time would be new steps. Without options: published runs, and what this system would reach there.",
        epilog=f"kinds of faults:\n{share_tables.kinds_text()}\n\ndocs/goodput.md says what is assumed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster = parser.add_argument_group("a cluster of your own")
    cluster.add_argument("--ranks", type=whole(1, MOST_RANKS), metavar="N", help="devices of the job")
    cluster.add_argument(
        "--nproc-per-node", type=whole(1, MOST_RANKS), metavar="N", help="devices of a node (default: 8)"
    )
    cluster.add_argument(
        "--like", choices=sorted(RUNS), help=f"take faults and times of a published run (default: {LLAMA})"
    )
    cluster.add_argument(
        "--job", metavar="JOB", help="take the times that a job of yours has measured, from its folder"
    )
    cluster.add_argument("--fault", action="append", default=[], type=_fault, metavar="KIND=RATE",
                         help="so many faults of a kind per device-hour, in place of the published ones; repeatable")  # fmt: skip
    for name, text in _TIMES.items():
        cluster.add_argument(
            f"--{name}-s", type=_number(MOST_SECONDS, above=name == "step"), metavar="SECONDS", help=text
        )
    cluster.add_argument("--interval-s", type=_number(MOST_SECONDS, above=True), metavar="SECONDS",
                         help="work between persistent checkpoints (default: the best, by Daly)")  # fmt: skip
    cluster.add_argument(
        "--slowdown",
        type=_number(10.0),
        metavar="SHARE",
        help="steps take longer by this share under this system (default: 0)",
    )
    parser.add_argument(
        "--simulate",
        type=whole(2, 100_000),
        metavar="RUNS",
        help="also draw so many runs, and show their confidence interval",
    )
    parser.add_argument(
        "--days", type=_number(100_000.0, above=True), default=90.0, help="of a simulated run (default: 90)"
    )
    parser.add_argument("--seed", type=whole(), default=1, help="of the simulation (default: 1)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the shares over the number of ranks: .png, .svg or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the text")
    given = parser.parse_args(arguments)
    given.own = bool(given.fault) or any(
        getattr(given, name) is not None
        for name in ("ranks", "nproc_per_node", "like", "job", "interval_s", *(f"{name}_s" for name in _TIMES))
    )
    if given.plot is not None and given.plot.suffix.lower() not in plot.FORMATS:
        parser.error(
            f"argument --plot: got {checked.shown(str(given.plot))}, expected a name that ends in {', '.join(plot.FORMATS)}"
        )
    if given.plot is not None and not given.own:
        parser.error("argument --plot: got no cluster, expected one: name --ranks or --like")
    return given


def _number(most: float, *, above: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        least = LEAST_SECONDS if above else 0.0
        if not least <= value <= most:
            bounds = f"above 0 (from {least:g}), at most {most:g}" if above else f"from 0 to {most:g}"
            raise argparse.ArgumentTypeError(f"got {checked.shown(text)}, expected a number {bounds}")
        return value

    return read


def _fault(text: str) -> tuple[str, float]:
    kind, separator, rate = text.partition("=")
    if not separator or kind not in KINDS:
        raise argparse.ArgumentTypeError(
            f"got {checked.shown(text)}, expected KIND=RATE with one of {', '.join(KINDS)}"
        )
    return kind, _number(MOST_RATE)(rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = parse(arguments)
    try:
        return _answer(given)
    except ConfigError as error:
        print(f"python -m ttp.goodput: error: {error}", file=sys.stderr)
        return USAGE


def _answer(given: argparse.Namespace) -> int:
    console = open_console(sys.stdout, soft_wrap=False)
    if not given.own:
        runs = [(run := make(), _answers(run.cluster, given)) for make in RUNS.values()]
        if given.json:
            console.out(json.dumps({"runs": [share_tables.run_json(run, answers) for run, answers in runs]}))
        for run, answers in runs if not given.json else ():
            console.print(share_tables.shown_run(run, answers))
        return 0
    cluster, known = _cluster(given)
    answers = _answers(cluster, given)
    if given.plot is not None:
        plot.draw(cluster, given.plot)
    if given.json:
        found = {name: {"seconds": each.seconds, "count": each.count} for name, each in known.items()}
        console.out(
            json.dumps(
                {
                    "cluster": share_tables.cluster_json(cluster),
                    "measured": found,
                    "strategies": [share_tables.answer_json(each) for each in answers],
                }
            )
        )
    else:
        console.print(share_tables.shown_cluster(cluster, answers, known))
    return 0


def _cluster(given: argparse.Namespace) -> tuple[Cluster, dict[str, Measured]]:
    """Return the cluster: a published run's, then a job's times, then what is given."""
    cluster, known = like(given.like or LLAMA), {}
    times = cluster.times
    if given.job is not None:
        from ttp.goodput.measured import measured  # loads what `ttp status` does

        known = measured(given.job)
        times = replace(times, **{name: each.seconds for name, each in known.items()})
        if "restart_s" in known:  # from the order to exit until the first step: with its load
            times = replace(times, load_s=0.0)
    own = {each.name: getattr(given, each.name) for each in fields(Times) if getattr(given, each.name) is not None}
    rates = {kind: 0.0 for kind in KINDS} | dict(given.fault) if given.fault else cluster.per_device_hour
    times = replace(times, **own)
    if times.step_s <= 0.0:
        raise ConfigError(f"--job: got {times.step_s:g} s for a step, expected more than 0. Name the time: --step-s")
    if times.save_s < LEAST_SECONDS and given.interval_s is None:
        raise ConfigError(
            f"--save-s: got {times.save_s:g} s, expected at least {LEAST_SECONDS:g}, as there is no best interval else. Name one: --interval-s"
        )
    return replace(
        cluster, ranks=given.ranks or cluster.ranks, ranks_per_node=given.nproc_per_node or cluster.ranks_per_node, times=times, per_device_hour=rates, slowdown=given.slowdown or 0.0, interval_s=given.interval_s
    ), known  # fmt: skip


def _answers(cluster: Cluster, given: argparse.Namespace) -> list[ModelledShare]:
    found = []
    for strategy in strategies(cluster):
        drawn = None
        if given.simulate is not None:
            lasts_s = given.days * 24.0 * HOUR
            if (expected := strategy.policy.fault_rate * lasts_s * given.simulate) > MOST_FAULTS * 100.0:
                raise ConfigError(
                    f"--simulate: got {expected:.2g} faults to draw, expected at most {MOST_FAULTS * 100.0:.2g}. Draw fewer runs, or fewer --days"
                )
            drawn = simulate(strategy.policy, lasts_s, runs=given.simulate, seed=given.seed)
        found.append(ModelledShare(strategy, split(strategy.policy), drawn))
    return found
