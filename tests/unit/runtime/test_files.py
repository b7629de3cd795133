"""What TTP makes beside checkpoints has the mode that TTP_FILE_MODE says, whatever the umask is; what was there before keeps its own."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.umasks import mode_of, modes, umask
from ttp import files
from ttp.chaos.faults.control_socket import Control
from ttp.chaos.matrix import MatrixPlan, run_matrix
from ttp.chaos.observed.nodes_job import NodesJob
from ttp.chaos.observed.target import Target
from ttp.chaos.observed.training_job import TrainingJob
from ttp.chaos.run.campaign import run_campaign
from ttp.checkpoint.format.durable import write_durably
from ttp.checkpoint.store import SharedStore
from ttp.config import Settings
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.journal import Journal, set_aside
from ttp.controller.process import start_controller
from ttp.errors import ConfigError, ControllerError
from ttp.exchange import controller_file, error_file, imported_modules, last_step, saved_alone
from ttp.exchange.last_step import LastStep
from ttp.exchange.saved_alone import SavedAlone
from ttp.fork_server.client import Listener
from ttp.launch.arguments import parse
from ttp.launch.attempts.attempt_directory import AttemptDirectory
from ttp.launch.checks import check_arguments
from ttp.launch.report.story_file import ReportFile
from ttp.launch.watch import hang_stacks
from ttp.mindio.saving.save_calls import Call
from ttp.processor.async_log import AsyncLog
from ttp.processor.stacks import StackWriter
from ttp.runtime.directory_lock import RunDirectories
from ttp.runtime.job_controller import _set_earlier_files_aside
from ttp.trainer.logs import open_logs

MASKS = (0, 0o022, 0o077)


def journal(folder: Path) -> None:
    for _ in range(2):
        made = Journal(
            folder / "log" / "journal_0.jsonl", ControllerSettings(job_id="job", world_size=1, term=1), segment_bytes=1
        )
        for _ in range(2):
            made.write_event(0.0, 0.0, "x", {})
            made.starting_state(None)
        made.close()
    set_aside(folder / "log" / "journal_0.jsonl")


def stacks(folder: Path) -> None:
    writer = StackWriter(folder / "log" / "rank_0" / "stacks.log", AsyncLog(0))
    writer.listen()
    writer.save("x")
    writer.finish(30.0)
    writer.close()
    hang_stacks.gather(folder / "stacks_0.txt", {0: "x"}, [])


def story(folder: Path) -> None:
    ReportFile(folder / "story.jsonl", threading.Lock(), "x").write(0.0, "x", {})


def accounts(folder: Path) -> None:
    last_step.write(folder, 0, LastStep(1, 1))
    saved_alone.write(saved_alone.path_of(folder, 0), SavedAlone(0.0, 0.0, 1, "", "", (), 1, ""))
    controller_file.write(folder, controller_file.Controllers((), 0, "/"))
    imported_modules.write(folder)


def error(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_file, "_path", str(folder / "error.json"))
        patch.setattr(error_file, "_pid", os.getpid())
        error_file.record(ValueError("x"))


def marks(folder: Path) -> None:
    """The folder itself is one of checkpoints."""
    directories = RunDirectories([str(folder)], "job", False, SharedStore())
    directories.claim()
    directories.candidates("never")
    directories.release()


def calls(folder: Path) -> None:
    Call.begin(folder, 3, lambda count: None).usable(0, [[0]], set(), set())


def logs(folder: Path) -> None:
    with open_logs(folder, 0):
        logging.getLogger("ttp").error("x")


def log_dir(folder: Path) -> None:
    check_arguments(parse(["--log-dir", str(folder / "of_torch"), "x.py"]))


def console(folder: Path) -> None:
    with Target(["true"], folder / "lap", socket_path=folder / "socket", environ={}) as target:
        target.start()
        for launcher in target.launchers:
            launcher.wait(30)


def nodes_console(folder: Path) -> None:
    node: Any = SimpleNamespace(name="a", popen=lambda *words, **given: None)
    NodesJob(folder / "job", [node]).start(node)


def training_job(folder: Path) -> None:
    with TrainingJob(folder / "job", ranks=1, launch_module="this", program=()) as job:
        job.process.wait(60)


def campaigns(folder: Path) -> None:
    scenario: Any = SimpleNamespace(nodes=0, seed=0)
    next(run_campaign(scenario, ["true"], folder / "campaign", compare=False))
    list(run_matrix(MatrixPlan(output=folder / "matrix", until_monotonic_s=0.0)))


def of_a_controller(folder: Path) -> None:
    _set_earlier_files_aside(folder / "first", 0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ControllerError):
        patch.setattr("ttp.controller.process._fork_or_execute", lambda *given: raises(OSError("x")))
        start_controller(ControllerSettings("job", 1, 1), folder / "log" / "journal_0.jsonl")


def raises(error: Exception) -> Any:
    raise error


def note(folder: Path) -> None:
    write_durably(folder / "note", b"", private=True)


MAKERS = (
    *(journal, stacks, story, accounts, error, marks, calls, logs, log_dir, console, nodes_console, training_job),
    *(campaigns, of_a_controller, note),
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", ["", "0640", "666"])
@pytest.mark.parametrize("make", MAKERS)
def test_every_file_and_folder_has_the_mode(
    make: Callable[[Path], None], given: str, mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_FILE_MODE", given)
    expected = {
        "": (stat.S_IFREG | 0o600, stat.S_IFDIR | 0o700),
        "0640": (stat.S_IFREG | 0o640, stat.S_IFDIR | 0o750),
        "666": (stat.S_IFREG | 0o666, stat.S_IFDIR | 0o777),
    }[given]
    with umask(mask):
        make(tmp_path)
    made = {str(path.relative_to(tmp_path)): os.lstat(path).st_mode for path in tmp_path.rglob("*")}
    assert made and {name: oct(mode) for name, mode in made.items() if mode not in expected} == {}


@pytest.mark.parametrize("make", [journal, stacks, story, logs, log_dir])
def test_what_was_there_before_keeps_its_mode(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Files that are appended to or written anew in their place, and folders."""
    with umask(0):
        make(tmp_path)
    before = {path: 0o755 if path.is_dir() else 0o664 for path in tmp_path.rglob("*") if "earlier" not in path.parts}
    for path, mode in before.items():
        path.chmod(mode)
    make(tmp_path)
    there = [path for path in before if path.exists()]
    assert there and {path: mode_of(path) for path in there} == {path: before[path] for path in there}


