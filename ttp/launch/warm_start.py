"""Has torch's agent fork its workers where it would execute them.

torch makes one `SubprocessHandler` for each worker; for the time of one start another class takes its place, which differs in how the
process begins and in nothing else.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ttp.fork_server.client import ForkServer
from ttp.fork_server.request import NotForked

_FACTORY = "get_subprocess_handler"


@dataclass(slots=True)
class HowStarted:
    """How the workers of one start have begun."""

    forked: int = 0
    reason: str = ""
    """Why workers were executed; empty: all were forked, or there were none."""


@contextmanager
def forking(server: ForkServer) -> Iterator[HowStarted]:
    """Have the workers that torch starts meanwhile forked, as long as they can be."""
    how = HowStarted()

    class ForkedHandler(SubprocessHandler):
        """A worker that is forked, or executed when it cannot be."""

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            try:
                if not how.reason:
                    if not how.forked:
                        server.prepare(args, env)
                    process = server.fork(args, env, self._stdout, self._stderr)
                    how.forked += 1
                    return process  # type: ignore[return-value]  # it has all of Popen that torch uses
            except NotForked as error:
                how.reason = str(error)
            return super()._popen(args, env)

    torchs_own = vars(api)[_FACTORY]
    setattr(api, _FACTORY, ForkedHandler)
    try:
        yield how
    finally:
        setattr(api, _FACTORY, torchs_own)
