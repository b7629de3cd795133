"""`python -m ttp.chaos.kills --in-place`: ranks of one job are killed at random moments, and other processes take their places while the others run on.

Each kill waits until the one before is over: a step was made that was none before. What cannot be ended in place must end by a checkpoint and a restart, which
is counted with the reason that the controller noted, and is not a failure. Judged from outside: in place exactly the killed ranks have other processes;
no committed step is lost; losses, norms and final weights are the baseline job's bits; no process and no file stays behind; and in the processes
that live through two dozen recoveries (the launcher, and the rank of `--spare`) nothing adds up. After the last kill the job is stopped as a preemption stops it, so that the baseline job has no more
steps than it needs. Limits of the times and of the share that ends in place are judged where they are given.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ttp import files
from ttp.chaos.observed.process_census import Held, adding_up, look_at, look_at_all
from ttp.chaos.observed.training_job import JobError, TrainingJob, marked
from ttp.chaos.verdict.recoveries import (
    BY_CHECKPOINT,
    IN_PLACE,
    EndedFault,
    FaultEnding,
    FaultTally,
    Identity,
    RecoveryLimits,
    ending_of,
    quantile,
)
from ttp.chaos.verdict.timeline import RunComparison, compare
from ttp.checkpoint.find import list_checkpoints, step_of

TRAINING_ITERS = "--training_config.training_iters"
STEPS_BETWEEN = 8
"""A kill comes within this many steps after the job's first new step."""
STEPS_A_KILL = 40
"""Steps that the job may make for each kill: some pass before one is looked for, and the job must not be over before the last."""
DECAY_STEPS = 10_000_000
"""Longer than any warm-up, and than any of these jobs."""
NEW_PROCESS_S = 0.4
"""A new process is killed within so many seconds after it has come: the recovery is under way, or just over."""
BACK_S = 150.0
"""A job that makes no new step for longer after a kill is stuck: longer than a fault may last, `TTP_OT`."""


def main(console: Console, args: Namespace, overrides: Sequence[str], seed: int, output: Path) -> int:
    """Run the kills and return the exit status: 0 if all is as it should be, wherever the faults ended, within the limits. Raises JobError."""
    rng = random.Random(seed)
    tally, looks = FaultTally(), list[list[Held]]()
    temporary = files.make_temporary("ttp-kills-")
    overrides = [*_steps((args.kills + 1) * STEPS_A_KILL), *overrides]
    try:
        with _job(output / "killed", args, overrides, temporary) as job:
            for number in range(args.kills):
                twice = bool(args.twice) and number % args.twice == args.twice - 1
                victim = rng.choice([rank for rank in range(args.ranks) if rank != args.spare])
                tally.faults.append(_fault(job, rng, args.ranks, victim, twice))
                looks.append(look_at_all(marked(job.mark)))
                console.print(f"kill {number + 1}: {escape(as_line(tally.faults[-1]))}")
            last, unsaved = _stop(job)
        left = _left_behind(job, temporary)  # the next attempt clears what this one leaves
        wrong = [f"the last stop: {unsaved} steps were lost"] if unsaved else []
        wrong += [f"kill {number}: {text}" for number, fault in enumerate(tally.faults, 1) for text in fault.problems()]
        wrong += [f"adds up: {one}" for one in adding_up(looks)]
        limits = RecoveryLimits(args.median_s, args.p99_s, args.least_in_place)
        content = {
            "seed": seed,
            "ranks": args.ranks,
            "faults": [asdict(fault) for fault in tally.faults],
            "wrong": wrong,
        }
        content["limits"] = [{"text": text, "kept": kept} for text, kept in tally.kept(limits)]
        content["held"] = [[asdict(held) for held in look] for look in looks]
        _put_down(output, content)  # before what may fail
        overrides = [*overrides, f"{TRAINING_ITERS}={last}"]
        with _job(output / "killed", args, overrides, temporary) as again:  # it writes the hash of the weights
            _finish(again)
        with _job(output / "baseline", args, overrides, temporary) as baseline:
            _finish(baseline)
        left += [*_left_behind(job, temporary), *baseline.leftovers()]
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    same = compare(job.metrics(), baseline.metrics(), job.final(), baseline.final())
    wrong += [f"left behind: {one}" for one in dict.fromkeys(left)]
    _put_down(output, content)
    return _report(console, tally, limits, same, wrong, seed)


def _left_behind(job: TrainingJob, temporary: Path) -> list[str]:
    """Return processes, temporary files and staging directories of a job that has ended. What torch leaves in the temporary folder is its own."""
    litter = sorted(path.name for path in temporary.iterdir() if not path.name.startswith("torch"))
    return [*job.leftovers(), *litter, *sorted(path.name for path in job.output_dir.glob("checkpoints/*_tmp*"))]


