"""Jobs in which torch is asked about the workers all the time, and reaps those that have ended: the others are held all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

KILLED = """
signal.signal(signal.SIGTERM, lambda *_: note("sigterm"))
note("begun")
if start != "3":
    await_file(f"begun-{1 - rank}-{start}")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)  # as long as it takes to save: torch would have ended it 30 times over, ttprun waits ten times as long
    note("saved")
    os._exit(75)  # at once: an interpreter that imported torch takes seconds to end on a busy machine
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "environ"),
    [(["--run-path"], {}), ([], {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "60"})],
    ids=["--run-path", "uninterruptible"],
)
def test_a_survivor_is_held_although_torch_is_asked_all_the_time(
    tmp_path: Path, options: list[str], environ: dict[str, str]
) -> None:
    """At three kills in a row no process is sent SIGTERM, and how each worker ended is known."""
    watch = ["--monitor-interval", "0.01", "--ttp-futile-starts", "0"]
    with Launch(tmp_path, KILLED, "--nproc-per-node", "2", *watch, *options, environ=environ) as job:
        assert job.wait() == 0, job.text
        for restart in (1, 2, 3):
            words = f"restarting ({restart} of 3 restarts): rank 1: signal SIGKILL; rank 0: exited for the restart (exit code 75)"
            assert words in job.text, job.text
        assert job.notes("saved") == ["saved-0-0", "saved-0-1", "saved-0-2"] and job.notes("sigterm") == []
        assert "torchelastic detected the exit" not in job.text and "its status is lost" not in job.text
        job.assert_nothing_left()
