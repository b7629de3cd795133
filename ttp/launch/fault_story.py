"""One start's fault, put together from its controllers' journals when the start is over: who, where, why, what was saved, and
how long it took.

Pure: journal lines in, a FaultStory out; no clock, no files. `story_text.py` says it in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttp.checkpoint.format.durable import step_of_directory
from ttp.launch.story import Recorded, blames_a_peer

Line = Mapping[str, Any]
"""`{"unix_s", "event", "fields", "controller"}`: the controller is 0 for the one that the start began with, i for a standby."""

TRACE_LINES = 3
STAGES = ("seen", "frozen", "decided", "written", "published")
"""The parts of a fault, in order: each took from the end of the one before it. `seen` begins with the first sign."""
_UNDECIDED = "not known on this node: its journal ends before a decision"
_NEVER_DECIDED = "the controllers ended before a decision"
_UNLED = "no controller on this node led the ranks"
_SAVED_UNKNOWN = "not known on this node: ranks left as a controller orders once the state is saved, and no journal here records which step"
_SIGNS = frozenset({"suspect", "hung", "death_seen", "fault_reported", "takeover_began"})
"""A takeover after which training goes on ends, like any other false alarm, with a thaw."""
_PEER = "peer_error"
NOTICE = "preempted"
_EXITING = "exiting"
ENDED = ("exited", "silent")
"""Kinds that say that a rank is gone, and not why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank that the fault befell."""

    rank: int
    host: str = ""
    pid: int = 0
    cause: str = ""
    phase: str = ""
    """Where it was: by its own report behind its gate, or its last heartbeat. Empty: not known."""
    step: int = 0
    reported: bool = False
    """Phase and step are from its report, not from its last heartbeat."""
    trace: tuple[str, ...] = ()
    """The end of its traceback."""
    stood: tuple[str, ...] = ()
    """Of a hang: the innermost frames of its main thread, the innermost first."""
    heard_s: float | None = None
    """How long after its last heartbeat its end was seen; None: not known."""
    reached: int = 0
    """It was READY of this step for certain, whatever its last heartbeat said before: others have the step's commit record. 0: nothing
    more is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where survivors were when they were frozen."""

    phase: str
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The dying-gasp checkpoint. `ranks`: those that wrote it."""

    step: int
    path: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStory:
    """All that an operator wants to know of one start's fault."""

    start: int
    began_unix_s: float
    kind: str
    """exited, silent, exception, hung, preempted, ...; `unled` when no controller led the ranks; `elsewhere`: see there."""
    culprits: tuple[Culprit, ...]
    survivors: tuple[Place, ...] = ()
    saved: Saved | None = None
    not_saved: str = ""
    """Why nothing was saved."""
    goes_on_from: str = ""
    """The checkpoint that the next start resumes from, as far as it is known."""
    steps_lost: int | None = None
    """Finished steps that have to be trained again; None: not known."""
    took_over: int = 0
    """The standby that ended the fault; 0: none had to."""
    took_ms: Mapping[str, float] | None = None
    """Milliseconds of each stage that there was, and `total`."""
    stacks: str = ""
    """Of a hang: the file with the stacks of all ranks, suspects first."""
    next: str = ""
    elsewhere: str = ""
    """What another node's launcher said of a fault that no journal on this node tells."""


def leading_lines(lines: Sequence[Line]) -> list[Line]:
    """Return a start's lines in order of time without those of standbys that did not lead it."""
    led_from: dict[int, float] = {}
    for line in lines:
        if line["event"] in ("takeover_began", "took_over"):
            led_from.setdefault(line["controller"], line["unix_s"])
    led_from[0] = float("-inf")
    kept = [line for line in lines if line["unix_s"] >= led_from.get(line["controller"], float("inf"))]
    return sorted(kept, key=lambda line: float(line["unix_s"]))


