"""A fault that cannot end well, on two nodes: one deadline bounds it on both, however many stages it has."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.test_endings import alive
from tests.chaos.two_launchers import train_on_two
from ttp.launch.attempts.attempt import UNLED_S

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

TIMEOUT_S = 12.0
"""TTP_OT. With a deadline of its own the second node would need as long again, or UNLED_S, as its controller is gone by then: both
end it later than twice this after the fault."""

LEASE_S = 8.0
"""A controller that stands still is on the line for so long, and then ranks are held for UNLED_S without one: longer than TTP_OT."""


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.timeout(600)
def test_two_launchers_have_one_deadline_when_nothing_is_decided(tmp_path: Path) -> None:
    """One rank is killed, all others and the controllers are stopped for good. The dead rank's launcher holds its other rank until
    TTP_OT has passed, and only then the other launcher learns that it must start again: nothing remains for its ranks."""
    assert UNLED_S <= TIMEOUT_S < UNLED_S + LEASE_S
    environ = {"TTP_OT": f"{TIMEOUT_S:g}", "TTP_LEASE_S": f"{LEASE_S:g}"}
    with contextlib.ExitStack() as stack:
        first, second, pids = train_on_two(stack, tmp_path, environ=environ)
        both = (first, second)
        controllers = [pid for job in both for pid in job.marked() if b"ttp.controller" in command_line(pid)]
        assert len(controllers) == 2
        for pid in (*controllers, *pids[1:]):
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        killed_s = time.monotonic()

        first.until(lambda: not alive(pids[1]), "end of the dead rank's neighbour")
        assert time.monotonic() - killed_s >= TIMEOUT_S, f"it might have gone on\n{first.text}"
        second.until(lambda: not any(map(alive, pids[2:])), "end of the other node's ranks")
        lasted_s = time.monotonic() - killed_s
        assert TIMEOUT_S <= lasted_s < 2 * TIMEOUT_S, f"{lasted_s:.1f} s\n{first.text}\n{second.text}"

        assert f"TTP_OT ({TIMEOUT_S:.0f} s) expired; terminating rank 1" in first.text
        (ago,) = re.findall(r"the fault began (\d+) s ago on another node; its deadline applies", second.text)
        assert TIMEOUT_S <= int(ago) + 1 <= lasted_s + 1, second.text
        assert "sending SIGTERM to ranks 2-3, which have up to 0 s to save and exit" in second.text
        assert f"TTP_OT ({TIMEOUT_S:.0f} s) expired; killing ranks 2-3" in second.text
        for job in both:
            assert "the ranks had no controller" not in job.text
            job.until(lambda job=job: "attempt 1: rank" in job.text, "next attempt", within_s=180)  # type: ignore[misc]
        first.await_notes(*(f"begun-{rank}-1" for rank in range(4)))