def _put_down(output: Path, content: dict[str, Any]) -> None:
    (output / "kills.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _job(folder: Path, args: Namespace, overrides: Sequence[str], temporary: Path) -> TrainingJob:
    return TrainingJob(
        folder,
        ranks=args.ranks,
        overrides=overrides,
        config=args.config,
        environ={"TTP_IN_PLACE": "cuda", "TMPDIR": str(temporary), "TORCH_FR_BUFFER_SIZE": "0"},
        launcher=["--max-restarts", str(args.kills + 1)],
    )


def _steps(most: int) -> list[str]:
    """Return the trainer's options for so many steps. The learning rate does not depend on where the job is stopped."""
    return [f"{TRAINING_ITERS}={most}", f"--optimizer_config.learning_rate_scheduler_kwargs.decay_steps={DECAY_STEPS}"]


def _stop(job: TrainingJob) -> tuple[int, int]:
    """Stop the job as a preemption does. Return the last step that it saved or has on record, and how many on record it did not save."""
    job.process.send_signal(signal.SIGTERM)
    job.wait(BACK_S)
    saved = max(map(step_of, list_checkpoints([job.output_dir / "checkpoints"])), default=0)
    return max(saved, job.last_step()), max(0, job.last_step() - saved)


def _finish(job: TrainingJob) -> None:
    status = job.wait(1800)
    if status != 0:
        raise JobError(f"the job ended with status {status}\n{job.console_tail()}")


# --- one fault ---


def _fault(job: TrainingJob, rng: random.Random, ranks: int, victim: int, twice: bool) -> EndedFault:
    """Kill a rank at a random moment, and with `twice` the process that comes for it; wait until the job is back. Raises JobError: it is not."""
    job.wait_for(lambda: job.last_step() >= 2 and len(job.pids()) == ranks, "two steps of all ranks", BACK_S)
    time.sleep(rng.uniform(0, STEPS_BETWEEN) * _step_s(job))  # the random moment itself
    attempts, before = job.starts(), identities(job)
    kills = [job.kill(victim)]
    if twice:
        (first,) = kills
        job.wait_for(
            lambda: job.pids().get(first.rank, first.pid) != first.pid or job.starts() != attempts,
            "a new process",
            BACK_S,
        )
        time.sleep(rng.uniform(0, NEW_PROCESS_S))
        kills.append(job.kill(first.rank))
    how = back(job, attempts[-1], [kill.unix_s for kill in kills])
    job.wait_for(lambda: len(job.pids()) == ranks, "all ranks", BACK_S)
    if how.how == IN_PLACE and job.starts() != attempts:
        raise JobError(f"the fault ended in place, and another attempt began\n{job.console_tail()}")
    return EndedFault(
        ranks=tuple(kill.rank for kill in kills),
        pids=tuple(kill.pid for kill in kills),
        unix_s=tuple(kill.unix_s for kill in kills),
        after_step=kills[0].after_step,
        before=before,
        after=identities(job),
        ending=how,
    )


def back(job: TrainingJob, attempt: int, killed_unix_s: Sequence[float]) -> FaultEnding:
    """Wait for the new step after kills in this attempt; return how the job came to it. Raises JobError: there is none within BACK_S."""
    found: list[FaultEnding] = []
    lines_before = len(job.metrics())

    def came_back() -> bool:
        nonlocal lines_before
        if len(metrics := job.metrics()) > lines_before:  # journals are read only where there may be a new step
            lines_before = len(metrics)
            one = ending_of(job.journal(attempt), metrics, killed_unix_s[0])
            found.extend([one] if one is not None and _covers(one, killed_unix_s) else [])
        return bool(found)

    job.wait_for(came_back, "new step after a kill", BACK_S)
    return found[0]


def _covers(one: FaultEnding, killed_unix_s: Sequence[float]) -> bool:
    """Say whether the new step came after the last kill: else it was that of the recovery before it."""
    return killed_unix_s[0] + one.stages_ms["new step"] / 1e3 > killed_unix_s[-1]


def identities(job: TrainingJob) -> dict[int, Identity]:
    """Return the process of each rank that has one now."""
    looked = {rank: look_at(pid) for rank, pid in job.pids().items()}
    return {rank: held.identity for rank, held in looked.items() if held is not None}


def _step_s(job: TrainingJob) -> float:
    recent = [float(line["time_ms"]) for line in job.metrics()[-12:] if line.get("time_ms")]
    return min(recent) / 1e3 if recent else 0.1  # of an accelerator the first one may take as long as all others


# --- report ---


def as_line(fault: EndedFault) -> str:
    one = fault.ending
    again = ", and the process that took its place" if len(fault.ranks) > 1 else ""
    text = f"rank {fault.ranks[0]} after step {fault.after_step}{again}: {one.how}"
    text += f", step {one.step + 1}" if one.step is not None else ", a new step"
    text += f" after {one.stages_ms['new step']:,.0f} ms"
    return text + (f" ({one.why})" if one.why else "") + "".join(f"; WRONG: {problem}" for problem in fault.problems())


def summary(tally: FaultTally) -> list[str]:
    """Return the figures: how many ended how, how long it took, and why some were not in place."""
    lines = []
    for how in (IN_PLACE, BY_CHECKPOINT):
        line, times = f"{how}: {tally.count(how)} of {len(tally.faults)}", tally.times_ms(how)
        if times:
            line += f"; kill to new step, ms ({len(times)} single kills): median {statistics.median(times):,.0f}"
            line += f", p90 {quantile(times, 0.9):,.0f}, p99 {quantile(times, 0.99):,.0f}, max {times[-1]:,.0f}"
        lines.append(line)
    return lines + [f"not in place, {count} times: {reason}" for reason, count in tally.reasons().items()]


def _report(
    console: Console,
    tally: FaultTally,
    limits: RecoveryLimits,
    same: RunComparison,
    wrong: Sequence[str],
    seed: int,
) -> int:
    for line in summary(tally):
        console.print(escape(line))
    judged = tally.kept(limits)
    for text, kept in judged:
        console.print(f"{'[bold green]kept[/]' if kept else '[bold red]missed[/]'}: {escape(text)}")
    for difference in same.differences[:20]:
        console.print(f"[red]difference[/]: {escape(difference)}")
    for one in wrong[:40]:
        console.print(f"[red]wrong[/]: {escape(one)}")
    without = sum(not fault.lost and fault.lost is not None for fault in tally.faults)
    console.print(
        f"{len(tally.faults)} kills, {without} without a lost step; {same.steps} steps compared:"
        f" {'[bold green]EQUAL[/]' if same.equal else '[bold red]NOT EQUAL[/]'} (seed {seed})"
    )
    return 0 if same.equal and not wrong and all(kept for _, kept in judged) else 1
