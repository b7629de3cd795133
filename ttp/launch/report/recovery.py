"""Faults from which an attempt has recovered without a restart: the controller's `incident` event, and whose process was replaced.

Owns how they are found and worded. Pure: journal lines in, reports and lines of text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ttp.launch.report.incident import Report, completed, is_recovery, report_fields
from ttp.launch.report.journals import Line, leading_lines
from ttp.launch.report.render import NAMED, fault_lines
from ttp.proto.incident import read_incident
from ttp.text.wording import ranks_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One such fault."""

    report: Report
    step: int
    """All ranks had finished it, and hold its state."""
    replaced: Mapping[int, int]
    """Rank -> its process from then on, of those that have another one; 0: not known."""
    seated: Mapping[str, str]
    """Spare node -> the lost one whose place it has from then on."""


def recoveries(start: int, lines: Sequence[Line]) -> list[Recovery]:
    """Return those of an attempt, in order, from its controllers' journals."""
    found: list[Recovery] = []
    since: list[Line] = []
    for line in leading_lines(lines):
        since.append(line)
        if is_recovery(line):
            found.append(_recovery(start, since))
            since = []
    return found


def _recovery(start: int, lines: Sequence[Line]) -> Recovery:
    """`lines`: from the end of the fault before to the incident, which is the last one."""
    incident = read_incident(lines[-1]["fields"])
    regrouped = next(line["fields"] for line in reversed(lines) if line["event"] == "regrouped")
    named = {line["fields"]["rank"]: line["fields"]["text"] for line in lines if line["event"] == "death_named"}
    came = {line["fields"]["rank"]: line["fields"]["pid"] for line in lines if line["event"] == "replacement_came"}
    culprits = tuple(completed(each, incident.suspected, {}, named, {}, None) for each in incident.culprits)
    began_unix_s = float(lines[-1]["unix_s"]) - (incident.took_ms or {}).get("total", 0.0) / 1e3
    report = Report(start=start, began_unix_s=began_unix_s, incident=replace(incident, culprits=culprits))
    replaced = {rank: came.get(rank, 0) for rank in regrouped["replaced"]}
    sent = [line["fields"] for line in lines if line["event"] == "take_places_sent"]
    seated = {each["host"]: each["lost"] for each in sent if each["freeze_id"] == regrouped["freeze_id"]}
    return Recovery(report=report, step=regrouped["step"], replaced=replaced, seated=seated)


def recovery_fields(recovery: Recovery) -> dict[str, Any]:
    """Return it as the fields of a `recovered` line of `story.jsonl`: those of a `fault` line, `step`, `replaced` and `seated`."""
    replaced = {str(rank): pid for rank, pid in recovery.replaced.items()}
    fields = {"step": recovery.step, "replaced": replaced, "seated": dict(recovery.seated)}
    return {**report_fields(recovery.report), **fields}


def recovery_lines(recovery: Recovery) -> list[str]:
    """Return it as labelled lines, under a heading."""
    incident = recovery.report.incident
    if incident.saved is None:
        incident = replace(incident, not_saved=f"not needed: all ranks hold step {recovery.step}")
    seated = "".join(f"; {spare}, a spare, has the place of {lost}" for spare, lost in recovery.seated.items())
    following = (
        f"no restart: training continues with step {recovery.step + 1}{_replaced_text(recovery.replaced)}{seated}"
    )
    known = replace(recovery.report, incident=incident, next=following)
    heading, *lines = fault_lines(known)
    return [heading.replace("--- fault", "--- recovered fault", 1), *lines]


def _replaced_text(replaced: Mapping[int, int]) -> str:
    if not replaced:
        return "; every rank kept its process"
    pids = [str(pid) for pid in replaced.values() if pid]
    more = ", ..." if len(pids) > NAMED else ""
    processes = f" (pid{'s' if len(pids) > 1 else ''} {', '.join(pids[:NAMED])}{more})" if pids else ""
    return f"; {ranks_text(replaced)} in {'other processes' if len(replaced) > 1 else 'another process'}{processes}"