@pytest.mark.parametrize("mask", [*MASKS, 0o177])
def test_sockets_and_their_folders_are_for_this_user_alone(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where TTP_FILE_MODE gives others more: who can connect to a fork server runs programs as this user."""
    monkeypatch.setenv("TTP_FILE_MODE", "0666")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = AttemptDirectory()
    with umask(mask):
        listener, made = Listener(), directory.make()
        with Control() as control:
            found = {path: mode_of(path) for path in tmp_path.rglob("*")}
    listener.close()
    sockets = {listener.path, control.path}
    assert found == {path: 0o600 for path in sockets} | {path.parent: 0o700 for path in sockets} | {made: 0o700}


def test_a_folder_of_a_group_hands_its_group_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit is inherited, and the mode that is set afterwards leaves it."""
    monkeypatch.setenv("TTP_FILE_MODE", "0640")
    tmp_path.chmod(0o2755)
    with umask(0o077):
        files.make_folder(tmp_path / "log")
    assert mode_of(tmp_path / "log") == 0o2750


def test_folders_above_follow_the_umask(tmp_path: Path) -> None:
    """Checkpoints may be beside it."""
    with umask(0o027):
        files.make_folder(tmp_path / "output" / "log")
    assert modes(tmp_path) == {"output": 0o750, "output/log": 0o700}


@pytest.mark.parametrize("path", ["/proc/none", "/proc/none/more", "file/log"])
def test_a_folder_that_cannot_be_made_is_an_error(path: str, tmp_path: Path) -> None:
    """Where nothing can be made, or a file is in the place of the folder above."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        files.make_folder(tmp_path / path)


def test_a_file_system_without_modes_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    with umask(0o777):
        files.make_folder(tmp_path / "log")
    assert mode_of(tmp_path / "log") == 0


def test_a_replaced_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses leaves nothing beside it."""
    path = tmp_path / "a.json"
    files.replace(path, "old")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, "new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_a_socket_that_is_there_is_not_opened_anew(tmp_path: Path) -> None:
    """`x` refuses what is there, as it does without an opener."""
    (tmp_path / "f").write_text("")
    with pytest.raises(FileExistsError), open(tmp_path / "f", "x", opener=files.opener):
        pass
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError):
        files.bind(listener, tmp_path / "f")


@pytest.mark.parametrize("value", ["640", "0640", "0600", "0666", "0660"])
def test_a_mode_for_owner_group_and_others_is_taken(value: str) -> None:
    Settings.from_env({"TTP_FILE_MODE": value})


@pytest.mark.parametrize(
    "value", ["0755", "0400", "0200", "1640", "0o640", "64", "rw-r-----", "0698", "00640", "0644\n0"]
)
def test_another_mode_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid TTP_FILE_MODE='?[^\n]*: expected octal digits as in 0640, with 6 "):
        Settings.from_env({"TTP_FILE_MODE": value})


def test_until_it_is_refused_a_wrong_mode_is_the_safe_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception's file may be written before anything reads the settings."""
    monkeypatch.setenv("TTP_FILE_MODE", "rubbish")
    with umask(0):
        files.replace(tmp_path / "f", "")
    assert mode_of(tmp_path / "f") == 0o600


def test_two_processes_of_the_same_id_replace_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers share a folder, and process ids: the second one writes while the first has not ended."""
    path, last = tmp_path / "known.json", os.replace

    def replace(unfinished: Path, to: Path) -> None:
        monkeypatch.setattr(os, "replace", last)
        files.replace(path, "of the second")
        assert path.read_text() == "of the second"
        last(unfinished, to)

    monkeypatch.setattr(os, "replace", replace)
    files.replace(path, "of the first")
    assert path.read_text() == "of the first" and list(tmp_path.iterdir()) == [path]
