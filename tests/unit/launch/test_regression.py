"""An attempt that has not resumed where the job had come to."""

from __future__ import annotations

from ttp.launch.report.incident import Report
from ttp.launch.report.regression import GoneBack, gone_back
from ttp.proto.incident import Incident


def fault(start: int, path: str = "") -> Report:
    return Report(start=start, began_unix_s=1.0, incident=Incident(kind="exited", goes_on_from=path))


def test_an_attempt_that_went_back_is_known_over_attempts_that_made_no_progress() -> None:
    """Attempt 0 has left step 7 whole; attempt 1 saved nothing and knows of no checkpoint; attempt 2 begins anew."""
    kept, nothing = fault(0, "/ckpt/iter_0000007"), fault(1)
    assert gone_back([kept, nothing], 2, 1, [0]) == GoneBack(first_step=1, kept_step=7, steps=7)
    assert gone_back([kept, nothing], 2, 8, [0]) is None and gone_back([], 2, 1, []) is None
    assert gone_back([kept, nothing], 2, 1, [0, 1]) is None, "attempt 1 has resumed somewhere, and may have lost that"
    assert gone_back([nothing], 2, 1, [0]) is None, "not known"


def test_a_job_that_begins_behind_a_broken_checkpoint_goes_back() -> None:
    """An earlier job had come to step 12. Until the job has come past it, its later attempts skip it as well: that is reported once."""
    broken = "/ckpt/iter_0000012"
    back = GoneBack(first_step=9, kept_step=12, steps=4, skipped=broken)
    assert gone_back([], 0, 9, [], broken) == back
    assert back.text(9).startswith(f"resumed at step 9, because {broken} was skipped: 4 steps to repeat")
    assert gone_back([fault(0, "/ckpt/iter_0000008")], 1, 9, [], broken) == back, "it ended before its first step"
    saved = "/ckpt/iter_0000010"
    assert gone_back([fault(0, saved)], 1, 11, [0], broken) is None, "attempt 0 had reported it"
    assert gone_back([fault(0, saved)], 1, 9, [0], saved) == GoneBack(
        first_step=9, kept_step=10, steps=2, skipped=saved
    )
    assert gone_back([], 0, 9, [], "/a directory that cannot be read") is None
