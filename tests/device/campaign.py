"""Many episodes, some in each set of rank processes: threads that wait at a gate for good end with their process.

python -m tests.device.campaign [FIRST_SEED] [COUNT]
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.device.build import extension
from tests.device.episode import Episode
from tests.device.mutants import MUTANTS, planted
from tests.device.plan import KINDS, plan_of
from tests.device.ranks import Rank, begin_ranks
from tests.unit.forkserver import fork_server
from ttp.nccl import NCCL_SETTINGS

EACH = 20
"""Episodes of one set of processes."""
EPISODE_S = 40.0
WORLDS = (2, 3, 4)


@dataclass
class Outcome:
    """What came of a campaign."""

    episodes: int = 0
    results: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def campaign(
    seeds: Sequence[int],
    *,
    kinds: Collection[str] = tuple(KINDS),
    mutant: str = "",
    world: int = 0,
    stop_at_first: bool = False,
    **forced: Any,
) -> Outcome:
    """Run an episode for each seed. world: ranks; 0: each set of processes another number. The rest: see `plan_of`, `mutants.apply`."""
    extension()
    outcome = Outcome()
    for begin in range(0, len(seeds), EACH):
        chosen = world or WORLDS[(begin // EACH) % len(WORLDS)]
        _set(seeds[begin : begin + EACH], chosen, tuple(kinds), mutant, forced, outcome)
        if outcome.violations and stop_at_first:
            break
    return outcome


def _set(
    seeds: Sequence[int], world: int, kinds: tuple[str, ...], mutant: str, forced: dict[str, Any], outcome: Outcome
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = fork_server()
        ranks = [
            context.Process(
                target=_rank_main, args=(Rank(n, world, folder, seeds[0]), list(seeds), kinds, mutant, forced)
            )
            for n in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + EPISODE_S * len(seeds)
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        lines = {
            rank: (folder / f"results_{rank}").read_text().splitlines()
            for rank in range(world)
            if (folder / f"results_{rank}").exists()
        }
        done = lines.get(0, [])
        outcome.episodes += len(done)
        outcome.results.update(line.split()[0] for line in done)
        errors = [path.read_text() for path in sorted(folder.glob("error_*"))]
        outcome.violations += [error for error in errors if "gloo/transport" not in error] or errors[:1]
        if not errors and len(done) < len(seeds):
            codes = [process.exitcode for process in ranks]
            stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stacks_*")))
            outcome.violations.append(
                f"world {world}, seed {seeds[len(done)]}: the ranks ended with {codes} or hung\n{stacks}"
            )


def _rank_main(rank: Rank, seeds: list[int], kinds: tuple[str, ...], mutant: str, forced: dict[str, Any]) -> None:
    plan: Any = None
    if mutant != "the settings of the watchdog are torch's own":
        os.environ.update({name: value for name, (value, _) in NCCL_SETTINGS.items()})
    try:
        begin_ranks(rank)
        beside = dist.new_group(backend="gloo")

        def exchange(value: Any) -> list[Any]:
            everyone = [None] * rank.world
            dist.all_gather_object(everyone, value, group=beside)
            return everyone

        with (
            open(rank.folder / f"results_{rank.number}", "w") as results,
            open(rank.folder / f"stacks_{rank.number}", "w") as stacks,
        ):
            for seed in seeds:
                faulthandler.dump_traceback_later(EPISODE_S, exit=True, file=stacks)
                plan = plan_of(seed, rank.world, kinds, **forced)
                with planted(mutant, "build"):
                    episode = Episode(plan, rank.number, rank.world, exchange)
                episode.rehearse()
                exchange(None)
                with planted(mutant, "run"):
                    result = episode.run()
                exchange(None)
                episode.end()
                print(result, plan, file=results, flush=True)
    except BaseException:
        (rank.folder / f"error_{rank.number}").write_text(
            f"world {rank.world}, rank {rank.number}, {plan}\n{traceback.format_exc()}"
        )
        os._exit(1)
    os._exit(0)


def caught(mutant: str) -> str:
    """Return how a planted mistake shows; empty: it does not."""
    chosen = MUTANTS[mutant]
    outcome = campaign(
        range(chosen.episodes),
        kinds=chosen.kinds,
        mutant=mutant,
        world=chosen.world,
        stop_at_first=True,
        **chosen.forced,
    )
    return outcome.violations[0] if outcome.violations else ""


def main() -> int:
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    begun, total = time.monotonic(), Outcome()
    for seed in range(first, first + count, EACH):
        seeds = range(seed, min(seed + EACH, first + count))
        part = campaign(seeds, world=WORLDS[(seed // EACH) % len(WORLDS)])
        total.episodes += part.episodes
        total.results += part.results
        total.violations += part.violations
        for violation in part.violations:
            print(violation, flush=True)
        if seed // EACH % 10 == 0 or part.violations:
            print(
                f"{total.episodes} faults, {dict(total.results)}, {len(total.violations)} violations, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    print(f"{total.episodes} faults on the device, {dict(total.results)}, {len(total.violations)} violations")
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
