"""A training step beside other people's: DDP with AdamW, DDP with ZeroRedundancyOptimizer, FSDP2 plain and as HSDP.

One model, the same ranks, weights, tokens, clipping and fused AdamW; the contenders take turns in the same processes, in a
shuffled order, and each turn's times are compared with the same turn's of the others. Bytes are what crossed the loopback of a
network namespace of the benchmark's own (all of it: collectives, barriers, TCP headers, the controller's streams), beside
the least that the layout has to send, per rank and step.

TTP's own part is given in two numbers. *on against off*: what its calls cost the training thread, in one process, by the clock and by
the processor time of that thread, which is less disturbed by what else runs (the comparison of replicas every hundred steps, which has a
decision record of its own, is switched off). *beside*: what its other threads take of a core while nothing trains, which is what a
rank that has no core to spare pays on top. `--alone` leaves the others out, for many turns of these two.

Exit status 1 when TTP is surely slower than the fastest of the others, or surely costs more than its limit: when even the
lower quartile of the ratios (of TTP's own part: the lower bound of their median, in processor time) is above it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
from typing import Any

from benchmarks._step_world import OFF, ON

LIMIT_OTHERS = 1.0
LIMIT_ON_OFF = 1.005
WORLDS = ((2, 2), (2, 1), (4, 2))
"""(ranks, replicas)."""


def run(options: argparse.Namespace, ranks: int, replicas: int) -> dict[str, Any]:
    """Run one world, in a network namespace of its own where that is allowed. Raises CalledProcessError."""
    shape = {name: getattr(options, name) for name in ("layers", "width", "length", "batch", "rounds", "steps", "seed")}
    facts = {"ranks": ranks, "replicas": replicas, "port": free_port(), **shape}
    command = [sys.executable, "-m", "benchmarks._step_world"]
    command += [word for name, value in facts.items() for word in (f"--{name}", str(value))]
    command += ["--alone"] if options.alone else []
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if alone():
        command = in_namespace(command)
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def alone() -> bool:
    """Whether a network namespace can be had, so that no other bytes are counted."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


def in_namespace(command: list[str]) -> list[str]:
    """Return the command that runs another one in a network namespace of its own, where that is allowed (`alone`)."""
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def least_sent(name: str, ranks: int, replicas: int) -> float:
    """Return what a rank has to send in a step, in units of the model's size."""
    whole = 1 - 1 / ranks
    if name in (ON, OFF):
        shards = ranks / replicas
        reduce = whole if replicas == 1 else (1 - replicas / ranks) + 2 * (replicas - 1) / replicas / shards
        return reduce + (1 - 1 / shards)
    if name == "FSDP2":
        return 3 * whole
    if name == "FSDP2 HSDP":
        half = 1 - 2 / ranks
        return 3 * half + 2 / ranks
    return 3 * whole if name == "DDP + ZeRO" else 2 * whole


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def sure_median(values: list[float]) -> tuple[float, float]:
    """Return the bounds between which the median lies with 95 % (order statistics: nothing is supposed of the distribution)."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return ordered[max(0, math.floor(middle - half))], ordered[min(len(values) - 1, math.ceil(middle + half))]


def report(found: dict[str, Any], ranks: int, replicas: int, counted: bool) -> list[str]:
    """Print the world's table; return the limits that were missed."""
    seconds: dict[str, list[float]] = found["seconds"]
    size = 4 * found["parameters"]
    others = [name for name in seconds if name not in (ON, OFF)]
    fastest = min(others or [OFF], key=lambda name: statistics.median(seconds[name]))
    print(f"{ranks} ranks, {replicas} replica{'s' if replicas > 1 else ''}, {found['parameters']:,} parameters in FP32")
    print(f"  {'':14} {'ms a step':>10}  {'quartiles':>15}  {'against ' + fastest:>24}  {'MB sent':>8}  {'least':>7}")
    for name, values in seconds.items():
        low, middle, high = quartiles([1e3 * value for value in values])
        ratio = quartiles([mine / theirs for mine, theirs in zip(values, seconds[fastest], strict=True)])
        sent = f"{found['sent'][name] / 1e6:8.2f}" if counted else f"{'?':>8}"
        against = f"{ratio[1]:.3f} ({ratio[0]:.3f} to {ratio[2]:.3f})"
        least = least_sent(name, ranks, replicas) * size / 1e6
        print(f"  {name:14} {middle:10.1f}  {low:6.1f} to {high:5.1f}  {against:>24}  {sent}  {least:7.2f}")
    spread = max(
        abs(ours - theirs)
        for name in seconds
        for ours, theirs in zip(found["losses"][ON], found["losses"][name], strict=True)
    )
    for what, times in (("the clock", seconds), ("processor time of the training thread", found["processor"])):
        costs = [on / off for on, off in zip(times[ON], times[OFF], strict=True)]
        cost, sure = quartiles(costs), sure_median(costs)
        print(
            f"  on against off, {what}: {cost[1]:.4f} ({cost[0]:.4f} to {cost[2]:.4f}), the median of {len(costs)} turns surely"
            f" between {sure[0]:.4f} and {sure[1]:.4f}"
        )
    print(
        f"  beside the training thread: {100 * found['beside']:.2f} % of a core, {100 * found['without']:.2f} % without TTP"
    )
    print(f"  losses differ by {spread:.1e} at most")
    missed = []
    against_fastest = quartiles([on / theirs for on, theirs in zip(seconds[ON], seconds[fastest], strict=True)])
    if others and against_fastest[0] > LIMIT_OTHERS:
        missed.append(f"{ranks} ranks, {replicas} replicas: slower than {fastest}")
    if sure[0] > LIMIT_ON_OFF:
        missed.append(f"{ranks} ranks, {replicas} replicas: protection costs more than {LIMIT_ON_OFF - 1:.1%}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank and step")
    parser.add_argument("--rounds", type=int, default=16, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="TTP on and off only")
    parser.add_argument(
        "--world", action="append", choices=[f"{ranks}x{replicas}" for ranks, replicas in WORLDS],
        help="ranks and replicas, all of these unless given",
    )  # fmt: skip
    options = parser.parse_args()
    counted = alone()
    if not counted:
        print("bytes are not counted: a network namespace needs `unshare` and `ip`, and the right to make one")
    missed = []
    for ranks, replicas in WORLDS:
        if options.world and f"{ranks}x{replicas}" not in options.world:
            continue
        missed += report(run(options, ranks, replicas), ranks, replicas, counted)
    for line in missed:
        print(f"step_time.py: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
