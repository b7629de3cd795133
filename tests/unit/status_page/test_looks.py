"""What is served when looks fail: never an old answer as if it were new."""

from __future__ import annotations

import pytest

from tests.unit.status.jobs import job_status, rank_status
from ttp.status import look
from ttp.status.answer import JobView
from ttp.status.ask import Reply
from ttp.status.find_job import Job
from ttp.status_page.looks import MOST_PAUSES, PERIOD_S, Looks


class Over(BaseException):
    """Ends a loop that never returns."""


def test_a_look_that_fails_is_one_line_and_its_answers_end_with_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it raises, the job is looked at again."""
    view = look.look(
        Job(None, "n0:5"), ask_at=lambda address, job_id: Reply(job_status([rank_status(0)], save_dirs=()))
    )
    now, looked, served = [0.0], list[int](), list[set[str]]()

    def at_once() -> JobView:
        looked.append(len(looked))
        if 1 <= looked[-1] <= MOST_PAUSES + 1:
            raise PermissionError(13, "Permission denied")
        return view

    def wait(seconds: float) -> None:
        assert seconds == PERIOD_S
        served.append(set(looks.answers()))
        if len(served) == MOST_PAUSES + 3:
            raise Over
        now[0] += seconds

    looks = Looks(at_once, wait, busy_s=lambda: 0.0, clock=lambda: now[0])
    with pytest.raises(Over):
        looks.run()
    everything = {"/", "/status.json", "/metrics"}
    assert served == [everything] * (MOST_PAUSES + 1) + [{"/"}] + [everything]
    assert capsys.readouterr().err.count("Permission denied") == 1
