"""What a job's files know of its faults and its end, and how much of its time was training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.status.jobs import BEGAN, Event, comes, end, fault, incident, journal, report, start
from ttp.exchange import last_step, time_marks
from ttp.status import history
from ttp.status.answer import End
from ttp.status.goodput import job_time

FROZEN = {"freeze_id": 1, "ranks": [0], "kind": "silent", "culprits": [1], "text": "nothing was received"}


def killed_once(log_dir: Path) -> None:
    """A rank is killed at 11 s, the step is saved at 12 s, and the second attempt trains from 21 s on."""
    decided = (12.0, "decided", {"freeze_id": 1, "step": 40, "able": [0], "roll_forward": []})
    journal(log_dir, 0, *comes(0.0), decided, incident(12.0, 1.0, 40))
    journal(log_dir, 1, *comes(20.0))


def test_a_fault_is_as_the_launcher_reports_it_and_there_once(tmp_path: Path) -> None:
    """The journal has the signal, the launcher why it was sent."""
    killed_once(tmp_path)
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40), start(1, 21.0))
    known = history.read(tmp_path)
    (found,) = known.faults
    assert (found.attempt, found.unix_s, found.kind, found.ranks) == (0, BEGAN + 11.0, "exited", [1])
    assert (found.cause, found.outcome, found.step, found.took_s) == ("signal SIGKILL, out of memory", "saved", 40, 0.5)
    assert known.end is None and known.next == "" and known.notes == () and known.last_step == 40


def test_a_fault_whose_agent_was_lost_with_it_is_as_the_journal_has_it(tmp_path: Path) -> None:
    """Rank 0's node was lost and came back: no launcher reports that attempt's end. One that a launcher judged to be none is none."""
    killed_once(tmp_path)
    report(tmp_path, start(0, 1.0), start(1, 21.0))
    (found,) = history.read(tmp_path).faults
    assert (found.attempt, found.kind, found.step) == (0, "exited", 40)
    (tmp_path / "story.jsonl").unlink()
    report(tmp_path, start(0, 1.0), (12.5, "unannounced", {"start": 0, "ranks": [1]}), start(1, 21.0))
    assert history.read(tmp_path).faults == ()


def test_a_fault_that_is_not_reported_yet_is_as_the_journal_has_it(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, None, None))
    report(tmp_path, start(0, 1.0))
    (found,) = history.read(tmp_path).faults
    assert (found.unix_s, found.cause, found.outcome) == (BEGAN + 11.0, "signal SIGKILL", "not saved")
    assert (found.detail, found.step, found.steps_lost, found.took_s) == ("all ranks are dead", None, None, 1.0)


def test_after_a_fault_the_report_says_what_follows(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, 40))
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40))
    assert history.read(tmp_path).next == "restart 1 of 3"


def test_what_is_survived_without_an_end_stays_beside_what_ends_the_attempt(tmp_path: Path) -> None:
    """A false alarm, a recovery in place, and a kill, in one attempt."""
    journal(
        tmp_path,
        0,
        *comes(0.0),
        (3.0, "freeze_sent", FROZEN),
        (4.5, "thawed", {"freeze_id": 1, "ranks": [0, 1]}),
        (6.0, "freeze_sent", FROZEN),
        incident(8.0, 2.0, 20, in_place=True),
        (8.0, "thawed", {"freeze_id": 2, "ranks": [0, 1]}),
        incident(12.0, 1.0, 40),
    )
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40))
    found = history.read(tmp_path).faults
    assert [each.outcome for each in found] == ["false alarm", "in place", "saved"]
    assert [each.took_s for each in found] == [1.5, 2.0, 0.5]
    assert found[0].ranks == [1] and found[0].cause == "nothing was received"


def marks(log_dir: Path, attempt: int, *steps: tuple[float, int]) -> None:
    """Write rank 0's notes of the first finished step, of the attempt and of each recovery."""
    lines = [json.dumps({"unix_s": BEGAN + at, "event": "stepped", "step": step, "took_s": 0.0}) for at, step in steps]
    (log_dir / f"times_{attempt}.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("reported", [False, True])
def test_the_restart_until_the_next_finished_step_is_a_faults_last_stage(tmp_path: Path, reported: bool) -> None:
    """Also where the launcher reports the fault, half a second earlier; the time that it took stays what it was."""
    killed_once(tmp_path)
    if reported:
        report(tmp_path, start(0, 1.0), fault(0, 11.0, 40), start(1, 21.0))
    (found,) = history.read(tmp_path).faults
    assert found.stages_s == {}, "the next attempt has finished no step so far"
    marks(tmp_path, 1, (24.25, 41))
    (found,) = history.read(tmp_path).faults
    assert found.stages_s == {"restarted": 12.75 if reported else 12.25}
    assert found.took_s == (0.5 if reported else 1.0)


def test_continuing_in_place_lasts_until_the_next_finished_step_of_the_attempt(tmp_path: Path) -> None:
    """Each recovery its own; not where the next fault came before a step, nor of a false alarm."""
    alarm = (13.0, "freeze_sent", FROZEN), (13.5, "thawed", {"freeze_id": 1, "ranks": [0, 1]})
    recovered = [incident(at, 1.0, 20, in_place=True) for at in (8.0, 20.0, 22.0)]
    journal(tmp_path, 0, *comes(0.0), recovered[0], *alarm, *recovered[1:])
    marks(tmp_path, 0, (2.0, 1), (8.5, 21), (23.0, 22))
    found = history.read(tmp_path).faults
    assert [each.stages_s for each in found] == [{"restarted": 0.5}, {}, {}, {"restarted": 1.0}]


def test_where_the_next_attempt_failed_before_a_step_the_restart_is_not_known(tmp_path: Path) -> None:
    killed_once(tmp_path)
    journal(tmp_path, 1, incident(25.0, 1.0, None))
    journal(tmp_path, 2, *comes(30.0))
    marks(tmp_path, 2, (33.0, 41))
    first, second = history.read(tmp_path).faults
    assert first.stages_s == {} and second.stages_s == {"restarted": 8.0}


def test_ranks_that_a_stopped_controller_declares_dead_after_the_end_have_no_fault(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0), (9.0, "finished", {"ranks": 2}), incident(12.0, 1.0, None))
    assert history.read(tmp_path).faults == ()


