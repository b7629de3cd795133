"""The status page, as a process beside a controller that leads ranks.

Owns its start, and that it is started again when it ends. It is a process, not a thread: whatever its clients do, the controller's interpreter and
its decisions have nothing to do with it. Never reads anything from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

REFUSED = 2
"""Its exit status where what it was given cannot be used: it is not started again."""
LEADS_POLL_S = 0.5
AGAIN_S = 10.0
"""From its end until it is started again."""


async def keep_page(
    job_id: str, log_dir: Path, bind: str, advertise: str, port: int, leads: Callable[[], bool]
) -> None:
    """Serve the page from the moment on at which this controller leads ranks, until this task is cancelled.

    `leads()`: say whether it does. port: 0: any free one.
    """
    while not leads():
        await asyncio.sleep(LEADS_POLL_S)
    command = [
        *(sys.executable, "-P", "-m", "ttp.status_page", "--parent", str(os.getpid()), "--job-id", job_id),
        *("--log-dir", str(log_dir), "--bind", bind, "--advertise", advertise, "--port", str(port)),
    ]
    while True:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            print(f"ttp-controller: the status page cannot be started: {error}", file=sys.stderr)
        else:
            try:
                if await process.wait() == REFUSED:
                    return
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await asyncio.sleep(AGAIN_S)
