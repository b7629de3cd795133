"""`make demo`: train a GPT on four ranks, SIGKILL one of them in the middle of a step, recover, and compare with a run that
nothing happened to, bit for bit. Twice, with the same kill: in place, where another process takes the killed one's place and the others run on, and by a
checkpoint and a restart.

    python -m ttp.chaos.demo [--kill-rank R] [--seed S] [--ranks 4] [--steps 60] [--text FILE_OR_FOLDER] [--output DIR]
                             [--config gpt_tiny] [trainer overrides]

Exit status: 0 when both runs equal the baseline one and no committed step was lost, 1 otherwise. Where a fault cannot end in place, the reason is shown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttp.chaos.folder import taken
from ttp.chaos.kills_in_place import back, identities
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.observed.training_job import JobError, TrainingJob
from ttp.chaos.verdict.recoveries import BY_CHECKPOINT, IN_PLACE, EndedFault
from ttp.chaos.verdict.timeline import RunComparison, by_step, compare
from ttp.errors import ConfigError
from ttp.inputs.options import MOST, whole
from ttp.text.console import open_console

WAYS = (("in place", "in_place", "True"), ("by restart", "killed", "False"))
"""Each way back: its name, its folder, and TTP_IN_PLACE."""


@dataclass(frozen=True, slots=True)
class KilledJob:
    """A job that was killed, and how it came back."""

    name: str
    job: TrainingJob
    fault: EndedFault
    same: RunComparison

    def rows(self) -> tuple[str, ...]:
        """Return what the table shows of it."""
        ending, fault = self.fault.ending, self.fault
        replaced = sum(fault.before.get(rank) != process for rank, process in fault.after.items())
        written = {IN_PLACE: "nothing", BY_CHECKPOINT: f"checkpoint of step {ending.step}"}.get(
            ending.how, "nothing, it was refused"
        )
        return (
            f"{ending.stages_ms['new step'] / 1e3:.2f} s",
            "unknown" if fault.lost is None else str(fault.lost),
            f"{replaced} of {len(fault.after)}",
            written,
            "EQUAL" if self.same.equal else "NOT EQUAL",
        )


LABELS = ("kill to next step", "committed steps lost", "processes replaced", "written", "bits of the baseline run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return the exit status."""
    args = parse(argv)
    console = open_console()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10_000)
    rng = random.Random(seed)
    victim = args.kill_rank if args.kill_rank is not None else rng.randrange(args.ranks)
    kill_step = rng.randint(max(2, args.steps // 6), max(3, args.steps * 2 // 3))
    fraction = rng.random()
    if not 0 <= victim < args.ranks:
        console.print(f"--kill-rank: got {victim}, expected 0 to {args.ranks - 1}, the ranks of this demo")
        return 2
    console.print(f"[bold]TTP demo[/]: {args.config} on {args.ranks} ranks, {args.steps} steps; demo seed {seed}")
    console.print(f"will SIGKILL rank {victim} during step {kill_step}, {fraction:.0%} into the step\n")
    output = Path(args.output).resolve()
    try:
        with InterruptGuard(), taken(output):
            return _run(args, console, output, victim, kill_step, fraction)
    except ConfigError as error:
        console.print(f"ttp.chaos.demo: {error}", markup=False, style="red")
        return 2
    except JobError as error:
        console.print(f"[red]the demo failed[/]: {error}", markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been ended")
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ttp.chaos.demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kill-rank", type=whole(-MOST), help="the rank to kill (default: random)")
    parser.add_argument("--seed", type=whole(), help="seed of the rank, step and moment (default: random, printed)")
    parser.add_argument("--ranks", type=whole(2, 1000), default=4)
    parser.add_argument("--steps", type=whole(4, 10**9), default=60)
    parser.add_argument("--text", help="a text file or folder to train on (default: text that comes with Python)")
    parser.add_argument("--output", default="output/demo")
    parser.add_argument("--config", default="gpt_tiny")
    args, overrides = parser.parse_known_args(argv)
    args.overrides = overrides
    return args


def _run(args: Any, console: Console, output: Path, victim: int, kill_step: int, fraction: float) -> int:
    overrides = ["--training_config.training_iters", str(args.steps), *args.overrides]
    if args.text:
        overrides += ["--dataset_config.dataset_dir", str(Path(args.text).resolve())]

    ended = []
    for name, folder, in_place in WAYS:
        environ = {"TTP_IN_PLACE": in_place}
        with TrainingJob(
            output / folder, ranks=args.ranks, overrides=overrides, config=args.config, environ=environ
        ) as job:
            fault = _train_and_kill(console, job, victim, kill_step, fraction, name)
            _follow(console, job, args.steps, f"after the kill, {name}")
            _expect_success(job)
        ended.append((name, job, fault))
    with TrainingJob(output / "baseline", ranks=args.ranks, overrides=overrides, config=args.config) as whole:
        _follow(console, whole, args.steps, "baseline run")
        _expect_success(whole)

    ways = [
        KilledJob(name, job, fault, compare(job.metrics(), whole.metrics(), job.final(), whole.final()))
        for name, job, fault in ended
    ]
    leftovers = [process for job in (*(way.job for way in ways), whole) for process in job.leftovers()]
    return _report(console, ways, leftovers, _plot(ways, whole, output / "loss.png"))


def _train_and_kill(
    console: Console, job: TrainingJob, victim: int, kill_step: int, fraction: float, how: str
) -> EndedFault:
    with console.status("starting the ranks"):
        job.wait_for(lambda: job.last_step() >= 1, "first step", 120)
    with console.status(f"training towards step {kill_step}"):
        job.wait_for_step(kill_step - 1)
    recent = [float(line["time_ms"]) for line in job.metrics()[2:] if line.get("time_ms")]
    before = identities(job)
    time.sleep(fraction * (statistics.median(recent) if recent else 100.0) / 1e3)  # the random moment itself
    kill = job.kill(victim)
    console.print(f"{how}: SIGKILL sent to rank {victim} (pid {kill.pid}); last step on record: {kill.after_step}")
    with console.status("coming back"):
        ending = back(job, job.starts()[0], [kill.unix_s])
    return EndedFault((victim,), (kill.pid,), (kill.unix_s,), kill.after_step, before, identities(job), ending)


def _follow(console: Console, job: TrainingJob, steps: int, what: str) -> None:
    with console.status(what) as status:

        def ended() -> bool:
            status.update(f"{what}: step {job.last_step()} of {steps}")
            return job.process.poll() is not None

        job.wait_for(ended, "end of the job", 300)


def _expect_success(job: TrainingJob) -> None:
    status = job.wait()
    if status != 0:
        raise JobError(f"{' '.join(job.command)} ended with status {status}\n{job.console_tail()}")


def _plot(ways: Sequence[KilledJob], whole: TrainingJob, path: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "not drawn: install matplotlib (pip install 'try-to-persist[plots]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    drawn = [
        (whole, "baseline", "-"),
        *((way.job, way.name, style) for way, style in zip(ways, ("--", ":"), strict=True)),
    ]
    for job, label, style in drawn:
        points = sorted((step, float(m["loss_value"])) for step, m in by_step(job.metrics()).items())
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=3 if style == "-" else 1.5)
    for way in ways:
        if way.fault.ending.step is not None:
            axes.axvline(way.fault.ending.step, color="gray", linewidth=1)
    axes.set(xlabel="step", ylabel="loss", title="Loss of the killed runs and of the baseline run")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


def _report(console: Console, ways: Sequence[KilledJob], leftovers: Sequence[str], plot: str) -> int:
    table = Table(f"SIGKILL of rank {ways[0].fault.ranks[0]}", *(way.name for way in ways))
    for label, *values in zip(LABELS, *(way.rows() for way in ways), strict=True):
        table.add_row(label, *values)
    console.print(table)
    wrong = [f"left behind: {process}" for process in leftovers]
    for way in ways:
        if way.name == IN_PLACE and way.fault.ending.why:
            console.print(f"not in place: {escape(way.fault.ending.why)}")
        wrong += [f"{way.name}: {text}" for text in (*way.fault.problems(), *way.same.differences[:10])]
    console.print(f"loss curves: {plot}")
    for text in wrong:
        console.print(f"[red]wrong[/]: {escape(text)}")
    if wrong or not all(way.same.equal for way in ways):
        console.print("[bold red]NOT EQUAL[/]: see above")
        return 1
    steps = ways[0].same.steps
    console.print(f"[bold green]EQUAL[/]: loss and grad norm of {steps} steps and the final weights are the same bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