def test_a_launcher_that_knows_better_has_no_fault(tmp_path: Path) -> None:
    """Workers that succeed without a word are dead to their controller alone."""
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, None))
    report(tmp_path, start(0, 1.0), end(13.0, 50, 50))
    known = history.read(tmp_path)
    assert known.faults == () and known.end is not None and known.end.result == "succeeded"


def test_copies_in_memory_correct_what_a_fault_has_lost(tmp_path: Path) -> None:
    killed_once(tmp_path)
    copies = (15.0, "copies", {"start": 0, "step": 44, "path": "/c/iter_0000044", "steps_lost": 1})
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40, 5), copies, start(1, 21.0))
    assert history.read(tmp_path).faults[0].steps_lost == 1


@pytest.mark.parametrize(
    ("last", "saved", "unknown", "lost"),
    [(50, 50, 0, 3), (50, None, 0, 3), (50, 40, 1, None)],
    ids=["saved", "own", "lost"],
)
def test_an_end_has_its_steps(tmp_path: Path, last: int, saved: int | None, unknown: int, lost: int | None) -> None:
    journal(tmp_path, 0, *comes(0.0))
    report(tmp_path, start(0, 1.0), end(31.0, last, saved, steps_lost=3, unknown_losses=unknown))
    known = history.read(tmp_path)
    assert known.end == End(BEGAN + 31.0, "succeeded", "", last, saved, lost)
    assert known.last_step == last


def test_an_end_in_a_fault_has_the_step_that_was_saved(tmp_path: Path) -> None:
    killed_once(tmp_path)
    report(
        tmp_path,
        start(0, 1.0),
        fault(0, 11.0, 40, next_="no restart"),
        end(13.0, 0, 0, last=None, result="failed", why="no"),
    )
    journal_of_1 = tmp_path / "journal_1.jsonl"
    journal_of_1.unlink()
    known = history.read(tmp_path).end
    assert known is not None
    assert (known.result, known.why, known.last_step, known.saved_step) == ("failed", "no", 40, 40)


@pytest.mark.parametrize("restarted", [(fault(0, -40.0, 3), start(1, -30.0)), ()], ids=["restarted", "in one attempt"])
def test_an_earlier_jobs_end_in_the_same_folder_is_not_this_ones(tmp_path: Path, restarted: tuple[Event, ...]) -> None:
    """Its lines stay in the file; its journals are in another folder by now."""
    report(tmp_path, start(0, -50.0), *restarted, end(-20.0, 9, 9))
    journal(tmp_path, 0, *comes(0.0))
    known = history.read(tmp_path)
    assert known.end is None and known.faults == () and known.notes == ()
    report(tmp_path, start(0, 1.0), end(9.0, 5, 5))
    known = history.read(tmp_path)
    assert known.end is not None and known.end.last_step == 5 and known.faults == ()


