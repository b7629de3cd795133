"""The start of the mirror process: what it is given, and a node that has no room for it."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.conftest import Job
from tests.unit.mirror.test_process import Agent, loop_of
from tests.unit.mirror.test_upload import uploader, whole
from ttp.launch.attempts.mirror import LONGEST_RESTART_S, RESTART_S, Mirror
from ttp.mirror import source
from ttp.mirror.copier import LONGEST_PAUSE_S
from ttp.mirror.remote import Remote, RemoteError
from ttp.mirror.source import MirrorSource
from ttp.runtime import mirror_resume
from ttp.runtime.mirror_resume import MirrorResume


class NoRoom:
    """Refuses the next processes, or the next threads that read what one reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes = self.threads = 0
        self.begun: list[subprocess.Popen[str]] = []
        popen, start = subprocess.Popen, threading.Thread.start

        def new_popen(*args: Any, **kwargs: Any) -> Any:
            if self.processes:
                self.processes -= 1
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            self.begun.append(popen(*args, **kwargs))
            return self.begun[-1]

        def new_start(thread: threading.Thread) -> None:
            if self.threads and thread.name == "ttp-mirror":
                self.threads -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(subprocess, "Popen", new_popen)
        monkeypatch.setattr(threading.Thread, "start", new_start)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> NoRoom:
    return NoRoom(monkeypatch)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The agent's clock, which its pauses at the end advance."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("ttp.launch.attempts.mirror.time", clock)
    yield now


@pytest.fixture
def folder_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"file://{tmp_path}/mirror"
    monkeypatch.setenv("TTP_MIRROR", url)
    return url


@pytest.mark.parametrize("what", ["processes", "threads"])
def test_a_process_that_cannot_be_started_is_tried_again_after_growing_pauses(
    what: str, no_room: NoRoom, now: list[float], folder_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(no_room, what, 2)
    mirror = Agent(tmp_path, tmp_path / "checkpoints").mirror
    for pause_s in (RESTART_S, 2 * RESTART_S):
        assert f"trying again in {pause_s:g} s" in caplog.messages[-1] and mirror.pid is None
        logged = len(caplog.messages)
        now[0] += pause_s - 0.25
        mirror.look(tmp_path)
        assert len(caplog.messages) == logged
        now[0] += 0.25
        mirror.look(tmp_path)
    assert all(line.startswith("the mirror process cannot be started: ") for line in caplog.messages)
    assert len(caplog.messages) == 2 and mirror.pid is not None
    assert all(process.poll() is not None for process in no_room.begun[:-1])
    mirror._kill()


@pytest.mark.parametrize("what", ["processes", "threads"])
def test_at_the_job_s_end_a_process_that_cannot_be_started_is_tried_again(
    what: str, no_room: NoRoom, now: list[float], folder_url: str, tmp_path: Path, job: Job
) -> None:
    job.save(tmp_path / "checkpoints", 7)
    setattr(no_room, what, 3)
    Agent(tmp_path, tmp_path / "checkpoints").mirror.finish()
    assert getattr(no_room, what) == 0 and whole(folder_url) == [7]


def test_at_the_job_s_end_a_process_that_can_never_be_started_is_not_waited_for(
    no_room: NoRoom, now: list[float], folder_url: str, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    no_room.processes = 100
    job.save(tmp_path / "checkpoints", 7)
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    agent.mirror.finish()
    assert no_room.processes == 100 - 1 - 5
    assert "could not be started, 5 times: the newest checkpoint is not in the mirror" in caplog.text
    assert [line["what"] for line in agent.story()] == ["expired"]


def test_a_node_without_descriptors_starts_the_process_later(
    now: list[float], folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        mirror = Agent(tmp_path, tmp_path / "checkpoints").mirror
    assert "Too many open files" in caplog.text and mirror.pid is None
    now[0] += RESTART_S
    mirror.look(tmp_path)
    assert mirror.pid is not None
    mirror._kill()


def test_the_process_gets_more_than_an_argument_may_have(folder_url: str, tmp_path: Path, job: Job) -> None:
    """Each checkpoint that is not the run's is named to it, with its path and inode."""
    job.save(tmp_path / "checkpoints", 7)
    others = {f"{tmp_path}/checkpoints/iter_{step:07d}": 1 << 60 for step in range(100, 3100)}
    given = MirrorSource((str(tmp_path / "checkpoints"),), passed_over=others)
    assert len(given.to_json()) > 128 << 10
    given.write(tmp_path)
    mirror = Mirror(end_s=600.0)
    mirror.look(tmp_path)
    mirror.finish()
    assert whole(folder_url) == [7]


def test_more_than_the_agent_reads_is_not_written(tmp_path: Path) -> None:
    fits = MirrorSource(("x" * (source._MOST_BYTES - len(MirrorSource(("",)).to_json())),))
    fits.write(tmp_path)
    assert source.read(tmp_path) == fits
    larger = MirrorSource((*fits.save_dirs,), passed_over={"/other": 1})
    with pytest.raises(OSError, match=r"bytes that name 1 checkpoints of other runs, expected at most 1048576\. Move"):
        larger.write(tmp_path)
    assert source.read(tmp_path) == fits


def test_a_warning_names_the_cost_where_the_agent_could_not_be_given_the_directories(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(mirror_resume, "show", lambda level, text: said.append(text))
    settings: Any = SimpleNamespace(
        mirror=folder_url, mirror_keep=0, launched=True, attempt_dir=str(tmp_path / "attempt"), shared_dirs=True
    )
    directories: Any = SimpleNamespace(keeps=True, used=["/checkpoints"])
    resume = MirrorResume(settings, directories, 0, torch.device("cpu"), None, None)
    resume.tell_agent({})
    assert len(said) == 1 and said[0].startswith("nothing is mirrored: ")
    (tmp_path / "attempt").mkdir()
    resume.tell_agent({})
    assert len(said) == 1 and source.read(tmp_path / "attempt") == MirrorSource(("/checkpoints",))
    monkeypatch.setattr(source, "_MOST_BYTES", 1000)
    resume.tell_agent({"/checkpoints/" + "x" * 1000: 1})
    assert len(said) == 2 and said[1].startswith("the mirror takes checkpoints of other runs for this one's: ")


def test_pauses_have_a_longest_also_after_days(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror()
    mirror._deaths = 100_000
    assert mirror._put_off() == LONGEST_RESTART_S

    def refuse(*_: object) -> None:
        raise RemoteError("no route")

    monkeypatch.setattr(Remote, "check_conditional", refuse)
    loop, said, _ = loop_of(uploader(url, tmp_path))
    loop._failures = 100_000
    assert loop.turn() == LONGEST_PAUSE_S and said.what == ["failed"]
