"""The report of a campaign: one HTML file with everything in it, no script, nothing that is loaded from elsewhere."""

from __future__ import annotations

import datetime
import html
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttp.chaos.report.plots import loss_curves, memory_curves, stage_histograms, stage_values, time_lines
from ttp.chaos.verdict.fault_outcome import STAGE_WORDS, STAGES
from ttp.chaos.verdict.invariants import HELD, VIOLATED

Values = Mapping[str, Any]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; } h2 { margin-top: 2em; border-bottom: 1px solid #d5dae1; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid #e6e9ee; vertical-align: top; }
table.claims td:nth-child(-n+3) { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: #1b7f4b; } .bad { color: #b3261e; font-weight: 600; } .open { color: #946200; }
.banner { padding: .6em 1em; border-radius: 6px; font-size: 18px; } .banner.good { background: #e3f5ea; }
.banner.bad { background: #fde7e5; } code { background: #f3f5f7; padding: 0 .3em; word-break: break-all; }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""


def write_report(content: Values, path: Path) -> Path:
    """Write the report of a result (`result_json.py`); return its path."""
    path.write_text(page(content), encoding="utf-8")
    return path


def page(content: Values) -> str:
    """Return the whole page."""
    incidents: Sequence[Values] = content["incidents"]
    body = [
        _head(content),
        "<h2>Verdicts</h2>",
        _verdicts(content["verdicts"]),
        "<h2>Faults by kind</h2>",
        _kinds(incidents),
        "<h2>Curves</h2><p>Each line is a fault, numbered as below; it is at the last step that was finished before.</p>",
        *_pictures(content),
        "<h2>Faults</h2>",
        _faults(incidents),
    ]
    title = html.escape(str(content["name"]))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>chaos: {title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _pictures(content: Values) -> list[str]:
    incidents = content["incidents"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return ["<p>No pictures: matplotlib is not installed (pip install 'try-to-persist[plots]').</p>"]
    return [
        loss_curves(content["curves"], incidents),
        *_memory(content),
        "<h2>Time lines</h2>",
        time_lines(incidents),
        "<h2>How long each stage took</h2>",
        _stages(incidents),
        stage_histograms(incidents),
    ]


def _memory(content: Values) -> list[str]:
    if "memory" not in content:  # an older result
        return []
    judged = [entry["growth_mib"] for entry in content["memory"] if entry["growth_mib"] is not None]
    sentence = f"{len(judged)} of {len(content['memory'])} curves of a rank in an attempt are long enough to be judged"
    sentence += f"; the most grows by {max(judged):,.1f} MiB in 1,000 steps" if judged else ""
    return [
        "<h2>Memory of the ranks</h2>",
        f"<p>What each process held for itself, without pages of files. {sentence}; limit {content['growth_mib']:g} MiB.</p>",
        memory_curves(content["memory"], content["incidents"], content["growth_mib"]),
    ]


def _head(content: Values) -> str:
    made = datetime.datetime.fromtimestamp(content["made_unix_s"]).astimezone().isoformat(" ", "minutes")
    good = content["good"]
    injections, skipped = content["fired"], content["not_reached"]
    sentence = f"{'Held' if good else 'Violated'}: {content['faults']} faults, {injections} injections, {len(content['laps'])} runs"
    sentence += f"; {skipped} did not happen" if skipped else ""
    soak = content["soak"]
    mode = f"; soak of {soak['duration_s']:,.0f} s at {soak['faults_per_hour']:g} faults an hour" if soak else ""
    return (
        f"<h1>{html.escape(str(content['name']))}</h1><p>{made}; seed {content['seed']}{mode}</p>"
        f'<p class="banner {"good" if good else "bad"}">{html.escape(sentence)}</p>'
        f"<p><code>{html.escape(shlex.join(content['command']))}</code></p>"
    )


def _verdicts(verdicts: Sequence[Values]) -> str:
    """Return each claim once: what was seen in the last run, or every run in which it was violated."""
    rows = []
    for name in dict.fromkeys(verdict["name"] for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict["name"] == name]
        wrong = [verdict for verdict in mine if verdict["state"] == VIOLATED]
        for verdict in wrong or mine[-1:]:
            count = sum(one["state"] == verdict["state"] for one in mine)
            colour = {HELD: "good", VIOLATED: "bad"}.get(verdict["state"], "open")
            runs = f"run {verdict['lap']}" if wrong else f"{count} of {len(mine)}"
            rows.append([name, _span(colour, verdict["state"]), runs, html.escape(verdict["text"])])
    return _table(["claim", "", "runs", "what was seen"], rows, name="claims")


def _kinds(incidents: Sequence[Values]) -> str:
    by_kind: dict[str, list[Values]] = {}
    for incident in incidents:
        by_kind.setdefault(incident["text"].split()[0].rstrip(","), []).append(incident)
    rows = []
    for kind, mine in sorted(by_kind.items()):
        outcomes = Counter(incident["outcome"] for incident in mine)
        wrong = [i for i in mine if i["firings"] and i["outcome"] not in i["expected"]]
        again = stage_values(mine, "first_new_step")
        rows.append(
            [
                html.escape(kind),
                str(len(mine)),
                html.escape(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())),
                _span("bad", str(len(wrong))) if wrong else "0",
                str(sum(incident["lost"] or 0 for incident in mine)),
                f"{statistics.median(again):,.0f} ms" if again else "-",
            ]
        )
    head = ["fault", "times", "what became of it", "unexpected", "steps lost", "median to the first new step"]
    return _table(head, rows, {1, 3, 4, 5})


def _stages(incidents: Sequence[Values]) -> str:
    rows = []
    for stage in STAGES:
        values = stage_values(incidents, stage)
        if values:
            cells = (values[0], statistics.median(values), values[int(0.99 * (len(values) - 1))], values[-1])
            rows.append([STAGE_WORDS[stage], str(len(values)), *(f"{value:,.0f}" for value in cells)])
    return _table(
        ["stage, ms since the fault", "faults", "least", "median", "99 of 100", "most"], rows, {1, 2, 3, 4, 5}
    )


def _faults(incidents: Sequence[Values]) -> str:
    rows = []
    for incident in incidents:
        good = incident["outcome"] in incident["expected"]
        injections = "; ".join(
            f"{one['kind']}: {one['whom']}" + (f" at {one['point']} of step {one['step']}" if one["point"] else "")
            for one in incident["firings"]
        )
        notes = "; ".join([*incident["problems"], *([incident["refused"]] if incident["refused"] else [])])
        rows.append(
            [
                str(incident["number"]),
                str(incident["lap"]),
                html.escape(incident["text"]),
                html.escape(injections),
                _span("good" if good else "bad" if incident["firings"] else "open", incident["outcome"]),
                _or_dash(incident["committed"]),
                _or_dash(incident["saved_step"]),
                _or_dash(incident["lost"]),
                *(_or_dash(incident["stages_ms"].get(stage)) for stage in ("seen", "published", "first_new_step")),
                html.escape(notes),
            ]
        )
    head = ["", "run", "fault", "what was done", "outcome", "finished before", "saved", "lost", "seen ms", "published ms", "new step ms", "notes"]  # fmt: skip
    return f'<div class="scroll">{_table(head, rows, {0, 1, 5, 6, 7, 8, 9, 10})}</div>'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), name: str = "") -> str:
    right = set(numbers)
    lines = ["".join(f'<th class="n">{n}</th>' if i in right else f"<th>{n}</th>" for i, n in enumerate(head))]
    for row in rows:
        lines.append("".join(f'<td class="n">{c}</td>' if i in right else f"<td>{c}</td>" for i, c in enumerate(row)))
    return f'<table class="{name}">' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _span(colour: str, text: str) -> str:
    return f'<span class="{colour}">{html.escape(text)}</span>'


def _or_dash(value: float | int | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