def fault_of(
    start: int,
    lines: Sequence[Line],
    exits: Mapping[int, str],
    first_exit_unix_s: float | None = None,
    *,
    raised: Mapping[int, Recorded] | None = None,
    pids: Mapping[int, int] | None = None,
    one_node: bool = False,
    elsewhere: str = "",
    left_saved: bool = False,
) -> FaultStory | None:
    """Tell the fault of a start from all its controllers' lines; None if there was none.

    `exits`: how workers on this node ended that failed by themselves, as the launcher saw it; `first_exit_unix_s`: when it
    saw the first of them. raised: what they recorded. pids: of this node's workers. one_node: no other node has a
    journal of this start. elsewhere: what ended it on another node, as that one's launcher said. left_saved: workers here left as a
    controller ordered once the state was saved.
    """
    exits, raised = dict(exits), dict(raised or {})
    for rank in raised.keys() & exits.keys():
        exits[rank] = f"{exits[rank]}: {raised[rank].line}"
    lines = leading_lines(lines)
    fault = _lines_of_the_fault(lines)
    if not fault:
        if not exits and not elsewhere:
            return None
        causes_first = sorted(exits, key=lambda rank: (rank in raised and blames_a_peer(raised[rank]), rank))
        alone = (Culprit(rank=rank, pid=(pids or {}).get(rank, 0), cause=exits[rank]) for rank in causes_first)
        culprits = tuple(_quoted(culprit, raised) for culprit in alone)
        return FaultStory(
            start=start,
            began_unix_s=first_exit_unix_s or 0.0,
            kind="unled" if exits else "elsewhere",
            culprits=culprits,
            not_saved=_SAVED_UNKNOWN if left_saved else "the journal tells of no fault" if lines else _UNLED,
            elsewhere="" if exits else elsewhere,
        )
    culprits = tuple(_quoted(culprit, raised) for culprit in _culprits(lines, fault, exits))
    began = float(fault[0]["unix_s"])
    if first_exit_unix_s is not None and any(culprit.rank in exits for culprit in culprits):
        began = min(began, first_exit_unix_s)
    published, refused = _last(fault, "published"), _last(fault, "refused")
    story = FaultStory(
        start=start,
        began_unix_s=began,
        kind=_kind(fault, {culprit.rank for culprit in culprits}, exits, raised),
        culprits=culprits,
        survivors=_survivors(fault, {culprit.rank for culprit in culprits}),
        took_over=max(int(line["controller"]) for line in fault),
        took_ms=_durations_ms(fault, began),
    )
    if published is not None:
        saved = _saved(fault, published)
        story = replace(story, saved=saved, goes_on_from=saved.path, steps_lost=_lost(fault, saved.step))
    elif refused is not None:
        path = str(refused["fields"].get("goes_on_from") or "")
        lost = _lost(fault, step_of_directory(Path(path)) or 0)
        story = replace(story, not_saved=refused["fields"]["reason"], goes_on_from=path, steps_lost=lost)
    else:
        told = _last(fault, "exit_sent")
        undecided = _NEVER_DECIDED if one_node else _UNDECIDED
        why = str(told["fields"]["reason"]) if told else undecided
        story = replace(story, not_saved=why)
    return story


def false_alarms(lines: Sequence[Line]) -> int:
    """Count the freezes of a start after which training went on."""
    return sum(line["event"] == "thawed" for line in leading_lines(lines))


def _lines_of_the_fault(lines: Sequence[Line]) -> list[Line]:
    """Return what happened from the first sign after the last false alarm to the ranks' leave; empty without a fault, and where all
    ranks have finished: a controller that was stopped meanwhile, and goes on, takes them for dead."""
    if any(line["event"] == "finished" for line in lines):
        return []
    begin = max((number + 1 for number, line in enumerate(lines) if line["event"] == "thawed"), default=0)
    tail = list(lines[begin:])
    end = next((number + 1 for number, line in enumerate(tail) if line["event"] == "exit_sent"), len(tail))
    first = next((number for number, line in enumerate(tail[:end]) if line["event"] in _SIGNS), None)
    if first is None or not any(line["event"] in ("freeze_sent", "refused", "exit_sent") for line in tail[first:end]):
        return []
    return tail[first:end]


def _last(lines: Sequence[Line], event: str) -> Line | None:
    return next((line for line in reversed(lines) if line["event"] == event), None)


def _kind(fault: Sequence[Line], culprits: Collection[int], exits: Collection[int], raised: Collection[int]) -> str:
    """Return the root cause's kind, in the controller's newest words. The launcher may know better: culprits ended by themselves,
    which a controller that only suspected them did not live to hear; or by an exception that they did not tell it."""
    told = _told_kind(fault, set(culprits) & set(exits))
    return "exception" if told in ENDED and culprits and set(culprits) <= set(raised) else told


