"""Starts a controller as a process of its own (rank 0 calls, and the ranks that start standbys).

The process leads its own session, so that neither the terminal's Ctrl-C nor the death of the rank that started it reaches
it. Owns the start only; the controller ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import site
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import ttp.errors
from ttp import files
from ttp.errors import ControllerError, NotWritable
from ttp.fork_server.forked_process import ForkedOrphan
from ttp.fork_server.forked_program import ENDED
from ttp.fork_server.request import NotForked, fork_at
from ttp.proto.address import join_address

from .core.facts.events import ControllerSettings

Process = subprocess.Popen[bytes] | ForkedOrphan

START_TIMEOUT_S = 60.0
PORT_WAIT_S = 10.0
"""How long a taken port is tried for again."""
_READY = "ttp-controller listening on "
CANNOT_LISTEN, CANNOT_WRITE = 3, 4
"""Exit statuses of a controller's process that has never listened."""


class CannotListen(ControllerError):
    """The controller's port is taken, or the address is not one of this machine's."""


@dataclass(frozen=True, slots=True)
class ControllerProcess:
    """A running controller. Keep it as long as this process lives: it reaps the controller when it has ended."""

    address: str
    """`host:port/term` for processors and agents."""
    pid: int
    process: Process = field(repr=False)

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status once it has ended, None when it has not within `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask it to end (SIGTERM): it does once no rank is attached; a standby that has guardians does not. Harmless when it has."""
        self.process.terminate()

    def dismiss(self) -> None:
        """Signal (SIGUSR1) that no rank will come to a standby any more; one that has taken over stays. Harmless when it has ended."""
        self.process.send_signal(signal.SIGUSR1)


def arguments(settings: ControllerSettings) -> list[str]:
    """Return the arguments of `python -m ttp.controller` that say what is not as by default."""
    usual = ControllerSettings("", -1, -1).flat()
    words = []
    for name, value in settings.flat().items():
        if value != usual[name]:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def start_controller(
    settings: ControllerSettings,
    journal: Path,
    *,
    bind: str = "127.0.0.1",
    advertise: str = "",
    port: int = 0,
    port_wait_s: float = PORT_WAIT_S,
    guardians: tuple[int, ...] = (),
    fork_server: str = "",
) -> ControllerProcess:
    """Start a controller and return once it listens.

    bind: the address to listen on; `0.0.0.0` when ranks are on other hosts. advertise: the host that others reach it by
    (default: `bind`). journal: its event log; its output goes to the file beside it that ends in `.log`. port_wait_s: how long a
    taken port is tried for again. guardians: when these processes are gone, a standby without ranks ends. fork_server: the socket of
    a server that forks controllers; empty: the program is executed.
    Raises CannotListen, NotWritable (the journal's directory), ControllerError (it did not start in time).
    """
    host = advertise or bind
    command = [
        *(sys.executable, "-P", "-m", "ttp.controller"),
        *("--bind", bind, "--advertise", host, "--port", str(port), "--port-wait-s", str(port_wait_s)),
        *("--journal", str(journal), *arguments(settings)),
        *(word for pid in guardians for word in ("--guardian", str(pid))),
    ]
    log_path = journal.with_suffix(".log")
    try:
        files.make_folder(journal.parent)
        log = open(log_path, "ab", opener=files.opener)  # noqa: SIM115  # closed below
    except OSError as error:
        raise unwritable_log_dir(journal.parent, error) from None
    try:
        with log:
            log_start = log.tell()
            process, stdout = _fork_or_execute(command, _environment(), log.fileno(), fork_server)
    except OSError as error:
        raise ControllerError(f"the controller cannot be started: {error}; its log would be {log_path}") from error
    with open(stdout, "rb"):
        line = _read_line(stdout)
    if line is None or not line.startswith(_READY):
        raise _start_error(process, line, log_path, log_start)
    _, _, rest = line.partition(_READY)
    bound_port = rest.split()[0].rpartition(":")[2]
    return ControllerProcess(join_address(host, int(bound_port), settings.term), process.pid, process)


def _fork_or_execute(command: list[str], environ: dict[str, str], log: int, fork_server: str) -> tuple[Process, int]:
    """Start the program in a session of its own; return it, and a descriptor from which its stdout is read. Raises OSError."""
    read_end, write_end = os.pipe()
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            if fork_server:
                with contextlib.suppress(NotForked):  # slower, and nothing else
                    return fork_at(fork_server, command, environ, (null, write_end, log)), read_end
            process = subprocess.Popen(
                command, stdin=null, stdout=write_end, stderr=log, start_new_session=True, env=environ
            )
            return process, read_end
        finally:
            os.close(null)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)


def unwritable_log_dir(log_dir: Path, error: OSError) -> NotWritable:
    """Return the refusal of a directory for journals."""
    return NotWritable(
        f"log directory {log_dir} cannot be written: {error.strerror or error} ({error.filename}). Choose another log_dir, or"
        " correct its permissions and free space"
    )


def _environment() -> dict[str, str]:
    """The controller must find this very ttp; `-P` keeps the user's working directory off its path. The error file is its rank's."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    root = str(Path(ttp.errors.__file__).resolve().parents[1])
    if root not in [*site.getsitepackages(), site.getusersitepackages()]:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return environment


def _read_line(descriptor: int) -> str | None:
    """Read up to the first newline or the end of the file; None after the timeout."""
    deadline = time.monotonic() + START_TIMEOUT_S
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while b"\n" not in received:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(descriptor, 4096)
            if not chunk:
                break
            received += chunk
    return received.partition(b"\n")[0].decode(errors="replace")


def _start_error(process: Process, line: str | None, log_path: Path, log_start: int) -> ControllerError | NotWritable:
    """End the process. `line`: what it said, None when it did not in time; one that closed its output is about to end by itself."""
    status: int | None = None
    try:
        if line is not None:
            status = process.wait(START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    if process.poll() is None:
        process.kill()
        process.wait()
    if line is not None and line.startswith(ENDED):
        status = int(line.removeprefix(ENDED))
    with open(log_path, "rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    said = "\n".join([line for line in lines if line.startswith("ttp-controller: ")] or lines)
    own = said.removeprefix("ttp-controller: ")
    if status == CANNOT_LISTEN:
        return CannotListen(own)
    if status == CANNOT_WRITE:
        return NotWritable(own)
    if status is None:
        what = f"did not say that it listens within {START_TIMEOUT_S:g} s and was killed"
    else:
        what = f"ended with exit status {status} before it listened"
    return ControllerError(f"the controller {what}; see {log_path}: {said[-2000:] or 'nothing was logged'}")
