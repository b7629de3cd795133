"""What ttprun prints and writes of a job, from journals on disk."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.launch.journals import JOURNALS, journal
from ttp.launch.report.incident import AttemptEnd
from ttp.launch.report.journals import read_journals
from ttp.launch.report.reporter import AttemptStart, Reporter
from ttp.processor.async_log import AsyncLog
from ttp.processor.stacks import StackWriter

START_KEYS = ["unix_s", "event", "launch", "start", "world_size", "survives", "standbys", "warnings", "rows", "pids"]
HOLD_KEYS = ["unix_s", "event", "launch", "start", "cause", "ranks", "up_to_s"]
HELD_KEYS = ["unix_s", "event", "launch", "start", "held_s", "why", "ranks"]
FAULT_KEYS = [
    "unix_s", "event", "launch", "start", "began_unix_s", "kind", "culprits", "survivors", "saved", "not_saved", "goes_on_from",
    "steps_lost", "took_over", "took_ms", "stacks", "next", "elsewhere", "time",
]  # fmt: skip
CULPRIT_KEYS = ["rank", "host", "pid", "cause", "phase", "step", "reported", "trace", "stood", "heard_s", "reached"]
SAVED_KEYS = ["step", "path", "bytes", "ranks"]
END_KEYS = [
    "unix_s", "event", "launch", "result", "starts", "faults", "notices", "false_alarms", "saved_steps", "steps_lost", "unknown_losses",
    "lost_s", "lasted_s", "untold_starts", "why", "lasted_since", "protected", "steps_again",
    "ended_in_fault", "last", "mirror", "recovered", "excluded", "time_use",
]  # fmt: skip
KILLED_AT_S = float(journal("killed")[-1]["unix_s"])


def put(name: str, log_dir: Path, number: int = 0) -> AttemptStart:
    shutil.copy(JOURNALS / f"{name}.jsonl", log_dir / f"journal_{number}.jsonl")
    return AttemptStart(number=number, begun_unix_s=0.0)


def ending(log_dir: Path | None, **exits: str) -> AttemptEnd:
    printed = {int(rank.removeprefix("rank_")): text for rank, text in exits.items()}
    return AttemptEnd(log_dir=log_dir, exits=printed, first_exit_unix_s=None, next="restart 1 of 3", pids={1: 71})


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_job_is_reported_from_its_start_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table once, though the client reads again and the end reads once more; then the fault; then the summary."""
    reporter = Reporter(clock=lambda: KILLED_AT_S + 2.0)
    reporter.begin(here=True)
    start = AttemptStart(number=0, begun_unix_s=0.0)
    (tmp_path / "journal_0.jsonl").touch()
    assert not reporter.watch(start, tmp_path), "no rank has registered yet"
    put("killed", tmp_path)
    assert reporter.watch(start, tmp_path) and reporter.watch(start, tmp_path)
    reporter.end(start, ending(tmp_path, rank_2="signal SIGKILL"))
    reporter.finish("succeeded")
    printed = capsys.readouterr().err
    assert printed.count("the job survives: any 1 of 4 ranks; 4 of 6 pairs ---") == 1
    rows = [line.split() for line in printed.splitlines() if "shard" in line]
    assert rows[0] == ["0", "vm", "22696", "shard", "0", "of", "2", "(0.2", "MiB)", "rank", "2"] and len(rows) == 4
    parts = ("the job survives", "also on", "--- fault in attempt 0", "next    restart 1 of 3", "--- the job has ended")
    assert sorted(parts, key=printed.index) == list(parts)
    assert "lost    0 steps; 2." in printed


def test_a_table_that_comes_after_the_first_lines_of_the_fault_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller client reads once a second; the agent's own line on a death may come first."""
    late = "attempt 0 as it was before its fault:\n--- attempt 0: 4 ranks"
    reporter = Reporter()
    reporter.begin(here=True)
    start = put("killed", tmp_path)
    whole = (tmp_path / "journal_0.jsonl").read_text()
    before, assembled, _ = whole.partition('"assembled"')
    (tmp_path / "journal_0.jsonl").write_text(
        before + assembled + whole[len(before + assembled) :].partition("\n")[0] + "\n"
    )
    assert reporter.watch(start, tmp_path)
    assert "--- attempt 0: 4 ranks" in (printed := capsys.readouterr().err) and "as it was before" not in printed
    again = Reporter()
    again.begin(here=True)
    again.end(put("killed", tmp_path), ending(tmp_path))
    assert late in capsys.readouterr().err


