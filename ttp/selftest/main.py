"""The command line of the self-test: what TTP relies on, tried for real on the device that is named, within five minutes.

    python -m ttp.selftest --device cuda [--ranks N] [--kills 3] [--minutes 5] [--seed S] [--output DIR] [trainer overrides]

0  every check that means something on this device was run, and passed
1  a check failed, or could not be run
2  a wrong command line, or no such device

DIR/report.json and DIR/report.txt are what to send. The jobs' own files are beside them.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ttp import files
from ttp.chaos.observed.training_job import JobError
from ttp.errors import ConfigError
from ttp.inputs.options import above_zero, whole
from ttp.selftest.jobs import Jobs
from ttp.selftest.probe_process import ProbeFailed, probe
from ttp.selftest.report import FAILED, NOT_RUN, PASSED, Check, as_json, as_text
from ttp.text.console import open_console
from ttp.version import VERSION

GOOD, BAD, USAGE, INTERRUPTED = 0, 1, 2, 130
MINUTES = 5.0
KILLS = 3
_OWN = (
    "report.json",
    "report.txt",
    "killed",
    "baseline",
    "blocked",
    "cpu_weights",
    "cpu_steps",
    "off_1",
    "off_2",
    "on_1",
    "on_2",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-test; return the exit status. argparse itself exits with 2."""
    args = parse(argv)
    console = open_console()
    try:
        return _run(args, console)
    except ConfigError as error:
        console.print(f"ttp.selftest: {error}", markup=False, style="red")
        return USAGE
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been ended")
        return INTERRUPTED


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; what is for the trainer is in `overrides`."""
    parser = argparse.ArgumentParser(prog="python -m ttp.selftest", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, npu, musa, xpu, a plug-in's own name, or auto (default: the first one present)",
    )
    parser.add_argument(
        "--ranks",
        type=whole(1, 1000),
        help="ranks of each job; more than there are devices share the first (default: 2, or 1 where there is one device)",
    )
    parser.add_argument(
        "--kills", type=whole(1, 100), default=KILLS, help=f"how often a rank is killed (default: {KILLS})"
    )
    parser.add_argument(
        "--minutes",
        type=above_zero("minutes", 1e6),
        default=MINUTES,
        help=f"what is not done by then is not run (default: {MINUTES:g})",
    )
    parser.add_argument("--seed", type=whole(), help="of the moments of the kills (default: random, printed)")
    parser.add_argument(
        "--output", type=Path, default=Path("output/selftest"), help="folder of the report and of the jobs"
    )
    args, overrides = parser.parse_known_args(argv)
    args.overrides = overrides
    return args


def _run(args: argparse.Namespace, console: Console) -> int:
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    output: Path = args.output.resolve()
    _prepare(output)
    began, unix_s = time.monotonic(), time.time()
    console.print(f"TTP self-test on {args.device}: at most {args.minutes:g} minutes; seed {seed}", markup=False)
    checks: list[Check] = []
    about = {"python": platform.python_version(), "ttp": VERSION, "seed": seed, "unix_s": round(unix_s, 1)}
    try:
        probed = probe(args.device)
    except ProbeFailed as error:
        unknown = {"type": args.device, "name": "unknown", "backend": "unknown", "driver": "unknown", "count": 0}
        _add(console, checks, Check("streams and events", FAILED, str(error)))
        _add(console, checks, Check("all other checks", NOT_RUN, "the device's probe failed"))
        return _write(console, output, as_json({**about, "device": unknown, "torch": version("torch")}, checks))
    device = probed["device"]
    ranks, shared = ranks_of(args.ranks, int(device["count"]))
    console.print(f"{device['type']}: {device['name']}; driver {device['driver']}", markup=False)
    for each in probed["checks"]:
        _add(console, checks, Check(**each))
    until = began + 60 * args.minutes
    _run_jobs(
        console,
        Jobs(output, device["trainer_device"], ranks, args.kills, seed, args.overrides, console, until, shared),
        checks,
    )
    took = {"ranks": ranks, "shared_device": shared, "seconds": round(time.monotonic() - began, 1)}
    return _write(console, output, as_json({"device": device, "torch": probed["torch"], **about, **took}, checks))


def _write(console: Console, output: Path, report: dict[str, Any]) -> int:
    """Leave the report in both forms, and return the exit status."""
    files.replace(output / "report.json", json.dumps(report, indent=2) + "\n")
    files.replace(output / "report.txt", as_text(report))
    good = report["verdict"] == PASSED
    console.print(
        f"[bold {'green' if good else 'red'}]{report['verdict'].upper()}[/]: {output / 'report.json'}, {output / 'report.txt'}"
    )
    return GOOD if good else BAD


def _run_jobs(console: Console, jobs: Jobs, checks: list[Check]) -> None:
    for title, names, run in jobs.parts():
        try:
            if time.monotonic() >= jobs.until_monotonic_s:
                raise JobError("not begun")
            console.print(f"... {title}", markup=False)
            found = run()
        except Exception as error:  # whatever it is, the report says so and is written
            reason = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
            found = [
                Check(names[0], FAILED, reason),
                *(Check(name, NOT_RUN, f"{names[0]} failed") for name in names[1:]),
            ]
            if isinstance(error, JobError) and time.monotonic() >= jobs.until_monotonic_s:
                reason = f"the time was over ({reason}); give more with --minutes"
                found = [Check(name, NOT_RUN, reason) for name in names]
        for each in found:
            _add(console, checks, each)


def _add(console: Console, checks: list[Check], check: Check) -> None:
    checks.append(check)
    figures = ", ".join(f"{name} {value}" for name, value in check.figures.items())
    color = {PASSED: "green", FAILED: "red", NOT_RUN: "red"}.get(check.status, "default")
    parts = [escape(part) for part in (check.reason, figures) if part]
    console.print(f"[{color}]{check.status}[/] {escape(check.name)}{': ' if parts else ''}{'; '.join(parts)}")


def ranks_of(asked: int | None, devices: int) -> tuple[int, bool]:
    """Return the ranks of each job, and whether they share a device. devices 0: the CPU, which takes any number."""
    ranks = asked or (1 if devices == 1 else 2)
    return ranks, 0 < devices < ranks


def _prepare(output: Path) -> None:
    """Empty the folder of an earlier self-test, and of nothing else. Raises ConfigError."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: got {output}, a file, expected a folder")
    files.make_folder(output)
    found = sorted(output.iterdir())
    if strange := [path.name for path in found if path.name not in _OWN]:
        raise ConfigError(
            f"--output is {output}: it holds {strange[0]!r}, which no self-test makes; name another folder, or empty it"
        )
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
