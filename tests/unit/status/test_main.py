"""The command line of `ttp status`: which job is meant, exit statuses, watching."""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.status.jobs import comes, end, inputs, job_status, journal, rank_status, report, start
from tests.waiting import LONG_S, until
from ttp import cli
from ttp.controller.agent_link import request_shutdown
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import start_controller
from ttp.proto.status import JobStatus
from ttp.status import ask, find_job, main, page_access
from ttp.status.ask import LocalProcess, Reply
from ttp.status.find_job import KnownController
from ttp.status.page_access import PagePlace


def ended_job(log_dir: Path) -> Path:
    journal(log_dir, 0, *comes(0.0))
    report(log_dir, start(0, 1.0), end(31.0, 50, 50))
    return log_dir


@pytest.mark.parametrize("place", find_job.PLACES)
def test_a_job_is_found_by_the_folders_that_people_name(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir = ended_job(tmp_path / place)
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["log_dir"] == str(log_dir)


def test_without_a_name_it_is_the_job_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_job(tmp_path / "output" / "log")
    monkeypatch.chdir(tmp_path)
    assert main.main([]) == 0
    assert "output/log" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "which is not there, expected a folder"),
        ("n0:70000", "which is not there, expected a folder"),
        ("file", "which is not a folder, expected the job's output_dir"),
        ("folder", "no job found: got"),
    ],
)
def test_a_name_without_a_job_is_refused_in_one_line(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "log").mkdir(parents=True)
    assert main.main([str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("ttp status: ") and words in printed.err
    assert printed.err.count("\n") == 1
    assert main.main([str(tmp_path / name), "--json"]) == 2
    assert words in json.loads(capsys.readouterr().out)["error"]


def test_where_it_was_looked_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([str(tmp_path)]) == 2
    assert f"looked into {tmp_path}, {tmp_path}/log, {tmp_path}/ttp_log" in capsys.readouterr().err


def test_a_job_whose_files_this_user_may_not_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's: it is not known whether there is a job."""

    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr("ttp.status.find_job.journals", refuse)
    assert main.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} cannot be read (Permission denied), expected a job whose files this user may read" in error
    assert error.startswith("ttp status: ") and error.count("\n") == 1


def test_an_address_that_is_refused_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert main.main([address]) == 2
    assert capsys.readouterr().err.startswith(
        f"ttp status: no job found at {address}: the controller at {address} cannot be reached: Connection refused"
    )


def test_a_broken_report_of_a_job_makes_the_answer_one_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal shows that its ranks have finished."""
    journal(tmp_path, 0, *comes(0.0), (9.0, "finished", {"ranks": 2}))
    (tmp_path / "story.jsonl").write_text("nothing\n")
    assert main.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "all ranks have finished" in out and out.count("note: ") == 1 and "is broken" in out


def test_a_link_to_a_page_that_is_not_served_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There never was one, or its process has ended; of a job that has ended none is shown."""
    ended_job(tmp_path)
    place = PagePlace("http://127.0.0.1:9/", os.uname().nodename, 2**22 + 1, "s", str(tmp_path / "token"))
    for _ in range(2):
        assert main.main(["--login", str(tmp_path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and "no status page found: got" in printed.err
        page_access.write(tmp_path, place)
    assert main.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == ""


def test_watching_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object a look, each on a line."""
    journal(tmp_path, 0, *comes(0.0))
    inputs(tmp_path, 0, "n0:5/1")
    monkeypatch.setattr(ask, "ask_at", lambda address, job_id: Reply(job_status([rank_status(0)])))
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            report(tmp_path, start(0, 1.0), end(31.0, 50, 50))

    assert main.main([str(tmp_path), "--json", "--watch", "0.5"], pause=pause) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["state"] for line in lines] == ["running", "running", "ended"] and waited == [0.5, 0.5]


def test_on_a_terminal_it_is_redrawn_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(tmp_path, 0, *comes(0.0))
    inputs(tmp_path, 0, "n0:5/1")
    monkeypatch.setattr(ask, "ask_at", lambda address, job_id: Reply(job_status([rank_status(0)])))
    console = Console(file=io.StringIO(), force_terminal=True, width=200, height=100, _environ={"TERM": "xterm"})
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt

    assert main.main([str(tmp_path), "--watch"], console, pause) == 0
    assert waited == [main.WATCH_S] * 2
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert drawn.count("training") >= 2 and "\x1b[" in drawn


# --- whom to ask ---


def test_the_controllers_of_the_newest_attempt_are_asked_the_latest_term_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that no rank has come to says so; the one that leads is believed."""
    for attempt, place in ((0, 0), (1, 0), (1, 1)):
        journal(tmp_path, attempt, *comes(20.0 * attempt), place=place)
        inputs(tmp_path, attempt, f"n{place}:{attempt}{place}/1", place=place)
    asked: list[str] = []

    def answer(address: str, job_id: str) -> Reply:
        asked.append(address)
        return Reply(
            job_status([rank_status(0)], role="standby" if address.startswith("n1") else "active", job_id=job_id)
        )

    monkeypatch.setattr(ask, "ask_at", answer)
    assert main.main([str(tmp_path), "--json"]) == 0
    assert asked == ["n1:11/1", "n0:10/1"]


def test_a_standby_is_shown_where_no_controller_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    standby = job_status([rank_status(0)], role="standby", stage="standby")
    replies = {"a:1/2": Reply(standby), "b:1/1": Reply(None, "refused")}
    monkeypatch.setattr(ask, "ask_at", lambda address, job_id: replies[address])
    reply = ask.ask([KnownController("run/0", 2, "a:1/2", 1), KnownController("run/0", 1, "b:1/1", 0)])
    assert reply == Reply(standby, "refused")


def test_an_inputs_file_that_is_being_written_names_no_controller(tmp_path: Path) -> None:
    path = journal(tmp_path, 0, *comes(0.0))
    Path(f"{path}.inputs").write_text('{"settings": {"$": "ttp.contr')
    assert find_job.controllers(tmp_path, 0) == []
    inputs(tmp_path, 0, "n0:5/1")
    assert find_job.controllers(tmp_path, 0) == [KnownController("run/0", 1, "n0:5/1", 0)]


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_controller_with_plain_connections_is_asked_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a process of the job, or by TTP_TLS=False of this one's own."""
    controller = start_controller(ControllerSettings("run/0", 1, 2), tmp_path / "log" / "journal_0.jsonl")
    try:
        until(lambda: find_job.controllers(tmp_path / "log", 0), "its address")
        monkeypatch.setattr(ask, "local_processes", lambda: [LocalProcess("run/0", {"TTP_LAUNCHED": "1"})])
        assert main.main([str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["phase"], found["leader"]["pid"]) == ("starting", controller.pid)
        assert [rank["state"] for rank in found["ranks"]] == ["missing", "missing"]
        monkeypatch.setattr(ask, "local_processes", lambda: ())
        assert main.main([str(tmp_path)]) == 1
        monkeypatch.setenv("TTP_TLS", "False")
        assert main.main([str(tmp_path)]) == 0
    finally:
        request_shutdown(controller.address)
        assert controller.wait(LONG_S) == 0


def test_a_process_of_the_job_says_how_its_controller_is_asked(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several jobs on a node the one that is named; without a name each in turn."""
    answers: dict[str, JobStatus] = {"run/0": job_status([rank_status(0)])}
    asked: list[str] = []

    def request(address: str, process: LocalProcess) -> Reply:
        asked.append(process.job_id)
        status = answers.get(process.job_id)
        return Reply(status, "" if status is not None else "UNAVAILABLE")

    processes: Sequence[LocalProcess] = [LocalProcess("other/0", {}), LocalProcess("run/0", {})]
    monkeypatch.setattr(ask, "local_processes", lambda: processes)
    monkeypatch.setattr(ask, "_as_operator", request)
    assert ask.ask_at(listening, "run/0").status is not None and asked == ["run/0"]
    assert ask.ask_at(listening).status is not None and asked == ["run/0", "other/0", "run/0"]
    assert ask.ask_at(listening, "other/0") == Reply(None, "UNAVAILABLE")
    assert "no process of job third/0 is on this node" in ask.ask_at(listening, "third/0").error
