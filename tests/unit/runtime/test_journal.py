"""The journal: what is read back equals what was written, and a bad disk harms nothing else."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.waiting import until
from ttp.controller import journal as journals
from ttp.controller.core.facts.events import ControllerSettings, Event, HeartbeatBatch, Received, StreamClosed, Tick
from ttp.controller.core.facts.state import Gathering
from ttp.controller.core.machine import initial, transition
from ttp.controller.journal import Journal, inputs_path, read_events, read_inputs, replay
from ttp.controller.json_codec import from_json, to_json
from ttp.hang_limits import HangLimits
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    FaultReport,
    FileEntry,
    Heartbeat,
    Phase,
    Progress,
    Registration,
    ShardGroup,
    StateReport,
)

SETTINGS = ControllerSettings(job_id="job", term=1, world_size=2)
RECORD = CommitRecord(3, math.inf, -0.0, True, 1e-310, (0.1, -math.inf), ())
EVENTS: list[Event] = [
    *(
        Received(Registration(rank, 2, "h", 10 + rank, (ShardGroup("g", "all", 8),), 0, ("/x",), "{}"))
        for rank in range(2)
    ),
    Received(Heartbeat(0, Phase.READY, 4)),
    HeartbeatBatch(
        (Heartbeat(0, Phase.READY, 4), Heartbeat(1, Phase.DONE, 3, True, False, 1, True, True, 3, (0.5, 0.25)))
    ),
    Tick(),
    StreamClosed((1,)),
    Received(StateReport(0, 1, True, Phase.READY, 4, 3, False, -1, (RECORD,))),
]


def test_inputs_read_back_equal_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS)
    journal.starting_state(initial(SETTINGS, 0.1))
    for number, event in enumerate(EVENTS):
        journal.input(number + 0.3, event)
    journal.close()
    recording = read_inputs(inputs_path(path))
    assert recording.settings == SETTINGS
    assert recording.state == initial(SETTINGS, 0.1)
    assert recording.inputs == tuple((number + 0.3, event) for number, event in enumerate(EVENTS))


def test_heartbeats_are_written_with_what_comes_behind_them(tmp_path: Path) -> None:
    """They come a thousand times a second, and a tick four times."""
    path = inputs_path(tmp_path / "journal.jsonl")
    journal = Journal(tmp_path / "journal.jsonl", SETTINGS)
    journal.starting_state(initial(SETTINGS, 0.0))
    beats = [HeartbeatBatch((Heartbeat(0, Phase.READY, step), Heartbeat(1, Phase.READY, step))) for step in range(3)]
    written = []
    events: list[Event] = [beats[0], beats[1], Tick(), beats[2]]
    for number, event in enumerate(events):
        journal.input(float(number), event)
        assert journal.wait_written()
        written.append(len(read_inputs(path).inputs))
    journal.write_event(0.0, 0.0, "cleared", {})
    assert journal.wait_written() and len(read_inputs(path).inputs) == 4, "an input has caused what is said of it"
    journal.close()
    assert written == [0, 0, 3, 3]
    assert [event for _, event in read_inputs(path).inputs] == events


def test_the_defaults_of_a_heartbeat_are_left_out() -> None:
    assert to_json(Heartbeat(0, Phase.COMPUTE, 0)) == {
        "$": "ttp.proto.messages:Heartbeat", "rank": 0, "phase": {"$": "ttp.proto.messages:Phase", "name": "COMPUTE"}, "step": 0,
    }  # fmt: skip


def test_a_state_in_the_middle_of_a_fault_survives_json() -> None:
    state = initial(SETTINGS, 0.0)
    for number, event in enumerate(EVENTS):
        state, _ = transition(state, event, number + 0.3)
    assert from_json(to_json(state)) == state
    assert hash(from_json(to_json(state))) == hash(state)


def test_a_full_segment_is_replaced_and_the_new_one_replays_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS, segment_bytes=200)
    state = initial(SETTINGS, 0.0)
    journal.starting_state(state)
    for number, event in enumerate(EVENTS):
        journal.input(number + 0.3, event)
        state, _ = transition(state, event, number + 0.3)
    assert journal.wait_written() and journal.wants_state
    journal.starting_state(state)
    assert not journal.wants_state, "one state is queued: another would be the same"
    journal.input(20.0, Tick())
    journal.close()
    last, before = read_inputs(inputs_path(path)), read_inputs(Path(f"{inputs_path(path)}.1"))
    assert last.inputs == ((20.0, Tick()),)
    *_, (_, _, replayed, _) = replay(before, transition)
    assert replayed == last.state == state


def test_a_segment_is_full_by_its_bytes_and_not_by_its_lines(tmp_path: Path) -> None:
    """One message may be as long as a thousand heartbeats."""
    journal = Journal(tmp_path / "journal.jsonl", SETTINGS, segment_bytes=50_000)
    journal.starting_state(initial(SETTINGS, 0.0))
    journal.input(1.0, Received(FaultReport(0, Cause(CauseKind.EXCEPTION, (0,), "ValueError"), "x" * 49_000)))
    assert journal.wait_written() and not journal.wants_state
    for number in range(20):
        journal.input(float(number), Received(Heartbeat(0, Phase.READY, 4)))
    assert journal.wait_written() and journal.wants_state
    journal.close()


def test_the_event_log_is_json_with_both_clocks_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS)
    journal.write_event(100.5, 7.25, "frozen", {"ranks": (0, 1), "norm": math.nan, "by": {"1": Phase.READY}})
    journal.close()
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"unix_s": 101')
    (line,) = read_events(path)
    assert (line.unix_s, line.monotonic_s, line.event) == (100.5, 7.25, "frozen")
    assert line.fields == {"ranks": [0, 1], "norm": "nan", "by": {"1": 1}}


def test_a_full_disk_loses_lines_says_so_once_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    inputs_path(path).symlink_to("/dev/full")
    journal = Journal(path, SETTINGS)
    for number in range(2000):
        journal.input(float(number), Tick())
        journal.write_event(0.0, float(number), "frozen", {})
    journal.close()
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 1 and "lost lines" in complaints[0]


def test_what_no_machine_reads_is_not_journaled() -> None:
    """Of a heartbeat where a step's time went, and the loss. Nor is a workload that is not known: older versions read the journal."""
    plain = Heartbeat(0, Phase.READY, 4)
    assert to_json(replace(plain, own_s=1.0, waited_s=0.5, loss=math.nan)) == to_json(plain)
    assert not {"own_s", "waited_s", "loss"} & to_json(plain).keys()
    known = Registration(0, 1, "h", 1, (), 0, (), "{}", workload="w")
    assert "workload" not in to_json(replace(known, workload="")) and from_json(to_json(known)) == known


