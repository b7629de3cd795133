"""What the trials found, as rows, tables and a picture.

Owns the arithmetic over trials and the generated part of docs/comparison.md; takes the values of the JSON file, so that a report can be made
from one. Needs matplotlib (the extra `plots`) for the picture only.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.steps import spread
from benchmarks.peers.systems import SYSTEMS
from benchmarks.peers.trial import AWAY_S, REFILL_S

PART = re.compile(r"(<!-- peers -->\n).*?(<!-- end -->)", re.DOTALL)
OTHERS, RANK_0 = "others", "0"
COLOURS = {OTHERS: "#2e4057", RANK_0: "#d1495b"}

Values = Mapping[str, Any]


def kills_of(found: Values, system: str, victim: str) -> list[Values]:
    """Return the kills of all jobs of a system, of rank 0 or of others, in order."""
    jobs = [job for job in found["jobs"] if job["system"] == system and job["victim"] == victim]
    return [kill for job in jobs for kill in job["kills"]]


def figures(kills: Sequence[Values], name: str) -> list[float]:
    return [kill["recovery"][name] for kill in kills if kill["recovery"][name] is not None]


def survived(kills: Sequence[Values]) -> str:
    """Say after how many kills a new step was finished."""
    return f"{len(figures(kills, 'new_s'))} of {len(kills)}" if kills else "-"


def kept(kills: Sequence[Values]) -> str:
    """Say after how many kills the other ranks had the processes that they had before; a run of an earlier version does not know."""
    known = [kill["stayed"] for kill in kills if kill.get("stayed") is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def cell(values: Sequence[float], form: str = ".2f") -> str:
    """Write median and range."""
    if not (found := spread(values)):
        return "never"
    median, least, most = (format(value, form) for value in found)
    return f"{median} ({least}-{most})"


def job_step_times(found: Values, system: str, ranks: int) -> tuple[list[float], list[float]]:
    """Return the median and the mean step time of each job, in milliseconds."""
    jobs = [
        job["step_s"] for job in found["jobs"] if job["system"] == system and job["ranks"] == ranks and job["step_s"]
    ]
    return [1e3 * statistics.median(each) for each in jobs], [1e3 * statistics.mean(each) for each in jobs]


def recovery_row(found: Values, system: str) -> list[str]:
    kills, first = kills_of(found, system, OTHERS), kills_of(found, system, RANK_0)
    later = [kill for kill in kills if kill["place"] > 0]
    full = figures(kills, "full_s")
    by_rank_0 = survived(first) + (f", {cell(figures(first, 'back_s'))} s" if figures(first, "back_s") else "")
    return [
        SYSTEMS[system].title,
        survived(kills),
        cell(figures(kills, "back_s")),
        cell(figures(kills, "lost"), "g"),
        cell(figures(kills, "new_s")),
        f"{cell(full)}, {len(full)} of {len(kills)}" if SYSTEMS[system].refills else "never: fewer ranks go on",
        kept([*kills, *first]),
        survived(later),
        by_rank_0,
    ]


def step_row(found: Values, system: str) -> list[str]:
    ranks = next(job["ranks"] for job in found["jobs"] if job["system"] == system)
    medians, means = job_step_times(found, system, ranks)
    plain_medians, plain_means = job_step_times(found, "plain", ranks)
    begin = [SYSTEMS[system].title, found["versions"][system], found["saves"][system], str(ranks)]
    if not medians or not plain_medians:
        return [*begin, "-", "-", "-", "-"]
    on, off = statistics.median(medians), statistics.median(plain_medians)
    mean = statistics.median(means) / statistics.median(plain_means)
    return [*begin, f"{off:.1f}", f"{on:.1f}", f"{on / off:.2f}", f"{mean:.2f}"]


RECOVERY_HEADS = (
    "system", "survived", "kill to next step, s", "steps lost", "to a new step, s", "all ranks again, s", "others kept running",
    "second kill survived", "rank 0 killed: survived, to next step",
)  # fmt: skip
STEP_HEADS = ("system", "version", "saves", "ranks", "step off, ms", "step on, ms", "median on / off", "mean on / off")


def ran(found: Values) -> list[str]:
    """Return the systems that have at least one job that began, in the order of the table."""
    began = {job["system"] for job in found["jobs"] if not job["error"]}
    return [name for name in SYSTEMS if name in began]


def missing(found: Values) -> dict[str, str]:
    """Return what was not installed, or had jobs that did not begin, with the last error."""
    errors = {SYSTEMS[name].title: error for name, error in found["not_installed"].items()}
    for name in {job["system"]: None for job in found["jobs"] if job["error"]}:
        jobs = [job["error"] for job in found["jobs"] if job["system"] == name]
        title = SYSTEMS[name].title if name in SYSTEMS else name
        errors[f"{title}: {sum(map(bool, jobs))} of {len(jobs)} jobs"] = next(filter(None, reversed(jobs)))
    return errors


def markdown(found: Values) -> str:
    """Write the generated part of docs/comparison.md."""
    jobs = sum(job["system"] != "plain" for job in found["jobs"])
    kills = sum(len(job["kills"]) for job in found["jobs"])
    lines = [
        f"{kills} kills in {jobs} jobs, one job at a time, the systems taking turns (seed {found['seed']}). {found['cores']} cores, "
        f"load {found['load'][0]:.1f} to {found['load'][1]:.1f} by other work included, CPU, gloo, torch {found['torch']}, {found['ranks']} ranks of one thread each, "
        f"a toy model of {found['parameters']:,} parameters. Median (least-most).",
        "",
        *rows(RECOVERY_HEADS, [recovery_row(found, name) for name in ran(found)]),
        "",
        f"*Never*: no new step within {AWAY_S:.0f} s, for all ranks again {REFILL_S:.0f} s more.",
        "",
        *rows(STEP_HEADS, [step_row(found, name) for name in ran(found)]),
    ]
    if errors := missing(found):
        lines += [
            "",
            *rows(("did not begin", "last line of its error"), [[name, f"`{errors[name]}`"] for name in errors]),
        ]
    return "\n".join([*lines, "", "![From the kill to the next step](pictures/peers.svg)"])


def rows(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]


def console(found: Values) -> str:
    """Write the same tables for a terminal."""
    text = []
    for heads, row in ((RECOVERY_HEADS, recovery_row), (STEP_HEADS, step_row)):
        table = [list(heads), *(row(found, name) for name in ran(found))]
        widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
        text += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table] + [
            ""
        ]
    return "\n".join([*text, *(f"did not begin: {name}: {error}" for name, error in missing(found).items())])


def picture(found: Values) -> str:
    """Draw a dot for each kill: seconds to the next step, by system; what never came back is at the right edge."""
    import matplotlib
    from matplotlib.figure import Figure

    names = ran(found)
    with matplotlib.rc_context({"svg.hashsalt": "peers"}):
        figure = Figure(figsize=(9, 1.1 + 0.4 * len(names)), layout="constrained")
        axes = figure.subplots()
        for place, name in enumerate(names):
            for victim, shift, legend in ((OTHERS, -0.12, "another rank killed"), (RANK_0, 0.12, "rank 0 killed")):
                kills = kills_of(found, name, victim)
                back = figures(kills, "back_s")
                never = [AWAY_S] * (len(kills) - len(back))
                label = legend if place == 0 else None
                axes.plot(back, [place + shift] * len(back), "o", color=COLOURS[victim], alpha=0.6, ms=5, label=label)
                axes.plot(never, [place + shift] * len(never), "X", color=COLOURS[victim], ms=8)
        axes.set_yticks(range(len(names)), [SYSTEMS[name].title for name in names])
        axes.set(
            xscale="log", xlim=(0.3, 1.2 * AWAY_S), xlabel="seconds from the kill to the next step (a cross: never)"
        )
        axes.set_xticks([0.5, 1, 2, 5, 10, 20, AWAY_S], ["0.5", "1", "2", "5", "10", "20", "never"])
        axes.minorticks_off()
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
        figure.legend(fontsize=8, loc="outside upper right", ncols=2)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def written(document: str, found: Values) -> str:
    """Return a document with its generated part made anew."""
    return PART.sub(lambda part: f"{part[1]}{markdown(found)}\n{part[2]}", document)