def test_the_lines_for_machines_are_frozen(tmp_path: Path) -> None:
    """Names and their order: others read them."""
    path = tmp_path / "elsewhere" / "events.jsonl"
    reporter = Reporter(path)
    reporter.begin(here=True)
    reporter.hold(0, "rank 2: signal SIGKILL", [0, 1, 3], 120.0)
    reporter.held(0, 1.5, "", [])
    reporter.end(put("killed", tmp_path), ending(tmp_path))
    reporter.finish("succeeded")
    hold, held, start, fault, end = written(path)
    assert [list(hold), list(held)] == [HOLD_KEYS, HELD_KEYS] and [hold["event"], held["event"]] == ["hold", "held"]
    assert [list(start), list(fault), list(end)] == [START_KEYS, FAULT_KEYS, END_KEYS]
    assert list(fault["culprits"][0]) == CULPRIT_KEYS and list(fault["saved"]) == SAVED_KEYS
    assert [start["event"], fault["event"], end["event"]] == ["start", "fault", "end"]
    assert start["rows"][0] == {"ranks": "0", "host": "vm", "shards": ["shard 0 of 2 (0.2 MiB)"], "also_on": ["rank 2"]}
    assert end["saved_steps"] == [7] and end["faults"] == 1 and end["protected"] is True
    assert not (tmp_path / "story.jsonl").exists()


def test_two_agents_in_one_folder_are_distinguished(tmp_path: Path) -> None:
    """Both begin with attempt 0, and the second appends."""
    for launch in ("none_1a", "none_2b"):
        reporter = Reporter(launch=launch)
        reporter.begin(here=True)
        assert reporter.watch(put("killed", tmp_path), tmp_path)
        reporter.hold(0, "rank 2: signal SIGKILL", [0, 1, 3], 120.0)
        reporter.finish("succeeded")
    printed = [(line["launch"], line["event"]) for line in written(tmp_path / "story.jsonl")]
    assert printed == [(launch, event) for launch in ("none_1a", "none_2b") for event in ("start", "hold", "end")]


def test_a_restart_of_the_same_ranks_repeats_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line reports that they are back, and the time without training ends there."""
    reporter = Reporter()
    for number in (0, 1):
        reporter.begin(here=True)
        start = put("killed", tmp_path, number)
        assert reporter.watch(start, tmp_path)
    printed = capsys.readouterr().err
    assert printed.count("also on") == 1 and "--- attempt 1: 4 ranks" in printed
    assert [line["start"] for line in written(tmp_path / "story.jsonl")] == [0, 1]


def test_a_hang_is_reported_with_the_collected_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The suspect's frames are quoted, out of its own file."""
    start = put("hung_at_the_start", tmp_path)
    reason = next(line["fields"]["text"] for line in journal("hung_at_the_start") if line["event"] == "hung")
    for rank in (0, 1):
        writer = StackWriter(tmp_path / f"rank_{rank}" / "stacks.log", AsyncLog(rank))
        writer.save(reason)
        writer.finish(30.0)
    reporter = Reporter()
    reporter.begin(here=True)
    reporter.end(start, ending(tmp_path))
    printed = capsys.readouterr().err
    assert "stood   rank 1 in " in printed and "test_reporter.py:" in printed
    assert f"all stacks, suspects first: {tmp_path}/stacks_0.txt" in printed
    assert (tmp_path / "stacks_0.txt").read_text().startswith("=== rank 1 (suspect) ===")


def test_a_node_without_rank_0_stays_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no journal, and the other node reports the job."""
    reporter = Reporter(tmp_path / "story.jsonl")
    reporter.begin(here=False)
    reporter.finish("succeeded")
    assert capsys.readouterr().err == "" and not (tmp_path / "story.jsonl").exists()


def test_a_node_whose_standby_led_reports_what_rank_0s_agent_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Disks that are not shared: the first controller's journal is on the other node."""
    shutil.copy(JOURNALS / "taken_over" / "standby_1_1.jsonl", tmp_path)
    reporter = Reporter()
    reporter.begin(here=False)
    reporter.end(AttemptStart(number=1, begun_unix_s=0.0), ending(tmp_path))
    printed = capsys.readouterr().err
    assert "saved   step 17 in " in printed and "standby 1 took over" in printed


