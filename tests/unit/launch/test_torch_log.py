"""torch's end line names the root cause."""

from __future__ import annotations

import logging

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttp.launch.torch_log import LOGGER, end_line_kept

LINE = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"


def failure(local_rank: int, pid: int, exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exitcode, error_file="")


def test_the_line_names_the_root_cause_and_other_lines_pass(caplog: pytest.LogCaptureFixture) -> None:
    """Held back until the cause is known; what else torch says goes out at once."""
    logger = logging.getLogger(LOGGER)
    with end_line_kept() as line:
        logger.warning("Sending process %s closing signal %s", 7, "SIGTERM")
        logger.error(LINE, 75, 0, 71, "python")
    assert [record.getMessage() for record in caplog.records] == ["Sending process 7 closing signal SIGTERM"]
    line.write(failure(1, 72, -9))
    assert caplog.records[-1].getMessage() == "failed (exitcode: -9) local_rank: 1 (pid: 72) of binary: python"
    line.write(failure(1, 72, -9))
    assert len(caplog.records) == 2 and logger.filters == []


def test_nothing_is_said_where_torch_said_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Another version may word the line in another way: then it has gone out already."""
    with end_line_kept() as line:
        logging.getLogger(LOGGER).error("worker %s failed", 0)
    line.write(failure(1, 72, -9))
    assert [record.getMessage() for record in caplog.records] == ["worker 0 failed"]
