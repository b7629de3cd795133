"""A scenario from its baseline run to its verdicts: one run of the job under the schedule, or, in a soak, as many as fit.

Owns the folders of a campaign, the baseline run that other runs are compared with, and how those follow each other:

    OUTPUT/baseline/, OUTPUT/baseline.json     the run without a fault, and what of it is compared
    OUTPUT/run_0/, OUTPUT/run_1/, ...          the runs under faults
    OUTPUT/result.json, OUTPUT/report.html     what became of it all
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttp import files
from ttp.chaos.faults.scenario import FaultSpec, Moment, Scenario
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.nodes.namespaces import why_not
from ttp.chaos.observed.recorder import Record, ReportedStep
from ttp.chaos.observed.target import OUTPUT
from ttp.chaos.observed.training_job import JobError
from ttp.chaos.run.environment import staged
from ttp.chaos.run.harness import Harness, OnProgress, run_baseline
from ttp.chaos.verdict.fault_outcome import FaultOutcome
from ttp.chaos.verdict.invariants import Run, Verdict, judge
from ttp.chaos.verdict.tensors import compare_checkpoints
from ttp.checkpoint.find import list_checkpoints, step_of
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.input_file import read_json


@dataclass(frozen=True, slots=True)
class Soak:
    """Faults drawn from the scenario's list, at random moments, for a while."""

    duration_s: float
    faults_per_hour: float


MOST_BASELINE_BYTES = 1 << 30
_LEAVES_FILES = ("kill_agent", "lose_node")
"""After these no process remains that could remove its temporary files."""


@dataclass(slots=True)
class JobRun:
    number: int
    folder: Path
    run: Run
    verdicts: list[Verdict]
    lasted_s: float


@dataclass(slots=True)
class Campaign:
    """What a command has gone through."""

    scenario: Scenario
    command: Sequence[str]
    output: Path
    soak: Soak | None = None
    runs: list[JobRun] = field(default_factory=list)
    baseline: Record | None = None

    @property
    def incidents(self) -> list[FaultOutcome]:
        return [incident for one in self.runs for incident in one.run.incidents]


def run_campaign(
    scenario: Scenario,
    command: Sequence[str],
    output: Path,
    *,
    soak: Soak | None = None,
    baseline: Path | None = None,
    compare: bool = True,
    on_progress: OnProgress = lambda *_: None,
    patience: InterruptGuard | None = None,
) -> Iterator[Campaign]:
    """Run it all; yields the campaign after the baseline run and after every run under faults.

    baseline: the baseline.json of an earlier campaign of the same command. compare: whether a baseline run is made.
    Raises JobError (the job did not run, or not end), ConfigError (the command or the machine cannot do it).
    """
    if scenario.nodes and (reason := why_not()):
        raise ConfigError(
            f"scenario {scenario.name!r}: nodes: {scenario.nodes}: {reason}; leave nodes out, or run it elsewhere"
        )
    campaign = Campaign(scenario, list(command), output, soak)
    patience = patience or InterruptGuard()
    try:
        files.make_folder(output)
    except OSError as error:
        raise ConfigError(f"--output: got {output} ({error.strerror}), expected a folder that can be made") from None
    final: Path | None = None
    if compare and any(OUTPUT in word for word in command):
        campaign.baseline, final = _baseline(campaign, baseline, on_progress, patience)
    yield campaign
    rng = random.Random(scenario.seed)
    deadline = time.monotonic() + (soak.duration_s if soak else 0.0)
    while not campaign.runs or time.monotonic() < deadline:
        campaign.runs.append(_run_once(campaign, deadline, rng, final, on_progress, patience))
        yield campaign
        if campaign.runs[-1].run.status != 0:
            break  # a job that does not come back would not the next time either


def soaking(
    scenario: Scenario, soak: Soak, rng: random.Random, deadline: float, ended: Callable[[], bool]
) -> Iterator[FaultSpec]:
    """Yield random faults of the scenario, with random gaps, until the job has ended or the time is over; the job then goes to its end."""
    while not ended():
        gap_s = rng.expovariate(soak.faults_per_hour / 3600.0)
        if time.monotonic() + gap_s > deadline:
            return
        fault = rng.choice(scenario.faults)
        yield replace(fault, moment=Moment(after_s=(gap_s, gap_s)))


