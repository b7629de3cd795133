"""Many simulated jobs over all cores: `python -m tests.simulation.soak SEED COUNT`.

Prints which kind of fault acted where and how often, how the jobs ended, what was lost, and every violated invariant with its
seed, which `python -m tests.simulation.replay SEED` prints in full. Exit status 1 after a violation, or when a cell that can
occur was not hit by enough jobs; Ctrl-C prints what was done so far (130).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.checks import unprotected, violations
from tests.simulation.faults import KINDS
from tests.simulation.garbage import seldom_collected
from tests.simulation.matrix import DUMP, PLACES, Tally, possible
from tests.simulation.scenario import Scenario, build
from tests.simulation.truth import events, of_last_fault

ENOUGH_JOBS = 50_000
"""From so many jobs on every possible cell must have been hit."""
BATCH = 250
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
NAMED = 20
"""Cells without a hit that are named: of a soak that is long enough there are few, of a short one hundreds."""
DISPUTED = "replicas differ"
"""Of a refusal: then nothing may be written, whatever is lost by it."""
LINE_EVERY_S = 30.0
"""Seconds between two plain lines of progress, where the output is not a terminal."""


def outcome_of(scenario: Scenario) -> str:
    """Return how the job ended, in a word or two."""
    names = {line.event for _, line in scenario.job.journal}
    for event in ("finished", "published", "refused"):
        if of_last_fault(scenario.job, event):
            return event
    if unprotected(scenario.job):
        return "unprotected"
    return "not assembled" if "assembled" not in names else "ended by its launcher"


def tally(seeds: range) -> Tally:
    """Run these jobs and return what became of them."""
    result = Tally()
    with seldom_collected():
        for seed in seeds:
            scenario = build(seed)
            found = violations(scenario)
            _note(result, scenario)
            if found:
                result.failures.append((seed, tuple(found)))
            scenario.job.dismantle()
    return result


def _note(result: Tally, scenario: Scenario) -> None:
    job = scenario.job
    result.jobs += 1
    result.note_strikes((strike.kind, strike.where) for strike in job.strikes if strike.kind in KINDS)
    ended = outcome_of(scenario)
    result.outcomes[ended] += 1
    why = reason_kind(str(events(job, "refused")[-1]["reason"])) if ended == "refused" else ""
    if why:
        result.refusals[why] += 1
    if ended in ("published", "refused") and why != DISPUTED:
        committed = max((record.step for record in job.known_records()), default=0)
        newest = job.disk.newest_published()
        result.lost_steps[committed - newest] += 1


_REASONS = (
    ("no live rank can write", "a shard has no live holder"),
    ("nothing to save", "no step was finished yet"),
    ("directories could be written", "no directory could be written"),
    ("all ranks are dead", "all ranks are dead"),
    ("was not over after", "the fault took longer than it may"),
    ("no rank was attached", "no rank was attached any more"),
    ("replicas differ", DISPUTED),
)


def reason_kind(reason: str) -> str:
    """Return what kind of refusal a reason is, without names and numbers."""
    return next((kind for text, kind in _REASONS if text in reason), reason)


def run(first: int, count: int, processes: int) -> Iterator[Tally]:
    """Yield the tallies of batches as they are done."""
    batches = [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]
    if processes == 1:
        yield from map(tally, batches)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _leave_ctrl_c) as pool:
        yield from pool.imap_unordered(tally, batches)


def _leave_ctrl_c() -> None:
    """Ctrl-C is for the process that prints what was done so far."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def gathered(first: int, count: int, processes: int, console: Console) -> Tally:
    """Run all, with progress: a bar on a terminal, a line now and then elsewhere. Ctrl-C ends it with what was done so far."""
    result = Tally()
    with contextlib.suppress(KeyboardInterrupt):
        _gather(result, first, count, processes, console)
    return result


def _gather(result: Tally, first: int, count: int, processes: int, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = said = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulated jobs", total=count)
        for batch in run(first, count, processes):
            result.add(batch)
            progress.update(task, completed=result.jobs)
            for seed, found in batch.failures:
                console.print(f"seed {seed}: {'; '.join(found)}", markup=False, highlight=False, soft_wrap=True)
            now = time.monotonic()
            if not console.is_terminal and now >= said + LINE_EVERY_S:
                said = now
                rate = result.jobs / (now - began)
                print(
                    f"{result.jobs} of {count} jobs, {rate:.0f} a second, {len(result.failures)} failures", flush=True
                )


# --- what is printed ---


def report(result: Tally, console: Console) -> None:
    console.print(_matrix(result))
    console.print(_orders(result))
    ended = Table("how it ended", "jobs", "of 100")
    for name, number in [
        *result.outcomes.most_common(),
        *((f"  refused: {r}", n) for r, n in result.refusals.most_common()),
    ]:
        ended.add_row(name, str(number), f"{100 * number / result.jobs:.2f}")
    console.print(ended)
    lost = Table("committed steps that no checkpoint has", "dumps and refusals")
    for steps, number in sorted(result.lost_steps.items()):
        lost.add_row(str(steps), str(number))
    console.print(lost)


def _matrix(result: Tally) -> Table:
    """Return how often each kind acted at each place; a dash: it cannot."""
    table = Table("fault", *PLACES, title="faults that acted, by where the job was")
    can = set(possible())
    for kind in KINDS:
        row = [str(result.cells[kind, place]) if (kind, place) in can else "-" for place in PLACES]
        table.add_row(kind, *row)
    return table


def _orders(result: Tally) -> Table:
    table = Table("which fault of its job", *DUMP, title="faults during a dump")
    for order in ("first", "second", "third", "later"):
        table.add_row(order, *(str(result.orders[order, place]) for place in DUMP))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    began = time.monotonic()
    result = gathered(arguments.seed, arguments.count, arguments.processes, console)
    report(result, console)
    took = time.monotonic() - began
    last = arguments.seed + arguments.count - 1
    print(f"seeds {arguments.seed} to {last}: {result.jobs} jobs in {took:.0f} s, {result.jobs / took:.0f} a second")
    interrupted = result.jobs < arguments.count
    if interrupted:
        print(f"interrupted: {arguments.count - result.jobs} of these seeds were not run")
    missing, odd = result.missing(), result.impossible()
    named = [f"; not {kind} in {place}" for kind, place in missing[:NAMED]]
    more = "".join(named) + (f"; and not {len(missing) - NAMED} more" if len(missing) > NAMED else "")
    print(f"{len(possible()) - len(missing)} of {len(possible())} cells hit that can occur{more}")
    for kind, place in odd:
        print(f"{kind} acted in {place}, which tests/simulation/matrix.py says cannot be: correct one of them")
    failing = [seed for seed, _ in result.failures]
    print(
        f"violations: {len(failing)}{f', python -m tests.simulation.replay {min(failing)} tells the first' if failing else ''}"
    )
    if failing or odd or (missing and result.jobs >= ENOUGH_JOBS):
        return 1
    return INTERRUPTED if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
