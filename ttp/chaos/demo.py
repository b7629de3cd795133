"""`make demo`: train a GPT on four ranks, SIGKILL one of them in the middle of a step, recover, and compare with a run that
nothing happened to, bit for bit.

    python -m ttp.chaos.demo [--kill-rank R] [--seed S] [--ranks 4] [--steps 60] [--text FILE_OR_FOLDER] [--output DIR]
                             [--config gpt_tiny] [trainer overrides]

Exit status: 0 when the resumed run equals the baseline one and no committed step was lost, 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ttp.chaos.folder import empty
from ttp.chaos.observed.training_job import JobError, Kill, TrainingJob
from ttp.chaos.verdict.timeline import FaultTimeline, RunComparison, by_step, compare, lost_steps, timeline
from ttp.errors import ConfigError
from ttp.inputs.options import MOST, whole
from ttp.text.console import open_console

STAGE_WORDS = {
    "death_seen": "death seen by the controller",
    "frozen": "all survivors frozen",
    "decided": "step decided",
    "written": "shards written (fsync, checksums)",
    "published": "checkpoint published",
    "first_new_step": "first new step after the restart",
}


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
        empty(output)
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

    with TrainingJob(output / "killed", ranks=args.ranks, overrides=overrides, config=args.config) as faulted:
        kill = _train_and_kill(console, faulted, victim, kill_step, fraction)
        _follow(console, faulted, args.steps, "after the kill")
        _expect_success(faulted)
    with TrainingJob(output / "baseline", ranks=args.ranks, overrides=overrides, config=args.config) as whole:
        _follow(console, whole, args.steps, "baseline run")
        _expect_success(whole)

    line = timeline(faulted.journals()[0], faulted.metrics(), kill.unix_s)
    same = compare(faulted.metrics(), whole.metrics(), faulted.final(), whole.final())
    lost = lost_steps(line, kill.after_step)
    leftovers = faulted.leftovers() + whole.leftovers()
    plot = _plot(faulted, whole, line, output / "loss.png")
    return _report(console, kill, line, same, lost, leftovers, plot)


def _train_and_kill(console: Console, job: TrainingJob, victim: int, kill_step: int, fraction: float) -> Kill:
    with console.status("starting the ranks"):
        job.wait_for(lambda: job.last_step() >= 1, "first step", 120)
    with console.status(f"training towards step {kill_step}"):
        job.wait_for_step(kill_step - 1)
    recent = [float(line["time_ms"]) for line in job.metrics()[2:] if line.get("time_ms")]
    time.sleep(fraction * (statistics.median(recent) if recent else 100.0) / 1e3)  # the random moment itself
    kill = job.kill(victim)
    console.print(f"SIGKILL sent to rank {victim} (pid {kill.pid}); last step on record: {kill.after_step}")
    return kill


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


def _plot(faulted: TrainingJob, whole: TrainingJob, line: FaultTimeline, path: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "not drawn: install matplotlib (pip install 'try-to-persist[plots]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for job, label, style in ((whole, "baseline", "-"), (faulted, "killed and resumed", "--")):
        points = sorted((step, float(m["loss_value"])) for step, m in by_step(job.metrics()).items())
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=3 if style == "-" else 1.5)
    if line.step is not None:
        axes.axvline(line.step, color="gray", linewidth=1, label=f"dying gasp: step {line.step}")
    axes.set(xlabel="step", ylabel="loss", title="Loss of the killed and of the baseline run")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


def _report(
    console: Console,
    kill: Kill,
    line: FaultTimeline,
    same: RunComparison,
    lost: int | None,
    leftovers: Sequence[str],
    plot: str,
) -> int:
    table = Table("since the kill", "ms", title=f"The fault: SIGKILL of rank {kill.rank}")
    for stage, label in STAGE_WORDS.items():
        value = getattr(line, stage)
        table.add_row(label, "-" if value is None else f"{value:,.0f}")
    console.print(table)
    if line.refused:
        console.print(f"no checkpoint: {line.refused}")
    console.print(f"dying-gasp checkpoint: step {line.step} in {line.path}")
    console.print(f"committed steps lost: {'unknown' if lost is None else lost}")
    console.print(f"loss curves: {plot}")
    for difference in same.differences[:10]:
        console.print(f"[red]difference[/]: {difference}")
    for process in leftovers:
        console.print(f"[red]left behind[/]: {process}")
    good = same.equal and lost == 0 and not leftovers
    if good:
        console.print(
            f"[bold green]EQUAL[/]: loss and grad norm of {same.steps} steps and the final weights are the same bits"
        )
    else:
        console.print("[bold red]NOT EQUAL[/]: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