def _run_once(
    campaign: Campaign,
    deadline: float,
    rng: random.Random,
    final: Path | None,
    on_progress: OnProgress,
    patience: InterruptGuard,
) -> JobRun:
    number, began = len(campaign.runs), time.monotonic()
    folder = campaign.output / f"run_{number}"
    scenario = campaign.scenario
    with staged(campaign.command, folder, scenario, patience) as (target, control):
        harness = Harness(target, control, scenario, rng, on_progress)
        soak, ended = campaign.soak, lambda: target.ended() is not None
        schedule = soaking(scenario, soak, rng, deadline, ended) if soak else iter(scenario.faults)
        status = harness.run(schedule, number)
        record = harness.record
        if not record.hellos:
            raise JobError(
                f"no rank called ttp.start in run {number} (the command ended with status {status}): faults and verdicts need it;"
                f" see docs/your_trainer.md\n{target.console_tail()}"
            )
        leftovers = target.leftovers()
        differences = None if final is None else compared(list_checkpoints(record.save_dirs), final)
        killed = any(firing.kind in _LEAVES_FILES for one in harness.incidents for firing in one.firings)
        litter = [*_litter(record), *(target.litter() if not killed else ())]
        run = Run(
            record, harness.incidents, status, leftovers, litter, campaign.baseline, differences, scenario.growth_mib
        )
    return JobRun(number, folder, run, judge(run), time.monotonic() - began)


def _newest(record: Record) -> Path | None:
    return next(iter(list_checkpoints(record.save_dirs)), None)


def compared(found: Sequence[Path], final: Path) -> list[str] | None:
    """Return the differences of a run's checkpoints (newest first) from the baseline run's newest; None: none of them has a counterpart."""
    if not found:
        return [f"the run has no checkpoint at its end, the baseline run's newest is {final.name}"]
    mine = comparable(found, final)
    return None if mine is None else compare_checkpoints(mine, final)


def comparable(found: Sequence[Path], final: Path) -> Path | None:
    """Return which of a run's checkpoints (newest first) to compare with the baseline run's newest: that of its step, else the newest
    if it is older, for then one is missing. A newer one, of a fault behind a trainer's last periodic save, has no counterpart."""
    same = next((path for path in found if path.name == final.name), None)
    return same or next((path for path in found[:1] if step_of(path) < step_of(final)), None)


def _litter(record: Record) -> list[str]:
    """Return what should have been temporary: staging directories that no process will finish."""
    return sorted(str(path) for directory in record.save_dirs for path in Path(directory).glob("*_tmp*"))


# --- the baseline run ---


def _baseline(
    campaign: Campaign, given: Path | None, on_progress: OnProgress, patience: InterruptGuard
) -> tuple[Record, Path | None]:
    if given is not None:
        return read_baseline(given)
    record = run_baseline(campaign.command, campaign.output / "baseline", campaign.scenario, on_progress, patience)
    final = _newest(record)
    write_baseline(campaign.output / "baseline.json", record, final)
    return record, final


def write_baseline(path: Path, record: Record, final: Path | None) -> None:
    """Keep what runs are compared with."""
    steps = {reported.step: [reported.grad_norm, list(reported.sums)] for reported in record.steps}
    content = {"world_size": record.world_size, "steps": steps, "final": str(final) if final else None}
    path.write_text(json.dumps(content), encoding="utf-8")


def _reported(step: str, reported: object) -> ReportedStep:
    """Return what a step reported. Raises ValueError."""
    if type(reported) is not list or len(reported) != 2 or not (step.isascii() and step.isdigit()):
        raise checked.Invalid(f"steps.{step}", reported, "a norm and a list of sums")
    sums = tuple(checked.string(*each) for each in checked.items(reported[1], f"steps.{step}[1]"))
    norm = checked.string(reported[0], f"steps.{step}[0]")
    for number in (norm, *sums):
        float.fromhex(number)
    return ReportedStep(int(step), 0.0, 0, (0, 0), norm, sums)


def read_baseline(path: Path) -> tuple[Record, Path | None]:
    """Raises ConfigError: that is not what `write_baseline` wrote."""
    try:
        content = checked.mapping(read_json(path, MOST_BASELINE_BYTES), "content")
        steps = [_reported(*step) for step in checked.mapping(*checked.field(content, "steps", "")).items()]
        named, at = checked.field(content, "final", "")
        final = Path(checked.string(named, at)) if named else None
        world_size = checked.integer(*checked.field(content, "world_size", ""), 1)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--baseline: got {path}, expected the baseline.json of a campaign of the same command ({' '.join(str(error).split())})"
        ) from None
    newest = max((reported.step for reported in steps), default=0)
    record = Record(world_size=world_size, steps=steps, newest_step=newest)
    return record, final if final is not None and os.path.isdir(final) else None
