"""The report's pictures, as SVG text: loss curves with the faults in them, memory, time lines, and how long each stage took.

Needs matplotlib (the extra `chaos`); draws, and writes no file.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ttp.chaos.observed.leaks import MIB
from ttp.chaos.verdict.fault_outcome import STAGE_WORDS, STAGES, named

Values = Mapping[str, Any]
COLOURS = {
    "seen": "#d1495b", "frozen": "#edae49", "decided": "#f4d35e", "regrouped": "#00798c", "written": "#66a182", "published": "#2e4057",
    "resumed": "#8d96a3", "first_new_step": "#c5cad3",
}  # fmt: skip
LEAST_MS = 1.0
SHOWN_LINES = 60
"""Time lines in one picture; the slowest of more."""
SHOWN_RUNS = 6
"""Runs whose memory is drawn: the first one (the baseline run, where there is one), those that leak, and the last ones."""
SHOWN_RANKS = 16
"""More ranks are drawn without their names."""


def loss_curves(curves: Sequence[Values], incidents: Sequence[Values]) -> str:
    """Draw every run's curve; a line where a fault came, with its number."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        if curve["points"]:
            steps, values = zip(*curve["points"], strict=True)
            whole = curve["name"] in ("baseline", "unbroken")  # once it was the second
            axes.plot(
                steps, values, label=curve["name"], linewidth=4.5 if whole else 1.3, color="#c5cad3" if whole else None
            )
    for incident in incidents:
        if incident["firings"]:
            good = incident["outcome"] in incident["expected"]
            axes.axvline(incident["committed"], color="#2e4057" if good else "#d1495b", linewidth=0.8, alpha=0.7)
            label = f"{incident['number']}" + "\n" * (incident["number"] % 3)  # neighbours at different heights
            axes.annotate(
                label,
                (incident["committed"], 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=7,
                va="bottom",
                ha="center",
            )
    name = next((curve["value_name"] for curve in curves), "loss")
    axes.set(xlabel="step", ylabel=name)
    if curves:
        axes.legend(fontsize=8)
    return _svg(figure)


def time_lines(incidents: Sequence[Values]) -> str:
    """Draw one bar a fault, from the first injection to the first new step, parted by its stages; the axis is logarithmic, as
    a dump takes a tenth of a second and a restart a hundred times as long."""
    from matplotlib.figure import Figure

    rows = [incident for incident in incidents if incident["stages_ms"]]
    rows = sorted(rows, key=lambda row: -max(row["stages_ms"].values()))[:SHOWN_LINES]
    rows.sort(key=lambda row: (row["lap"], row["number"]), reverse=True)
    figure = Figure(figsize=(11, 1.2 + 0.26 * max(4, len(rows))), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        began = LEAST_MS
        for stage in STAGES:
            if stage in row["stages_ms"]:
                ended = max(began, row["stages_ms"][stage])
                axes.barh(place, ended - began, left=began, color=COLOURS[stage], height=0.7)
                began = ended
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.set(xlabel="milliseconds since the fault; each colour ends where the stage was reached")
    handles = [_patch(COLOURS[stage]) for stage in STAGES]
    labels = [STAGE_WORDS[stage] for stage in STAGES]
    figure.legend(handles, labels, fontsize=7, loc="outside upper center", ncols=len(STAGES))
    return _svg(figure)


def stage_histograms(incidents: Sequence[Values]) -> str:
    """Draw, for each stage, how long after the fault it was reached."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    places = figure.subplots(2, 4).flatten()
    for place, stage in zip(places, STAGES, strict=False):
        values = stage_values(incidents, stage)
        if values:
            place.hist(
                values, bins=min(30, max(5, len(values) // 2)), color=COLOURS[stage], edgecolor="#2e4057", linewidth=0.4
            )
            place.axvline(statistics.median(values), color="#2e4057", linewidth=1)
            place.set_title(
                f"{STAGE_WORDS[stage]}\nmedian {statistics.median(values):,.0f} ms of {len(values)}", fontsize=8
            )
        else:
            place.set_title(f"{STAGE_WORDS[stage]}\nnone", fontsize=8)
        place.set_xlabel("ms since the fault", fontsize=7)
        place.tick_params(labelsize=7)
    for place in places[len(STAGES) :]:
        place.set_axis_off()
    return _svg(figure)


def memory_curves(entries: Sequence[Values], incidents: Sequence[Values], limit_mib: float) -> str:
    """Draw what every rank held over time, a picture a run: a line for each process, so that a restart begins a new one; a
    thin upright line where a fault came, with its number."""
    from matplotlib.figure import Figure

    runs = [name for name in dict.fromkeys(entry["run"] for entry in entries) if _points(entries, name)]
    leaks = dict.fromkeys(entry["run"] for entry in entries if (entry["growth_mib"] or 0.0) > limit_mib)
    expected = list(dict.fromkeys([*runs[:1], *leaks, *runs[::-1]]))[:SHOWN_RUNS]
    shown = [name for name in runs if name in expected]
    if not shown:
        return "<p>No rank was seen for long enough.</p>"
    figure = Figure(figsize=(11, 0.6 + 2.6 * len(shown)), layout="constrained")
    for axes, name in zip(figure.subplots(len(shown), squeeze=False).flatten(), shown, strict=True):
        began = min(point[0] for point in _points(entries, name))
        named_ranks: set[int] = set()
        for entry in sorted(entries, key=lambda entry: int(entry["rank"])):
            if entry["run"] == name and entry["points"]:
                moments, _, sizes = zip(*entry["points"], strict=True)
                label = f"rank {entry['rank']}" if entry["rank"] not in named_ranks else None
                named_ranks.add(entry["rank"])
                axes.plot(
                    [moment - began for moment in moments],
                    [size / MIB for size in sizes],
                    color=f"C{entry['rank'] % 10}", label=label, linewidth=1.2, marker=".", markersize=2.5,
                )  # fmt: skip
        for incident in incidents:
            if incident["firings"] and name == f"run {incident['lap']}":
                moment = incident["firings"][0]["unix_s"] - began
                axes.axvline(moment, color="#2e4057", linewidth=0.8, alpha=0.5)
                axes.annotate(str(incident["number"]), (moment, 1.0), xycoords=("data", "axes fraction"), fontsize=7, ha="center")  # fmt: skip
        axes.set_title(name, fontsize=9, loc="left", pad=10)
        axes.set(xlabel="seconds", ylabel="MiB")
        if len(named_ranks) <= SHOWN_RANKS:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure)


def _points(entries: Sequence[Values], name: str) -> list[Sequence[float]]:
    return [point for entry in entries if entry["run"] == name for point in entry["points"]]


def stage_values(incidents: Sequence[Values], stage: str) -> list[float]:
    """Return the milliseconds to a stage, of every fault that came to it."""
    return sorted(float(incident["stages_ms"][stage]) for incident in incidents if stage in incident["stages_ms"])


def _label(incident: Values) -> str:
    """Return the fault's number, what it was and whom its first injection hit."""
    text = named(incident["text"], incident["firings"][0]["whom"]) if incident["firings"] else incident["text"]
    return f"{incident['number']}: {text[:52]}"


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    return text[text.index("<svg") :]
