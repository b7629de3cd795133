"""Launchers under test: real processes, watched from outside through files and `/proc`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

DEADLINE_S = 240.0
"""A launcher imports torch before it does anything: some seconds, and many on a machine that has other things to do."""
TTPRUN = ("-m", "ttp.launch")
TORCHRUN = ("-m", "torch.distributed.run")

WARM = {"TTP_WARM_START": "True"}
"""For tests of what forked workers are. Other workers without torch import nothing that takes time, and are executed (TTP_TEST_WARM=True: not). TTP_WARM_START=False: all are."""

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
start = os.environ.get("TTP_ATTEMPT", os.environ["TORCHELASTIC_RESTART_COUNT"])
def note(name, text=""):
    part = out / f".{name}-{rank}-{start}"
    part.write_text(str(text))
    part.rename(out / f"{name}-{rank}-{start}")
def await_file(name):
    end = time.monotonic() + 180
    while not (out / name).exists():
        if time.monotonic() > end:
            sys.exit(f"no {name}")
        time.sleep(0.01)
def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
"""
"""Plain Python, no torch: a worker starts in 50 ms. `note` leaves `<name>-<rank>-<attempt>` in the output folder."""


class Launch:
    """One launcher and its workers, in a session of their own.

    Use as a context manager: leaving it kills all that carries its mark.
    """

    def __init__(
        self,
        out: Path,
        worker: str,
        *options: str,
        program: Sequence[str] = TTPRUN,
        environ: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        name: str = "launcher",
        form: str = "script",
    ) -> None:
        """`arguments` follow the output folder on the worker's command line; `name` distinguishes launchers of one folder.
        `form`: the worker is given as a script, as a `module` (its folder must be on PYTHONPATH), or as a `program`."""
        self.out = out
        self._mark = f"{out}:{name}"
        script = out / "worker.py"
        script.write_text((f"#!{sys.executable}\n" if form == "program" else "") + PRELUDE + worker)
        script.chmod(0o755)
        what = {"script": [str(script)], "module": ["-m", "worker"], "program": ["--no-python", str(script)]}[form]
        self.log = out / f"{name}.log"
        command = [sys.executable, *program, *options, *what, str(out), *arguments]
        # Other tests of this process may have loaded gRPC, which leaves its setting in the environment.
        no_torch = "torch" not in worker and "ttp" not in worker
        cold = (no_torch and os.environ.get("TTP_TEST_WARM") != "True") or os.environ.get("TTP_WARM_START") == "False"
        warm_start = {"TTP_WARM_START": "False"} if cold else {}
        own = ("TORCHELASTIC_", "TTP_", "PET_", "GRPC_ENABLE_FORK_SUPPORT")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**clean, **warm_start, "OMP_NUM_THREADS": "1", "LAUNCH_TEST_MARK": self._mark, **(environ or {})},
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in (self.process.pid, *self.marked()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], bool], what: str, within_s: float = DEADLINE_S) -> None:
        """Poll a condition; fail with the launcher's output after a generous time."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.text}"
            time.sleep(0.01)

    def says(self, words: str) -> None:
        """Wait until the launcher has said this: its workers may be faster with their first notes."""
        self.until(lambda: words in self.text, repr(words))

    def await_notes(self, *names: str) -> None:
        for name in names:
            self.until((self.out / name).exists, name)

    def notes(self, name: str) -> list[str]:
        """Return the notes of this name, sorted: `<name>-<rank>-<attempt>`."""
        return sorted(path.name for path in self.out.glob(f"{name}-*"))

    def read(self, note: str) -> str:
        return (self.out / note).read_text()

    def wait(self) -> int:
        """Wait for the launcher's end and return its exit status."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end\n{self.text}") from None

    def marked(self) -> list[int]:
        """Return the processes of this launch, zombies apart, whatever their session; the launcher apart."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and int(entry.name) != self.process.pid
                    and f"LAUNCH_TEST_MARK={self._mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def assert_nothing_left(self) -> None:
        """No rank remains; multiprocessing's own resource tracker ends when it reads that the launcher has."""

        def left() -> dict[int, bytes]:
            return {pid: text for pid, text in self._marked_commands().items() if b"resource_tracker" not in text}

        assert not left(), f"left behind: {left()}\n{self.text}"
        self.until(lambda: not self._marked_commands(), "end of the resource tracker")

    def _marked_commands(self) -> dict[int, bytes]:
        """Return the command lines of the processes that remain; those that go meanwhile are not."""
        commands = {}
        for pid in self.marked():
            with contextlib.suppress(OSError):
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return {pid: text for pid, text in commands.items() if text}