def earlier_job(tmp_path: Path) -> None:
    """One of three attempts, in the same folder."""
    lines = start(0, -90.0), fault(0, -80.0, 3), start(1, -70.0), fault(1, -60.0, 3), start(2, -50.0), end(-40.0, 9, 9)
    report(tmp_path, *lines)


def test_an_end_after_attempts_without_a_journal_here_is_the_jobs(tmp_path: Path) -> None:
    """Of a job on several nodes another one may have led from then on. An earlier job with more attempts is another job all the same."""
    earlier_job(tmp_path)
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, 40))
    known = history.read(tmp_path)
    assert known.end is None and [each.step for each in known.faults] == [40]
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40), start(1, 21.0))
    known = history.read(tmp_path)
    assert known.end is None and len(known.faults) == 1 and known.next == ""
    report(tmp_path, fault(1, 25.0, 45), start(2, 27.0), end(30.0, 50, 50))
    known = history.read(tmp_path)
    assert known.end is not None and (known.end.last_step, known.end.saved_step) == (50, 50)
    assert [(each.attempt, each.step) for each in known.faults] == [(0, 40), (1, 45)]


def test_an_earlier_jobs_end_is_not_that_of_one_whose_first_journal_is_elsewhere(tmp_path: Path) -> None:
    """This node came with the second attempt."""
    earlier_job(tmp_path)
    journal(tmp_path, 1, *comes(0.0))
    known = history.read(tmp_path)
    assert known.end is None and known.faults == ()


def test_without_a_launcher_a_job_has_ended_when_its_ranks_have_finished(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0), (9.0, "finished", {"ranks": 2}))
    known = history.read(tmp_path).end
    assert known is not None and (known.unix_s, known.result) == (BEGAN + 9.0, "all ranks have finished")


def test_a_file_of_the_report_alone_is_enough_for_an_end(tmp_path: Path) -> None:
    """Of a job on several nodes this one may have no journal."""
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40), start(1, 21.0), end(30.0, 50, 50))
    known = history.read(tmp_path)
    assert known.attempts == () and len(known.faults) == 1
    assert known.end is not None and known.end.last_step == 50


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"not JSON\n", "line 1 is not JSON, expected one JSON object a line"),
        (b"[1, 2]\n", "line 1: got '[1, 2]', expected an object with the key event"),
        (b'{"event": "start"}\n', "the key 'start' is missing"),
        (b'{"event": "fault", "start": 0, "unix_s": 2e9}\n', "the key 'took_ms' is missing"),
        (b'{"event": "start", "start": [], "unix_s": 1.0}\n', "TypeError"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
    ],
)
def test_a_broken_report_costs_a_note_of_one_line(tmp_path: Path, content: bytes, what: str) -> None:
    """The journals beside it are read all the same."""
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, 40))
    (tmp_path / "story.jsonl").write_bytes(content)
    known = history.read(tmp_path)
    (note,) = known.notes
    assert what in note and str(tmp_path / "story.jsonl") in note and "Move the file away" in note and "\n" not in note
    assert [each.step for each in known.faults] == [40]


def test_files_that_cannot_be_read_are_not_called_broken(tmp_path: Path) -> None:
    """Nor is it advised to move them away."""
    for name in ("story.jsonl", "journal_0.jsonl"):
        (tmp_path / name).mkdir()
    journal, report = history.read(tmp_path).notes
    for note in (journal, report):
        assert "cannot be read (NotRegular" in note and "broken" not in note and "Move" not in note


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0))
    path = report(tmp_path, start(0, 1.0))
    path.write_text(path.read_text() + '{"unix_s": 1, "eve\n')
    report(tmp_path, end(9.0, 5, 5))
    known = history.read(tmp_path)
    assert known.end is not None and known.notes == ()


def test_a_broken_journal_costs_its_attempt_and_a_note(tmp_path: Path) -> None:
    killed_once(tmp_path)
    (tmp_path / "journal_0.jsonl").write_text('{"unix_s": 1.0}\n')
    known = history.read(tmp_path)
    assert [attempt.number for attempt in known.attempts] == [1]
    assert len(known.notes) == 1 and "the journal of attempt 0" in known.notes[0] and "\n" not in known.notes[0]


