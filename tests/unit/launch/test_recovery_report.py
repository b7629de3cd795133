"""What is reported of faults from which an attempt has recovered, from journals that the shipped controller writes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.test_reporter import FAULT_KEYS, ending, written
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_regroup import job, replacement, torn_rank_3
from tests.unit.protocol.test_seats import whole
from ttp.controller.core.facts.state import Stage
from ttp.launch.report import reporter as reporter_module
from ttp.launch.report.incident import false_alarms
from ttp.launch.report.journals import Line, read_journals
from ttp.launch.report.merge import earlier, of_this_job
from ttp.launch.report.recovery import recoveries, recovery_fields, recovery_lines
from ttp.launch.report.reporter import AttemptStart, Reporter
from ttp.processor.stacks import ASKED_NAME, process_text
from ttp.proto.messages import CauseKind, Regrouped, WorkerExit

BEGAN_S = 1000.0


class Journaled:
    """A controller of the test whose journal is on disk."""

    def __init__(self, log_dir: Path) -> None:
        self.bench = job()
        self.path = log_dir / "journal_0.jsonl"
        self._written = 0
        self.write()

    def write(self) -> None:
        with self.path.open("a") as file:
            for line in self.bench.journal[self._written :]:
                fields = {name: value for name, value in line.fields.items()}
                file.write(
                    json.dumps({"unix_s": BEGAN_S + self.bench.now, "event": line.event, "fields": fields}) + "\n"
                )
        self._written = len(self.bench.journal)

    def recover(self, pid: int = 203, kills: int = 103, step: int = 7, named: bool = True) -> None:
        """Rank 3 ends, another process takes its place, and all train on; in 3 s. `named`: its agent reports how it ended."""
        bench = self.bench
        bench.say(killed(3, "exiting", pid=kills), after=10.0)
        self.write()
        bench.all_report(step, ranks=(0, 1, 2))
        if named:
            bench.say(WorkerExit(3, kills, "signal SIGKILL", 0.0), after=1.0)
        bench.say(replacement(freeze_id=bench.state.freeze_id, pid=pid), after=1.0)
        self.write()
        for rank in range(4):
            bench.say(Regrouped(rank, bench.state.freeze_id), after=0.25)
        assert bench.at(Stage.RUNNING)
        self.write()


@pytest.fixture
def journaled(tmp_path: Path) -> Journaled:
    return Journaled(tmp_path)


def lines_of(journaled: Journaled) -> list[Line]:
    return read_journals(journaled.path.parent, 0, 0.0)


def test_a_recovery_says_what_happened_and_whose_process_was_replaced(journaled: Journaled) -> None:
    journaled.recover()
    (recovery,) = recoveries(0, lines_of(journaled))
    assert (recovery.step, recovery.replaced) == (6, {3: 203})
    (culprit,) = recovery.report.incident.culprits
    assert (culprit.rank, culprit.pid, culprit.cause) == (3, 103, "signal SIGKILL")
    assert recovery.report.began_unix_s == pytest.approx(BEGAN_S + 10.0)
    heading, who, cause, *_, saved, took, following = recovery_lines(recovery)
    assert heading == "--- recovered fault in attempt 0: a process exited ---"
    assert who.endswith("rank 3 on node host3 (pid 103)") and cause == "cause   signal SIGKILL"
    assert saved == "saved   not needed: all ranks hold step 6; no step lost"
    assert "regrouped 3,000 ms; 3,000 ms in all" in took
    assert following == ("next    no restart: training continues with step 7; rank 3 in another process (pid 203)")


def test_a_spare_node_that_has_taken_a_lost_ones_place_is_named(tmp_path: Path) -> None:
    """The one of the recovery that has succeeded: the one before had been lost as it sat down."""
    bench = whole(spares=("c", "d"))
    lines: list[Line] = [
        {"unix_s": BEGAN_S, "controller": 0, "event": line.event, "fields": dict(line.fields)} for line in bench.journal
    ]
    at = next(number for number, line in enumerate(lines) if line["event"] == "take_places_sent")
    lines.insert(at, {**lines[at], "fields": {"host": "d", "lost": "b", "ranks": (2, 3), "freeze_id": 0}})
    (recovery,) = recoveries(0, lines)
    assert recovery.seated == {"c": "b"} and recovery_fields(recovery)["seated"] == {"c": "b"}
    assert recovery_lines(recovery)[-1].endswith(
        "ranks 2-3 in other processes (pids 202, 203); c, a spare, has the place of b"
    )


def test_ranks_that_kept_their_processes_are_not_called_replaced(tmp_path: Path) -> None:
    """Training had raised on one, and nothing was lost."""
    journaled = Journaled(tmp_path)
    bench = journaled.bench
    bench.say(fault(3, CauseKind.EXCEPTION), after=10.0)
    bench.all_report(7)
    bench.say(*(Regrouped(rank, 1) for rank in range(4)))
    journaled.write()
    (recovery,) = recoveries(0, lines_of(journaled))
    assert recovery.replaced == {} and recovery_lines(recovery)[-1].endswith("; every rank kept its process")


def test_a_process_that_had_lost_its_state_is_named_as_replaced(tmp_path: Path) -> None:
    journaled = Journaled(tmp_path)
    torn_rank_3(journaled.bench)
    journaled.bench.say(replacement())
    journaled.bench.say(*(Regrouped(rank, 1) for rank in range(4)))
    journaled.write()
    (recovery,) = recoveries(0, lines_of(journaled))
    assert recovery.replaced == {3: 203} and recovery.report.incident.kind == "exception"


def test_it_is_reported_soon_and_once(journaled: Journaled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As soon as the controller has written of it; the job trains on. At the end it counts as a fault, and as no attempt."""
    journaled.recover()
    last = journaled.path.read_text().splitlines(keepends=True)
    journaled.path.write_text("".join(last[:-1]))  # the incident is still to be written
    reporter, start = Reporter(clock=lambda: BEGAN_S + 100.0), AttemptStart(number=0, begun_unix_s=0.0)
    reporter.begin(here=True)
    assert not reporter.follow(start, tmp_path) and not reporter.follow(start, tmp_path)
    assert "recovered" not in capsys.readouterr().err
    journaled.path.write_text("".join(last))
    assert not reporter.follow(start, tmp_path) and not reporter.follow(start, tmp_path)
    assert capsys.readouterr().err.count("--- recovered fault in attempt 0") == 1
    reporter.end(start, ending(tmp_path))
    reporter.finish("succeeded")
    printed = capsys.readouterr().err
    assert "fault in attempt" not in printed and "ran     1 attempt in" in printed
    assert "faults  1 fault (1 recovered without a restart)\n" in printed and "; 3.0 s without training" in printed
    report_lines = written(tmp_path / "story.jsonl")
    assert [line["event"] for line in report_lines] == ["start", "recovered", "end"]
    assert list(report_lines[1]) == [*(key for key in FAULT_KEYS if key != "time"), "step", "replaced", "seated"]
    assert (report_lines[1]["step"], report_lines[1]["replaced"], report_lines[1]["steps_lost"]) == (6, {"3": 203}, 0)
    assert (
        report_lines[2]["faults"],
        report_lines[2]["recovered"],
        report_lines[2]["starts"],
        report_lines[2]["lost_s"],
    ) == (1, 1, 1, 3.0)


