"""Run simulated jobs by seed: `python -m tests.simulation.replay SEED` prints one job's journals; `--count N` runs many."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator

from tests.simulation.checks import violations
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario, build
from tests.simulation.soak import outcome_of
from tests.simulation.training import LAYOUTS


def transcript(scenario: Scenario) -> Iterator[str]:
    """Print the faults and the journals of a job that has run, line by line."""
    job = scenario.job
    mode = "local copies" if job.training.local_copy else "spanning records"
    yield f"seed {scenario.seed}: {job.training.layout.name}, {job.training.steps} steps, {mode}, agents {job.agents}{own_text(job)}"
    yield from (f"  fault: {fault}" for fault in scenario.faults)
    lines = [(at, f"c{c.place} {line.event}: {dict(line.fields)}") for c in job.controllers for at, line in c.journal]
    lines += [(float(note.split()[0]), "    " + note.split(maxsplit=1)[1]) for note in job.notes]
    for at, text in sorted(lines, key=lambda pair: pair[0]):
        yield f"{at:9.4f}  {text}"
    for c in job.controllers:
        yield f"controller c{c.place}: {'killed' if c.dead else c.over or 'not over'} ({c.state.stage.value})"
    yield f"acted: {'; '.join(f'{s.kind} in {s.where} at {s.at_s:.4f} s' for s in job.strikes) or 'nothing'}"
    yield f"disk {job.disk.published}"


def own_text(job: Job) -> str:
    """Say what is special about a job's directories."""
    if job.own is None:
        return ""
    return f", each host with its own {' '.join(job.own.names)}, fragile: {' '.join(sorted(job.own.fragile)) or 'none'}"


def tell(scenario: Scenario) -> None:
    print("\n".join(transcript(scenario)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--count", type=int, default=1, help="run this many seeds from SEED on")
    parser.add_argument("--layout", choices=[layout.name for layout in LAYOUTS], help="instead of the seed's own")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failing seed")
    arguments = parser.parse_args()
    layout = next((layout for layout in LAYOUTS if layout.name == arguments.layout), None)
    outcomes: collections.Counter[str] = collections.Counter()
    failing = []
    began = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        scenario = build(seed, layout)
        found = violations(scenario)
        outcomes[outcome_of(scenario)] += 1
        if found:
            failing.append(seed)
            print(f"seed {seed}: {'; '.join(found)}")
            if not arguments.keep_going:
                tell(scenario)
                break
        elif arguments.count == 1:
            tell(scenario)
    ran = sum(outcomes.values())
    print(f"{ran} jobs in {time.monotonic() - began:.1f} s: {dict(outcomes)}; failing seeds: {failing or 'none'}")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