def test_a_type_has_the_name_that_journals_have_always_had() -> None:
    """Its module has moved; journals that were written before are read, and older versions read those of today."""
    assert to_json(Tick()) == {"$": "ttp.controller.events:Tick"}
    assert from_json({"$": "ttp.controller.events:Tick"}) == Tick()
    batch = HeartbeatBatch((Heartbeat(0, Phase.READY, 4),))
    assert to_json(batch)["$"] == "ttp.controller.events:Beats" and from_json(to_json(batch)) == batch
    progress = Progress(1, 2)
    assert to_json(progress)["$"] == "ttp.proto.messages:Working" and from_json(to_json(progress)) == progress
    file = FileEntry("f", 1, "xxh3_128:00", 0)
    fields = {"$": "ttp.proto.messages:FileEntry", "name": "f", "nbytes": 1, "sha256": "xxh3_128:00", "rank": 0}
    assert to_json(file) == fields and from_json(fields) == file
    state = initial(SETTINGS, 0.0)
    for number, event in enumerate(EVENTS):
        state, _ = transition(state, event, float(number))
    written = json.dumps(to_json(state))
    names = set(re.findall(r'"(ttp\.[\w.]+:\w+)"', written))
    assert len(names) > 8 and not [name for name in names if ".core." in name]
    assert from_json(json.loads(written)) == state


