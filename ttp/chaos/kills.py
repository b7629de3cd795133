"""`make chaos`: one long job, killed again and again at random moments, judged against a job that nothing happened to.

    python -m ttp.chaos.kills [--kills 20] [--ranks 4] [--seed S] [--output DIR] [trainer overrides]
    python -m ttp.chaos.kills --in-place [--twice EVERY] [--spare RANK] [--median-s S] [--p99-s S] [--least-in-place SHARE]

Every kill picks its rank and its moment at random (seed printed). The job must come back from each by itself; at the end
the loss and grad norm of every step and the final weights must be the baseline job's bits, no committed step may be lost,
and no process may be left behind. `--in-place`: other processes take the places of those that were killed, and the others keep running
(`ttp.chaos.kills_in_place`). Exit status 0 or 1; 1 also where a limit was missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ttp.chaos import kills_in_place
from ttp.chaos.folder import taken
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.observed.training_job import JobError, Kill, TrainingJob
from ttp.chaos.verdict.timeline import (
    FaultTimeline,
    Line,
    RunComparison,
    compare,
    known_to_the_dead_alone,
    lost_steps,
    timeline,
)
from ttp.errors import ConfigError
from ttp.inputs.options import above_zero, whole
from ttp.text.console import open_console

STEPS_BETWEEN = 8
"""A kill comes within this many steps after the job's first new steps."""
STEPS_A_KILL = 2 * STEPS_BETWEEN + 4
"""Steps that the job is given for each kill: on a busy machine a few pass before one is looked for, and the job must not be over
before the last."""


ONLY_IN_PLACE = ("median_s", "p99_s", "least_in_place", "spare", "twice")
"""Options that have no effect on kills that cost a restart."""


