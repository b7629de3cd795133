"""Judges a run: the invariants I1 to I12 as far as they can be seen from outside, bit-equality with a baseline run, leftovers,
memory that grows.

Pure functions over records. A verdict says what was looked at; what could not be seen is said to be so, not passed over.
The invariants are those of docs/proof.md; the numbers in the texts are theirs.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ttp.chaos.observed.leaks import GROWTH_MIB, LEAST_SAMPLES, LEAST_STEPS, WARM_UP_STEPS, Growth, growth_of
from ttp.chaos.observed.recorder import Record
from ttp.chaos.verdict import in_place
from ttp.chaos.verdict.fault_outcome import ENDED, NOT_REACHED, OVERDUE, UNSAVED, FaultOutcome

HELD, VIOLATED, UNSEEN = "held", "violated", "not seen"
SHOWN = 5
"""Problems of one kind that are listed."""
SHOWN_LEAKS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one claim."""

    name: str
    state: str
    """HELD, VIOLATED or UNSEEN."""
    text: str
    """What was looked at, or what was wrong, or why nothing could be seen."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that is judged of one run."""

    record: Record
    incidents: Sequence[FaultOutcome]
    status: int
    leftovers: Sequence[str]
    litter: Sequence[str]
    """Temporary files and sockets that stayed."""
    baseline: Record | None = None
    final: Sequence[str] | None = None
    """Differences of the newest checkpoints; None: not compared."""
    growth_mib: float = GROWTH_MIB
    """What a rank's memory may grow by in 1,000 steps."""


def judge(run: Run) -> list[Verdict]:
    """Return the verdicts, invariants first."""
    fired = [incident for incident in run.incidents if incident.happened]
    problems = _sorted_by_name([problem for incident in run.incidents for problem in incident.problems])
    return [
        _verdict("I1 complete", _broken(run), f"{len(run.record.checkpoints)} published checkpoints verified", problems),
        _verdict("I2 one step", _misnamed(run), "each checkpoint's name, manifest and tensors say one step", problems),
        _bytes(run),
        _verdict("I4 published once", _twice(run), f"{_count(run, 'published')} publications; trackers never went back", problems),
        _verdict("I5 each shard once", _broken(run), "the files of every checkpoint tile every tensor, with no overlap", problems),
        _verdict("I6 right step", _wrong_step(fired), f"{_saved(fired)} dying gasps, none behind a finished step", problems),
        _verdict("I7 frozen", _moved(run), "no rank finished a step behind a published one in the same attempt, unless its gates had opened again", problems),
        _verdict("I8 fenced", _fenced(run), f"{_count(run, 'took_over')} takeovers; no publication under an older term", problems),
        _verdict("I9 covered", _uncovered(fired), f"{len(fired)} faults: saved, or refused with a reason", problems),
        _verdict("I10 newest valid", _wrong_resume(run), f"{len(run.record.resumes)} loads by ranks", problems),
        _verdict("I11 in time", _late(run, fired), f"all of {len(fired)} faults settled in time, nothing left behind", problems),
        _data(run),
        _memory(run),
        *([_in_place(run)] if any("in_place" in one.expected for one in run.incidents) else []),
        _outcomes(run.incidents),
    ]  # fmt: skip


def _verdict(name: str, wrong: Sequence[str], text: str, others: Mapping[str, list[str]]) -> Verdict:
    """`others`: problems that were noted on the way, by the invariant's number."""
    wrong = [*wrong, *others.get(name.split()[0], [])]
    if not wrong:
        return Verdict(name, HELD, text)
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return Verdict(name, VIOLATED, "; ".join(wrong[:SHOWN]) + more)