def test_a_field_has_the_name_that_journals_have_always_had() -> None:
    members = initial(SETTINGS, 0.0).members
    for written, name, value in [
        ("amnesty", "leases_renewed_at", members),
        ("heard", "received_at", members.table[0]),
        ("heard_at", "last_message_at", Gathering(deadline=3.0, last_message_at=2.0)),
    ]:
        encoded = to_json(value)
        assert written in encoded and name not in encoded
        assert from_json(encoded) == value


def test_the_limits_of_a_hang_are_written_as_journals_have_always_had_them() -> None:
    """Each beside the other settings; those that an old journal lacks are the defaults."""
    settings = replace(SETTINGS, hang=HangLimits(floor_s=1.0, start_s=2.0))
    written = to_json(settings)
    assert (written["hang_floor_s"], written["hang_start_s"], "hang" in written) == (1.0, 2.0, False)
    assert from_json(written) == settings
    del written["hang_factor"]
    assert from_json(written) == settings


def test_a_stage_is_written_as_journals_have_always_had_it() -> None:
    """By its name, with its fields beside it; what an older version kept of another stage is not read."""
    states = [initial(SETTINGS, 0.0)]
    for number, event in enumerate(EVENTS):
        states.append(transition(states[-1], event, float(number))[0])
    for state in (states[0], states[-1]):
        written = to_json(state)
        assert written["stage"] == {"$": "ttp.controller.state:Stage", "name": state.stage.name}
        assert ("fault" in written, "at" in written) == (state.fault is not None, False)
        assert from_json({"early": [], "gather_by": 9.0, "dump": None, **written}) == state
    assert to_json(states[0])["deadline"] == SETTINGS.register_timeout_s and to_json(states[0])["coverage"] is None


def test_a_file_that_names_foreign_types_builds_nothing() -> None:
    with pytest.raises(ValueError, match="not a type of ttp"):
        from_json({"$": "subprocess:Popen", "args": ["true"]})
    with pytest.raises(ValueError, match="not known here"):
        from_json({"$": "ttp.proto.messages:Nothing"})
    with pytest.raises(TypeError, match="cannot go into the journal"):
        to_json(object())


def test_lines_wait_for_a_busy_driver_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that never rests gets its events written all the same, every line and in order."""
    monkeypatch.setattr(journals, "PATIENCE_S", 3600.0)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS)
    journal.driver_busy()
    for number in range(3 * journals.LINES_AT_ONCE):
        journal.write_event(0.0, number, "decided", {})
    until(lambda: bool(journal._idle._cond._waiters), "the journal to wait for the driver")  # type: ignore[attr-defined]
    assert not list(read_events(path)), "written while the driver was busy"
    monkeypatch.setattr(journals, "PATIENCE_S", 0.001)
    journal.driver_idle()
    journal.driver_busy()
    journal.write_event(0.0, -1, "published", {})
    deadline = time.monotonic() + 30.0
    while not (lines := list(read_events(path))) or lines[-1].event != "published":
        assert time.monotonic() < deadline, "the journal waits for a driver that never rests"
        time.sleep(0.005)
    assert [line.monotonic_s for line in lines] == [*range(3 * journals.LINES_AT_ONCE), -1]
    journal.close()


def test_closing_does_not_wait_for_the_driver(tmp_path: Path) -> None:
    """What it said last is written, busy or not."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS)
    journal.driver_busy()
    journal.write_event(0.0, 1.0, "finished", {})
    journal.close()
    assert [line.event for line in read_events(path)] == ["finished"]


def grown(path: Path) -> Journal:
    """Return a journal that has written a segment, and is asked for the state with which the next one begins."""
    journal = Journal(path, SETTINGS, segment_bytes=200)
    journal.starting_state(initial(SETTINGS, 0.1))
    while not journal.wants_state:
        journal.input(1.0, Tick())
        assert journal.wait_written()
    return journal


def test_a_segment_that_somebody_has_removed_costs_no_line_of_the_next_one(tmp_path: Path) -> None:
    """To make room, say."""
    path = tmp_path / "journal.jsonl"
    journal = grown(path)
    inputs_path(path).unlink()
    journal.starting_state(initial(SETTINGS, 0.1))
    journal.input(2.0, EVENTS[0])
    journal.write_event(2.0, 2.0, "published", {"step": 7})
    journal.close()
    assert [line.event for line in read_events(path)] == ["published"]
    assert [event for _, event in read_inputs(inputs_path(path)).inputs] == [EVENTS[0]]


