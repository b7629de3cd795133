"""What a simulated checkpoint holds, judged: its parts, their values, its step."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import cast

from tests.simulation.disk import File, Manifest
from tests.simulation.job import Job


def wrong_parts(job: Job, step: int, files: Iterable[File]) -> list[str]:
    """I3, I5: every part of every shard once, each with the value of a fault-free run."""
    found, parts = [], sorted(part for file in files for part in file.parts)
    for group in job.training.groups:
        mine = [part for part in parts if part[0] == group]
        count = mine[0][2] if mine else 1
        if [(index, of) for _, index, of, _ in mine] != [(index, count) for index in range(count)]:
            found.append(f"I5: step {step}, {group}: parts {[part[1:3] for part in mine]}, expected each once")
        expected = job.training.expected(group, step)
        wrong = job.comparing.wrong_part(group, step)
        if wrong and any(value != expected for _, _, _, value in mine):
            found.append(f"{wrong}: step {step}, {group}: its bytes are not those of a fault-free run")
    return found


def wrong_step(job: Job, path: str, step: int, committed: int) -> list[str]:
    """I6: the last committed step, or the one in flight; the former when a sound survivor proves it."""
    if step not in (committed - 1, committed):
        return [f"I6: step {step} was published, step {committed} was the last that was committed"]
    if step == committed or job.training.local_copy or _given_up_with_its_node(job, committed):
        return []
    for controller in job.controllers:
        reported = False
        for _, line in controller.journal:
            reported = reported or committed in cast(tuple[int, ...], line.fields.get("records", ()))
            if reported and line.fields.get("path") == path:
                return [f"I6: step {step} was published although a rank reported record {committed}"]
    return []


def _given_up_with_its_node(job: Job, step: int) -> bool:
    """Say whether only processes have come to a step, or have its record, whose nodes were given up before: the others have left it to make their
    groups again. One that had ended by then does not count where none of them had reported the record."""
    lost_s = {line.fields["lost"]: at for at, line in reversed(job.journal) if line.event == "take_places_sent"}
    first_s = min(lost_s.values(), default=inf)
    known = any(
        step in cast(tuple[int, ...], line.fields.get("records", ())) for at, line in job.journal if at <= first_s
    )
    everybody = (*job.ranks, *job.in_place.former)
    there = [p for p in everybody if p.gate.state_step >= step or any(one.step >= step for one in p.gate.records)]
    counted = [process for process in there if known or process.ended_s > first_s]
    return bool(counted) and all(f"host{process.node}" in lost_s for process in counted)


def wrong_record(job: Job, path: str, step: int, manifest: Manifest) -> list[str]:
    """I12: a restart takes the learning rates and the loss scale of the step from its record."""
    if manifest.record == job.training.record(step):
        return []
    record = "no record" if manifest.record is None else f"the record of step {manifest.record.step}"
    return [f"I12: {path} resumes with {record}, expected that of step {step}"]