@dataclass(frozen=True, slots=True)
class Survived:
    kill: Kill
    timeline: FaultTimeline
    lost: int | None
    alone: int = 0
    """Steps that only the dead rank knew of, and had written into the metrics; not among the lost ones."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kills and return the exit status."""
    args, overrides = parse(argv)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    console = open_console()
    console.print(f"{args.kills} random kills over {args.ranks} ranks; seed {seed}")
    output = Path(args.output).resolve()
    try:
        with InterruptGuard(), taken(output):
            if args.in_place:
                return kills_in_place.main(console, args, overrides, seed, output)
            survived, same, leftovers = run(console, args, overrides, random.Random(seed), output)
    except ConfigError as error:
        console.print(f"ttp.chaos.kills: {error}", markup=False, style="red")
        return 2
    except JobError as error:
        console.print(f"[red]failed[/] (seed {seed}): {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been ended")
        return 130
    return _report(console, survived, same, leftovers, seed, args.kills)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and what is for the trainer."""
    parser = argparse.ArgumentParser(prog="python -m ttp.chaos.kills", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=whole(1, 100_000), default=20)
    parser.add_argument("--ranks", type=whole(2, 1000), default=4)
    parser.add_argument("--seed", type=whole())
    parser.add_argument("--output", default="output/chaos")
    parser.add_argument("--config", default="gpt_tiny")
    parser.add_argument(
        "--in-place", action="store_true", help="recover without a checkpoint wherever that is possible"
    )
    parser.add_argument(
        "--spare", type=whole(), help="in place: this rank is never killed, so that what adds up in it shows"
    )
    parser.add_argument(
        "--twice",
        type=whole(),
        help="in place: after every so many kills the new process is killed, too (default: never)",
    )
    seconds = above_zero("seconds", 3600)
    for name, quantity in (("--median-s", "median"), ("--p99-s", "99th percentile")):
        text = f"in place: the {quantity} of the time from a single kill to the next new step must not be longer"
        parser.add_argument(name, type=seconds, metavar="S", help=text)
    parser.add_argument(
        "--least-in-place",
        type=above_zero("a share", 1),
        metavar="SHARE",
        help="in place: at least this share of the single kills must end without a checkpoint",
    )
    args, overrides = parser.parse_known_args(argv)
    for name in ONLY_IN_PLACE:
        if getattr(args, name) is not None and not args.in_place:
            parser.error(
                f"--{name.replace('_', '-')} without --in-place: expected both. Add --in-place, or leave it out"
            )
    if args.spare is not None and args.spare >= args.ranks:
        parser.error(f"--spare: got {args.spare}, expected a rank of this job, 0 to {args.ranks - 1}")
    return args, overrides


def run(
    console: Console,
    args: Any,
    overrides: Sequence[str],
    rng: random.Random,
    output: Path,
    until_monotonic_s: float = inf,
) -> tuple[list[Survived], RunComparison, list[str]]:
    """Train the killed job and the baseline one and judge them. Raises JobError: a job did not do its part, or not until then."""
    steps = (args.kills + 1) * STEPS_A_KILL
    overrides = ["--training_config.training_iters", str(steps), *overrides]
    launcher = ["--max-restarts", str(args.kills + 1)]
    with TrainingJob(
        output / "killed",
        ranks=args.ranks,
        overrides=overrides,
        config=args.config,
        launcher=launcher,
        until_monotonic_s=until_monotonic_s,
    ) as faulted:
        kills = []
        for number in range(args.kills):
            kills.append(_kill_once(faulted, rng, args.ranks, number))
            console.print(f"kill {number + 1}: rank {kills[-1].rank} after step {kills[-1].after_step}")
        _finish(faulted)
    with TrainingJob(
        output / "baseline",
        ranks=args.ranks,
        overrides=overrides,
        config=args.config,
        until_monotonic_s=until_monotonic_s,
    ) as whole:
        _finish(whole)
    metrics = faulted.metrics()
    survived = []
    for kill, journal in zip(kills, faulted.journals(), strict=False):
        line = timeline(journal, metrics, kill.unix_s)
        survived.append(judged(kill, line, journal))
    same = compare(metrics, whole.metrics(), faulted.final(), whole.final())
    return survived, same, faulted.leftovers() + whole.leftovers()


def judged(kill: Kill, line: FaultTimeline, journal: Sequence[Line]) -> Survived:
    """Count what a kill lost. Rank 0 writes the metrics: one step at most it may have known of alone."""
    lost = lost_steps(line, kill.after_step)
    if lost == 1 and kill.rank == 0 and line.step is not None and known_to_the_dead_alone(journal, line.step):
        return Survived(kill, line, 0, alone=1)
    return Survived(kill, line, lost)


def _kill_once(job: TrainingJob, rng: random.Random, ranks: int, number: int) -> Kill:
    """Wait for the attempt's first new steps, then kill a random rank at a random moment."""
    job.wait_for(lambda: len(job.starts()) == number + 1 and len(job.pids()) == ranks, f"attempt {number}", 120)
    first = job.last_step()
    job.wait_for_step(
        first + 2
    )  # the first one loads and compiles: on an accelerator it may take as long as all others
    recent = [float(line["time_ms"]) for line in job.metrics()[-12:] if line.get("time_ms")]
    step_s = min(recent) / 1e3 if recent else 0.1
    time.sleep(rng.uniform(0, STEPS_BETWEEN) * step_s)  # the random moment itself
    return job.kill(rng.randrange(ranks))


def _finish(job: TrainingJob) -> None:
    status = job.wait(900)
    if status != 0:
        raise JobError(f"the job ended with status {status}\n{job.console_tail()}")


def _report(
    console: Console, survived: list[Survived], same: RunComparison, leftovers: list[str], seed: int, expected: int
) -> int:
    table = Table(
        "kill", "rank", "last step on record", "published step", "lost", "seen", "frozen", "published", "first new step"
    )
    for number, entry in enumerate(survived, 1):
        line = entry.timeline
        times = [line.death_seen, line.frozen, line.published, line.first_new_step]
        columns = ["-" if t is None else f"{t:,.0f} ms" for t in times]
        cell = f"{entry.lost} (+{entry.alone})" if entry.alone else str(entry.lost)
        table.add_row(*map(str, (number, entry.kill.rank, entry.kill.after_step, line.step)), cell, *columns)
    console.print(table)
    for difference in same.differences[:20]:
        console.print(f"[red]difference[/]: {difference}")
    for process in leftovers:
        console.print(f"[red]left behind[/]: {process}")
    lost = [entry for entry in survived if entry.lost != 0]
    if alone := sum(entry.alone for entry in survived):
        console.print(f"(+1): a step that only the rank that died knew of, and had written down: {alone} trained again")
    missing = expected - len(survived)
    if missing:
        console.print(f"[red]{missing} kills without a journal[/]")
    good = same.equal and not lost and not leftovers and not missing
    console.print(
        f"{len(survived)} kills, {len(survived) - len(lost)} without a lost step; {same.steps} steps compared:"
        f" {'[bold green]EQUAL[/]' if same.equal else '[bold red]NOT EQUAL[/]'} (seed {seed})"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
