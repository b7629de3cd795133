"""Makes torch's agent fork its workers instead of executing them.

torch makes one `SubprocessHandler` for each worker. Owns its replacement while one attempt starts: a class that differs only in how the process
begins. All workers of an attempt are forked together, when torch reads the first one's pid.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ttp.fork_server.client import ForkServer, Program
from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.request import NotForked

NO_PROCESS = 1 << 30
"""No process has this number, and none is signalled by it."""
_FACTORY = "get_subprocess_handler"


class WarmStart:
    """The workers of one attempt: forked together, or executed."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._waiting: list[tuple[LaterProcess, Program, Callable[[], Any]]] = []
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
        except NotForked as error:
            self.reason = str(error)
            for process, program, _ in waiting:
                process.begun = ForkedChild(NO_PROCESS, program.argv, 1)  # has ended, for torch as it cleans up
            for process, _, execute in waiting:
                process.begun = execute()


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
