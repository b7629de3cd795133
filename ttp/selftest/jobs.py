"""The checks that are jobs of ttprun: kills, a dump beside a long kernel, replicas, resuming on the CPU, and the time of a step.

Owns what each demands. The jobs are those of `ttp.chaos`, and are judged as there.
"""

from __future__ import annotations

import random
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console

from ttp.chaos.kills import STEPS_A_KILL, Survived, run
from ttp.chaos.observed.training_job import JobError, TrainingJob, read_jsonl
from ttp.chaos.verdict.timeline import Line, by_step, compare
from ttp.selftest.report import FAILED, MEASURED, NOT_APPLICABLE, PASSED, Check

CONFIG = "gpt_tiny"
JOB_S = 200.0
ON_CPU_STEPS = 5
"""Steps that are trained on the CPU from the device's checkpoint."""
CLOSE = 0.02
"""Largest relative difference of a loss on the CPU from the device's: other kernels round otherwise."""
TIMED_STEPS = 30
_UNMEASURED = 10
"""First steps of a job, which load and allocate."""
KILLED, TIMES = "kill and restart", "from a kill to the next new step"
DUMP, READY, REPLICAS = "dump beside a long kernel", "READY waits for the device", "replicas compared"
ON_CPU, STEP_TIME = "resume on the CPU", "time of a step, on to off"
Figures = dict[str, Any]


