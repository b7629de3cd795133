"""One look at a job: what its controller answers, what its files know, and how it is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.status.jobs import (
    BEGAN,
    comes,
    end,
    fault,
    incident,
    inputs,
    job_status,
    journal,
    rank_status,
    report,
    start,
)
from ttp.checkpoint.format.durable import inodes_in
from ttp.checkpoint.passed_over import write_notes
from ttp.errors import ConfigError
from ttp.proto.messages import Cause, CauseKind, Phase
from ttp.proto.status import CoverageStatus, FaultStatus, JobStatus, PaceStatus, StragglerStatus
from ttp.status import ask, look
from ttp.status.answer import JobView
from ttp.status.ask import Reply
from ttp.status.find_job import Job
from ttp.status.tables import duration_text, shown


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[JobStatus]]:
    """Return what the controller answers; with nothing in it, it does not."""
    given: list[JobStatus] = []

    def asked(address: str, job_id: str = "") -> Reply:
        return (
            Reply(given[0])
            if given
            else Reply(None, f"the controller at {address} cannot be reached: Connection refused")
        )

    monkeypatch.setattr(ask, "ask_at", asked)
    monkeypatch.setattr(ask, "local_processes", lambda: ())
    yield given


def looked(log_dir: Path, *, all_ranks: bool = False, at_s: float = 40.0) -> JobView:
    return look.look(Job(log_dir), all_ranks=all_ranks, clock=lambda: BEGAN + at_s)


def text_of(status: JobView) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(shown(status))
    return captured.get()


def job_at(tmp_path: Path) -> Path:
    log_dir = tmp_path / "log"
    journal(log_dir, 0, *comes(0.0))
    inputs(log_dir, 0, "n0:5/1")
    return log_dir


def test_a_job_that_trains(tmp_path: Path, answers: list[JobStatus]) -> None:
    answers.append(job_status([rank_status(0), rank_status(1, phase=Phase.READY, silent_s=0.4)]))
    found = looked(job_at(tmp_path))
    assert (found.state, found.phase, found.source, found.job, found.attempt) == (
        "running",
        "training",
        "controller",
        "run/0",
        0,
    )
    assert (found.step, found.step_s, found.steps_per_s, found.still_s, found.hang_limit_s) == (7, 0.5, 2.0, 0.2, 10.0)
    assert found.goodput == pytest.approx(39 / 40) and found.since_unix_s == BEGAN
    assert found.leader is not None and (found.leader.host, found.leader.pid, found.leader.place) == ("n0", 7, 0)
    assert [row.state for row in found.ranks] == ["compute", "ready"] and found.notes == []
    text = text_of(found)
    assert "running: training" in text and "7, 2 steps/s, 0.5 s a step; progress 0.2 s ago (a hang after 10 s)" in text
    assert "controller of term 1 (the first one, of rank 0), pid 7 at n0:5/1" in text and "n1:6/2" in text
    assert "every shard has 2 live holders or more; no single death costs a step" in text
    assert "97.5 % of 40.0 s x 2 ranks went into new steps; start 2.5 % (1.0 s)" in text


@pytest.mark.parametrize(
    ("phase", "stage", "changed"),
    [
        ("standstill", "running", {"pace": PaceStatus(7, 8, 0.5, 0.6, 6.0, 10.0)}),
        ("paused", "running", {"ranks": (rank_status(0, paused=True),)}),
        ("training", "running", {"ranks": (rank_status(0, paused=True, silent_s=5.0),)}),
        ("starting", "assembling", {}),
        ("frozen", "freezing", {}),
        ("writing", "writing", {}),
        ("no controller leads the ranks", "standby", {"role": "standby"}),
        ("a later one", "a later one", {}),
    ],
)
def test_a_controllers_stage_is_what_the_job_does(
    phase: str, stage: str, changed: dict[str, object], answers: list[JobStatus], tmp_path: Path
) -> None:
    answers.append(replace(job_status([rank_status(0)]), stage=stage, **changed))  # type: ignore[arg-type]
    found = looked(job_at(tmp_path))
    assert found.phase == phase
    assert (found.leader is None) == (stage == "standby")


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"pid": 0, "attached": False}, "missing"),
        ({"dead": True, "attached": False}, "dead"),
        ({"attached": False, "suspect": True}, "detached"),
        ({"suspect": True}, "suspect"),
        ({"finished": True}, "finished"),
        ({"paused": True}, "paused"),
        ({"phase": Phase.UPDATING}, "updating"),
    ],
)
def test_a_ranks_state_is_the_worst_that_is_true(
    changed: dict[str, object], state: str, answers: list[JobStatus], tmp_path: Path
) -> None:
    answers.append(job_status([rank_status(0, **changed)]))
    assert looked(job_at(tmp_path)).ranks[0].state == state


def test_the_finished_step_is_the_newest_that_a_rank_is_behind(tmp_path: Path, answers: list[JobStatus]) -> None:
    answers.append(job_status([rank_status(0, step=9, phase=Phase.DONE), rank_status(1, step=9, phase=Phase.READY)]))
    assert looked(job_at(tmp_path)).step == 9


def test_a_fault_that_is_handled_now_is_the_first_and_no_training(tmp_path: Path, answers: list[JobStatus]) -> None:
    log_dir = job_at(tmp_path)
    cause = Cause(CauseKind.EXITED, (1,), "signal SIGKILL")
    answers.append(
        job_status([rank_status(0), rank_status(1, dead=True, cause=cause)], stage="writing", fault=FaultStatus(10.0, (cause,)),
                   coverage=CoverageStatus(2, 1, 0, (0,), 1, ("n0",), 1))
    )  # fmt: skip
    found = looked(log_dir)
    assert [(row.outcome, row.kind, row.ranks, row.unix_s) for row in found.faults] == [
        ("now", "exited", [1], BEGAN + 30.0)
    ]
    assert found.steps_per_s is None and found.still_s is None and found.goodput == pytest.approx(29 / 40)
    text = text_of(found)
    assert "is handled now" in text and "the death of one of these costs steps: rank 0; node n0" in text


def test_a_collective_that_failed_before_the_death_was_seen_is_not_the_cause(
    tmp_path: Path, answers: list[JobStatus]
) -> None:
    """Which of the two the controller receives first is chance."""
    failed = Cause(CauseKind.PEER_ERROR, (0,), "Connection closed by peer")
    died = Cause(CauseKind.EXITED, (1,), "signal SIGKILL")
    for causes, kind, ranks in (((failed, died), "exited", [1]), ((failed,), "peer_error", [0])):
        answers[:] = [job_status([rank_status(0), rank_status(1)], stage="writing", fault=FaultStatus(10.0, causes))]
        (row,) = looked(job_at(tmp_path / kind)).faults
        assert (row.kind, row.ranks, row.cause) == (kind, ranks, causes[-1].text)


def test_shards_without_a_holder_come_first(tmp_path: Path, answers: list[JobStatus]) -> None:
    answers.append(job_status([rank_status(0)], coverage=CoverageStatus(2, 0, 1, (0,), 1)))
    assert "1 of 2 shards without a live holder" in text_of(looked(job_at(tmp_path)))


def test_of_ten_thousand_ranks_those_to_look_at_are_shown(tmp_path: Path, answers: list[JobStatus]) -> None:
    """Gone, at fault, behind, slow, silent: in this order; with --ranks all, in theirs."""
    special: dict[int, dict[str, object]] = {
        70: {"silent_s": 2.5},
        5000: {"step_s": 3.0},
        9000: {"step": 7},
        400: {"cause": Cause(CauseKind.EXCEPTION, (400,), "RuntimeError: no")},
        8000: {"suspect": True},
        7000: {"attached": False},
        6000: {"pid": 0},
        9999: {"dead": True},
    }
    answers.append(job_status([rank_status(rank, **special.get(rank, {})) for rank in range(10_000)]))
    log_dir = job_at(tmp_path)
    found = looked(log_dir)
    assert [row.rank for row in found.ranks][:8] == [9999, 6000, 7000, 8000, 400, 9000, 5000, 70]
    assert len(found.ranks) == look.FEW_RANKS and found.rank_count == 10_000
    assert "ranks: 16 of 10000, those to look at first (--ranks shows all)" in text_of(found)
    assert [row.rank for row in looked(log_dir, all_ranks=True).ranks] == list(range(10_000))


def test_many_faults_are_shown_in_part(tmp_path: Path, answers: list[JobStatus]) -> None:
    log_dir = job_at(tmp_path)
    journal(log_dir, 0, *(incident(float(10 + second), 0.5, 20, in_place=True) for second in range(12)))
    answers.append(job_status([rank_status(0)]))
    found = looked(log_dir)
    assert len(found.faults) == look.FEW_FAULTS and found.fault_count == 12
    assert found.faults[0].unix_s > found.faults[-1].unix_s
    assert "faults: the newest 10 of 12" in text_of(found)
    assert len(looked(log_dir, all_ranks=True).faults) == 12


def test_where_no_controller_answers_the_files_are_shown_and_why(tmp_path: Path, answers: list[JobStatus]) -> None:
    log_dir = job_at(tmp_path)
    found = looked(log_dir)
    assert (found.state, found.phase, found.source, found.leader) == ("unknown", "unknown", "files", None)
    assert [(row.rank, row.node, row.pid, row.state) for row in found.ranks] == [
        (0, "n0", 10, "unknown"),
        (1, "n1", 11, "unknown"),
    ]
    assert found.notes == ["the controller at n0:5/1 cannot be reached: Connection refused"]
    assert found.unix_s == BEGAN + 1.0, "the time of the newest line"
    assert "note: the controller at n0:5/1 cannot be reached: Connection refused" in text_of(found)


def test_between_two_attempts_the_report_says_so(tmp_path: Path, answers: list[JobStatus]) -> None:
    log_dir = job_at(tmp_path)
    journal(log_dir, 0, incident(12.0, 1.0, 40))
    report(log_dir, start(0, 1.0), fault(0, 11.0, 40))
    found = looked(log_dir)
    assert (found.state, found.phase, found.step) == ("unknown", "between attempts", None)


def test_a_job_that_has_ended_is_not_asked(tmp_path: Path, answers: list[JobStatus]) -> None:
    log_dir = job_at(tmp_path)
    report(log_dir, start(0, 1.0), end(31.0, 50, 50))
    answers.append(job_status([rank_status(0)]))
    found = looked(log_dir)
    assert (found.state, found.source, found.notes) == ("ended", "files", [])
    assert "50, saved; 0 steps lost" in text_of(found)


def test_a_job_that_has_ended_shows_what_it_was(tmp_path: Path, answers: list[JobStatus]) -> None:
    """The ranks of its newest attempt, on which nodes they were, and the mean time of a step: 16 steps in 8 s, of which a save took 2."""
    log_dir = job_at(tmp_path)
    journal(log_dir, 0, incident(9.0, 1.0, 8))
    journal(log_dir, 1, *comes(20.0), (29.0, "finished", {"ranks": 2}))
    notes = ((21.0, "stepped", 9, 0.0), (25.0, "saved", 16, 2.0))
    (log_dir / "times_1.jsonl").write_text(
        "".join(
            json.dumps({"unix_s": BEGAN + at, "event": event, "step": step, "took_s": took_s}) + "\n"
            for at, event, step, took_s in notes
        )
    )
    report(log_dir, start(0, 1.0), fault(0, 8.5, 8), start(1, 20.5), end(31.0, 25, 25))
    found = looked(log_dir)
    assert (found.state, found.attempt, found.world_size, found.rank_count) == ("ended", 1, 2, 2)
    assert [(row.rank, row.node, row.pid, row.state) for row in found.ranks] == [
        (0, "n0", 10, "ended"),
        (1, "n1", 11, "ended"),
    ]
    assert found.step_s == pytest.approx(6 / 16)
    assert (found.step, found.steps_per_s, found.leader) == (25, None, None)
    text = text_of(found)
    assert "25, 0.375 s a step on average" in text and " 1      n1     11    ended" in text
    json.dumps(asdict(found), allow_nan=False)


def test_where_the_files_of_an_ended_job_have_no_time_of_a_step_none_is_shown(
    tmp_path: Path, answers: list[JobStatus]
) -> None:
    log_dir = job_at(tmp_path)
    report(log_dir, start(0, 1.0), end(31.0, 50, 50))
    found = looked(log_dir)
    assert found.step_s is None and "a step" not in text_of(found) and len(found.ranks) == 2


@pytest.mark.parametrize(
    ("saved", "text"), [(0, "not saved"), (40, "saved up to step 40"), (None, "not known to be saved")]
)
def test_a_last_step_that_is_not_on_disk_is_said(
    saved: int | None, text: str, tmp_path: Path, answers: list[JobStatus]
) -> None:
    log_dir = job_at(tmp_path)
    report(log_dir, start(0, 1.0), end(31.0, 50, saved))
    assert f"50, {text}" in text_of(looked(log_dir))


def test_a_folder_without_controllers_addresses_is_said(tmp_path: Path, answers: list[JobStatus]) -> None:
    journal(tmp_path, 0, *comes(0.0))
    (note,) = looked(tmp_path).notes
    assert "no journal in" in note


def test_an_address_at_which_nothing_answers_is_an_error(answers: list[JobStatus]) -> None:
    with pytest.raises(
        ConfigError, match=r"no job found at n0:5: .* cannot be reached: Connection refused. Name the job's output_dir"
    ):
        look.look(Job(None, "n0:5"))


def test_an_address_alone_shows_what_the_controller_knows(answers: list[JobStatus]) -> None:
    answers.append(job_status([rank_status(0)]))
    found = look.look(Job(None, "n0:5"))
    assert (found.state, found.log_dir, found.goodput, found.faults) == ("running", "", None, [])


def test_a_checkpoint_that_cannot_be_read_is_listed_without_its_cause(tmp_path: Path, answers: list[JobStatus]) -> None:
    log_dir = job_at(tmp_path)
    for step in range(1, 6):
        (tmp_path / "checkpoints" / f"iter_{step:07}").mkdir(parents=True)
    found = looked(log_dir)
    assert [(row.step, row.cause, row.bytes) for row in found.checkpoints] == [
        (5, "", None),
        (4, "", None),
        (3, "", None),
    ]
    assert "cannot be read" in text_of(found)


def test_what_the_job_has_passed_over_is_not_listed(tmp_path: Path, answers: list[JobStatus]) -> None:
    """Another run's of higher steps would be taken for the job's newest, in metrics as well. A note that cannot be read says nothing."""
    log_dir, folder = job_at(tmp_path), tmp_path / "checkpoints"
    for step in (70, 80, 90):
        (folder / f"iter_{step:07}").mkdir(parents=True)
    write_notes([str(folder)], inodes_in([str(folder)]))
    for step in (10, 20):
        (folder / f"iter_{step:07}").mkdir()
    assert [row.step for row in looked(log_dir).checkpoints] == [20, 10]
    (folder / ".ttp_passed_over.json").write_text("")
    assert [row.step for row in looked(log_dir).checkpoints] == [90, 80, 70]
    (folder / ".ttp_passed_over.json").unlink()
    (folder / ".ttp_passed_over.json").mkdir()
    assert [row.step for row in looked(log_dir).checkpoints] == [90, 80, 70]


def test_every_key_is_there_in_every_state(tmp_path: Path, answers: list[JobStatus]) -> None:
    """Programs read them; no value is one that JSON has not."""
    log_dir = job_at(tmp_path)
    without = looked(log_dir)
    answers.append(job_status([rank_status(0)], pace=PaceStatus(), coverage=CoverageStatus()))
    with_controller = looked(log_dir)
    assert list(asdict(without)) == list(asdict(with_controller))
    json.dumps([asdict(without), asdict(with_controller)], allow_nan=False)


def test_durations_are_short() -> None:
    texts = {
        0.04: "0.0 s",
        59.94: "59.9 s",
        60.0: "1 min 0 s",
        250.0: "4 min 10 s",
        11_100.0: "3 h 5 min",
        190_000.0: "2 d 4 h",
        -1.0: "0.0 s",
    }
    assert {seconds: duration_text(seconds) for seconds in texts} == texts


def test_before_a_rank_has_come_no_step_is_finished(tmp_path: Path, answers: list[JobStatus]) -> None:
    answers.append(job_status([rank_status(0, pid=0, step=0)], stage="assembling", pace=PaceStatus()))
    assert looked(job_at(tmp_path)).step is None


def test_a_checkpoint_directory_that_refuses_to_be_looked_at_is_a_note(
    tmp_path: Path, answers: list[JobStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    log_dir = job_at(tmp_path)
    monkeypatch.setattr(Path, "is_dir", refuses)
    found = looked(log_dir)
    assert any("cannot be listed: Permission denied" in note for note in found.notes) and not found.checkpoints


def test_a_slow_rank_is_shown_before_all_that_are_well(answers: list[JobStatus], tmp_path: Path) -> None:
    """With what it takes and what the others take, in the text as well; its own time is in its row."""
    many = [rank_status(rank, own_s=0.1, waited_s=0.02) for rank in range(40)]
    slow = tuple(StragglerStatus(rank, f"n{rank // 8}", 1.25, 0.125, 0.1, 48) for rank in range(20, 30))
    answers.append(job_status(many, stragglers=slow, loss=1.5))
    view = looked(job_at(tmp_path))
    assert [row.rank for row in view.ranks[:10]] == [*range(20, 30)]
    assert [row.slower for row in view.ranks[9:11]] == [1.25, None] and view.ranks[0].waited_s == 0.02
    assert (view.loss, view.loss_finite) == (1.5, True)
    text = text_of(view)
    assert "rank 20 on node n2: 1.25 times the others' own time of a step (0.125 s, theirs 0.1 s), for 48 steps" in text
    assert "and 2 more" in text and "loss" in text and "1.5" in text and "0.1 s" in text


@pytest.mark.parametrize(
    ("owns", "step_s", "compared"),
    [
        ((0.1, 0.1), 0.5, True),
        ((0.1, None), 0.5, False),
        ((None, None), 0.5, False),
        ((None, None), None, None),
    ],
    ids=["all", "one alone", "an accelerator", "no step yet"],
)
def test_where_ranks_are_not_compared_it_is_said(
    answers: list[JobStatus],
    tmp_path: Path,
    owns: tuple[float | None, ...],
    step_s: float | None,
    compared: bool | None,
) -> None:
    """On an accelerator they have the times of their steps, and none of their own."""
    ranks = [rank_status(rank, own_s=own_s, step_s=step_s) for rank, own_s in enumerate(owns)]
    answers.append(job_status(ranks, pace=PaceStatus(7, 8, step_s)))
    found = looked(job_at(tmp_path))
    assert found.stragglers_compared is compared and found.stragglers == []
    assert ("ranks are not compared" in text_of(found)) == (compared is False)


def test_of_one_rank_alone_the_text_does_not_say_that_it_is_not_compared(
    answers: list[JobStatus], tmp_path: Path
) -> None:
    answers.append(job_status([rank_status(0, own_s=0.1)]))
    found = looked(job_at(tmp_path))
    assert found.stragglers_compared is False and "not compared" not in text_of(found)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_and_said(answers: list[JobStatus], tmp_path: Path, loss: float) -> None:
    """JSON has no such number."""
    answers.append(job_status([rank_status(0)], loss=loss))
    view = looked(job_at(tmp_path))
    assert (view.loss, view.loss_finite) == (None, False) and "not finite" in text_of(view)
    json.dumps(asdict(view), allow_nan=False)