def test_the_fault_of_a_lost_node_is_reported_by_the_one_that_rank_0_moves_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a shared disk rank 0's agent reports. If the next attempt has rank 0 here, that agent was lost."""
    reporter = Reporter()
    for name in ("journal_1.jsonl", "standby_1_1.jsonl"):
        shutil.copy(JOURNALS / "taken_over" / name, tmp_path)
    start = AttemptStart(number=1, begun_unix_s=0.0)
    for here in (False, True):
        reporter.begin(here=False)
        reporter.end(start, ending(tmp_path))
        assert capsys.readouterr().err == ""
        reporter.begin(here)
        assert capsys.readouterr().err.count("standby 1 took over") == here


def test_workers_without_a_session_are_reported_on_the_console_only(capsys: pytest.CaptureFixture[str]) -> None:
    """And a summary that does not speak of training."""
    reporter = Reporter()
    reporter.begin(here=True)
    reporter.end(AttemptStart(number=0, begun_unix_s=0.0), ending(None, rank_1="exit code 1"))
    reporter.finish("failed", "rank 1: exit code 1")
    printed = capsys.readouterr().err
    assert (
        "who     rank 1 (pid 71)" in printed
        and "cause   exit code 1" in printed
        and "saved   nothing: no controller on this node led the ranks" in printed
        and printed.endswith("faults  1 fault\nlost    not protected: no rank called ttp.start()\n")
    )


def test_attempts_without_a_session_have_their_lines_as_soon_as_there_is_a_place(tmp_path: Path) -> None:
    """The first attempt died in an import; the second one's ranks published where its journals are."""
    reporter = Reporter(clock=lambda: KILLED_AT_S)
    reporter.begin(here=True)
    reporter.end(AttemptStart(number=0, begun_unix_s=5.0, world_size=4), ending(None, rank_1="exit code 1"))
    assert not list(tmp_path.iterdir())
    reporter.begin(here=True)
    reporter.end(put("killed", tmp_path, 1), ending(tmp_path))
    reporter.finish("failed", "rank 2: signal SIGKILL")
    lines = written(tmp_path / "story.jsonl")
    assert [line["event"] for line in lines] == ["start", "fault", "start", "fault", "end"]
    assert list(lines[0]) == START_KEYS and (lines[0]["world_size"], lines[0]["unix_s"]) == (4, 5.0)
    assert lines[0]["pids"] == {"1": 71} and (lines[-1]["result"], lines[-1]["why"]) == (
        "failed", "rank 2: signal SIGKILL")  # fmt: skip


def test_a_launcher_that_leaves_without_rank_0_says_why_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that has never begun an attempt. The lines of rank 0's agent in the same file are read as before."""
    path = tmp_path / "story.jsonl"
    Reporter(path, clock=lambda: 1.0).finish("failed", "NeverMet: 5 attempts in a row")
    (left,) = written(path)
    assert list(left) == ["unix_s", "event", "launch", "node", "result", "why", "starts"] and left["event"] == "left"
    assert (left["why"], left["starts"]) == ("NeverMet: 5 attempts in a row", 0) and capsys.readouterr().err == ""
    first = Reporter(path, clock=lambda: KILLED_AT_S)
    first.begin(here=True)
    first.end(put("killed", tmp_path), ending(tmp_path))
    Reporter(path).finish("ended by SIGTERM")
    later = Reporter(path, clock=lambda: KILLED_AT_S + 60.0)
    later.begin(here=True, number=1)
    later.end(put("killed", tmp_path, 1), ending(tmp_path))
    later.finish("succeeded")
    assert written(path)[-1]["faults"] == 2


@pytest.mark.parametrize("content", ['{"unix_s": 1.0, "event"\n', "[" * 100_000 + "\n", None])
def test_a_damaged_journal_costs_a_line_of_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """The launcher goes on; the summary comes all the same. None: a pipe, which nothing writes to."""
    journal = tmp_path / "journal_0.jsonl"
    if content is None:
        os.mkfifo(journal)
    else:
        journal.write_text(content)
    reporter = Reporter()
    reporter.begin(here=True)
    start = AttemptStart(number=0, begun_unix_s=0.0)
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        assert reporter.watch(start, tmp_path)
        reporter.end(start, ending(tmp_path))
    assert "cannot read the table of shards" in caplog.text
    assert "cannot report the end of attempt 0" in caplog.text


