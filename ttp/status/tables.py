"""A job's status as people read it: labelled lines, then tables of ranks, faults and checkpoints.

Pure: a status in, what rich prints out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ttp.launch.report.time_use import use_text
from ttp.status.answer import CoverageNow, FaultRow, JobView, RankLine, StragglerRow
from ttp.text.wording import counted, ranks_text, size_text

_COLOURS = {
    "dead": "red",
    "missing": "red",
    "detached": "red",
    "suspect": "yellow",
    "running": "green",
    "ended": "cyan",
}
_NAMED = 8
NOT_COMPARED = "ranks are not compared: fewer than two of them report their own time of a step (docs/stragglers.md)"


def shown(status: JobView) -> RenderableType:
    """Return a status for a console."""
    parts: list[RenderableType] = [_head(status)]
    if status.ranks:
        parts += ["", _ranks(status)]
    if status.faults:
        parts += ["", _faults(status)]
    if status.checkpoints:
        parts += ["", _checkpoints(status)]
    parts += [Text(f"note: {note}", style="yellow") for note in status.notes]
    return Group(*parts)


def _head(status: JobView) -> RenderableType:
    grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for label, text in _lines(status):
        if text:
            grid.add_row(label, text)
    return grid


def _lines(status: JobView) -> Iterable[tuple[str, str | Text]]:
    colour = _COLOURS.get(status.state, "yellow")
    state = Text(status.state, style=colour)
    if status.phase != status.state:
        state.append(f": {status.phase}", style="default")
    if status.source == "files":
        state.append(f" (by its files, up to {time_text(status.unix_s)})", style="default")
    yield "state", state
    named = status.job or (f"attempt {status.attempt}" if status.attempt is not None else "")
    yield "job", f"{named}, {counted(status.world_size, 'rank')}" if status.world_size else named
    yield "files", status.log_dir
    yield "step", "" if status.step is None else f"{status.step}{_pace(status)}"
    yield "loss", _loss(status)
    yield "goodput", _goodput(status)
    if status.stragglers:
        yield "slow", _stragglers(status)
    elif status.stragglers_compared is False and status.world_size > 1:
        yield "slow", NOT_COMPARED
    if status.leader is not None:
        leader = status.leader
        which = "the first one, of rank 0" if leader.place == 0 else f"standby {leader.place}"
        yield "leads", f"controller of term {leader.term} ({which}), pid {leader.pid} at {leader.address}"
    if status.source == "controller":
        yield "standbys", ", ".join(status.standbys) or "none"
    yield "page", status.page
    yield "survives", status.survives
    if status.coverage is not None:
        yield "coverage", coverage_text(status.coverage)
    for each in status.excluded:
        yield "sick", each
    if status.end is not None:
        end = status.end
        yield "ended", f"{time_text(end.unix_s)}: {end.result}" + (f": {end.why}" if end.why else "")
        yield "last step", _last(status)


def _pace(status: JobView) -> str:
    parts = []
    if status.steps_per_s is not None and status.step_s is not None:
        parts.append(f"{status.steps_per_s:.3g} steps/s, {status.step_s:.3g} s a step")
    elif status.step_s is not None and status.end is not None:
        parts.append(f"{status.step_s:.3g} s a step on average")
    if status.still_s is not None and status.hang_limit_s is not None:
        parts.append(f"progress {status.still_s:.1f} s ago (a hang after {status.hang_limit_s:.0f} s)")
    return f", {'; '.join(parts)}" if parts else ""


def _loss(status: JobView) -> str:
    if status.loss_finite is None:
        return ""
    return f"{status.loss:.6g}" if status.loss is not None else "not finite"


def straggler_text(row: StragglerRow) -> str:
    """`rank 3 on node b: 1.21 times the others' own time of a step (0.121 s, theirs 0.1 s), for 140 steps`."""
    times = f"{row.own_s:.3g} s, theirs {row.others_s:.3g} s"
    return f"rank {row.rank} on node {row.node}: {row.ratio:.2f} times the others' own time of a step ({times}), for {counted(row.steps, 'step')}"


def _stragglers(status: JobView) -> str | Text:
    lines = [straggler_text(row) for row in status.stragglers[:_NAMED]]
    if len(status.stragglers) > _NAMED:
        lines.append(f"and {len(status.stragglers) - _NAMED} more")
    return Text("\n".join(lines), style="yellow")


def _goodput(status: JobView) -> str:
    if status.time_use is None or status.since_unix_s is None:
        return ""
    return f"since {time_text(status.since_unix_s)}: {use_text(status.time_use)}"


def _last(status: JobView) -> str:
    end = status.end
    if end is None or end.last_step is None:
        return ""
    saved = "not known to be saved" if end.saved_step is None else "not saved"
    if end.saved_step:
        saved = "saved" if end.saved_step >= end.last_step else f"saved up to step {end.saved_step}"
        path = next((each.path for each in status.checkpoints if each.step == end.saved_step), "")
        saved += f" in {path}" if path else ""
    lost = "" if end.lost is None else f"; {counted(end.lost, 'step')} lost"
    return f"{end.last_step}, {saved}{lost}"


def coverage_text(coverage: CoverageNow) -> str:
    """`every shard has 2 live holders or more; no single death costs a step`."""
    if coverage.uncovered:
        return f"{coverage.uncovered} of {counted(coverage.shards, 'shard')} without a live holder"
    held = f"every shard has {counted(coverage.least_holders, 'live holder')} or more"
    fatal = []
    if coverage.fatal_rank_count:
        fatal.append(_some(ranks_text(coverage.fatal_ranks[:_NAMED]), coverage.fatal_rank_count))
    if coverage.fatal_node_count:
        nodes = "node " + ", ".join(coverage.fatal_nodes[:_NAMED])
        fatal.append(_some(nodes, coverage.fatal_node_count))
    if not fatal:
        return f"{held}; no single death costs a step"
    copies = ", but for copies in memory" if coverage.copies else ""
    return f"{held}; the death of one of these costs steps{copies}: {'; '.join(fatal)}"


def _some(text: str, count: int) -> str:
    return f"{text} and {count - _NAMED} more" if count > _NAMED else text


def _ranks(status: JobView) -> Table:
    table = _table("rank", "node", "pid", "state", Column("step", justify="right"), Column("step time", justify="right"),
                   Column("own", justify="right"), Column("heartbeat", justify="right"), "fault")  # fmt: skip
    if len(status.ranks) < status.rank_count:
        table.title = f"ranks: {len(status.ranks)} of {status.rank_count}, those to look at first (--ranks shows all)"
    for row in status.ranks:
        table.add_row(*_rank_cells(row))
    return table


def _rank_cells(row: RankLine) -> Sequence[str | Text]:
    step_time = "" if row.step_s is None else f"{row.step_s:.3g} s"
    own = "" if row.own_s is None else f"{row.own_s:.3g} s"
    age = "" if row.heartbeat_age_s is None else f"{row.heartbeat_age_s:.1f} s ago"
    state = Text(row.state, style=_COLOURS.get(row.state, ""))
    return (
        str(row.rank),
        Text(row.node),
        str(row.pid or ""),
        state,
        str(row.step or ""),
        step_time,
        Text(own, style="yellow" if row.slower is not None else ""),
        age,
        Text(row.cause),
    )


def _faults(status: JobView) -> Table:
    table = _table("fault", "attempt", "ranks", Column("cause", overflow="fold"), Column("outcome", overflow="fold"),
                   Column("took", justify="right"))  # fmt: skip
    if len(status.faults) < status.fault_count:
        table.title = f"faults: the newest {len(status.faults)} of {status.fault_count} (--ranks shows all)"
    for row in status.faults:
        table.add_row(
            time_text(row.unix_s),
            str(row.attempt),
            ranks_text(row.ranks).partition(" ")[2] if row.ranks else "",
            Text(f"{row.kind}: {row.cause}" if row.cause and row.kind != row.cause else row.kind),
            Text(_outcome(row)),
            "" if row.took_s is None else duration_text(row.took_s),
        )
    return table


def _outcome(row: FaultRow) -> str:
    lost = "" if row.steps_lost is None else f"; {counted(row.steps_lost, 'step')} lost"
    match row.outcome:
        case "saved":
            return f"step {row.step} saved{lost}"
        case "not saved":
            return f"nothing saved: {row.detail}{lost}"
        case "in place":
            return f"continued in place{lost}"
        case "now":
            return "is handled now"
    return row.outcome


def _checkpoints(status: JobView) -> Table:
    table = _table(
        "checkpoint",
        Column("step", justify="right"),
        "cause",
        Column("size", justify="right"),
        Column("age", justify="right"),
    )
    for row in status.checkpoints:
        age = "" if row.written_unix_s is None else duration_text(status.unix_s - row.written_unix_s)
        nbytes = "" if row.bytes is None else size_text(row.bytes)
        table.add_row(Text(row.path), str(row.step), row.cause or "cannot be read", nbytes, age)
    return table


def _table(*columns: Column | str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")


def time_text(unix_s: float) -> str:
    """Return a time in this machine's zone: `2026-11-26 03:08:57`."""
    return datetime.datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: float) -> str:
    """`0.3 s`, `4 min 10 s`, `3 h 5 min`, `2 d 4 h`."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, name, below, lower in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {lower}"
    return f"{whole} s"