def test_where_a_process_stood_that_was_ended_for_it_is_reported(
    journaled: Journaled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what it wrote when its agent asked; of a fault before it, whose process had ended by itself, there is nothing."""
    for number in (1, 2):
        journaled.recover(pid=200 + number, kills=103 if number == 1 else 201, step=6 + number)
    stacks = tmp_path / "rank_3" / ASKED_NAME
    stacks.parent.mkdir()
    main = 'main thread 0x01\nThread 0x0000000000000001 (most recent call first):\n  File "train.py", line 7 in wait\n'
    stacks.write_text(f"2026-01-01 10:00:00 {process_text(201)}\n{main}")
    reporter, start = Reporter(clock=lambda: BEGAN_S + 100.0), AttemptStart(number=0, begun_unix_s=0.0)
    reporter.begin(here=True)
    assert not reporter.follow(start, tmp_path) and not reporter.follow(start, tmp_path)
    printed = capsys.readouterr().err
    assert printed.count("--- recovered fault") == 2 and printed.count("stood   ") == 1
    path = tmp_path / "stacks_0_2.txt"
    assert "stood   rank 3 in wait, train.py:7\n" in printed and f"all stacks, suspects first: {path}" in printed
    assert path.read_text().startswith("=== rank 3 (suspect) ===") and not (tmp_path / "stacks_0_1.txt").exists()


def test_a_recovery_whose_stacks_cannot_be_kept_is_reported_without_them(
    journaled: Journaled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reporter_module, "with_stacks", full)
    journaled.recover()
    reporter, start = Reporter(clock=lambda: BEGAN_S + 100.0), AttemptStart(number=0, begun_unix_s=0.0)
    reporter.begin(here=True)
    assert not reporter.follow(start, tmp_path) and not reporter.follow(start, tmp_path)
    assert capsys.readouterr().err.count("--- recovered fault") == 1


def test_journals_are_read_when_they_have_grown_alone(
    journaled: Journaled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look each second costs a job of a month nothing. A standby's count as well; those of another attempt do not."""
    reads: list[int] = []

    def read(log_dir: Path, start: int, begun_unix_s: float) -> list[Line]:
        reads.append(start)
        return read_journals(log_dir, start, begun_unix_s)

    monkeypatch.setattr(reporter_module, "read_journals", read)
    reporter, start = Reporter(), AttemptStart(number=0, begun_unix_s=0.0)
    reporter.begin(here=True)
    for _ in range(5):
        reporter.follow(start, tmp_path)
    assert len(reads) == 2, "for the table, and once more"
    (tmp_path / "journal_1.jsonl").write_text("{")
    for path in (journaled.path, tmp_path / "standby_0_1.jsonl"):
        before = len(reads)
        with path.open("a") as file:
            file.write("{")
        for _ in range(5):
            reporter.follow(start, tmp_path)
        assert len(reads) == before + 1, path
    journaled.path.unlink()
    (tmp_path / "standby_0_2.jsonl").symlink_to(tmp_path / "gone")  # as one that goes while it is looked at
    assert not reporter.follow(start, tmp_path) and not reporter.follow(start, tmp_path)


def test_a_fault_after_a_recovery_is_one_of_its_own(
    journaled: Journaled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here one that the controller did not live to end. What was known of the first is not the second's."""
    journaled.recover()
    journaled.recover(pid=303, kills=203, step=9)
    journaled.bench.say(killed(3, "exiting", pid=303), after=10.0)
    journaled.write()
    reporter = Reporter(clock=lambda: BEGAN_S + 100.0)
    reporter.begin(here=True)
    reporter.end(AttemptStart(number=0, begun_unix_s=0.0), ending(tmp_path, rank_3="exit code 3"))
    reporter.finish("failed")
    report_lines = written(tmp_path / "story.jsonl")
    assert [line["event"] for line in report_lines] == ["start", "recovered", "recovered", "fault", "end"]
    assert [line["replaced"] for line in report_lines[1:3]] == [{"3": 203}, {"3": 303}]
    (culprit,) = report_lines[3]["culprits"]
    assert (culprit["rank"], culprit["cause"]) == (3, "exit code 3")
    assert (report_lines[4]["faults"], report_lines[4]["recovered"], report_lines[4]["unknown_losses"]) == (3, 2, 1)
    assert false_alarms(lines_of(journaled)) == 0


def test_an_attempt_that_has_recovered_and_succeeds_ended_in_no_fault(journaled: Journaled, tmp_path: Path) -> None:
    journaled.recover()
    reporter = Reporter(clock=lambda: BEGAN_S + 100.0)
    reporter.begin(here=True)
    reporter.end(AttemptStart(number=0, begun_unix_s=0.0), ending(tmp_path))
    reporter.finish("succeeded")
    end = written(tmp_path / "story.jsonl")[-1]
    assert end["ended_in_fault"] is False and end["untold_starts"] == []


def report_line(event: str, start: int, **fields: object) -> dict[str, Any]:
    return {"unix_s": 5.0, "event": event, "start": start, "began_unix_s": 5.0, **fields}


def test_recoveries_that_another_agent_reported_count_too(journaled: Journaled) -> None:
    """Several in an attempt, before its fault; not those of an earlier job in the same file."""
    journaled.recover()
    (recovery,) = recoveries(0, lines_of(journaled))
    recovered = {"unix_s": 6.0, "event": "recovered", **recovery_fields(recovery)}
    mine = [report_line("start", 0), recovered, recovered, report_line("fault", 0), report_line("start", 1)]
    before = [report_line("start", 0), recovered]
    assert of_this_job([*before, *mine], 1) == mine
    found = earlier([*before, *mine], own={1}, last=1)
    assert (
        found.recovered == (recovered, recovered) and found.faults == (mine[3],) and found.lost_s == pytest.approx(6.0)
    )
    assert earlier(mine, own={0, 1}, last=1).recovered == ()


def test_how_a_process_ended_is_not_taken_from_the_fault_before(journaled: Journaled) -> None:
    """Of the second one nothing is known but that it was exiting."""
    journaled.recover()
    journaled.recover(pid=303, kills=203, step=9, named=False)
    causes = [each.report.incident.culprits[0].cause for each in recoveries(0, lines_of(journaled))]
    assert causes == ["signal SIGKILL", "exited"]
