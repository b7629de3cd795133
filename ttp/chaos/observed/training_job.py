"""One training job under `ttprun`, run as a child process and watched from outside: its steps, its ranks' pids, its
controllers' journals. Kills what it is ordered to kill and checks that no process remains.

Reads what the job writes for people and machines (`metrics.jsonl`, `journal_*.jsonl`, `final.json`); needs no cooperation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ttp import files

POLL_S = 0.005


class JobError(RuntimeError):
    """The job did not do what the harness waited for; the message carries the end of its output."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal that the harness sent."""

    rank: int
    pid: int
    unix_s: float
    after_step: int
    """Last step in the metrics at that moment."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON-lines file (a last line without its newline is still being written)."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


class GrowingLines:
    """A JSON-lines file that grows: each look reads only what was added since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all whole lines so far. A file that has become shorter is read anew."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._lines = 0, []
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._lines += [json.loads(line) for line in whole.splitlines() if line.strip()]
        self._offset += len(whole)
        return list(self._lines)


class Observed(ABC):
    """What a job that writes to `output_dir` shows to an observer, however it was launched."""

    def __init__(self, output_dir: Path, until_monotonic_s: float = inf) -> None:
        """`until_monotonic_s`: nothing is waited for longer than that."""
        self.output_dir = output_dir
        self._until_s = until_monotonic_s
        self._metrics = GrowingLines(output_dir / "metrics.jsonl")
        self._journals: dict[Path, GrowingLines] = {}
        files.make_folder(output_dir)

    @abstractmethod
    def ended(self) -> str:
        """Say how the job ended; empty while it runs."""

    @abstractmethod
    def console_tail(self, lines: int = 40) -> str:
        """Return the end of what the launchers printed."""

    @property
    def mark(self) -> str:
        """An environment value that every process of this job inherits: how leftovers are recognised."""
        return f"ttp-job:{self.output_dir}"

    # --- what the job wrote ---

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, the job's first attempt to its last."""
        return self._metrics.read()

    def last_step(self) -> int:
        return max((int(line["step"]) for line in self.metrics() if "loss" in line), default=0)

    def journals(self) -> list[list[dict[str, Any]]]:
        """Return each attempt's journal, oldest first: what all its controllers logged, in order of time. An event's fields
        stand beside its name and time; `controller` is 0 for the one that the attempt began with, i for the i-th standby."""
        return [self.journal(start) for start in self.starts()]

    def starts(self) -> list[int]:
        """Return the numbers of the attempts that a controller began so far."""
        log_dir = self.output_dir / "log"
        return sorted(int(path.stem.split("_")[1]) for path in log_dir.glob("journal_*.jsonl"))

    def journal(self, start: int) -> list[dict[str, Any]]:
        """Return the journal of the attempt of this number."""
        return sorted(self._lines_of(start), key=lambda line: line["unix_s"])

    def _lines_of(self, start: int) -> Iterator[dict[str, Any]]:
        log_dir = self.output_dir / "log"
        for path in (log_dir / f"journal_{start}.jsonl", *sorted(log_dir.glob(f"standby_{start}_*.jsonl"))):
            place = int(path.stem.split("_")[2]) if path.stem.startswith("standby") else 0
            for line in self._journals.setdefault(path, GrowingLines(path)).read():
                yield {**line.get("fields", {}), **line, "controller": place}

    def final(self) -> dict[str, Any]:
        """Return final.json (the last step and a hash of the final weights)."""
        value: dict[str, Any] = json.loads((self.output_dir / "final.json").read_text(encoding="utf-8"))
        return value

    # --- waiting ---

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll until `condition` holds. Raises JobError when the job ends first or the time is over."""
        deadline = min(time.monotonic() + timeout_s, self._until_s)
        while not condition():
            if (how := self.ended()) and not condition():
                raise JobError(f"the job ended ({how}) before {what}\n{self.console_tail()}")
            if time.monotonic() > deadline:
                raise JobError(f"no {what} within {timeout_s:.0f} s\n{self.console_tail()}")
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, timeout_s: float = 300.0) -> None:
        self.wait_for(lambda: self.last_step() >= step, f"step {step}", timeout_s)

    # --- faults ---

    def pids(self) -> dict[int, int]:
        """Return the pid of every rank of the newest attempt, from its controllers' journals. A rank that was replaced has its newest process's."""
        starts = self.starts()
        lines = self.journal(starts[-1]) if starts else []
        came = ("registered", "replacement_came")
        return {int(line["rank"]): int(line["pid"]) for line in lines if line.get("event") in came}

    def controller_pids(self) -> dict[int, int]:
        return controllers_of(self.mark)

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> Kill:
        """Send a signal to a rank of the newest attempt and say when."""
        pid = self.pids()[rank]
        after_step = self.last_step()
        now = time.time()
        os.kill(pid, signum)
        return Kill(rank, pid, now, after_step)

    # --- after the end ---

    def leftovers(self) -> list[str]:
        """Return every process that still carries this job's mark (after the launcher's end there must be none)."""
        return sorted(f"pid {pid}: {command}" for pid, command in marked(self.mark))


class TrainingJob(Observed):
    """`ttprun --nproc-per-node N -m ttp.trainer ...` writing to `output_dir`.

    Use as a context manager: leaving it ends the launcher if it still runs.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        ranks: int,
        overrides: Sequence[str] = (),
        config: str = "gpt_tiny",
        environ: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        launch_module: str = "ttp.launch",
        program: Sequence[str] = ("-m", "ttp.trainer"),
        until_monotonic_s: float = inf,
    ) -> None:
        """`launcher`: its own options. `launch_module`: `torch.distributed.run` for torchrun."""
        super().__init__(output_dir, until_monotonic_s)
        self.ranks = ranks
        self._console = open(output_dir / "console.log", "ab", opener=files.opener)  # noqa: SIM115 - closed by __exit__
        command = [sys.executable, "-m", launch_module, "--nproc-per-node", str(ranks), *launcher, *program]
        command += ["--config", config, "--training_config.output_dir", str(output_dir), *overrides]
        self.command = command
        self.process = subprocess.Popen(
            command,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={
                "TTP_IN_PLACE": "False",
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TTP_TEST_MARK": self.mark,
                **(environ or {}),
            },
            start_new_session=True,
        )

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._console.close()

    def ended(self) -> str:
        status = self.process.poll()
        return "" if status is None else f"status {status}"

    def console_tail(self, lines: int = 40) -> str:
        return "\n".join((self.output_dir / "console.log").read_text(errors="replace").splitlines()[-lines:])

    def wait(self, timeout_s: float = 300.0) -> int:
        """Wait for the launcher's end and return its exit status."""
        limit_s = max(0.0, min(timeout_s, self._until_s - time.monotonic()))
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise JobError(
                f"the job did not end: waited {limit_s:.0f} s for it; the end of {self.output_dir / 'console.log'}:\n{self.console_tail()}"
            ) from None


def controllers_of(mark: str) -> dict[int, int]:
    """Return the pid of every controller that runs: 0 for the first of its attempt, i for the i-th standby."""
    found = {}
    for pid, command in marked(mark):
        arguments = command.split()
        if "ttp.controller" in arguments:
            found[int(arguments[arguments.index("--standby") + 1]) if "--standby" in arguments else 0] = pid
    return found


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Yield pid and command line of every process that carries this mark."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"TTP_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:  # a zombie has none
                    yield int(entry.name), command
        except OSError:
            continue  # ended meanwhile, or another user's