def _sorted_by_name(problems: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        name, _, text = problem.partition(": ")
        found[name].append(text)
    return found


def _count(run: Run, event: str) -> int:
    return sum(line["event"] == event for line in run.record.journal)


def _saved(fired: Sequence[FaultOutcome]) -> int:
    return sum(incident.saved_step is not None for incident in fired)


def _corrupted(run: Run) -> dict[str, float]:
    """Return when the harness itself broke a checkpoint, by its name."""
    firings = [firing for incident in run.incidents for firing in incident.firings if firing.kind == "corrupt"]
    return {firing.whom.split("/")[0]: firing.unix_s for firing in firings}


def _torn(run: Run) -> bool:
    """Say whether the disk was made to break its promise."""
    return any(firing.kind == "torn" for incident in run.incidents for firing in incident.firings)


def _broken(run: Run) -> list[str]:
    own = _corrupted(run)
    return [
        f"{seen.path}: {seen.broken}"
        for seen in run.record.checkpoints
        if seen.broken and seen.path.rpartition("/")[2] not in own and not _torn(run)
    ]


def _misnamed(run: Run) -> list[str]:
    return [
        f"{seen.path} has step {seen.step}"
        for seen in run.record.checkpoints
        if not seen.broken and not seen.path.endswith(f"iter_{seen.step:07d}")
    ]


def _twice(run: Run) -> list[str]:
    wrong = []
    published = defaultdict(list)
    for line in run.record.journal:
        if line["event"] == "published":
            published[int(line["step"])].append(line)
    own = _corrupted(run)
    starts = sorted(
        float(line["unix_s"]) for line in run.record.journal if line["event"] == "assembled" and line["controller"] == 0
    )
    for step, lines in published.items():
        paths = {str(line["path"]) for line in lines}
        if len(paths) > 1 or (len({line["unix_s"] // 1 for line in lines}) > 1 and f"iter_{step:07d}" not in own):
            # An attempt that ends before its first new step finds the same step again, and keeps what is there.
            terms = [(bisect(starts, float(line["unix_s"])), line["controller"]) for line in lines]
            if len(paths) > 1 or len(set(terms)) < len(terms):
                wrong.append(f"step {step} was published {len(lines)} times: {', '.join(sorted(paths))}")
    newest: dict[str, int] = {}
    for unix_s, directory, step in run.record.tracker:
        broke = any(moment <= unix_s for moment in own.values())
        if step < newest.get(directory, 0) and not broke:
            wrong.append(f"the tracker of {directory} went from {newest[directory]} back to {step}")
        newest[directory] = step
    return wrong


def _wrong_step(fired: Sequence[FaultOutcome]) -> list[str]:
    return [
        f"{incident.text}: step {incident.saved_step} was saved, and step {incident.committed} had been finished"
        for incident in fired
        if incident.saved_step is not None and incident.saved_step < incident.committed - incident.unproven
    ]


def _moved(run: Run) -> list[str]:
    """A rank of the attempt that published must not finish a step behind the published one before the gates have opened again, if they do. What the dead
    alone knew does not count: they were dead by then."""
    wrong = []
    for incident in run.incidents:
        if not incident.fired or incident.saved_step is None:
            continue
        key, saved = incident.firings[0].key, incident.saved_step + incident.unproven
        wrong += [
            f"{incident.text}: rank {reported.rank} finished step {reported.step} of attempt {key[1]}, behind the saved step {saved}"
            for reported in run.record.steps
            if reported.key == key and reported.step > saved and not reported.recovered
            if reported.unix_s < incident.opened_unix_s
        ]
    return wrong


def _fenced(run: Run) -> list[str]:
    """A controller that was stopped may decide by what it had received before, once it continues, and receives what its earlier orders came
    to: no rank takes new ones. Both sides of a parted network may have ranks, each under a controller of its own: what they publish is I4's."""
    parted = fault_stretches(
        [one for one in run.incidents if any(firing.kind == "partition" for firing in one.firings)]
    )
    wrong = []
    took: dict[int, float] = {}
    ordered: dict[tuple[int, str], float] = {}
    for line in sorted(run.record.journal, key=lambda line: float(line["unix_s"])):
        place, event, moment = int(line["controller"]), line["event"], float(line["unix_s"])
        match event:
            case "assembled" if place == 0:
                took, ordered = {}, {}
            case "took_over":
                took[place] = moment
            case "write_sent" | "write_moved":
                ordered[place, "written"] = moment
            case "publish_sent":
                ordered[place, "published"] = moment
            case "written" | "published":
                since = ordered.get((place, event), moment)
                above = [other for other, begun in took.items() if other > place and begun < since - 1]
                apart = any(begin <= moment <= end for begin, end in parted)
                if above and not apart:
                    what = "had ranks write" if event == "written" else "published"
                    wrong.append(f"controller {place} {what} after controller {above[0]} had taken over")
    return wrong


def _uncovered(fired: Sequence[FaultOutcome]) -> list[str]:
    wrong = []
    for incident in fired:
        neither = incident.outcome == "relaunched" and incident.saved_step is None and not incident.refused
        if incident.outcome == UNSAVED or neither:
            wrong.append(f"{incident.text}: the job started again with neither a checkpoint nor a refusal")
        elif incident.outcome == "refused" and not incident.refused.strip():
            wrong.append(f"{incident.text}: refused without a reason")
    return wrong


def _wrong_resume(run: Run) -> list[str]:
    """After a dying gasp every rank loads that step; after any fault the newest checkpoint, unless it was broken by the harness: then it says
    what it skipped."""
    wrong = []
    for incident in run.incidents:
        if incident.outcome == "saved" and incident.resumed_step != incident.saved_step:
            wrong.append(
                f"{incident.text}: step {incident.saved_step} was saved, step {incident.resumed_step} was loaded"
            )
        elif incident.resumed_step is not None and incident.outcome != ENDED:
            newest = _newest_whole(run, incident)
            if incident.resumed_step < newest:
                wrong.append(
                    f"{incident.text}: step {newest} was on disk and whole, step {incident.resumed_step} was loaded"
                )
        corrupted = any(firing.kind == "corrupt" for firing in incident.firings)
        if corrupted and incident.outcome == "saved":
            wrong.append(f"{incident.text}: a checkpoint with flipped bits was loaded, or its skip was not logged")
    by_start: dict[tuple[int, int], set[int]] = defaultdict(set)
    for resumed in run.record.resumes:
        by_start[resumed.key].add(resumed.step)
    return wrong + [
        f"attempt {key[1]}: ranks loaded different steps {sorted(steps)}"
        for key, steps in by_start.items()
        if len(steps) > 1
    ]


def _newest_whole(run: Run, incident: FaultOutcome) -> int:
    """Return the step of the newest checkpoint that was whole when the incident's last attempt began; 0: there was none. One that the harness
    broke, or whose disk it filled, is not."""
    until = incident.over_unix_s or inf
    began: dict[tuple[int, int], float] = {}
    for unix_s, key, _, _ in run.record.hellos:
        if unix_s <= until:
            began.setdefault(key, unix_s)
    own = _corrupted(run)
    full = tuple(f"{one.whom}/" for other in run.incidents for one in other.firings)
    whole = [
        seen.step
        for seen in run.record.checkpoints
        if not seen.broken and seen.unix_s <= began[max(began)]
        if seen.path.rpartition("/")[2] not in own and not seen.path.startswith(full)
    ]
    return max(whole, default=0)


def _late(run: Run, fired: Sequence[FaultOutcome]) -> list[str]:
    wrong = [f"{incident.text}: not settled by the deadline" for incident in fired if incident.outcome == OVERDUE]
    wrong += [f"{incident.text}: the job ended" for incident in fired if incident.outcome == ENDED]
    if run.status != 0:
        wrong.append(f"the job ended with status {run.status}")
    return wrong + [f"left behind: {one}" for one in (*run.leftovers, *run.litter)]


def _bytes(run: Run) -> Verdict:
    name = "I3 same bytes"
    if run.baseline is None:
        return Verdict(name, UNSEEN, "no baseline run to compare with (--no-compare, or no {output} in the command)")
    wrong = [*differences(run.record, run.baseline), *(run.final or ())]
    if wrong:
        return _verdict(name, wrong, "", {})
    steps = len({reported.step for reported in run.baseline.steps})
    final = "not compared (the two runs have none of one step)" if run.final is None else "the same bits"
    if not has_bits(run.baseline):
        state = UNSEEN if run.final is None else HELD
        return Verdict(name, state, f"{_NO_BITS}; the newest checkpoints' tensors: {final}")
    return Verdict(
        name, HELD, f"sums and grad norm of {steps} steps are the same bits; the newest checkpoints' tensors: {final}"
    )


def _data(run: Run) -> Verdict:
    """The data's position, the random numbers and the schedule show in every later step's sums."""
    name = "I12 host state"
    if run.baseline is None:
        return Verdict(name, UNSEEN, "no baseline run to compare with")
    if not any(incident.resumed_step is not None or incident.outcome == "in_place" for incident in run.incidents):
        return Verdict(name, UNSEEN, "the job was never resumed")
    wrong = differences(run.record, run.baseline)
    if not wrong and not has_bits(run.baseline):
        return Verdict(name, UNSEEN, _NO_BITS)
    return _verdict(name, wrong, "every step after a resume or a recovery in place has the baseline run's sums", {})


def _in_place(run: Run) -> Verdict:
    """Recoveries in place: other processes for exactly the lost ranks, the next step, and no other step published."""
    name, found = "in place", [one for one in run.incidents if one.outcome == "in_place"]
    if not found:
        return Verdict(name, UNSEEN, "no fault ended in place")
    wrong = [text for incident in found for text in in_place.problems(incident, run.record)]
    text = f"{len(found)} recoveries in place: only lost processes were replaced, the next step was the next one"
    return _verdict(name, wrong, text, {})


_NO_BITS = "no step has a sum or a grad norm that could differ"


def has_bits(record: Record) -> bool:
    """Say whether the steps carry anything that a diverged run would have otherwise."""
    return any(reported.sums or float.fromhex(reported.grad_norm) != 0.0 for reported in record.steps)


def differences(faulted: Record, baseline: Record) -> list[str]:
    """Compare what every rank reported of every step with the baseline run; all steps must be there."""
    expected = {reported.step: (reported.grad_norm, reported.sums) for reported in baseline.steps}
    wrong = []
    for reported in faulted.steps:
        if reported.step not in expected:
            wrong.append(f"step {reported.step}: the baseline run has none")
        elif (reported.grad_norm, reported.sums) != expected[reported.step]:
            got = f"grad norm {reported.grad_norm}, sums {list(reported.sums)}"
            norm, sums = expected[reported.step]
            wrong.append(f"step {reported.step}, rank {reported.rank}: {got}; the baseline run: {norm}, {list(sums)}")
    if missing := sorted(set(expected) - {reported.step for reported in faulted.steps}):
        wrong.append(f"steps {missing[:SHOWN]} are missing ({len(missing)})")
    return wrong


def _outcomes(incidents: Sequence[FaultOutcome]) -> Verdict:
    wrong = [
        f"{incident.text}: {incident.outcome}, expected {' or '.join(incident.expected)}"
        for incident in incidents
        if incident.happened and not incident.as_expected
    ]
    skipped = sum(incident.outcome == NOT_REACHED for incident in incidents)
    text = f"{len(incidents) - skipped} faults had an outcome that was expected"
    return _verdict("outcomes", wrong, text + (f"; {skipped} did not happen" if skipped else ""), {})


def fault_stretches(incidents: Sequence[FaultOutcome]) -> list[tuple[float, float]]:
    """Return the times (from, to) at which a fault was under way."""
    return [(incident.began_unix_s, incident.over_unix_s) for incident in incidents if incident.fired]


def growths(run: Run) -> list[tuple[str, Growth]]:
    """Return what the memory of every rank of every attempt shows where it can be judged: of the run (``), then of the baseline run."""
    faulted = fault_stretches(run.incidents)
    curves = [("", curve) for curve in run.record.curves()]
    curves += [("the baseline run's ", curve) for curve in (run.baseline.curves() if run.baseline else ())]
    return [(whose, growth) for whose, curve in curves if (growth := growth_of(curve, faulted)) is not None]


def _memory(run: Run) -> Verdict:
    name, found = "memory", growths(run)
    if not found:
        steps = WARM_UP_STEPS + LEAST_STEPS
        seen = f"seen {LEAST_SAMPLES} times, over {steps} steps, with no fault under way"
        return Verdict(name, UNSEEN, f"not judged: in no attempt was a rank {seen}")
    found.sort(key=lambda one: one[1].mib, reverse=True)
    if wrong := [f"{whose}{growth.text}" for whose, growth in found if growth.mib > run.growth_mib]:
        text = f"{len(wrong)} of {len(found)} curves of a rank in an attempt are over {run.growth_mib:g} MiB in 1,000 steps: "
        return Verdict(name, VIOLATED, text + "; ".join(wrong[:SHOWN_LEAKS]))
    whose, most = found[0]
    text = (
        f"{len(found)} curves of a rank in an attempt; most: {whose}{most.text}"
        if most.mib
        else f"none of {len(found)} curves of a rank in an attempt grows"
    )
    return Verdict(name, HELD, f"{text}; limit {run.growth_mib:g}")
