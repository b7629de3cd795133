"""The job under test: any command, started, marked, faulted at its launcher and ended; on this machine or on nodes of namespaces.

In the command's words `{output}` is the folder of this run (so that a baseline run can have its own), and with nodes
`{nodes}` their number and `{endpoints}` their names with a port, for `--rdzv-endpoint`. Every process inherits a mark in
its environment: what still carries it after the end is a leftover. `{disk}` is a folder that a small file system is
mounted on, where the scenario wants one and this process may mount; an ordinary folder elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttp import files
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.training_job import controllers_of, marked
from ttp.errors import ConfigError

PORT = 29400
END_S = 30.0
POLL_S = 0.02
OUTPUT = "{output}"
DISK = "{disk}"


class Target:
    """The launchers of one run. Use as a context manager: leaving it ends all that carries its mark."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        socket_path: Path,
        environ: Mapping[str, str],
        nodes: Sequence[Node] = (),
        small_disk_mib: int = 0,
        patience: InterruptGuard | None = None,
    ) -> None:
        """Raises ConfigError: the command's program is not there, or it does not use the small disk."""
        if small_disk_mib and not any(DISK in word for word in command):
            raise ConfigError(
                f"command {shlex.join(command)}: the scenario has small_disk_mib: {small_disk_mib} and no word has {DISK};"
                f" name a checkpoint directory in it, as in `--training_config.save_dirs=[{DISK},{OUTPUT}/checkpoints]`"
            )
        self._patience = patience or InterruptGuard()
        self.folder = folder
        self.disk = folder / "disk"
        self._small_disk_mib = small_disk_mib
        self.mounted = False
        """`disk` is a small file system now."""
        self.nodes = tuple(nodes)
        self.mark = f"ttp-chaos:{folder}"
        places = ",".join(f"{node.name}:{PORT}" for node in nodes)
        values = {OUTPUT: str(folder), DISK: str(self.disk), "{nodes}": str(len(nodes)), "{endpoints}": places}
        self.command = [_replaced(word, values) for word in _found(command)]
        self.launches = 0
        """How often the whole command was started."""
        self.launchers: list[subprocess.Popen[bytes]] = []
        files.make_folder(folder)
        self._environ = {
            "OMP_NUM_THREADS": "1",
            **environ,
            "TTP_CHAOS": str(socket_path),
            "TTP_TEST_MARK": self.mark,
        }

    def __enter__(self) -> Target:
        try:
            self._make_disk()
        except BaseException:
            self._unmount()
            raise
        self._temporary = files.make_temporary("ttp-job-")
        self._environ = {"TMPDIR": str(self._temporary), **self._environ}
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._let_leave()
        finally:
            self.kill_all()
            self._unmount()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _make_disk(self) -> None:
        if any(str(self.disk) in word for word in self.command):
            self.disk.mkdir(exist_ok=True)
        if self._small_disk_mib:
            size = f"size={self._small_disk_mib}m"
            mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.disk)]
            self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def _unmount(self) -> None:
        if self._small_disk_mib and os.path.ismount(self.disk):
            subprocess.run(["umount", "--lazy", str(self.disk)], capture_output=True, check=False)
        self.mounted = False

    def _let_leave(self) -> None:
        """Ask launchers that still run to end, as Ctrl-C does, and wait while somebody is willing to."""
        running = [launcher for launcher in self.launchers if launcher.poll() is None]
        if not running:
            return
        for launcher in running:
            launcher.send_signal(signal.SIGINT)
        whom = f"launcher{'s' if len(running) > 1 else ''} {', '.join(f'pid {launcher.pid}' for launcher in running)}"
        self._patience.say(
            f"ending the job: waiting up to {END_S:.0f} s for {whom} to save the step and leave; Ctrl-C again ends it at once"
        )
        deadline = time.monotonic() + END_S
        while any(launcher.poll() is None for launcher in running):
            if self._patience.over or time.monotonic() > deadline:
                why = "at once, as asked for" if self._patience.over else f"after {END_S:.0f} s"
                self._patience.say(f"killing what is left of the job {why}")
                return
            time.sleep(POLL_S)

    def start(self) -> None:
        """Start the command, on every node where there are some."""
        self.launches += 1
        self.launchers = [self._launch(index) for index in range(max(1, len(self.nodes)))]

    def start_on(self, index: int) -> None:
        """Start the launcher of a node that was lost."""
        self.launchers[index] = self._launch(index)

    def _launch(self, index: int) -> subprocess.Popen[bytes]:
        with open(self.console_path(index), "ab", opener=files.opener) as console:
            if self.nodes:
                return self.nodes[index].popen(self.command, environ=self._environ, output=console)
            return subprocess.Popen(
                self.command,
                stdout=console,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environ},
                start_new_session=True,
            )

    def console_path(self, index: int = 0) -> Path:
        return self.folder / (f"console-{self.nodes[index].name}.log" if self.nodes else "console.log")

    def console_tail(self, lines: int = 30) -> str:
        """Return the end of what the launchers printed."""
        paths = [self.console_path(index) for index in range(max(1, len(self.nodes)))]
        return "\n".join(
            "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) for path in paths if path.exists()
        )

    def ended(self) -> int | None:
        """Return the first status that is not 0, or 0, when all launchers have ended; None while one runs."""
        statuses = [launcher.poll() for launcher in self.launchers]
        if any(status is None for status in statuses):
            return None
        return next((status for status in statuses if status), 0)

    def controllers(self) -> dict[int, int]:
        return controllers_of(self.mark)

    def leftovers(self) -> list[str]:
        """Return every process that carries this run's mark; after the end there must be none."""
        return sorted(f"pid {pid}: {command}" for pid, command in marked(self.mark))

    def litter(self) -> list[str]:
        """Return the temporary files, folders and sockets that the job has made and not removed. torch leaves some of its own."""
        return sorted(str(path) for path in self._temporary.iterdir() if not path.name.startswith("torch"))

    def kill_all(self) -> None:
        """SIGKILL all that carries the mark, and reap the launchers."""
        deadline = time.monotonic() + END_S
        while (left := [pid for pid, _ in marked(self.mark)]) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for launcher in self.launchers:
                launcher.poll()
            time.sleep(POLL_S)
        if left:
            self._patience.say(f"still there {END_S:.0f} s after SIGKILL: {'; '.join(self.leftovers())}")
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(0.0 if left else END_S)


def _found(command: Sequence[str]) -> list[str]:
    """Return the command with `ttprun` as this interpreter runs it."""
    if not command:
        raise ConfigError(
            "no command: expected the job's after `--`, as in `ttp chaos run scenario.yaml -- ttprun ... train.py`"
        )
    if command[0] == "ttprun":
        return [sys.executable, "-m", "ttp.launch", *command[1:]]
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"command {shlex.join(command)}: {command[0]!r} is not executable, expected a program on PATH, or a path"
        )
    return list(command)


def _replaced(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
