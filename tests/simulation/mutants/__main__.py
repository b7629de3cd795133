"""Break the shipped machines in every small way, one at a time, and name what no test notices.

What survives the protocol's tests and the simulated jobs is printed with its place: either it changes nothing that matters
(`equivalents` says which and why), or a test is missing, or the code is dead.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tests.simulation.mutants.changes import MODULES, Mutant, mutants_of, named
from tests.simulation.mutants.checks import TESTS, with_checks
from tests.simulation.mutants.equivalents import reason
from tests.simulation.mutants.trial import Bench, Check, measured

LINE_EVERY_S = 30.0
"""Seconds between two lines of progress."""


@dataclass
class Tally:
    """What became of one module's mutants."""

    mutants: int = 0
    caught: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)


def tallied(bench: Bench, chosen: Sequence[Mutant], say_all: bool) -> dict[str, Tally]:
    """Try the mutants and print each survivor as it is found; `say_all`: the caught ones as well, and by what."""
    tallies: dict[str, Tally] = {}
    began = said = time.monotonic()
    for place, mutant in enumerate(chosen):
        tally = tallies.setdefault(mutant.module, Tally())
        tally.mutants += 1
        why = reason(mutant)
        try:
            verdict = "" if why and not say_all else bench.tried(mutant)
        except RuntimeError as error:
            tally.not_tried.append(str(error))
            print(f"NOT TRIED {error}", flush=True)
            continue
        if verdict:
            tally.caught += 1
        elif why:
            tally.equivalent += 1
        else:
            tally.survivors.append(mutant)
        if say_all or not (verdict or why):
            word = f"caught by {verdict}" if verdict else "equivalent" if why else "SURVIVED"
            print(f"{word}: {described(mutant)}", flush=True)
        if verdict and why:
            print(f"  yet it is listed as equivalent: {why}", flush=True)
        now = time.monotonic()
        if now >= said + LINE_EVERY_S:
            said = now
            print(f"... {place + 1} of {len(chosen)} in {now - began:.0f} s", flush=True)
    return tallies


def described(mutant: Mutant) -> str:
    return f"{mutant.place} ({mutant.name}) `{mutant.source}`: {mutant.change}"


def printed(tallies: dict[str, Tally], seconds: float) -> None:
    """Print the table, and under it how long it took."""
    table = Table("module", "mutants", "caught", "equivalent", "survived", title="small changes of the machines")
    total = Counter[str]()
    for module, tally in tallies.items():
        counts = {
            "mutants": tally.mutants, "caught": tally.caught, "equivalent": tally.equivalent, "survived": len(tally.survivors),
        }  # fmt: skip
        total.update(counts)
        table.add_row(module, *map(str, counts.values()))
    table.add_row("all", *(str(total[name]) for name in ("mutants", "caught", "equivalent", "survived")))
    Console().print(table)
    print(f"{total['mutants']} mutants in {seconds:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--module", action="append", choices=MODULES, help="only this one; may be said several times")
    parser.add_argument(
        "--mutant", action="append", default=[], help="only this one (controller.core.dump.freeze:12); likewise"
    )
    parser.add_argument("--seeds", type=int, default=300, help="simulated jobs of each mutant (default: 300)")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files and folders; none: simulated jobs alone")
    parser.add_argument("--longest-s", type=float, default=math.inf, help="leave out checks that take longer than this")
    parser.add_argument("--sample", type=int, default=0, help="only so many, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="tell of every mutant, and try the equivalent ones as well")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    arguments = parser.parse_args()
    chosen = [mutant for module in arguments.module or MODULES for mutant in mutants_of(module)]
    if arguments.mutant:
        try:
            chosen = named(arguments.mutant)
        except ValueError as error:
            parser.error(str(error))
    if arguments.sample:
        chosen = random.Random(arguments.seed).sample(chosen, min(arguments.sample, len(chosen)))
    if arguments.list:
        for mutant in chosen:
            print(described(mutant))
        return 0
    began, failed = time.monotonic(), [True]

    def work(checks: list[Check]) -> None:
        bench = measured(checks, arguments.longest_s)
        took = sum(one.cpu_s for one in bench.checks)
        print(f"{len(bench.checks)} checks in {took:.0f} s of processor time; {len(chosen)} mutants to try", flush=True)
        tallies = tallied(bench, chosen, arguments.all)
        printed(tallies, time.monotonic() - began)
        failed[0] = any(tally.survivors or tally.not_tried for tally in tallies.values())

    try:
        with_checks(arguments.tests, arguments.seeds, work)
    except RuntimeError as error:
        print(f"no mutant was tried: {error}", file=sys.stderr)
    return 1 if failed[0] else 0


if __name__ == "__main__":
    sys.exit(main())
