"""Scripts of one job each, with the transcript that they must give: `python -m tests.simulation.script FILE... [--update]`.

A script has comments, lines that lay out the job, lines that name faults (see `script_faults`), then `---` and the
golden transcript. Nothing in the job is random. Every invariant is checked as well, and every fault must have struck.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.simulation.checks import run_and_check
from tests.simulation.scenario import Scenario
from tests.simulation.script_faults import ScriptError, plan
from tests.simulation.settings import OwnDirectories, Times
from tests.simulation.staged import StagedJob
from tests.simulation.training import Layout, Training, even, pipeline, ring

SCRIPTS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))
MARK = "---"


@dataclass
class Script:
    """What stands above the mark. `harmless`: nothing in it may cost the job more than a pause."""

    layout: Layout = field(default_factory=lambda: even(4))
    steps: int = 5
    standbys: int = 0
    agents: bool = True
    directories: tuple[str, ...] = ("/a", "/b")
    own_directories: bool = False
    fragile: tuple[str, ...] = ()
    """Hosts whose disk is lost with them."""
    local_copy: bool = False
    collectives_hang: bool = False
    harmless: bool = False
    times: Times = field(default_factory=Times)
    faults: list[str] = field(default_factory=list)


def parse(text: str) -> Script:
    """Read the lines above the mark. Raises ScriptError for one without meaning."""
    script = Script()
    for line in (line.split("#")[0].strip() for line in text.split(f"\n{MARK}\n")[0].splitlines()):
        word, _, rest = line.partition(" ")
        match word:
            case "":
                continue
            case "layout":
                script.layout = _layout(rest)
            case "steps" | "standbys":
                setattr(script, word, int(rest))
            case "directories":
                script.directories = tuple(rest.split())
            case "own" if rest == "directories":
                script.own_directories = True
            case "host" if rest.endswith(" loses its disk"):  # when all its ranks are killed
                script.fragile += (f"host{int(rest.split()[0])}",)
            case "without" if rest == "agents":
                script.agents = False
            case "local" if rest == "copies":
                script.local_copy = True
            case "collectives" if rest == "hang":
                script.collectives_hang = True
            case "harmless":
                script.harmless = True
            case "hang":  # hang limit 0.5 s
                script.times = replace(
                    script.times, hang_floor_s=float(rest.split()[1]), hang_factor=5.0, heartbeat_s=0.05
                )
            case _:
                script.faults.append(line)
    return script


def _layout(text: str) -> Layout:
    """Return the layout of `even 4`, `even 4 on one host`, `ring 3`, `ring 4 of 3` or `pipeline 8 of 2`."""
    read = re.fullmatch(r"(even|ring|pipeline) (\d+)(?: of (\d+))?( on one host)?", text)
    if read is None:
        raise ScriptError(
            f"invalid layout {text!r}: expected `even 4`, `even 4 on one host`, `ring 4 of 3` or `pipeline 8 of 2`"
        )
    size = int(read[2])
    if read[1] == "even":
        return even(size, size if read[4] else 2)
    return ring(size, int(read[3] or 2)) if read[1] == "ring" else pipeline(size, int(read[3] or 2))


def play(script: Script) -> tuple[str, list[str]]:
    """Run a script; return its transcript, and what is wrong: violated invariants, and faults that never struck."""
    training = Training(script.layout, script.steps, script.local_copy)
    job = StagedJob(
        training,
        script.times,
        agents=script.agents,
        standbys=script.standbys,
        collectives_hang=script.collectives_hang,
        roots=script.directories,
        own=OwnDirectories(script.directories, frozenset(script.fragile)) if script.own_directories else None,
    )
    job.logged_steps = frozenset(
        int(step)
        for line in script.faults
        for step in re.findall(r"(?:READY|UPDATING|DONE|record|step|update) (\d+)", line)
    )
    planned = [plan(job, line) for line in script.faults]
    found = run_and_check(Scenario(0, job, harmless=script.harmless))
    found += [f"never came to: {fault.line}" for fault in planned if not fault.struck]
    return job.transcript(), found


def compare(path: Path) -> tuple[str, str]:
    """Play a file; return what is wrong with it, for people, and the file as it would be right."""
    text = path.read_text(encoding="utf-8")
    above, _, golden = text.partition(f"\n{MARK}\n")
    transcript, found = play(parse(text))
    lines = difflib.unified_diff(
        golden.splitlines(keepends=True), transcript.splitlines(keepends=True), f"{path.name} (golden)", "now", n=2
    )
    wrong = "".join([*(f"{path.name}: {text}\n" for text in found), *lines])
    return wrong, f"{above}\n{MARK}\n{transcript}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=SCRIPTS, help="default: all scenarios")
    parser.add_argument("--update", action="store_true", help="write what happens now as the golden transcript")
    arguments = parser.parse_args()
    failed = 0
    for path in arguments.files:
        wrong, right = compare(path)
        failed += bool(wrong)
        print(wrong or f"{path.name}: as it should be", end="" if wrong else "\n")
        if arguments.update:
            path.write_text(right, encoding="utf-8")
    return 1 if failed and not arguments.update else 0


if __name__ == "__main__":
    sys.exit(main())