def test_an_earlier_jobs_lines_in_the_same_file_are_not_this_ones(tmp_path: Path) -> None:
    """A new launcher in the same folder begins with attempt 0 again, and appends."""
    put("killed", tmp_path)
    with open(tmp_path / "journal_0.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"unix_s": KILLED_AT_S + 60, "event": "assembled", "fields": {}}) + "\n")
        file.write('{"unix_s": 17')
    lines = read_journals(tmp_path, 0, KILLED_AT_S + 30)
    assert [line["event"] for line in lines] == ["assembled"]


def test_an_agent_that_rank_0_moves_to_counts_the_earlier_ones_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own attempt was the third: the first fault is in the file, how the second one ended died with its teller."""
    first = Reporter(clock=lambda: KILLED_AT_S)
    for number in (0, 1):
        first.begin(here=True, number=number)
        start = put("killed", tmp_path, number)
        assert first.watch(start, tmp_path)
        if number == 0:
            first.end(start, ending(tmp_path))
    capsys.readouterr()
    later = Reporter(clock=lambda: KILLED_AT_S + 60.0)
    later.begin(here=True, number=2)
    later.end(put("killed", tmp_path, 2), ending(tmp_path))
    later.finish("succeeded")
    printed = capsys.readouterr().err
    assert "ran     3 attempts in 60.0 s" in printed
    assert (
        "faults  2 faults; the end of attempt 1 is not known on this node" in printed
        and "saved   steps 7, 7" in printed
    )
    end = written(tmp_path / "story.jsonl")[-1]
    assert (end["starts"], end["faults"], end["untold_starts"], end["lasted_since"]) == (3, 2, [1], 0)


def test_a_launcher_that_knows_its_own_attempt_only_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Disks that are not shared: nothing is known of the attempts before, and nothing is made up."""
    reporter = Reporter(tmp_path / "story.jsonl", clock=lambda: 7.0)
    reporter.begin(here=True, number=2)
    reporter.end(AttemptStart(number=2, begun_unix_s=0.0), AttemptEnd(
        log_dir=None, exits={}, first_exit_unix_s=None, next="", pids={1: 71}))  # fmt: skip
    reporter.finish("succeeded")
    printed = capsys.readouterr().err
    assert "ran     3 attempts; 0.0 s since attempt 2" in printed
    assert (
        "faults  0 faults; the end of attempts 0-1 is not known on this node" in printed
        and "lost    unknown: the end of attempts 0-1" in printed
    )


def test_events_are_written_beside_the_newest_journals_once_their_disk_fails(tmp_path: Path) -> None:
    """The directory of the first attempt's journals fails in the second, whose journals are in the next one."""
    reporter = Reporter(clock=lambda: KILLED_AT_S)
    places = [tmp_path / "first", tmp_path / "second"]
    for number, place in enumerate(places):
        place.mkdir()
        reporter.begin(here=True)
        reporter.end(put("killed", place, number), ending(place))
        if number == 0:
            place.rename(tmp_path / "was first")
            place.touch()
    reporter.finish("succeeded")
    assert [line["event"] for line in written(tmp_path / "was first" / "story.jsonl")] == ["start", "fault"]
    assert [line["event"] for line in written(places[1] / "story.jsonl")] == ["start", "fault", "end"]
    assert written(places[1] / "story.jsonl")[-1]["faults"] == 2


def test_a_disk_that_hangs_does_not_hold_the_launcher_up_in_the_middle_of_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader blocks the writer; the line is there once it has one."""
    monkeypatch.setattr("ttp.launch.report.story_file.WRITE_S", 0.05)
    path = tmp_path / "story.jsonl"
    os.mkfifo(path)
    reporter = Reporter(path)
    reporter.hold(0, "rank 2: signal SIGKILL", [0, 1], 120.0)  # rank 0 is on another node: its agent reports
    reporter.begin(here=True)
    reporter.hold(0, "rank 2: signal SIGKILL", [0, 1], 120.0)
    reporter.held(0, 0.5, "", [])
    with os.fdopen(os.open(path, os.O_RDWR)) as reader:  # a writer of its own: the pipe does not end between two lines
        lines = [json.loads(reader.readline()) for _ in range(2)]
    assert [(line["event"], line["ranks"]) for line in lines] == [("hold", [0, 1]), ("held", [])]


class Lost(io.StringIO):
    """A stream that fails at every write."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        OSError(28, "No space left on device"),
        ValueError("I/O operation on closed file"),
    ],
)
def test_a_lost_console_loses_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Nothing is raised, above all not rich's SystemExit; what is for machines was written before."""
    monkeypatch.setattr(sys, "stderr", Lost(error))
    reporter = Reporter()
    reporter.begin(here=True)
    assert reporter.watch(put("killed", tmp_path), tmp_path)
    reporter.end(AttemptStart(number=0, begun_unix_s=0.0), ending(tmp_path, rank_2="signal SIGKILL"))
    reporter.finish("succeeded")
    assert [line["event"] for line in written(tmp_path / "story.jsonl")] == ["start", "fault", "end"]


