"""What an operator reads: a fault in a few labelled lines, and the job's summary at its end.

Pure: text out of facts. Where it goes is the chronicle's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ttp.last_step import LastStep
from ttp.launch.fault_story import STAGES, Culprit, FaultStory, Saved
from ttp.launch.losses import Losses, lost_text
from ttp.wording import counted, ranks_text, size_text

_NAMED = 8
_QUOTED = 4
"""Suspects of a hang whose frames are quoted; the others' are in the gathered file."""
_LABEL = 8
"""Columns of the labels."""

_KINDS = {
    "exited": "a process ended",
    "silent": "a rank fell silent",
    "exception": "an exception",
    "hung": "a hang",
    "preempted": "a notice to leave",
    "agent_lost": "a launcher was lost",
    "controller_lost": "the controllers were lost",
    "peer_error": "a failed collective, nobody known to be at fault",
    "unled": "workers failed",
    "elsewhere": "another node failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole job, as this node's launcher saw it, and others before it have told."""

    result: str
    starts: int
    faults: int
    notices: int
    """So many of the faults were notices to leave."""
    false_alarms: int
    saved_steps: tuple[int, ...]
    """Steps of the dying-gasp checkpoints."""
    steps_lost: int
    """`steps_again` included."""
    unknown_losses: int
    """Faults after which it is not known how many steps were lost."""
    lost_s: float
    """From each fault's first sign until all ranks were there again, or until the job's end."""
    lasted_s: float
    untold_starts: tuple[int, ...] = ()
    """Starts of which it is not known here how they ended: another node's launcher was to tell them."""
    why: str = ""
    """Why it failed, where `result` does not say it."""
    lasted_since: int = 0
    """The start with which `lasted_s` begins: this launcher was not there before, and nobody's story is."""
    protected: bool = True
    """A rank has called `ttp.start`; False: none has in any start, and nobody knows what the script did."""
    steps_again: int = 0
    """Steps that a start trained again though a checkpoint of them was there: it was broken, or not taken."""
    ended_in_fault: bool
    """The last start ended in a fault or a notice."""
    last: LastStep | None
    """Where the last start's training ended, if that was no fault and rank 0 has reported it."""

    @property
    def losses(self) -> Losses:
        """What decides on the line of what was lost."""
        return Losses(
            protected=self.protected,
            faults=self.faults,
            notices=self.notices,
            steps_lost=self.steps_lost,
            steps_again=self.steps_again,
            unknown_losses=self.unknown_losses,
            untold_starts=self.untold_starts,
            ended_in_fault=self.ended_in_fault,
            last=self.last,
            without_training=_seconds(self.lost_s),
        )


def fault_lines(story: FaultStory) -> list[str]:
    """Say a fault in labelled lines, under a heading."""
    found = [
        ("who", "another node" if story.elsewhere else _who(story.culprits)),
        ("cause", story.elsewhere or _cause(story.culprits)),
        *(("", text) for culprit in story.culprits[:1] for text in culprit.trace[:-1]),
        ("where", _where(story)),
        *(("" if place else "stood", text) for place, text in enumerate(_stood(story))),
        ("saved", _saved(story)),
        ("took", _took(story.took_ms or {}, story.took_over)),
        ("next", _next(story)),
    ]
    heading = f"--- fault in start {story.start}: {_KINDS.get(story.kind, story.kind)} ---"
    return [heading, *(f"{label:<{_LABEL}}{text}" for label, text in found if text)]


def summary_lines(summary: Summary) -> list[str]:
    """Say how the job went."""
    faults = counted(summary.faults - summary.notices, "fault")
    if summary.notices:
        faults += f", {summary.notices} notice{'' if summary.notices == 1 else 's'} to leave"
    if summary.false_alarms:
        faults += f", {counted(summary.false_alarms, 'false alarm')}"
    if summary.untold_starts:
        faults += f"; how {_starts(summary.untold_starts)} ended is not known on this node"
    saved = ", ".join(map(str, summary.saved_steps[-_NAMED:]))
    more = "..., " if len(summary.saved_steps) > _NAMED else ""
    since = f"; since start {summary.lasted_since}" if summary.lasted_since else " in"
    found = [
        ("result", summary.result),
        ("why", summary.why),
        ("starts", f"{summary.starts}{since} {_seconds(summary.lasted_s)}"),
        ("faults", faults),
        ("saved", f"step{'s' if len(summary.saved_steps) > 1 else ''} {more}{saved}" if saved else ""),
        ("lost", lost_text(summary.losses)),
    ]
    return ["--- the job has ended ---", *(f"{label:<{_LABEL}}{text}" for label, text in found if text)]


def _starts(numbers: Sequence[int]) -> str:
    return ranks_text(numbers).replace("rank", "start", 1)


def _who(culprits: Sequence[Culprit]) -> str:
    """`rank 2 on node a (pid 71); ranks 4-5 on node b (pids 80, 81)`."""
    nodes: dict[str, list[Culprit]] = {}
    for culprit in culprits:
        nodes.setdefault(culprit.host, []).append(culprit)
    return "; ".join(_on_node(host, group) for host, group in nodes.items()) or "no rank is known to be at fault"


def _on_node(host: str, group: Sequence[Culprit]) -> str:
    pids = [str(culprit.pid) for culprit in group if culprit.pid]
    more = ", ..." if len(pids) > _NAMED else ""
    processes = f" (pid{'s' if len(pids) > 1 else ''} {', '.join(pids[:_NAMED])}{more})" if pids else ""
    return f"{ranks_text(culprit.rank for culprit in group)}{f' on node {host}' if host else ''}{processes}"


def _grouped(culprits: Iterable[Culprit], texts: Iterable[str]) -> str:
    """`signal SIGKILL`, or where they differ `rank 0: signal SIGKILL; rank 2: exit code 1`."""
    groups: dict[str, list[int]] = {}
    for culprit, text in zip(culprits, texts, strict=True):
        if text:
            groups.setdefault(text, []).append(culprit.rank)
    if len(groups) == 1:
        return next(iter(groups))
    told = [f"{ranks_text(ranks)}: {text}" for text, ranks in list(groups.items())[:_NAMED]]
    return "; ".join(told) + ("; ..." if len(groups) > _NAMED else "")


def _cause(culprits: Sequence[Culprit]) -> str:
    return _grouped(culprits, (culprit.cause for culprit in culprits))


def _where(story: FaultStory) -> str:
    """Say where the culprits were, and where the others stood when they were frozen."""
    own = _grouped(story.culprits, (_place(culprit, len(story.culprits) == 1) for culprit in story.culprits))
    others = "; ".join(f"{ranks_text(p.ranks)} in {p.phase} of step {p.step}" for p in story.survivors[:_NAMED])
    return "; the others: ".join(text for text in (own or "not known", others) if text) if own or others else ""


def _place(culprit: Culprit, alone: bool) -> str:
    """Say where a rank was: by its own report, or for certain and in its last heartbeat. `alone`: also how old that was, which differs
    from rank to rank."""
    if not culprit.phase:
        return ""
    said = f"{culprit.phase} of step {culprit.step}"
    if culprit.reported:
        return f"in {said}"
    age = f", {culprit.heard_s:.1f} s before" if alone and culprit.heard_s is not None else ""
    if culprit.reached:
        return f"in READY of step {culprit.reached} or later (last heartbeat{age}: {said})"
    return f"last heartbeat{age}: {said}"


def _stood(story: FaultStory) -> list[str]:
    quoted = [culprit for culprit in story.culprits if culprit.stood][:_QUOTED]
    lines = [
        f"rank {culprit.rank} {frame}" if place == 0 else f"    called {frame}"
        for culprit in quoted
        for place, frame in enumerate(culprit.stood)
    ]
    silent = [c.rank for c in story.culprits if not c.stood and story.kind == "hung"]
    if silent:
        lines.append(f"{ranks_text(silent)}: no stacks were found on this node")
    return [*lines, f"all stacks, suspects first: {story.stacks}"] if story.stacks else lines


def _saved(story: FaultStory) -> str:
    if story.saved is None:
        known = "" if story.not_saved.startswith("not known") else "nothing: "
        return f"{known}{story.not_saved}{_lost(story.steps_lost)}"
    return f"{_written(story.saved)}{_lost(story.steps_lost)}"


def _written(saved: Saved) -> str:
    return f"step {saved.step} in {saved.path} ({size_text(saved.bytes)}, written by {ranks_text(saved.ranks)})"


def _lost(steps: int | None) -> str:
    if steps is None:
        return ""
    return f"; {counted(steps, 'step')} lost" if steps else "; no step lost"


def _took(took_ms: Mapping[str, float], took_over: int) -> str:
    parts = ", ".join(f"{stage} {took_ms[stage]:,.0f} ms" for stage in STAGES if stage in took_ms)
    by = f"; standby {took_over} took over from the controller" if took_over else ""
    return f"{parts}; {took_ms['total']:,.0f} ms in all{by}" if parts else ""


def _next(story: FaultStory) -> str:
    if not story.next.startswith("restart"):
        return story.next
    return f"{story.next}, from {story.goes_on_from or 'the newest valid checkpoint that is found'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
