"""Every test with real processes, many times beside busy ones: `make flaky`.

A test that passes once and fails once is a defect: of the test, or of what it tests. Owns the choice of places, the busy processes, and
a state file, with which an interrupted run goes on where it was. Never repeats a failed run: every failure counts. Long tests are not among
them unless asked for (`--marks long`): a pass of them takes an hour. With `--pauses 0.03` threads and processes pause at 3 % of the lines of ttp,
or with `--lines-of tests` of the tests (`tests/pauses`), which shows in a few runs what is taken for granted of their order; a run's number is its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAUSES = ROOT / "tests/pauses"
TIMES = 10
BUSY = 2
WORKERS = 3
MARKS = "not long"
PLACES = (
    *(
        f"tests/unit/{folder}"
        for folder in (
            *("launch", "fork_server", "runtime", "session", "groups", "regroup", "mindio", "optim", "chaos", "adopt"),
            *("doctor", "selftest", "status", "status_page", "copies", "mirror", "identity", "examples", "benchmarks"),
        )
    ),
    *(f"tests/unit/checkpoint/test_{name}.py" for name in ("signature", "stock_torch")),
    *(f"tests/unit/cli/test_{name}.py" for name in ("cli", "fuzz_command")),
    *(
        f"tests/unit/trainer/test_{name}.py"
        for name in ("layouts", "layouts_in_full", "encoder_decoder", "recompute", "prepare")
    ),
    "tests/unit/goodput/test_main.py",
    "tests/parity",
    "tests/chaos",
    "tests/device",
    "tests/fuzz",
)
"""Folders and files whose tests start processes, or ranks as threads under a real controller."""
LEFT_OUT = {
    "tests/simulation": "a simulated clock: a seed shows the same every time, and processes only divide the seeds among them or hold a mutant",
    "tests/model": "searches without a clock; processes only divide them",
    "tests/unit/house": "linters, and builds of the distribution and of the site: commands that end by themselves",
}
"""Files and folders whose tests start processes as well, and why they are not repeated."""


@dataclass
class State:
    """What has been run so far. A run is all tests of one place, once."""

    commit: str
    runs: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    """`test`, `run` and `output`, the file with all that pytest printed."""

    @classmethod
    def load(cls, path: Path, commit: str) -> State:
        """Return what the file has of this commit; of another one, or without a file, nothing has been run."""
        with contextlib.suppress(FileNotFoundError):
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            if found.commit == commit:
                return found
            print(f"flaky: {path} is of commit {found.commit[:12]}: all runs begin anew")
        return cls(commit)

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)


def places_of(places: Sequence[str]) -> list[str]:
    """Return these places. Raises SystemExit for one that has no tests."""
    for place in places:
        here = ROOT / place
        if not (here.is_file() or any(here.glob("test_*.py"))):
            raise SystemExit(f"flaky: invalid place: got {place!r}, expected a test file or a folder with test files")
    return list(places)


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep so many processors busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pausing(seed: int, share: float, lines_of: str) -> dict[str, str]:
    """Return the environment of processes that pause at this share of the lines of `ttp` or of `tests`; with 0, this process's."""
    if not share:
        return dict(os.environ)
    path = os.pathsep.join([str(PAUSES), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "PAUSES": f"{seed} {share} {lines_of}"}


def run_once(place: str, marks: str, workers: int, output: Path, environment: dict[str, str]) -> list[str]:
    """Run the tests of a place; return which failed. `output` gets what pytest prints, and is kept where one failed, as the tests' folders are."""
    report, wrote = output.with_suffix(".xml"), tempfile.mkdtemp(prefix="flaky-")
    command = [
        sys.executable,
        "-m",
        "pytest",
        place,
        "-q",
        "-m",
        marks,
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        f"--basetemp={wrote}",
    ]
    with open(output, "wb") as stream:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
        ).returncode
        stream.write(f"what the tests wrote is in {wrote}\n".encode())
    failed = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}::{case.get('name')}")
        report.unlink()
    if status not in (0, 5) and not failed:  # 5: no test of the place has these marks
        failed.append(f"{place}: pytest ended with status {status}")
    if not failed:
        output.unlink()
        shutil.rmtree(wrote, ignore_errors=True)
    return list(dict.fromkeys(failed))


def run_all(
    state: State,
    places: Sequence[str],
    times: int,
    marks: str,
    workers: int,
    share: float,
    lines_of: str,
    folder: Path,
    until_s: float,
) -> None:
    """Run what is missing: every place once, then every place a second time, and so on. Begins no run after `until_s`."""
    for number in range(times):
        for place in places:
            if state.runs.get(place, 0) > number:
                continue
            if time.monotonic() >= until_s:
                return
            output = folder / f"{place.strip('/').replace('/', '.').removesuffix('.py')}_{number + 1}.txt"
            began_s = time.monotonic()
            failed = run_once(place, marks, workers, output, pausing(number + 1, share, lines_of))
            state.runs[place] = number + 1
            state.failures += [{"test": test, "run": str(number + 1), "output": str(output)} for test in failed]
            state.save(folder / "state.json")
            result = f"FAILED: {', '.join(failed)}; see {output}" if failed else "passed"
            print(
                f"flaky: {place}, run {number + 1} of {times}: {result} ({time.monotonic() - began_s:.0f} s)",
                flush=True,
            )


def summary(state: State, places: Sequence[str], times: int) -> str:
    done = sum(min(state.runs.get(place, 0), times) for place in places)
    lines = [f"{one['test']}, run {one['run']}: see {one['output']}" for one in state.failures]
    missing = [place for place in places if state.runs.get(place, 0) < times]
    if missing:
        lines.append(f"not run {times} times yet, the same command goes on: {', '.join(missing)}")
    lines.append(f"{done} of {len(places) * times} runs done, {len(state.failures)} failed tests")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when no test has failed so far, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=__doc__)
    parser.add_argument("places", nargs="*", help="test files and folders (default: all that start processes)")
    parser.add_argument("--times", type=int, default=TIMES, help="runs of each place (default %(default)s)")
    parser.add_argument("--busy", type=int, default=BUSY, help="busy processes beside them (default %(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="tests at the same time (default %(default)s)")
    parser.add_argument("--pauses", type=float, default=0.0, help="share of the lines that pause (default: none)")
    parser.add_argument("--lines-of", choices=("ttp", "tests"), default="ttp", help="whose lines (default %(default)s)")
    parser.add_argument("--marks", default=MARKS, help="which tests, as pytest -m (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "output/flaky", help="state and outputs (default output/flaky)"
    )
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    if given.marks != MARKS:  # other tests of the same places
        folder /= re.sub(r"\W+", "_", given.marks) or "all"
    if not 0 <= given.pauses <= 1:
        parser.error(f"invalid --pauses: got {given.pauses:g}, expected a share of the lines, 0 to 1, as in 0.03")
    if given.lines_of != "ttp" and not given.pauses:
        parser.error(f"invalid --lines-of: got {given.lines_of} without --pauses, expected both, as in --pauses 0.25")
    if given.pauses:
        folder /= f"pauses_{given.pauses:g}_{given.lines_of}"
    folder.mkdir(parents=True, exist_ok=True)
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    state = State.load(folder / "state.json", asked.stdout.strip() or "no commit")
    places = places_of(given.places or PLACES)
    with busy(given.busy):
        until_s = time.monotonic() + 60 * given.minutes
        run_all(state, places, given.times, given.marks, given.workers, given.pauses, given.lines_of, folder, until_s)
    print(summary(state, places, given.times))
    return 1 if state.failures else 0


if __name__ == "__main__":
    sys.exit(main())
