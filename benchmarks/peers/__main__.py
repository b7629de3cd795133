"""TTP in place, TTP by a restart, torchrun with DCP and other systems take turns with the same trainer: a rank is killed, then another.

    make bench BENCH=peers
    python -m benchmarks.peers --runs 1 --systems ttp_in_place,ttp,torchrun

Each system has an environment of its own under build/peers, made at its first use; TTP and torchrun run in that of the benchmark. One job at a
time; in each a rank is killed by SIGKILL at a random step, and again when training continues. A second series kills rank 0. The figures are written
to output/peers/SEED.json with a picture; `--write-docs` puts them into docs/comparison.md.

Exit status 1 when TTP did not survive a kill or lost a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import report, trial
from benchmarks.peers.environments import ROOT, NotInstalled, python_of, version_of
from benchmarks.peers.systems import OWN, PLAIN, SYSTEMS, TORCH, System

OUTPUT = ROOT / "output" / "peers"
DOCUMENT = ROOT / "docs" / "comparison.md"
PARAMETERS = 131_841
"""Of the toy model."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--runs", type=int, default=5, help="jobs of each system in which ranks but 0 are killed")
    parser.add_argument("--rank-0-runs", type=int, default=1, help="jobs of each system in which rank 0 is killed")
    parser.add_argument("--kills", type=int, default=2, help="kills in each job")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints, where a system saves so")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--write-docs", action="store_true", help="rewrite the table and the picture of docs/comparison.md"
    )
    parser.add_argument("--report", type=Path, help="run nothing: report an earlier run's JSON file")
    options = parser.parse_args(argv)
    options.systems = options.systems.split(",")
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"no system {', '.join(sorted(unknown))}: expected some of {', '.join(SYSTEMS)}")
    return options


def turns(options: argparse.Namespace, names: Sequence[str], draw: random.Random) -> list[tuple[str, str, int]]:
    """Return (system, victim, ranks) of every job: in each round every system once, in random order, and plain DDP beside them."""
    worlds = {name: SYSTEMS[name].ranks or options.ranks for name in names}
    plain = [("plain", "", ranks) for ranks in sorted(set(worlds.values()))]
    order = []
    for number in range(options.runs + options.rank_0_runs):
        victim = report.OTHERS if number < options.runs else report.RANK_0
        jobs = [(name, victim, ranks) for name, ranks in worlds.items()] + (plain if number < options.runs else [])
        order += draw.sample(jobs, len(jobs))
    return order


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Install what is missing, run every job, and return what was found."""
    draw = random.Random(options.seed)
    pythons, not_installed = {}, {}
    for name in options.systems:
        try:
            pythons[name] = python_of(SYSTEMS[name])
        except NotInstalled as error:
            not_installed[name] = str(error)
            print(f"{SYSTEMS[name].title} is not installed: {error}", flush=True)
    order = turns(options, list(pythons), draw)
    jobs: list[dict[str, Any]] = []
    loads = []
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="ttp_peers_"))
    try:
        for number, (name, victim, ranks) in enumerate(order):
            loads.append(os.getloadavg()[0])
            system: System = SYSTEMS.get(name, PLAIN)
            job = trial.run(
                name, system, pythons.get(name) or python_of(PLAIN), ranks, options.kills if victim else 0, victim,
                options.save_every, root / f"{name}_{number}", draw,
            )  # fmt: skip
            jobs.append({**dataclasses.asdict(job), "ranks": ranks})
            shutil.rmtree(root / f"{name}_{number}", ignore_errors=True)
            print(f"{number + 1} of {len(order)}, {time.monotonic() - began:.0f} s: {summary(system, job)}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        "seed": options.seed, "torch": TORCH, "cores": len(os.sched_getaffinity(0)), "load": [min(loads), max(loads)],
        "ranks": options.ranks, "parameters": PARAMETERS, "not_installed": not_installed, "jobs": jobs,
        "versions": {name: version_of(SYSTEMS[name]) for name in pythons},
        "saves": {name: SYSTEMS[name].saves.format(every=options.save_every) for name in pythons},
    }  # fmt: skip


def summary(system: System, job: trial.Result) -> str:
    """Say in one line what a job came to."""
    if job.error:
        return f"{system.title} did not begin: {job.error}"
    kills = [
        f"rank {kill.rank} killed, {seconds(kill.recovery.back_s)}, {kill.recovery.lost} steps lost{', the others kept running' if kill.stayed else ''}"
        for kill in job.kills
    ]
    return f"{system.title}: {'; '.join(kills) or 'no kill'}"


def seconds(value: float | None) -> str:
    return "never back" if value is None else f"back after {value:.2f} s"


def missed(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return TTP's kills that were not survived, or cost a step."""
    jobs = [job for job in found["jobs"] if job["system"] in OWN]
    kills = [kill for job in jobs for kill in job["kills"]]
    failed = [kill for kill in kills if kill["recovery"]["new_s"] is None or kill["recovery"]["lost"]]
    return failed + [job for job in jobs if job["error"]]


def main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    if options.report:
        try:
            found = json.loads(options.report.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(
                f"cannot read --report {options.report}: {error}. Give the JSON file of an earlier run, output/peers/SEED.json",
                file=sys.stderr,
            )
            return 2
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the job in progress as well
        print(f"seed {options.seed}, {options.ranks} ranks, {options.kills} kills a job", flush=True)
        found = measure(options)
    picture = report.picture(found)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    result = OUTPUT / f"{found['seed']}.json"
    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    result.with_suffix(".svg").write_text(picture, encoding="utf-8")
    if options.write_docs:
        DOCUMENT.write_text(report.written(DOCUMENT.read_text(encoding="utf-8"), found), encoding="utf-8")
        (ROOT / "docs" / "pictures" / "peers.svg").write_text(picture, encoding="utf-8")
    print(f"\n{report.console(found)}\n\nwritten: {result.relative_to(ROOT)}")
    failed = missed(found)
    print(f"TTP survived every kill and lost no step: {'no' if failed else 'yes'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
