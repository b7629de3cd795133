"""What is served when looks fail: never an old answer as if it were new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.status.jobs import job_status, rank_status
from ttp.status import look
from ttp.status.answer import JobView
from ttp.status.ask import Reply
from ttp.status.find_job import Job
from ttp.status_page.curve import FILE_NAME, MOST, PaceCurve
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


def points_of(curve: PaceCurve) -> list[tuple[int, float | None]]:
    fields = curve.fields()
    return list(zip(fields["step"], fields["loss"], strict=True))


def seen(step: int, loss: float | None = None) -> JobView:
    view = look.look(
        Job(None, "n0:5"), ask_at=lambda address, job_id: Reply(job_status([rank_status(0)], save_dirs=()))
    )
    return replace(view, step=step, step_s=0.5, loss=loss)


def test_the_curve_of_an_earlier_page_goes_on(tmp_path: Path) -> None:
    """A page ends with its controller: with every fault that restarts the ranks, where people look at the curve most."""
    file = tmp_path / FILE_NAME
    for step in range(MOST + 10):
        PaceCurve(file).add(seen(step, None if step % 2 else 1.0 / (1 + step)))
    curve = PaceCurve(file)
    steps = [step for step, _ in points_of(curve)]
    assert steps == sorted(steps) and steps[0] <= 1 and len(steps) < MOST
    curve.add(seen(MOST + 10))
    curve.add(seen(MOST + 11, 0.25))
    assert points_of(PaceCurve(file))[-1] == (MOST + 11, 0.25), "of two looks one is taken by now"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"every": 0}', '{"every": 1, "unix_s": [1], "step": [], "step_s": [], "loss": []}',
     '{"every": 1, "unix_s": ["x"], "step": [1], "step_s": [1], "loss": [1]}'],
)  # fmt: skip
def test_a_file_that_no_page_has_written_is_left_out(tmp_path: Path, content: str) -> None:
    file = tmp_path / FILE_NAME
    file.write_text(content)
    curve = PaceCurve(file)
    assert points_of(curve) == []
    curve.add(seen(3))
    assert points_of(PaceCurve(file)) == [(3, None)]