def _told_kind(fault: Sequence[Line], ended: set[int]) -> str:
    if ended and not any(line["event"] in ("death_seen", "hung", "fault_reported") for line in fault):
        return "exited"
    named = next((line for line in reversed(fault) if line["event"] in ("publish_sent", "freeze_sent")), None)
    first = next((line for line in fault if "kind" in line["fields"]), None)
    chosen = named or first
    if chosen is None:
        return "controller_lost" if _last(fault, "takeover_began") else "unknown"
    return str(chosen["fields"]["kind"])


def _culprits(lines: Sequence[Line], fault: Sequence[Line], exits: Mapping[int, str]) -> tuple[Culprit, ...]:
    """Return the ranks that died, raised, hung or were told to leave, in the order seen; peers' errors are not their own."""
    found: dict[int, Culprit] = {}
    told_to_leave: set[int] = set()
    for line in fault:
        fields = line["fields"]
        if line["event"] == "hung":
            for rank in fields["ranks"]:
                found[rank] = Culprit(rank=rank, cause=fields["text"])
        elif line["event"] == "death_seen":
            known = found.get(fields["rank"], Culprit(rank=fields["rank"]))
            place = {name: fields[name] for name in ("phase", "step", "heard_s") if name in fields}
            found[fields["rank"]] = replace(known, cause=_and_then(known.cause, fields["text"]), **place)
        elif line["event"] == "fault_reported" and fields["kind"] == NOTICE and _has_begun(found, told_to_leave):
            continue  # the launcher was told to end in the middle of a fault, and has told those that are held
        elif line["event"] == "fault_reported" and fields["kind"] != _PEER:
            if fields["kind"] == NOTICE:
                told_to_leave.add(fields["rank"])
            trace = trace_end(fields.get("detail", ""))
            found[fields["rank"]] = Culprit(rank=fields["rank"], cause=fields["text"], trace=trace)
    if not found:
        found = {rank: replace(one, cause=exits.get(rank, one.cause)) for rank, one in _suspected(fault).items()}
    names = _names(lines)
    frozen = next((line["fields"] for line in fault if line["event"] == "frozen"), None)
    registered = {line["fields"]["rank"]: line["fields"] for line in lines if line["event"] == "registered"}
    told = (_completed(culprit, names, exits, frozen, registered) for culprit in found.values())
    ready = _ready_on_all_ranks(fault)
    return tuple(_advanced(culprit, ready) for culprit in told)


def _and_then(cause: str, end: str) -> str:
    """Add to what befell a rank how it ended then."""
    if not cause:
        return end
    return cause if end == _EXITING else f"{cause}; then {end}"


def _quoted(culprit: Culprit, raised: Mapping[int, Recorded]) -> Culprit:
    """Add the exception that a rank recorded and did not tell the controller."""
    told = raised.get(culprit.rank)
    if told is None or culprit.trace:
        return culprit
    known = culprit.cause if told.line in culprit.cause else f"{culprit.cause}: {told.line}"
    return replace(culprit, cause=known, trace=trace_end(told.trace))


def _has_begun(found: Mapping[int, Culprit], told_to_leave: Collection[int]) -> bool:
    """Say whether the fault was another than a notice before this line."""
    return any(rank not in told_to_leave for rank in found)


def _ready_on_all_ranks(fault: Sequence[Line]) -> int:
    """Return the newest step of which every rank of this start was READY for certain: somebody reported its commit record, which the
    spanning collective made. 0: not known (with local copies there is none, and a single record may be a checkpoint's)."""
    rounds = [line["fields"] for line in fault if line["event"] == "frozen"]
    records = {step for fields in rounds for step in fields["records"]}
    if any(step >= 0 for fields in rounds for step in fields.get("backup_steps", ())):
        return 0
    return max((step for step in records if step - 1 in records), default=0)


def _advanced(culprit: Culprit, ready: int) -> Culprit:
    """Add that a rank had come farther than its last heartbeat said."""
    if not culprit.phase or culprit.reported:
        return culprit
    known = culprit.step if culprit.phase != "COMPUTE" else culprit.step - 1
    return replace(culprit, reached=ready) if ready > known else culprit