@dataclass
class Jobs:
    """The jobs of one self-test, each in a folder of its own. A check that needs another's job is made after it."""

    output: Path
    device: str
    """As the trainer calls it."""
    ranks: int
    kills: int
    seed: int
    overrides: Sequence[str]
    console: Console
    until_monotonic_s: float = inf
    """Nothing is waited for longer."""
    shared: bool = False
    """There are fewer devices than ranks: all use the first."""
    _baseline: Path | None = field(default=None, init=False)

    @property
    def steps(self) -> int:
        """Steps of every job."""
        return (self.kills + 1) * STEPS_A_KILL

    @property
    def lone(self) -> bool:
        return self.ranks == 1

    def _arguments(self, device: str = "") -> list[str]:
        alone = ["--training_config.copies=memory"] if self.lone else []
        return [
            *alone,
            f"--training_config.device={device or self.device}",
            f"--training_config.shared_device={self.shared}",
            f"--training_config.training_iters={self.steps}",
            f"--optimizer_config.learning_rate_scheduler_kwargs.decay_steps={self.steps}",
            *self.overrides,
        ]

    def _job(
        self,
        name: str,
        *overrides: str,
        device: str = "",
        environ: Mapping[str, str] | None = None,
        program: str = "ttp.trainer",
    ) -> TrainingJob:
        return TrainingJob(
            self.output / name,
            ranks=self.ranks,
            overrides=[*self._arguments(device), *overrides],
            config=CONFIG,
            environ=environ,
            launcher=["--max-restarts", "1"],
            program=("-m", program),
            until_monotonic_s=self.until_monotonic_s,
        )

    def parts(self) -> tuple[tuple[str, tuple[str, ...], Callable[[], list[Check]]], ...]:
        """Return what is to be done, with the names of its checks, in an order in which each finds what it needs."""
        return (
            ("kills and restarts, and a job without a fault", (KILLED, TIMES), self.kill_and_restart),
            ("a dump beside a long kernel, READY, and replicas", (DUMP, READY, REPLICAS), self.beside_a_long_kernel),
            ("what the device has written, resumed on the CPU", (ON_CPU,), self.resume_on_the_cpu),
            ("the time of a step with TTP and without", (STEP_TIME,), self.time_of_a_step),
        )

    # --- kills ---

    def kill_and_restart(self) -> list[Check]:
        """SIGKILL of a rank at a random moment, again and again; then a job that nothing happens to. Two checks."""
        args = Namespace(kills=self.kills, ranks=self.ranks, config=CONFIG)
        survived, same, leftovers = run(
            self.console, args, self._arguments(), random.Random(self.seed), self.output, self.until_monotonic_s
        )
        self._baseline = self.output / "baseline"
        resumed = [
            line for line in read_jsonl(self.output / "killed" / "metrics.jsonl") if line.get("event") == "resume"
        ]
        lost = [self._lost(entry, start) for entry, start in zip(survived, resumed, strict=False)]
        wrong = list(same.differences[:3]) + [f"left behind: {process}" for process in leftovers[:3]]
        if len(lost) < self.kills:
            wrong.append(f"{self.kills} kills, and {len(resumed)} resumed attempts")
        if not self.lone:
            wrong += [f"kill {number}: {steps} committed steps lost" for number, steps in enumerate(lost, 1) if steps]
        figures: Figures = {
            "kills": self.kills,
            "ranks": self.ranks,
            "steps": same.steps,
            "lost_steps": lost,
            "seed": self.seed,
        }
        how = "copies in memory, as one rank has no replica" if self.lone else "replicas"
        good = f"losses, norms and final weights are the bits of a job without a fault; protected by {how}"
        return [_judged(KILLED, wrong, good, figures), self._times(survived)]

    def _lost(self, entry: Survived, start: Line) -> int:
        """Return how many committed steps were trained again. A step that the dead rank alone knew of is none."""
        return max(0, entry.kill.after_step - int(start["from_step"])) if entry.lost is None else entry.lost

    def _times(self, survived: Sequence[Survived]) -> Check:
        metrics = read_jsonl(self.output / "killed" / "metrics.jsonl")
        times = [
            milliseconds for entry in survived if (milliseconds := _to_new_step(metrics, entry.kill.unix_s)) is not None
        ]
        if len(times) < len(survived):
            return Check(TIMES, FAILED, f"{len(survived)} kills, and {len(times)} of them have a step after them")
        return Check(
            TIMES,
            MEASURED,
            "",
            {"median_ms": round(statistics.median(times)), "all_ms": [round(each) for each in times]},
        )

    # --- a long kernel ---

    def beside_a_long_kernel(self) -> list[Check]:
        """The dump beside a busy stream, what READY means, and replicas compared. Three checks."""
        with self._job("blocked", program="ttp.selftest.blocked_step") as job:
            _ended(job)
            journal = job.journals()[0]
            notes = [read_jsonl(job.output_dir / f"noted_{rank}.jsonl") for rank in range(self.ranks)]
            differences: Sequence[str] = ("there is no job to compare with: its check failed",)
            if self._baseline is not None:
                final, metrics = _final(self._baseline), read_jsonl(self._baseline / "metrics.jsonl")
                differences = compare(job.metrics(), metrics, job.final(), final).differences
            left = job.leftovers()
        return [
            self._dump(journal, notes, [*differences, *(f"left behind: {process}" for process in left)]),
            self._ready(notes),
            self._replicas(notes),
        ]

    def _dump(self, journal: Sequence[Line], notes: Sequence[Sequence[Line]], differences: Sequence[str]) -> Check:
        kernels = [line for rank in notes for line in rank if line["noted"] in ("kernel begun", "thread sleeps")]
        if not kernels:
            return Check(DUMP, NOT_APPLICABLE, "one rank on the CPU: its training thread itself is the kernel")
        raised = next(line for line in notes[-1] if line["noted"] == "raises")
        published = next((line for line in journal if line.get("event") == "published"), None)
        if published is None:
            refused = next((line["reason"] for line in journal if line.get("event") == "refused"), "no reason")
            return Check(DUMP, FAILED, f"nothing was saved: {refused}")
        took, lasts = float(published["unix_s"]) - float(raised["unix_s"]), float(kernels[0]["seconds"])
        ended = [float(line["unix_s"]) for rank in notes for line in rank if line["noted"] == "kernel ended"]
        wrong = list(differences[:3])
        if took > lasts or any(at <= float(published["unix_s"]) for at in ended):
            wrong.insert(0, "the dump ended after the kernel: it has waited for it")
        if int(published["step"]) < int(raised["step"]):
            wrong.insert(0, f"step {published['step']} was saved, though step {raised['step']} was committed")
        figures: Figures = {"dump_ms": round(1e3 * took), "kernel_s": lasts, "step": published["step"]}
        return _judged(DUMP, wrong, "saved while it ran; after the restart the bits of a job without a fault", figures)

    def _ready(self, notes: Sequence[Sequence[Line]]) -> Check:
        if self.device == "cpu":
            return Check(READY, NOT_APPLICABLE, "on the CPU gradients are final when the call returns")
        seen = [[bool(line["final"]) for line in rank if line["noted"] == "ready"] for rank in notes]
        wrong = [f"rank {rank} did not come to the place" for rank, found in enumerate(seen) if not found]
        wrong += [
            f"rank {rank} was READY while a kernel ran behind its backward pass"
            for rank, found in enumerate(seen)
            if found and not all(found)
        ]
        return _judged(READY, wrong, "no rank was READY before the kernels of its step had ended", {})

    def _replicas(self, notes: Sequence[Sequence[Line]]) -> Check:
        if self.lone:
            return Check(REPLICAS, NOT_APPLICABLE, "one rank has no replica")
        seen = [next((line for line in rank if line["noted"] == "replicas"), None) for rank in notes]
        altered = [next((line for line in rank if line["noted"] == "altered"), None) for rank in notes]
        wrong = [f"rank {rank} has not compared" for rank, line in enumerate(seen) if line is None]
        wrong += [
            f"rank {rank}: {line['differing']} tensors differ"
            for rank, line in enumerate(seen)
            if line and line["differing"]
        ]
        wrong += [
            f"rank {rank} did not see weights that were altered"
            for rank, line in enumerate(altered)
            if not line or not line["differing"]
        ]
        figures: Figures = {"replicas": seen[0]["replicas"], "step": seen[0]["step"]} if seen[0] else {}
        return _judged(REPLICAS, wrong, "all bits are equal, and weights altered on purpose were seen", figures)

    # --- the CPU ---

    def resume_on_the_cpu(self) -> list[Check]:
        """The device's last checkpoint gives the same weights on the CPU, and training continues there from its emergency checkpoint."""
        killed = self.output / "killed"
        last = max(killed.glob("checkpoints/iter_???????"), default=None)
        resumed = [line for line in read_jsonl(killed / "metrics.jsonl") if line.get("event") == "resume"]
        if last is None or not resumed:
            return [Check(ON_CPU, FAILED, f"{killed} has no checkpoint of a job that was killed")]
        wrong, figures = [], Figures()
        with self._job("cpu_weights", f"--training_config.resume={last}", device="cpu") as job:
            _ended(job)
            figures["step"] = job.final()["step"]
            if job.final()["weights_sha256"] != _final(killed)["weights_sha256"]:
                wrong.append(f"the weights of {last.name} are not the bits that the device had")
        emergency, step = str(resumed[-1]["path"]), int(resumed[-1]["from_step"])
        until = min(step + ON_CPU_STEPS, self.steps)
        overrides = (f"--training_config.resume={emergency}", f"--training_config.training_iters={until}")
        with self._job("cpu_steps", *overrides, device="cpu") as job:
            _ended(job)
            here, there = by_step(job.metrics()), by_step(read_jsonl(killed / "metrics.jsonl"))
        steps = range(step + 1, until + 1)
        missing = [each for each in steps if each not in here]
        wrong += [f"steps {missing} were not trained"] if missing else []
        apart = [abs(here[each]["loss_value"] / there[each]["loss_value"] - 1) for each in steps if each in here]
        if apart:
            figures |= {"from_step": step, "steps": len(apart), "largest_difference_of_loss": f"{max(apart):.2g}"}
            wrong += [f"a loss differs by {max(apart):.1%}"] if max(apart) > CLOSE else []
        return [
            _judged(ON_CPU, wrong, "the same weights, and the same losses up to the rounding of other kernels", figures)
        ]

    # --- the time of a step ---

    def time_of_a_step(self) -> list[Check]:
        """With TTP and without, in turns. Measured, without a bound: what is a step's time here says little of a large model's."""
        times: dict[str, list[float]] = {"on": [], "off": []}
        for number in (1, 2):
            for how, environ in (("off", {"ENABLE_TTP": "False"}), ("on", {})):
                overrides = [f"--training_config.training_iters={TIMED_STEPS}"]
                if how == "off" and self.lone:
                    overrides.append("--training_config.copies=null")
                with self._job(f"{how}_{number}", *overrides, environ=environ) as job:
                    _ended(job)
                times[how].append(_step_ms(job.output_dir))
        on, off = times["on"], times["off"]
        figures: Figures = {
            "ratio": round(statistics.median(on) / statistics.median(off), 3),
            "spread": f"{min(on) / max(off):.3f} to {max(on) / min(off):.3f}",
            "on_ms": [round(each, 2) for each in on],
            "off_ms": [round(each, 2) for each in off],
        }
        return [Check(STEP_TIME, MEASURED, "medians of whole jobs", figures)]


