"""Search a model job from the command line: `python -m tests.model --faults 2`."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from tests.model.search import Found, Search
from tests.model.shape import FAULTS, FAULTS_IN_PLACE, THREE_RANKS, Shape
from tests.model.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--calm-steps", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--peer-errors", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), choices=FAULTS_IN_PLACE)
    parser.add_argument(
        "--in-place-s", type=float, default=0.0, help="how long ranks may take to regroup; 0: not tried"
    )
    parser.add_argument("--three-ranks", action="store_true", help="two shards, of which one rank has both")
    parser.add_argument("--no-agents", action="store_true")
    parser.add_argument("--unreduced", action="store_true")
    parser.add_argument("--limit", type=int, default=0)
    args = parser.parse_args()
    shape = replace(
        Shape(), faults=args.faults, steps=args.steps, calm_steps=args.calm_steps, parts=args.parts, standbys=args.standbys,
        peer_errors=args.peer_errors, kinds=tuple(args.kinds), agents=not args.no_agents, in_place_s=args.in_place_s,
    )  # fmt: skip
    if args.three_ranks:
        shape = replace(shape, holders=THREE_RANKS)
    world = World(shape)
    found = Search(world, reduced=not args.unreduced).run(args.limit, _tell)
    _tell(found)
    print(
        f"rank states {len(world.of_ranks.values)}, controller states {len(world.of_controllers.values)}, "
        f"disks {len(world.of_disks.values)}, messages {len(world.of_messages.values)}"
    )
    for outcome, count in found.outcomes.most_common():
        print(f"{count:9d} {outcome}")
    if found.violation:
        print(f"VIOLATION {found.violation}")
        for action in found.path:
            print("  ", *action)
    print("complete" if found.complete else "not complete")
    return 1 if found.violation else 0


def _tell(found: Found) -> None:
    rate = found.states / max(found.seconds, 1e-9)
    print(
        f"{found.states} states, {found.steps} steps, {found.crossings} crossings, {found.ends} ends, {found.seconds:.1f} s ({time.process_time():.1f} s CPU), {rate:.0f}/s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
