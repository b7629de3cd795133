"""Two faults of all kinds: `python -m tests.model.pairs`.

One search for each pair of kinds, so that the memory of one is enough: together they are the search of two faults of any kind. Prints
how many situations and ends each had, and how the jobs ended. Exit status 1 after a violation.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations_with_replacement
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from tests.model.search import Found, Search
from tests.model.shape import FAULTS, FAULTS_IN_PLACE, THREE_RANKS, Shape
from tests.model.world import World
from ttp.proto.frozen import replace

Pair = tuple[str, str]
PAIRS: tuple[Pair, ...] = tuple(combinations_with_replacement(FAULTS, 2))
PAIRS_IN_PLACE: tuple[Pair, ...] = tuple(
    pair for pair in combinations_with_replacement(FAULTS_IN_PLACE, 2) if {"kill", "raise"} & {*pair}
)
"""A recovery begins with a death or an exception."""


def named_pair(text: str) -> Pair:
    """Return the pair that `stop+kill` names, in whichever order. Raises ArgumentTypeError."""
    for pair in (*PAIRS, *PAIRS_IN_PLACE):
        if sorted(pair) == sorted(text.split("+")):
            return pair
    raise argparse.ArgumentTypeError(f"{text!r}: expected two of {', '.join(FAULTS)}, as in {'+'.join(PAIRS[1])}")


def shape_of(pair: Pair, calm_steps: int, in_place: bool = False) -> Shape:
    """Return the search of at most one fault of each of two kinds, or of two of one kind. `in_place`: in a job of three ranks, which may
    regroup; for longer than a lease where a process may stand still."""
    first, second = pair
    kinds = (first,) if first == second else pair
    shape = Shape(faults=2, kinds=kinds, each_once=first != second, calm_steps=calm_steps)
    if not in_place:
        return shape
    return replace(shape, peer_errors=0, holders=THREE_RANKS, in_place_s=1.0 if "stop" in pair else 0.25)


def search(pair: Pair, calm_steps: int, most: int, in_place: bool) -> tuple[Pair, Found, float]:
    """Search one pair, at most so many situations of it; also return the seconds of CPU that it took."""
    began = time.process_time()
    return pair, Search(World(shape_of(pair, calm_steps, in_place))).run(limit=most), time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model.pairs", description=__doc__)
    parser.add_argument(
        "--calm-steps", type=int, default=1, help="steps that are finished before anything goes wrong (1)"
    )
    parser.add_argument(
        "--most", type=int, default=4_000_000, help="situations of a pair (4 million, about 2 GB); 0: to the end"
    )
    parser.add_argument(
        "--in-place", action="store_true", help="where ranks may regroup: a death or an exception, and another fault"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("pairs", nargs="*", type=named_pair, metavar="KIND+KIND", help="only these (default: all)")
    args = parser.parse_args()
    pairs: list[Pair] = args.pairs or list(PAIRS_IN_PLACE if args.in_place else PAIRS)
    began = time.monotonic()
    results: list[tuple[Pair, Found, float]] = []
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed(
            [pool.submit(search, pair, args.calm_steps, args.most, args.in_place) for pair in pairs]
        ):
            pair, found, seconds = done.result()
            results.append((pair, found, seconds))
            print(f"{len(results)} of {len(pairs)}: {_line(pair, found, seconds)}", flush=True)
            if found.violation:
                _tell(pair, found)
                pool.shutdown(cancel_futures=True)
                return 1
    _print_table(results)
    states = sum(found.states for _, found, _ in results)
    cut = [" + ".join(pair) for pair, found, _ in results if not found.complete]
    ended = f"left at {args.most} situations: {', '.join(cut)}" if cut else "every search came to its end"
    print(f"{states} situations in {time.monotonic() - began:.0f} s, no violation; {ended}")
    return 0


def _line(pair: Pair, found: Found, seconds: float) -> str:
    return f"{' + '.join(pair)}: {found.states} situations, {found.ends} ends, {seconds:.0f} s CPU {found.violation}"


def _tell(pair: Pair, found: Found) -> None:
    print(f"VIOLATION with {' + '.join(pair)}: {found.violation}")
    for action in found.path:
        print("  ", *action)


def _print_table(results: list[tuple[Pair, Found, float]]) -> None:
    table = Table("two faults", "situations", "ends", "s CPU", *(names := _outcomes(results)))
    for pair, found, seconds in sorted(results, key=lambda result: (*PAIRS, *PAIRS_IN_PLACE).index(result[0])):
        counts = (str(found.outcomes[name]) for name in names)
        table.add_row(" + ".join(pair), str(found.states), str(found.ends), f"{seconds:.0f}", *counts)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _outcomes(results: list[tuple[Pair, Found, float]]) -> list[str]:
    return sorted({name for _, found, _ in results for name in found.outcomes})


if __name__ == "__main__":
    sys.exit(main())
