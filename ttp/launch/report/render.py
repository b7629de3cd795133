"""What an operator reads: the table of an attempt, and a fault in a few labelled lines.

Pure: facts in, lines out. Where they go is the reporter's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ttp.launch.report.incident import Report
from ttp.proto.incident import STAGES, Culprit, Incident
from ttp.text.wording import counted, ranks_text, size_text

NAMED = 8
_QUOTED = 4
"""Suspects of a hang whose frames are quoted; the others' are in the file of stacks."""
_LABEL = 8
"""Columns of the labels."""

_KINDS = {
    "exited": "a process exited",
    "silent": "a rank fell silent",
    "exception": "an exception",
    "hung": "a hang",
    "diverged": "replicas that differ",
    "preempted": "a preemption notice",
    "agent_lost": "an agent was lost",
    "controller_lost": "the controllers were lost",
    "peer_error": "a failed collective, root cause unknown",
    "unled": "workers failed",
    "elsewhere": "another node failed",
}


def labelled(found: Iterable[tuple[str, str]]) -> list[str]:
    """Lay out labels and texts; a label without a text is omitted."""
    return [f"{label:<{_LABEL}}{text}" for label, text in found if text]


def attempt_table(rows: Sequence[Mapping[str, Any]], pids: Mapping[str, int]) -> Table:
    """Lay out which shards are stored where: a row for each rank, or for each node of a large job."""
    by_rank = any(row["shards"] for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        ("rank", "node", "pid", "holds", "also on") if by_rank else ("ranks", "node", "their shards also on")
    ):
        table.add_column(heading, overflow="fold")
    for row in rows:
        cells = [row["ranks"], row["host"]]
        cells += [str(pids.get(row["ranks"], "")), "; ".join(row["shards"])] if by_rank else []
        table.add_row(*(Text(cell) for cell in (*cells, "; ".join(row["also_on"]))))
    return table


def fault_lines(report: Report) -> list[str]:
    """Return a fault as labelled lines, under a heading."""
    incident = report.incident
    culprits = incident.culprits
    found = [
        ("who", "another node" if report.elsewhere else _who(culprits)),
        ("cause", report.elsewhere or _grouped(culprits, (culprit.cause for culprit in culprits))),
        *(("", text) for culprit in culprits[:1] for text in culprit.trace[:-1]),
        ("where", _where(incident)),
        *(("" if place else "stood", text) for place, text in enumerate(_stood(report))),
        ("saved", _saved(incident, report.copied and report.next.startswith("restart"))),
        ("took", _took(incident.took_ms or {}, incident.took_over)),
        ("next", _next(report)),
    ]
    heading = f"--- fault in attempt {report.start}: {_KINDS.get(incident.kind, incident.kind)} ---"
    return [heading, *labelled(found)]


def _who(culprits: Sequence[Culprit]) -> str:
    """`rank 2 on node a (pid 71); ranks 4-5 on node b (pids 80, 81)`."""
    nodes: dict[str, list[Culprit]] = {}
    for culprit in culprits:
        nodes.setdefault(culprit.host, []).append(culprit)
    return "; ".join(_on_node(host, group) for host, group in nodes.items()) or "no rank is known to be at fault"


def _on_node(host: str, group: Sequence[Culprit]) -> str:
    pids = [str(culprit.pid) for culprit in group if culprit.pid]
    more = ", ..." if len(pids) > NAMED else ""
    processes = f" (pid{'s' if len(pids) > 1 else ''} {', '.join(pids[:NAMED])}{more})" if pids else ""
    return f"{ranks_text(culprit.rank for culprit in group)}{f' on node {host}' if host else ''}{processes}"


def _grouped(culprits: Iterable[Culprit], texts: Iterable[str]) -> str:
    """`signal SIGKILL`, or where they differ `rank 0: signal SIGKILL; rank 2: exit code 1`."""
    groups: dict[str, list[int]] = {}
    for culprit, text in zip(culprits, texts, strict=True):
        if text:
            groups.setdefault(text, []).append(culprit.rank)
    if len(groups) == 1:
        return next(iter(groups))
    named = [f"{ranks_text(ranks)}: {text}" for text, ranks in list(groups.items())[:NAMED]]
    return "; ".join(named) + ("; ..." if len(groups) > NAMED else "")


def _where(incident: Incident) -> str:
    """Return where the culprits were, and where the others were when they were frozen."""
    alone = len(incident.culprits) == 1
    own = _grouped(incident.culprits, (_place(culprit, alone) for culprit in incident.culprits))
    others = "; ".join(f"{ranks_text(p.ranks)} in {p.phase} of step {p.step}" for p in incident.survivors[:NAMED])
    return "; the others: ".join(text for text in (own or "not known", others) if text) if own or others else ""


def _place(culprit: Culprit, alone: bool) -> str:
    """Return where a rank was: by its own report, or by its last heartbeat. `alone`: also that heartbeat's age, which differs from rank to
    rank."""
    if not culprit.phase:
        return ""
    place = f"{culprit.phase} of step {culprit.step}"
    if culprit.reported:
        return f"in {place}"
    age = f", {culprit.heard_s:.1f} s before" if alone and culprit.heard_s is not None else ""
    if culprit.reached:
        return f"in READY of step {culprit.reached} or later (last heartbeat{age}: {place})"
    return f"last heartbeat{age}: {place}"


def _stood(report: Report) -> list[str]:
    frames = [(culprit.rank, report.stood.get(culprit.rank, ())) for culprit in report.incident.culprits]
    lines = [
        f"rank {rank} {frame}" if place == 0 else f"    called {frame}"
        for rank, stood in [each for each in frames if each[1]][:_QUOTED]
        for place, frame in enumerate(stood)
    ]
    silent = [rank for rank, stood in frames if not stood and report.incident.kind == "hung"]
    if silent:
        lines.append(f"{ranks_text(silent)}: no stacks were found on this node")
    return [*lines, f"all stacks, suspects first: {report.stacks}"] if report.stacks else lines


def _saved(incident: Incident, copied: bool) -> str:
    """`copied`: copies in memory may have later steps than the newest checkpoint; they are looked at when the ranks have ended."""
    lost = ""
    if incident.steps_lost is not None:
        lost = f"; {counted(incident.steps_lost, 'step')} lost" if incident.steps_lost else "; no step lost"
        lost += ", unless copies in memory have them" if incident.steps_lost and copied else ""
    if (saved := incident.saved) is not None:
        written = f"{size_text(saved.bytes)}, written by {ranks_text(saved.ranks)}"
        return f"step {saved.step} in {saved.path} ({written}){lost}"
    by_itself = incident.not_saved.startswith("not ")
    return f"{'' if by_itself else 'nothing: '}{incident.not_saved}{lost}"


def _took(took_ms: Mapping[str, float], took_over: int) -> str:
    parts = ", ".join(f"{stage} {took_ms[stage]:,.0f} ms" for stage in STAGES if stage in took_ms)
    by = f"; standby {took_over} took over from the controller" if took_over else ""
    return f"{parts}; {took_ms['total']:,.0f} ms in all{by}" if parts else ""


def _next(report: Report) -> str:
    if not report.next.startswith("restart"):
        return report.next
    restart, semicolon, condition = report.next.partition("; ")
    source = report.incident.goes_on_from or "the newest valid checkpoint that is found"
    return f"{restart}, from {source}{semicolon}{condition}"