def _names(lines: Sequence[Line]) -> dict[int, str]:
    """Return what a rank's end turned out to be, once it was more than `exiting`."""
    names = {}
    for line in lines:
        fields = line["fields"]
        if line["event"] in ("freeze_sent", "publish_sent") and len(fields["culprits"]) == 1:
            names[fields["culprits"][0]] = fields["text"]
        elif line["event"] == "death_named":
            names[fields["rank"]] = fields["text"]
    return {rank: text for rank, text in names.items() if text != _EXITING}


def _suspected(fault: Sequence[Line]) -> dict[int, Culprit]:
    asked = _last(fault, "freeze_sent")
    if asked is None:
        return {}
    return {rank: Culprit(rank=rank, cause=asked["fields"]["text"]) for rank in asked["fields"]["culprits"]}


def _completed(
    culprit: Culprit,
    names: Mapping[int, str],
    exits: Mapping[int, str],
    frozen: Mapping[str, Any] | None,
    registered: Mapping[int, Mapping[str, Any]],
) -> Culprit:
    """Add what other lines know: its process, the status it ended with, and where it stood."""
    rank = culprit.rank
    if culprit.cause == _EXITING:
        culprit = replace(culprit, cause=exits.get(rank) or names.get(rank) or "exited")
    elif rank in exits and exits[rank].startswith(culprit.cause):  # `signal SIGKILL`, and why
        culprit = replace(culprit, cause=exits[rank])
    if frozen is not None and rank in frozen["ranks"]:
        place = frozen["ranks"].index(rank)
        own = {"phase": frozen["phases"][place], "step": frozen["steps"][place]}
        culprit = replace(culprit, **own, heard_s=None, reported=True)
    process = registered.get(rank, {})
    return replace(culprit, host=process.get("host", ""), pid=process.get("pid", 0))


def trace_end(detail: str) -> tuple[str, ...]:
    """Return the last lines of a traceback without the marks under the code."""
    lines = [line.strip() for line in detail.splitlines()]
    return tuple(line for line in lines if line.strip("^~ "))[-TRACE_LINES:]


def _survivors(fault: Sequence[Line], culprits: set[int]) -> tuple[Place, ...]:
    frozen = next((line["fields"] for line in fault if line["event"] == "frozen"), None)
    places: dict[tuple[int, str], list[int]] = {}
    if frozen is not None:
        for rank, phase, step in zip(frozen["ranks"], frozen["phases"], frozen["steps"], strict=True):
            if rank not in culprits:
                places.setdefault((step, phase), []).append(rank)
    return tuple(Place(phase=phase, step=step, ranks=tuple(ranks)) for (step, phase), ranks in sorted(places.items()))


def _saved(fault: Sequence[Line], published: Line) -> Saved:
    """Add up the last attempt: what was written since its orders went out."""
    begin = max((number for number, line in enumerate(fault) if line["event"] == "write_sent"), default=0)
    written = [line["fields"] for line in fault[begin:] if line["event"] == "written"]
    return Saved(
        step=published["fields"]["step"],
        path=published["fields"]["path"],
        bytes=sum(fields["bytes"] for fields in written),
        ranks=tuple(sorted({fields["rank"] for fields in written})),
    )


def _lost(fault: Sequence[Line], kept: int) -> int | None:
    """Return how many steps after `kept` some rank had finished or had the record of; None if no rank told."""
    records = [step for line in fault if line["event"] == "frozen" for step in line["fields"]["records"]]
    told = any(line["event"] == "frozen" for line in fault)
    return max(0, max(records, default=kept) - kept) if told else None


def _durations_ms(fault: Sequence[Line], began: float) -> dict[str, float]:
    """Return how long each stage took that there was, from the end of the one before it."""
    named = next((line for line in fault if line["event"] == "freeze_sent"), fault[0])
    ends: dict[str, float | None] = {"seen": float(named["unix_s"])}
    for stage in STAGES[1:]:
        last = _last(fault, stage)
        ends[stage] = float(last["unix_s"]) if last else None
    took: dict[str, float] = {}
    before = began
    for stage in STAGES:
        end = ends[stage]
        if end is not None:
            took[stage] = round(max(0.0, end - before) * 1e3, 1)
            before = max(before, end)
    took["total"] = round(max(0.0, float(fault[-1]["unix_s"]) - began) * 1e3, 1)
    return took
