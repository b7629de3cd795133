"""`--on-event`: the command gets every event, and nothing that it does delays or ends anything else."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import LONG_S, until
from ttp.errors import ConfigError
from ttp.launch import main as launch_main
from ttp.launch.report import event_command
from ttp.launch.report.event_command import EventCommand, split_command
from ttp.launch.report.story_file import ReportFile


def keeps(path: Path) -> list[str]:
    """Return a command that appends its stdin to a file."""
    return ["/bin/sh", "-c", f"cat >> {shlex.quote(str(path))}"]


def test_every_event_of_a_report_reaches_the_command_in_order(tmp_path: Path) -> None:
    """Those that are written in a thread too; not how far a mirror has come."""
    got = tmp_path / "got"
    command = EventCommand(keeps(got))
    report = ReportFile(tmp_path / "story.jsonl", threading.Lock(), "l", command.put)
    report.write(1.0, "start", {"start": 0})
    report.write(2.0, "mirror", {"behind": 1})
    report.write_in_thread(3.0, "hold", {"ranks": [1]})
    report.write(4.0, "end", {"result": "succeeded"})
    command.close()
    lines = [json.loads(line) for line in got.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "hold", "end"]
    assert lines[1]["ranks"] == [1] and lines[2]["result"] == "succeeded"


def test_who_puts_an_event_never_waits_for_a_command_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed after its time, with what it has started; what does not fit into the queue is left out and counted."""
    pids = tmp_path / "pids"
    command = EventCommand(["/bin/sh", "-c", f"sleep 600 & echo $! $$ >> {pids}; wait"], run_s=1.0, most_waiting=2)
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        began = time.monotonic()
        for number in range(50):
            command.put(f"{number}\n")
        assert time.monotonic() - began < 20.0  # 50 runs would take 50 s
        until(lambda: "it ran for more than 1 s: killed" in caplog.text, "the end of the first run")
        command.close(0.1)
    assert caplog.text.count("others are left out") == 1
    left_out = int(caplog.text.split("--on-event: ")[-1].split(" events")[0])
    assert 20 <= left_out <= 49
    for pid in pids.read_text().split():
        until(lambda pid=pid: not runs(int(pid)), f"the end of process {pid}")  # type: ignore[misc]


def test_after_the_jobs_end_nothing_is_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The command that runs is killed, and the events that wait have none; the count is theirs alone."""
    got = tmp_path / "got"
    command = EventCommand(["/bin/sh", "-c", f"cat >> {got}; exec sleep 600"])
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        for number in range(3):
            command.put(f"{number}\n")
        until(lambda: got.exists() and got.read_text() == "0\n", "the first run")
        command.close(0.1)
        command._thread.join(LONG_S)
    assert not command._thread.is_alive() and got.read_text() == "0\n"
    assert "2 events were left out" in caplog.text and "exit status" not in caplog.text


def test_a_command_that_is_being_started_at_the_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end waits for its start."""
    begun, go_on, started = threading.Event(), threading.Event(), list[subprocess.Popen[bytes]]()
    popen = subprocess.Popen

    def slow(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
        begun.set()
        assert go_on.wait(LONG_S)
        started.append(popen(*given, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(event_command, "START_S", LONG_S)
    command = EventCommand(["/bin/sleep", "600"])
    command.put("x")
    assert begun.wait(LONG_S)
    closing = threading.Thread(target=command.close, args=(0.0,))
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        closing.start()
        until(lambda: "killed" in caplog.text, "the end of its patience")
    go_on.set()
    closing.join(LONG_S)
    assert started[0].wait(LONG_S) == -signal.SIGKILL


def test_all_is_closed_though_the_last_events_are_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second Ctrl-C, which comes while the job's end waits for the command."""
    closed = []

    class Closes:
        def __init__(self, name: str) -> None:
            self.name = name

        def put(self, event: str) -> None: ...

        def close(self) -> None:
            closed.append(self.name)
            raise KeyboardInterrupt

        def begin_controllers(self, *given: Any) -> None: ...

    monkeypatch.setattr(launch_main, "make_copies", lambda: Closes("copies"))
    monkeypatch.setattr(launch_main, "make_identities", lambda settings: Closes("identities"))
    monkeypatch.setattr(launch_main, "EventCommand", lambda words: Closes("events"))
    monkeypatch.setattr(launch_main, "_log_to_stderr", lambda: None)
    monkeypatch.setattr(launch_main, "launch", lambda *given: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(KeyboardInterrupt):
        launch_main.main(["--on-event", "true", "train.py"], Closes("fork servers"))  # type: ignore[arg-type]
    assert closed == ["copies", "identities", "fork servers", "events"]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_that_fails_is_one_line_and_the_next_event_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    got = tmp_path / "got"
    command = EventCommand(["/bin/sh", "-c", f"cat >> {got}; exit 3"])
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        for number in range(3):
            command.put(f"{number}\n")
        command.close()
    assert got.read_text() == "0\n1\n2\n"
    assert caplog.text.count("--on-event: /bin/sh: it ended with exit status 3") == 1  # arguments may be secret


def test_a_command_that_reads_nothing_and_one_that_is_gone_cost_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ttp.launch"):
        reads_nothing = EventCommand(["/bin/true"])
        reads_nothing.put("x" * 1_000_000)
        reads_nothing.close()
        gone = EventCommand(["/no/such/program"])
        gone.put("x")
        gone.close()
    assert "it cannot be started: No such file or directory" in caplog.text and caplog.text.count("--on-event") == 1


def test_commands_run_behind_the_ranks(tmp_path: Path) -> None:
    """In a session of their own, so that the terminal's Ctrl-C does not end them before the last event."""
    got = tmp_path / "got"
    code = f"import os; open({str(got)!r}, 'w').write(f'{{os.getsid(0) == os.getpid()}} {{os.nice(0)}}')"
    command = EventCommand([sys.executable, "-c", code])
    command.put("{}")
    command.close(LONG_S)
    assert got.read_text() == f"True {max(10, os.nice(0))}"


@pytest.mark.parametrize("text", ["no-such-program-anywhere x", "'", " "])
def test_a_command_that_cannot_run_is_refused_before_the_job_starts(
    text: str,
) -> None:
    with pytest.raises(ConfigError, match="invalid --on-event: got"):
        split_command(text)


def test_words_are_those_of_a_shell() -> None:
    assert split_command("sh -c 'cat >> \"a b\"'") == ["sh", "-c", 'cat >> "a b"']
