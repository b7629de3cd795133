"""`ttp chaos run` that is interrupted: it says what it waits for, a second Ctrl-C ends it at once, and nothing remains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttp.chaos.nodes.namespaces import why_not
from ttp.chaos.observed.training_job import marked
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.verify import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
PATIENCE_S = 30.0
"""What the harness gives a job to leave."""
HARNESS = """
import signal, sys
from ttp.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
sys.exit(main(sys.argv[1:]))
"""
STUBBORN = """
import os, signal, subprocess, sys, time
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
open(f"{sys.argv[1]}/up-{os.uname().nodename}", "w").close()
time.sleep(1000)
"""
"""A launcher that does not leave, and has a child."""


class Harness:
    """`ttp chaos run` as a process. Use as a context manager: leaving it kills what remains."""

    def __init__(self, output: Path, scenario: str, *command: str) -> None:
        file = output.parent / "scenario.yaml"
        file.write_text(scenario)
        words = [sys.executable, "-c", HARNESS, "chaos", "run", str(file), "--no-compare", "--output", str(output)]
        self.output = output
        self.log = output.parent / "harness.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([*words, "--", *command], stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for pid, _ in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())

    def until(self, expected: str) -> None:
        """Wait until the harness has said this."""
        deadline = time.monotonic() + WAIT_S
        while expected not in self.text:
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {expected!r}: {self.text}"
            time.sleep(0.02)

    def await_file(self, path: Path, text: str = "") -> None:
        deadline = time.monotonic() + WAIT_S
        while not path.exists() or text not in path.read_text(errors="replace"):
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {path}: {self.text}"
            time.sleep(0.02)

    def left(self) -> Iterator[tuple[int, str]]:
        yield from marked(f"ttp-chaos:{self.output / 'run_0'}")


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"ttp-{pid}-")]


NODES = pytest.mark.skipif(bool(why_not()), reason="no nodes on this machine")


@pytest.mark.parametrize("nodes", [0, pytest.param(2, marks=(NODES, pytest.mark.nodes))])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_ends_a_job_that_does_not_leave_at_once(
    tmp_path: Path, nodes: int, second: signal.Signals
) -> None:
    """Launchers and their children that ignore everything, on this machine or on nodes of namespaces, are gone."""
    output = tmp_path / "out"
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    scenario = f"{{faults: [{{fault: kill}}], nodes: {nodes}}}"
    names = [f"node-{'ab'[number]}" for number in range(nodes)] or [os.uname().nodename]
    with Harness(output, scenario, sys.executable, str(tmp_path / "stubborn.py"), "{output}") as harness:
        for name in names:
            harness.await_file(output / "run_0" / f"up-{name}")
        assert len(list(harness.left())) == 2 * len(names)
        harness.process.send_signal(signal.SIGINT)
        harness.until("waiting up to 30 s for launcher")
        harness.until("Ctrl-C again ends it at once")
        assert harness.process.poll() is None and len(list(harness.left())) == 2 * len(names)
        began = time.monotonic()
        harness.process.send_signal(second)
        assert harness.process.wait(WAIT_S) == 130, harness.text
        assert time.monotonic() - began < PATIENCE_S / 2
        assert "killing what is left of the job at once" in harness.text and "interrupted" in harness.text
        assert list(harness.left()) == []
        assert not nodes or namespaces(harness.process.pid) == []


def test_a_single_one_lets_the_job_save_its_step_and_leave(tmp_path: Path) -> None:
    """The example trainer: it is reported what is waited for, and the step in flight is there afterwards."""
    output = tmp_path / "out"
    script = str(ROOT / "examples" / "own_trainer" / "train.py")
    command = [sys.executable, "-m", "ttp.launch", "--nproc-per-node", "2", script]
    scenario = "{faults: [{fault: kill, step: 900000}], job_s: 3000}"
    arguments = ["--steps", "1000000", "--save-dir", "{output}/checkpoints"]
    with Harness(output, scenario, *command, *arguments) as harness:
        harness.await_file(output / "run_0" / "console.log", "step 200:")
        harness.process.send_signal(signal.SIGINT)
        harness.until("to save the step and leave; Ctrl-C again ends it at once")
        assert harness.process.wait(WAIT_S) == 130, harness.text
        assert "killing" not in harness.text, "it left by itself"
        assert list(harness.left()) == []
    newest = list_checkpoints([output / "run_0" / "checkpoints"])[0]
    assert verify(newest).step >= 200
