"""Makes torch's agent fork its workers instead of executing them.

torch makes one `SubprocessHandler` for each worker. Owns its replacement while one attempt starts: a class that differs only in how the process
begins. All workers of an attempt are forked together, when torch reads the first one's pid. Later another process may take a worker's place:
torch's handler then finds that one, and never the exit of the first.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ttp.exchange import imported_modules
from ttp.fork_server.client import ForkServer, Program
from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.preload import has_accelerator
from ttp.fork_server.request import NotForked

log = logging.getLogger("ttp.launch")

NO_PROCESS = 1 << 30
"""No process has this number, and none is signalled by it."""
_FACTORY = "get_subprocess_handler"


class WarmStart:
    """The workers of one attempt: forked together, or executed."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._waiting: list[tuple[LaterProcess, Program, Callable[[], Any]]] = []
        self._forked: dict[int, tuple[LaterProcess, Program]] = {}
        """By global rank."""
        self._forked_from = 0, ""
        """The server's process, and the script as it was."""
        self.reason = ""
        """Why the workers were executed; empty: they were forked."""

    def add(self, program: Program, execute: Callable[[], Any]) -> LaterProcess:
        """Add a worker; `execute()` starts it if it cannot be forked."""
        process = LaterProcess(self)
        self._waiting.append((process, program, execute))
        return process

    def begin(self) -> None:
        """Start all added workers. Raises OSError: the program cannot be executed."""
        waiting, self._waiting = self._waiting, []
        programs = [program for _, program, _ in waiting]
        try:
            self._server.prepare(programs[0].argv, programs[0].environ)
            for (process, _, _), child in zip(waiting, self._server.fork(programs), strict=True):
                process.begun = child
            self._forked_from = self._server.pid, _script_stamp(programs[0])
            self._forked = {int(program.environ["RANK"]): (process, program) for process, program, _ in waiting}
        except NotForked as error:
            self.reason = str(error)
            for process, program, _ in waiting:
                process.begun = ForkedChild(NO_PROCESS, program.argv, 1)  # has ended, for torch as it cleans up
            for process, _, execute in waiting:
                process.begun = execute()

    def fork_again(self, rank: int, variables: Mapping[str, str]) -> tuple[ForkedChild, ForkedChild]:
        """Fork another process in the place of a rank's, which has ended: the same program with these variables besides, and the same log files,
        to which it appends. From any thread. Return it and the first one, which is not reaped. Raises NotForked.

        The error file of the first process is removed: it is not the other one's.
        """
        if self.reason:
            raise NotForked(f"the workers were started without the fork server: {self.reason}")
        process, program = self._forked[rank]
        if self._forked_from != (self._server.pid, _script_stamp(program)):
            raise NotForked("the fork server was lost since the workers were started, or their script has changed")
        if path := program.environ.get("TORCHELASTIC_ERROR_FILE", ""):
            with suppress(OSError):
                Path(path).unlink()
        child = self._server.fork_one(replace(program, environ={**program.environ, **variables}))
        first, process.begun = process.begun, child
        return child, first


def _script_stamp(program: Program) -> str:
    """Return what shows that a worker's script has changed: the other workers run it as it was. Empty for a module."""
    with suppress(OSError):
        if program.argv[2] != "-m":
            status = os.stat(program.argv[2])
            return f"{status.st_size} {status.st_mtime_ns}"
    return ""


class LaterProcess:
    """A proxy of a worker's process: the first use of any starts all workers of the attempt."""

    def __init__(self, start: WarmStart) -> None:
        self._start = start
        self.begun: Any = None
        """A `ForkedChild` or a `subprocess.Popen`."""

    def __getattr__(self, name: str) -> Any:
        if self.begun is None:
            self._start.begin()
        return getattr(self.begun, name)


@contextmanager
def forking(server: ForkServer) -> Iterator[WarmStart]:
    """Fork the workers that torch starts meanwhile, if they can be forked."""
    start = WarmStart(server)

    class WarmHandler(SubprocessHandler):
        """A worker that starts together with the others of its attempt."""

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            out = self._stdout.fileno() if self._stdout is not None else 1
            err = self._stderr.fileno() if self._stderr is not None else 2
            execute = super()._popen
            return start.add(Program(args, env, (0, out, err)), lambda: execute(args, env))  # type: ignore[return-value]

    torchs_own = vars(api)[_FACTORY]
    setattr(api, _FACTORY, WarmHandler)
    try:
        yield start
    finally:
        setattr(api, _FACTORY, torchs_own)


class LearnedImports:
    """Has the fork server import, once, the modules that an attempt's workers had imported at their first step."""

    def __init__(self) -> None:
        self._learned = False

    def look(self, server: ForkServer, directory: Path | None) -> None:
        """`directory`: the attempt's. Does nothing on a host with accelerators: what such an import does to the devices is not known."""
        if self._learned or directory is None or has_accelerator():
            return
        try:
            names = imported_modules.read(directory)
        except (OSError, ValueError) as error:
            log.warning("cannot read the list of modules that the workers imported: %s", error)
            self._learned = True
            return
        if names:
            self._learned = True
            log.info("the fork server imports %d modules that the workers had imported", len(names))
            server.also_import(names)
