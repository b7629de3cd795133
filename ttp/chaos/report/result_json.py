"""A campaign as JSON: all that the report shows, so that it can be drawn again from the file alone.

name, command, seed, laps, faults, fired, good          the whole
not_reached, incomplete                                 how many faults did not happen, or with fewer injections than were meant
incidents[]: number, lap, text, label, firings[], outcome, expected, committed, saved_step, resumed_step, lost,
             refused, stages_ms{}, problems[]           each fault
findings[]                                              what was to end in place and did not, with the reason
verdicts[]: lap, name, state, text                      each claim of each run; laps, lap: the runs, the number of one
curves[]: name, points[[step, value]], value_name       each run's loss (or grad norm, where no loss is reported)
memory[]: run, launch, start, rank, pid, points[[unix_s, step, bytes]], growth_mib
                                                        each rank of each attempt; growth in 1,000 steps, null: too short to tell
growth_mib                                              the limit of growth
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ttp.chaos.observed.leaks import growth_of
from ttp.chaos.observed.recorder import Record
from ttp.chaos.run.campaign import Campaign
from ttp.chaos.verdict.fault_outcome import NOT_REACHED, FaultOutcome
from ttp.chaos.verdict.in_place import finding
from ttp.chaos.verdict.invariants import VIOLATED, fault_stretches

CURVE_POINTS = 2000
"""A longer curve is thinned out."""
MEMORY_POINTS = 20_000
"""The same for what all ranks of a run held."""
Result = Mapping[str, Any]


def result_of(campaign: Campaign) -> dict[str, Any]:
    """Return the campaign as plain values."""
    incidents = [{"lap": fields.pop("run"), **fields} for fields in map(asdict, campaign.incidents)]
    verdicts = [{"lap": one.number, **asdict(verdict)} for one in campaign.runs for verdict in one.verdicts]
    violated = [verdict for verdict in verdicts if verdict["state"] == VIOLATED]
    skipped = sum(incident["outcome"] == NOT_REACHED for incident in incidents)
    curves = [] if campaign.baseline is None else [_curve("baseline", campaign.baseline)]
    curves += [_curve(f"run {one.number}", one.run.record) for one in campaign.runs]
    memory = [] if campaign.baseline is None else _memory("baseline", campaign.baseline, ())
    memory += [
        entry for one in campaign.runs for entry in _memory(f"run {one.number}", one.run.record, one.run.incidents)
    ]
    return {
        "made_unix_s": time.time(),
        "name": campaign.scenario.name,
        "command": list(campaign.command),
        "seed": campaign.scenario.seed,
        "soak": asdict(campaign.soak) if campaign.soak else None,
        "laps": [{"number": one.number, "status": one.run.status, "lasted_s": one.lasted_s} for one in campaign.runs],
        "faults": len(incidents),
        "fired": sum(len(incident["firings"]) for incident in incidents),
        "not_reached": skipped,
        "incomplete": sum(not incident.complete for incident in campaign.incidents) - skipped,
        "good": bool(campaign.runs) and not violated,
        "incidents": incidents,
        "findings": [text for text in map(finding, campaign.incidents) if text],
        "verdicts": verdicts,
        "curves": curves,
        "memory": memory,
        "growth_mib": campaign.scenario.growth_mib,
    }


def write_result(campaign: Campaign) -> dict[str, Any]:
    """Write OUTPUT/result.json and return its content."""
    content = result_of(campaign)
    (campaign.output / "result.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return content


def _curve(name: str, record: Record) -> dict[str, Any]:
    """Return one value a step: the first of the sums that ride on the spanning collective (the trainer's loss), else the norm."""
    with_sums = any(reported.sums for reported in record.steps)
    values = {}
    for reported in sorted(record.steps, key=lambda reported: reported.step):
        value = (
            float.fromhex(reported.sums[0]) / max(1, record.world_size)
            if reported.sums
            else float.fromhex(reported.grad_norm)
        )
        if math.isfinite(value):
            values[reported.step] = value
    every = max(1, math.ceil(len(values) / CURVE_POINTS))
    points = [[step, value] for place, (step, value) in enumerate(values.items()) if place % every == 0]
    return {"name": name, "value_name": "loss" if with_sums else "grad norm", "points": points}


def _memory(name: str, record: Record, incidents: Sequence[FaultOutcome]) -> list[dict[str, Any]]:
    """Return what each rank of each attempt held."""
    faulted = fault_stretches(incidents)
    every = max(1, math.ceil(sum(len(curve.samples) for curve in record.curves()) / MEMORY_POINTS))
    entries = []
    for curve in record.curves():
        key, rank = curve.key, curve.rank
        growth = growth_of(curve, faulted)
        points = [[round(one.unix_s, 2), one.step, one.nbytes] for one in curve.samples[::every]]
        entry = {"run": name, "launch": key[0], "start": key[1], "rank": rank, "pid": curve.pid, "points": points}
        entries.append({**entry, "growth_mib": None if growth is None else growth.mib})
    return entries