def test_a_line_is_for_machines_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is interrupted as it prints has written already."""
    lines: list[int] = []

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            path = tmp_path / "story.jsonl"
            lines.append(len(written(path)) if path.exists() else 0)
            return len(text)

    reporter = Reporter()
    reporter.begin(here=True)
    start, end = put("killed", tmp_path), ending(tmp_path)
    acts: list[Callable[[], object]] = [
        lambda: reporter.watch(start, tmp_path),
        lambda: reporter.end(start, end),
        lambda: reporter.finish("succeeded"),
    ]
    for count, act in enumerate(acts, 1):
        lines.clear()
        monkeypatch.setattr(sys, "stderr", Watched())
        act()
        assert set(lines) == {count}


def test_a_malformed_line_of_an_earlier_agent_costs_that_agents_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The end is reported, with a summary of this agent's reports, and with the attempt that is not in it."""
    path = tmp_path / "story.jsonl"
    first = Reporter(clock=lambda: KILLED_AT_S)
    first.begin(here=True)
    first.end(put("killed", tmp_path), ending(tmp_path))
    path.write_text(path.read_text().replace('"saved"', '"sawed"'))
    later = Reporter(path, clock=lambda: KILLED_AT_S + 60.0)
    later.begin(here=True, number=1)
    later.end(put("killed", tmp_path, 1), ending(tmp_path))
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        later.finish("failed", "rank 2: signal SIGKILL")
    assert caplog.messages == ["cannot summarize the job: KeyError: 'saved'"]
    end = written(path)[-1]
    assert list(end) == END_KEYS and (end["result"], end["why"]) == ("failed", "rank 2: signal SIGKILL")
    assert (end["starts"], end["faults"], end["untold_starts"]) == (2, 1, [0])
    assert "the end of attempt 0 is not known on this node" in capsys.readouterr().err


def test_a_job_that_cannot_be_summed_up_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who reads the lines and waits for it sees how the job ended, and why."""
    reporter = Reporter(clock=lambda: KILLED_AT_S)
    reporter.begin(here=True)
    reporter.end(put("killed", tmp_path), ending(tmp_path))
    (report,) = reporter._reports
    altered = replace(report, incident=replace(report.incident, steps_lost=cast(int, "many")))
    monkeypatch.setattr(reporter, "_reports", [altered])
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        reporter.finish("failed", "rank 2: signal SIGKILL")
    assert "also without the other agents' reports: TypeError" in caplog.text
    end = {"event": "end", "launch": "", "result": "failed", "starts": 1, "why": "rank 2: signal SIGKILL"}
    assert written(tmp_path / "story.jsonl")[-1] == {"unix_s": KILLED_AT_S, **end}


@pytest.mark.parametrize("saved", [True, False])
def test_the_report_of_ranks_that_exit_without_close_names_what_to_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, saved: bool
) -> None:
    """All have succeeded. Those that were in their close() waited, took the others for dead, and saved."""
    reporter = Reporter()
    reporter.begin(here=True)
    start = put("killed", tmp_path)
    if not saved:
        path = tmp_path / "journal_0.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"event": "incident"' not in line))
    reporter.end(start, replace(ending(tmp_path), pids={0: 70, 1: 71, 2: 72, 3: 73}, succeeded=True, next=""))
    hint = "next    none: all workers on this node succeeded. A rank that exits without calling close() is reported as failed"
    assert (hint in capsys.readouterr().err) == saved
    assert ("exited with code 0 without calling close()" in caplog.text) == (not saved)
    assert written(tmp_path / "story.jsonl")[-1]["event"] == ("fault" if saved else "unannounced")


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    """The disk was full: the next line is complete, and a later agent still reads the earlier one's reports."""
    path = tmp_path / "story.jsonl"
    first = Reporter(clock=lambda: KILLED_AT_S)
    first.begin(here=True)
    first.end(put("killed", tmp_path), ending(tmp_path))
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"unix_s": 17')
    later = Reporter(path, clock=lambda: KILLED_AT_S + 60.0)
    later.begin(here=True, number=1)
    later.end(put("killed", tmp_path, 1), ending(tmp_path))
    later.finish("succeeded")
    texts = path.read_text().splitlines()
    assert texts[2] == '{"unix_s": 17' and [json.loads(text)["event"] for text in texts[3:]] == [
        "start",
        "fault",
        "end",
    ]
    assert json.loads(texts[-1])["faults"] == 2
