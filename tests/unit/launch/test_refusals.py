"""A start that cannot go otherwise next time is known by what its workers say, and by nothing else."""

from __future__ import annotations

import pytest

from ttp.launch.processes import Lost
from ttp.launch.refusals import refusal
from ttp.launch.story import Recorded

MISMATCH = Recorded("CheckpointMismatch: other model", "...\nttp.errors.CheckpointMismatch: other model\n")
PEER = Recorded("RuntimeError: Connection closed by peer [127.0.0.1]", "...")
OWN = Recorded("ValueError: boom", "...\nValueError: boom")
SAYS = "CheckpointMismatch says what must be corrected first"


@pytest.mark.parametrize(
    ("statuses", "raised", "said"),
    [
        ({0: 2, 1: 75}, {}, "exit code 2 says that the configuration is wrong"),
        ({0: 1, 1: 1}, {0: MISMATCH, 1: MISMATCH}, SAYS),
        ({0: 1, 1: 75}, {0: MISMATCH}, SAYS),
        ({0: 1, 1: 1}, {0: PEER, 1: MISMATCH}, SAYS),
        ({0: 1, 1: 1}, {0: OWN, 1: MISMATCH}, ""),
        ({0: 1, 1: -9}, {0: MISMATCH}, ""),
        ({0: 1, 1: 1}, {0: MISMATCH}, ""),
        ({0: 2, 1: 3}, {}, ""),
        ({0: 75}, {}, ""),
        ({0: 1}, {0: OWN}, ""),
    ],
)
def test_a_restart_is_useless_when_some_refuse_and_none_fails_by_itself(
    statuses: dict[int, int], raised: dict[int, Recorded], said: str
) -> None:
    """A rank whose collective failed has only lost a peer."""
    assert refusal(statuses, raised) == said


def test_an_error_of_the_same_name_is_another_librarys() -> None:
    """So is one of ttp's that the next start may not meet."""
    theirs = Recorded("ConfigError: no such key", "...\nsomelib.errors.ConfigError: no such key")
    fault = Recorded("ControllerError: its port is taken", "...\nttp.errors.ControllerError: its port is taken")
    assert refusal({0: 1}, {0: theirs}) == refusal({0: 1}, {0: fault}) == ""


def test_a_directory_that_cannot_be_written_is_final_at_the_jobs_first_start() -> None:
    """Later its disk may have failed, and may come back."""
    told = Recorded("NotWritable: /d: read-only", "...\nttp.errors.NotWritable: /d: read-only\n")
    statuses: dict[int, int | Lost | None] = {0: 1, 1: 1}
    assert refusal(statuses, {0: told, 1: told}, first_start=True) == "NotWritable says what must be corrected first"
    assert refusal(statuses, {0: told, 1: told}) == ""


def test_a_checkpoint_error_may_be_a_disks() -> None:
    """It may go better next time: a file system that was away, a file that a node could not take."""
    told = Recorded("CheckpointError: no space left", "...\nttp.errors.CheckpointError: no space left\n")
    assert refusal({0: 1}, {0: told}) == ""
