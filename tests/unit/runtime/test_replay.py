"""A journal is decided once more: the same lines, and an altered one is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.controller.core.facts.events import ControllerSettings, Event, Received, Tick
from ttp.controller.core.facts.events import Journal as Line
from ttp.controller.core.machine import initial, transition
from ttp.controller.journal import Journal, set_aside_earlier
from ttp.controller.replay import compare, main
from ttp.errors import ProtocolError
from ttp.proto.messages import Progress, Registration, ShardGroup, WorkerExit
from ttp.status_page.curve import FILE_NAME

SETTINGS = ControllerSettings(job_id="job", term=1, world_size=2)


def record(path: Path, events: list[Event], segment_bytes: int = 1 << 20) -> None:
    """Write a journal as the driver does."""
    journal, state = Journal(path, SETTINGS, segment_bytes=segment_bytes), initial(SETTINGS, 0.0)
    journal.starting_state(state)
    for number, event in enumerate(events):
        journal.input(float(number), event)
        try:
            state, effects = transition(state, event, float(number))
        except ProtocolError as error:
            journal.write_event(0.0, float(number), "protocol_error", {"text": str(error)})
            continue
        for effect in effects:
            if isinstance(effect, Line):
                journal.write_event(0.0, float(number), effect.event, effect.fields)
        assert journal.wait_written()
        if journal.wants_state:
            journal.starting_state(state)
    journal.close()


EVENTS: list[Event] = [
    *(Received(Registration(r, 2, "h", 10 + r, (ShardGroup("g", "all", 8),), 0, ("/x",), "{}")) for r in range(2)),
    Received(Progress(7, 1)),  # of no rank of this job: refused, and refused again
    Tick(),
    Received(WorkerExit(1, 11, "signal SIGKILL", 0.0)),
]


def test_a_journal_decides_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs that the machine refused are refused again; the lines are printed with what was sent."""
    path = tmp_path / "journal_0.jsonl"
    record(path, EVENTS)
    assert main([str(path), "--sent"]) == 0
    printed = capsys.readouterr().out
    assert "death_seen: rank 1, kind exited, text signal SIGKILL" in printed
    assert "-> Freeze to 0" in printed
    assert main([f"{path}.inputs"]) == 0, "either file may be named"


def test_the_end_of_a_long_journal_decides_the_same_again(tmp_path: Path) -> None:
    """The oldest inputs are dropped; what the kept ones decided is compared."""
    path = tmp_path / "journal_0.jsonl"
    record(path, EVENTS, segment_bytes=200)
    compared = compare(path)
    assert compared.difference == ""
    assert 0 < len(compared.again) < 4


def test_the_journal_of_an_earlier_launch_is_moved_aside_and_replays_there(tmp_path: Path) -> None:
    """Both begin with attempt 0 in the same folder; what remains of later attempts is the earlier one's as well."""
    path = tmp_path / "journal_0.jsonl"
    record(path, EVENTS)
    for later in ("journal_1.jsonl", "standby_1_1.jsonl"):
        record(tmp_path / later, EVENTS[:2])
    record(path, EVENTS[:2])
    (tmp_path / "stacks_0.txt").write_text("where rank 1 stood")
    (tmp_path / FILE_NAME).write_text("{}")
    set_aside_earlier(tmp_path, 1)
    assert not list((tmp_path / "earlier").glob("*stacks*")), "an attempt of the same launch may have written them"
    path.rename(kept := tmp_path / "kept")
    set_aside_earlier(tmp_path, 0)
    kept.rename(path)
    assert [each.read_text() for each in (tmp_path / "earlier").glob(f"*_{FILE_NAME}")] == ["{}"], "the page's curves"
    assert not (tmp_path / FILE_NAME).exists()
    (stacks,) = (tmp_path / "earlier").glob("*_stacks_0.txt")
    assert stacks.read_text() == "where rank 1 stood" and not (tmp_path / "stacks_0.txt").exists()
    assert sorted(each.name for each in tmp_path.glob("*.jsonl")) == [path.name]
    first, second = (sorted((tmp_path / "earlier").glob(f"*_{name}_?.jsonl")) for name in ("journal", "standby_1"))
    assert len(first) == 2 and len(second) == 1
    reported = {each.name.partition("_")[2]: compare(each) for each in first}
    assert [(name, one.difference, len(one.recorded)) for name, one in sorted(reported.items())] == [
        ("journal_0.jsonl", "", len(reported["journal_0.jsonl"].again)),
        ("journal_1.jsonl", "", len(compare(path).recorded)),
    ]
    assert (
        len(reported["journal_0.jsonl"].recorded) > len(compare(path).recorded) > 0 and compare(path).difference == ""
    )


def test_an_altered_event_log_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line that differs is shown, as it was written and as it is decided now."""
    path = tmp_path / "journal_0.jsonl"
    record(path, EVENTS)
    path.write_text(path.read_text().replace("SIGKILL", "SIGTERM"))
    assert main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert "the controller wrote" in printed and "SIGTERM" in printed and "SIGKILL" in printed


def test_a_journal_without_inputs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file that is missing."""
    (tmp_path / "journal_0.jsonl").write_text("")
    (tmp_path / "journal_0.jsonl.inputs").write_text("")
    assert main([str(tmp_path / "journal_0.jsonl")]) == 2
    assert "journal_0.jsonl.inputs" in capsys.readouterr().err


def test_a_journal_of_a_controller_that_wrote_no_incidents_replays(tmp_path: Path) -> None:
    """They are decided as they were before."""
    path = tmp_path / "journal_0.jsonl"
    record(path, [*EVENTS, Received(WorkerExit(0, 10, "signal SIGKILL", 0.0))])
    lines = path.read_text().splitlines(keepends=True)
    assert sum('"event": "incident"' in line for line in lines) == 1 and compare(path).difference == ""
    path.write_text("".join(line for line in lines if '"event": "incident"' not in line))
    assert compare(path).difference == ""