@pytest.mark.parametrize("refused", ["replace", "open"])
def test_a_segment_that_cannot_be_begun_is_written_into_the_old_one(
    tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file system refuses a rename, or another file, as a quota does. What happens goes on to be written, and nothing stays in memory."""
    path = tmp_path / "journal.jsonl"
    journal = grown(path)

    def refuse(*arguments: object) -> None:
        if refused == "open" or arguments[0] == inputs_path(path):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    if refused == "replace":
        monkeypatch.setattr(os, "replace", refuse)
    else:
        monkeypatch.setattr(journal, "_open_inputs", refuse)
    journal.starting_state(initial(SETTINGS, 0.1))
    journal.input(2.0, EVENTS[0])
    journal.write_event(2.0, 2.0, "published", {"step": 7})
    assert journal.wait_written()
    monkeypatch.undo()
    while not journal.wants_state:
        journal.input(3.0, Tick())
        assert journal.wait_written()
    journal.starting_state(initial(SETTINGS, 0.1))
    journal.input(4.0, EVENTS[2])
    journal.close()
    assert [line.event for line in read_events(path)] == ["published"]
    assert capsys.readouterr().err.count("lost lines: [Errno 122] Disk quota exceeded") == 1
    assert [event for _, event in read_inputs(inputs_path(path)).inputs] == [EVENTS[2]], "a new segment after all"


def test_a_new_segment_begins_with_its_state_where_the_last_lines_of_the_old_one_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be replayed otherwise."""
    path = tmp_path / "journal.jsonl"
    journal = grown(path)
    old = journal._inputs

    class Full:
        """A file whose disk has become full."""

        def tell(self) -> int:
            return old.tell()

        def close(self) -> None:
            old.close()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "_inputs", Full())
    journal.starting_state(initial(SETTINGS, 0.1))
    journal.input(2.0, EVENTS[0])
    journal.close()
    assert [event for _, event in read_inputs(inputs_path(path)).inputs] == [EVENTS[0]]


def test_a_line_that_cannot_be_written_costs_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The thread that writes lives on: what is queued behind would stay in memory for ever."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS)
    journal.write_event(1.0, 1.0, "first", {"of": {1: object()}})
    journal.write_event(2.0, 2.0, "second", {"step": 7})
    journal.close()
    assert [line.event for line in read_events(path)][-1] == "second"


def test_a_disk_that_does_not_answer_costs_inputs_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has happened is kept. When the disk answers again, a file begins that can be replayed; the one before ends where inputs were lost."""
    monkeypatch.setattr(journals, "MOST_QUEUED", 10)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SETTINGS)
    journal.starting_state(initial(SETTINGS, 0.1))
    answers, write = threading.Event(), journal._write

    def hang(kind: str, content: object) -> None:
        assert answers.wait(60.0)
        write(kind, content)

    monkeypatch.setattr(journal, "_write", hang)
    for number in range(50):
        journal.input(float(number), Tick())
        journal.input(number + 0.5, EVENTS[3])
    assert journal._queue.qsize() <= 11 and not journal.wants_state
    journal.write_event(60.0, 60.0, "published", {"step": 7})
    answers.set()
    assert journal.wait_written() and journal.wants_state
    journal.input(60.5, EVENTS[3])
    journal.starting_state(initial(SETTINGS, 61.0))
    assert not journal.wants_state
    journal.input(62.0, EVENTS[0])
    journal.close()
    assert [line.event for line in read_events(path)] == ["published"]
    last, before = read_inputs(inputs_path(path)), read_inputs(Path(f"{inputs_path(path)}.1"))
    assert [event for _, event in last.inputs] == [EVENTS[0]]
    times = [now for now, _ in before.inputs]
    assert 0 < len(times) < 100 and times == [number / 2 for number in range(len(times))], "without a gap"
    assert "its disk did not answer, and " in capsys.readouterr().err