def _judged(name: str, wrong: Sequence[str], good: str, figures: Figures) -> Check:
    return Check(name, FAILED if wrong else PASSED, "; ".join(wrong) if wrong else good, figures)


def _ended(job: TrainingJob) -> None:
    status = job.wait(JOB_S)
    if status != 0:
        raise JobError(f"the job ended with status {status}\n{job.console_tail()}")


def _final(folder: Path) -> Line:
    return read_jsonl(folder / "final.json")[0]


def _step_ms(folder: Path) -> float:
    """Return the median time of a step of the last attempt."""
    times = [float(line["time_ms"]) for line in read_jsonl(folder / "metrics.jsonl") if line.get("time_ms")]
    return statistics.median(times[min(_UNMEASURED, len(times) - 1) :])


def _to_new_step(metrics: Sequence[Line], killed_unix_s: float) -> float | None:
    """Return the milliseconds from a kill to the first step of the next attempt that none had done before."""
    done, resumed = 0, False
    for line in metrics:
        resumed |= line.get("event") == "resume" and float(line["unix_s"]) > killed_unix_s
        if "loss" not in line or line.get("recovered"):
            continue
        if resumed and int(line["step"]) > done:
            return 1e3 * (float(line["unix_s"]) - killed_unix_s)
        done = max(done, int(line["step"]))
    return None
