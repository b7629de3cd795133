"""Small changes of the machines that random jobs alone must find: `make mutants` tries the next 30, each in up to 20,000 jobs.

Mutants come in an order that is always the same, and what became of each is kept in a file: the same command goes on with the next ones. A
change of the machines or of the simulation begins anew. Owns the file; which mutants there are, `changes` says, and which of them random jobs
are known not to find, `not_by_seeds`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.simulation.checks import violations
from tests.simulation.garbage import seldom_collected
from tests.simulation.mutants.changes import MODULES, ROOT, Mutant, file_of, mutants_of, named
from tests.simulation.mutants.equivalents import reason
from tests.simulation.mutants.not_by_seeds import known
from tests.simulation.mutants.trial import forked, limit_cpu, put_in
from tests.simulation.scenario import build

IN_ONE_GO = 30
MOST_JOBS = 20_000
STATE = ROOT / "output/mutants/by_seeds.json"
ADAPTERS = (
    "controller.handler",
    "processor.handler",
    "processor.gate",
    "processor.freeze_state",
    "processor.worker",
    "processor.starting",
)
NOT_RANDOM = ("controller.core.facts.answers", "processor.core.refusals", "proto.limits", "proto.names", "proto.fence")
"""They refuse what no machine of this job sends."""
MACHINES = tuple(module for module in MODULES if module not in (*ADAPTERS, *NOT_RANDOM))
IMPORT = "its import"
ENDLESS = "a job that did not end"


@dataclass
class Found:
    """What random jobs showed of one mutant: nothing yet, while `by` is empty."""

    jobs: int = 0
    by: str = ""


@dataclass
class State:
    """What has been tried so far, of this code."""

    code: str
    found: dict[str, Found] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, code: str) -> State:
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["code"] == code:
                return cls(code, {name: Found(**one) for name, one in kept["found"].items()})
            print(f"{path} is of other machines or another simulation: all begins anew")
        return cls(code)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)


def code() -> str:
    """Return a digest of all that decides what a seed shows."""
    files = [*map(file_of, MODULES), *sorted((ROOT / "tests/simulation").rglob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def in_order(modules: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these modules as they are tried: mixed, so that any number of them is a sample."""
    mutants = [mutant for module in modules for mutant in mutants_of(module) if not reason(mutant)]
    random.Random(0).shuffle(mutants)
    return mutants


def look(change: Callable[[], bool], first: int, count: int) -> Found:
    """Run the jobs of these seeds on a change, which is made in a process of its own, until one shows it."""

    def trial(tell: Callable[[object], None]) -> None:
        if not change():
            tell((0, IMPORT))
            return
        with seldom_collected():
            for seed in range(first, first + count):
                tell((seed, ENDLESS))
                limit_cpu(1.0)
                if by := _shown(seed):
                    tell((seed, by))
                    return
        tell((first + count - 1, ""))

    results, status = forked(trial)
    if not results:
        raise RuntimeError(f"the change could not be made: status {status}")
    seed, by = results[-1]
    return Found(seed + 1, by)


def _shown(seed: int) -> str:
    try:
        scenario = build(seed)
        found = violations(scenario)
        if not found:
            scenario.job.dismantle()
            return ""
        return found[0]
    except Exception as error:
        return f"raised: {error!r}"


def try_next(state: State, chosen: Sequence[Mutant], most: int, jobs: int, path: Path) -> list[Mutant]:
    """Try those that have not been tried yet in so many jobs, so many at most; return them."""
    due = [mutant for mutant in chosen if _is_due(state.found.get(mutant.name), jobs)][:most]
    for mutant in due:
        began, before = time.monotonic(), state.found.get(mutant.name, Found()).jobs
        found = state.found[mutant.name] = look(lambda mutant=mutant: put_in(mutant), before, jobs - before)  # type: ignore[misc]
        state.save(path)
        place = f"{mutant.place} ({mutant.name}) `{mutant.source}`: {mutant.change}"
        print(f"{_outcome(mutant, found)}: {place} [{time.monotonic() - began:.0f} s]", flush=True)
    return due


def _outcome(mutant: Mutant, found: Found) -> str:
    one = known(mutant)
    if found.by:
        stale = "; REMOVE ITS ROW from not_by_seeds.py and docs/limits.md" if one else ""
        return f"found by seed {found.jobs - 1}, {found.by[:60]}{stale}"
    if one:
        return f"not found by {found.jobs} seeds, as is known ({one.why}; {one.test} finds it)"
    return f"NOT FOUND by {found.jobs} seeds"


def as_known(mutant: Mutant, found: Found) -> bool:
    """Say whether random jobs have found this mutant, or not, as they should."""
    return bool(found.by) == (known(mutant) is None)


def _is_due(found: Found | None, jobs: int) -> bool:
    return found is None or (not found.by and found.jobs < jobs)


def summary(state: State, chosen: Sequence[Mutant], jobs: int) -> str:
    done = [
        (mutant, found)
        for mutant in chosen
        if not _is_due(found := state.found.get(mutant.name), jobs) and found is not None
    ]
    missed = [mutant for mutant, found in done if not found.by]
    why = f" ({n} of them as is known)" if (n := sum(known(mutant) is not None for mutant in missed)) else ""
    return (
        f"{len(done)} of {len(chosen)} mutants tried: {len(done) - len(missed)} found by seeds alone, {len(missed)} not found by {jobs}{why}; "
        f"{len(chosen) - len(done)} left, the same command goes on"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every mutant of this go was found, but those that are known not to be; 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants.by_seeds", description=__doc__)
    parser.add_argument("--module", action="append", choices=MODULES, help="only this one; may be said several times")
    parser.add_argument(
        "--mutant", action="append", default=[], help="only this one (controller.core.dump.freeze:12); likewise"
    )
    parser.add_argument("--most", type=int, default=IN_ONE_GO, help="mutants in this go (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=MOST_JOBS, help="jobs of each mutant (default: %(default)s)")
    parser.add_argument("--state", type=Path, default=STATE, help="what has been tried (default: %(default)s)")
    given = parser.parse_args(arguments)
    chosen = in_order(given.module or MACHINES)
    if given.mutant:
        try:
            chosen = named(given.mutant)
        except ValueError as error:
            parser.error(str(error))
    state = State.load(given.state, code())
    tried = try_next(state, chosen, given.most, given.jobs, given.state)
    print(summary(state, chosen, given.jobs))
    return 0 if all(as_known(mutant, state.found[mutant.name]) for mutant in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