def test_a_journal_that_grows_is_read_anew(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0))
    assert history.read(tmp_path).faults == ()
    journal(tmp_path, 0, incident(12.0, 1.0, 40))
    assert len(history.read(tmp_path).faults) == 1


# --- goodput ---


def goodput_of(known: history.History, now_unix_s: float, step_s: float | None) -> float | None:
    use = job_time(known, now_unix_s, step_s)
    if use is None:
        return None
    assert sum(use.rank_s.values()) == pytest.approx(use.ranks * use.whole_s), "the parts are the whole"
    return use.goodput


def test_the_time_without_training_is_the_start_of_each_attempt_and_each_fault(tmp_path: Path) -> None:
    """Of 40 s: 1 s until the ranks came, 10 s from the fault to the next attempt's last rank."""
    killed_once(tmp_path)
    assert goodput_of(history.read(tmp_path), BEGAN + 40.0, None) == pytest.approx((10.0 + 19.0) / 40.0)


@pytest.mark.parametrize("written", [False, True])
def test_a_recovery_in_place_has_its_checkpoint_where_one_was_written_first(tmp_path: Path, written: bool) -> None:
    journal(tmp_path, 0, *comes(0.0), incident(8.0, 2.0, 20, in_place=True, written=written))
    (found,) = history.read(tmp_path).faults
    assert (found.outcome, "/c/iter_0000020" in found.detail) == ("in place", written)


def test_a_recovery_in_place_and_a_false_alarm_cost_what_they_took(tmp_path: Path) -> None:
    journal(
        tmp_path, 0, *comes(0.0), (3.0, "freeze_sent", FROZEN), (4.0, "thawed", {"freeze_id": 1, "ranks": []}),
        incident(8.0, 2.0, 20, in_place=True),
    )  # fmt: skip
    assert goodput_of(history.read(tmp_path), BEGAN + 10.0, 1.0) == pytest.approx((9.0 - 3.0) / 10.0)


def test_steps_that_were_trained_again_count_as_lost(tmp_path: Path) -> None:
    killed_once(tmp_path)
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40, 5), start(1, 21.0))
    known = history.read(tmp_path)
    assert goodput_of(known, BEGAN + 40.0, 0.2) == pytest.approx((10.0 + 19.0 - 5 * 0.2) / 40.0)
    assert goodput_of(known, BEGAN + 40.0, None) is None, "the time of a step is not known"


def test_steps_that_no_attempt_has_trained_again_so_far_cost_nothing_yet(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, 40, 5))
    assert goodput_of(history.read(tmp_path), BEGAN + 20.0, 0.2) == pytest.approx(10.0 / 20.0)


def test_of_a_job_that_has_ended_a_steps_time_is_estimated(tmp_path: Path) -> None:
    """The second attempt took 10 s for 50 steps."""
    killed_once(tmp_path)
    report(tmp_path, start(0, 1.0), fault(0, 11.0, 40, 5), start(1, 21.0), end(31.0, 90, 90))
    assert goodput_of(history.read(tmp_path), BEGAN + 31.0, None) == pytest.approx((10.0 + 10.0 - 5 * 0.2) / 31.0)


def test_without_the_jobs_beginning_it_is_not_known(tmp_path: Path) -> None:
    journal(tmp_path, 1, *comes(20.0))
    assert goodput_of(history.read(tmp_path), BEGAN + 40.0, None) is None
    assert goodput_of(history.History(), BEGAN, None) is None


def test_an_attempt_that_never_assembled_trained_nothing(tmp_path: Path) -> None:
    journal(tmp_path, 0, *comes(0.0)[:1])
    assert goodput_of(history.read(tmp_path), BEGAN + 10.0, None) == 0.0


def test_where_the_clock_was_set_back_the_last_step_and_the_first_one_are_known(tmp_path: Path) -> None:
    """Rank 0 has written them under earlier times than those of its registration."""
    journal(tmp_path, 0, *comes(0.0), (30.0, "finished", {}))
    time_marks.path_of(tmp_path, 0).write_text(
        json.dumps({"unix_s": BEGAN - 3600.0, "event": "stepped", "step": 1, "took_s": 0.0}) + "\n"
    )
    last = {"unix_s": BEGAN - 3590.0, "step": 9, "saved_step": 9}
    last_step.path_of(tmp_path, 0).write_text(json.dumps(last))
    known = history.read(tmp_path)
    assert known.end is not None and (known.end.last_step, known.end.saved_step) == (9, 9)
    assert known.times[0].first_step == 1
