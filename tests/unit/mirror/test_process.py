"""The mirror process: its loop, its reports, its end, and its death with the process that started it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.s3 import S3
from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.mirror.test_upload import uploader, whole
from tests.waiting import until
from ttp.launch.attempts.mirror import Mirror
from ttp.launch.report.reporter import Reporter
from ttp.launch.report.summary import mirror_text
from ttp.mirror import copier
from ttp.mirror.copier import NEVER_TAKEN, Loop
from ttp.mirror.remote import Remote, RemoteError
from ttp.mirror.source import MirrorSource
from ttp.mirror.upload import Uploader


class Said:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, fields: Mapping[str, Any]) -> None:
        self.lines.append(json.loads(json.dumps(fields)))

    @property
    def what(self) -> list[str]:
        return [line["what"] for line in self.lines]


def loop_of(up: Uploader) -> tuple[Loop, Said, threading.Event]:
    said, ending = Said(), threading.Event()
    return Loop(up, said, ending), said, ending


def test_a_failure_is_reported_with_the_lag_and_the_pause_after_it_grows(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 5):
        job.save(tmp_path, step)
    up = uploader(url, tmp_path)
    loop, said, _ = loop_of(up)
    assert up.copy(tmp_path / "iter_0000002") > 0

    def refuse(self: Remote, path: Path, name: str) -> None:
        raise RemoteError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", refuse)
        assert [loop.turn() for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert said.what == ["failed"] * 8 and said.lines[-1]["failures"] == 8
    assert (said.lines[0]["step"], said.lines[0]["behind_steps"], said.lines[0]["error"]) == (2, 3, "no route")
    assert said.lines[0]["behind_s"] >= 0
    assert mirror_text({**said.lines[0], "behind_s": 12.3}) == "step 2, 3 steps and 12 s behind: no route"
    assert loop.turn() == 0.0 and said.lines[-1]["what"] == "mirrored" and whole(url) == [5, 2]
    assert mirror_text(said.lines[-1]) == "step 5, nothing behind"
    monkeypatch.setattr(Remote, "put", refuse)
    job.save(tmp_path, 6)
    assert loop.turn() == 1.0, "a success forgets the failures before it"


def test_a_broken_checkpoint_is_passed_over_once(url: str, tmp_path: Path, job: Job) -> None:
    for step in (2, 5):
        job.save(tmp_path, step)
    flip_a_bit(tmp_path / "iter_0000005", next((tmp_path / "iter_0000005").glob("*.distcp")).name)
    loop, said, _ = loop_of(uploader(url, tmp_path))
    assert [loop.turn() for _ in range(3)] == [0.0, 0.0, 1.0]
    assert said.what == ["passed over", "mirrored"] and "was altered" in said.lines[0]["error"] and whole(url) == [2]


def test_a_checkpoint_that_lacks_a_file_is_passed_over_and_not_waited_for(url: str, tmp_path: Path, job: Job) -> None:
    for step in (2, 5):
        job.save(tmp_path, step)
    next((tmp_path / "iter_0000005").glob("*.distcp")).unlink()
    loop, said, ending = loop_of(uploader(url, tmp_path))
    assert [loop.turn() for _ in range(3)] == [0.0, 0.0, 1.0]
    assert said.what == ["passed over", "mirrored"] and "lacks a file" in said.lines[0]["error"] and whole(url) == [2]
    ending.set()
    loop.run()


def test_older_ones_that_could_not_be_removed_are_removed_by_the_next_turn(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, said, _ = loop_of(uploader(url, tmp_path, keep=1))
    job.save(tmp_path, 1)
    assert loop.turn() == 0.0
    job.save(tmp_path, 2)

    def refuse(self: Uploader) -> list[int]:
        raise RemoteError("503")

    with monkeypatch.context() as patch:
        patch.setattr(Uploader, "remove_older", refuse)
        assert loop.turn() == 1.0 and whole(url) == [2, 1]
    assert [loop.turn(), loop.turn()] == [0.0, 1.0] and whole(url) == [2]
    assert said.what == ["mirrored", "mirrored", "failed", "removed"]


def test_a_checkpoint_that_is_pruned_meanwhile_is_nothing_to_report(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job.save(tmp_path, 2)
    loop, said, _ = loop_of(uploader(url, tmp_path))
    put = Remote.put

    def prune(self: Remote, local: Path, name: str) -> None:
        if path.exists():
            path.rename(path.with_name("iter_0000002_tmp_pruned_1"))
        put(self, local, name)

    monkeypatch.setattr(Remote, "put", prune)
    assert loop.turn() == 1.0 and said.what == [] and whole(url) == []


def test_at_the_end_only_the_newest_is_waited_for(url: str, tmp_path: Path, job: Job) -> None:
    for step in (1, 2, 3):
        job.save(tmp_path, step)
    loop, said, ending = loop_of(uploader(url, tmp_path))
    ending.set()
    loop.run()
    assert said.what == ["mirrored"] and whole(url) == [3]


def test_a_store_that_has_never_taken_a_write_is_not_waited_for_and_one_that_has_is(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong name or credential; a store that is away for a while."""
    monkeypatch.setattr(copier, "LOOK_S", 0.0)
    job.save(tmp_path, 1)

    def refuse(self: Remote, *_: object) -> bool:
        raise RemoteError("AccessDenied")

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put_new", refuse)
        loop, said, ending = loop_of(uploader(url, tmp_path))
        ending.set()
        loop.run()
        assert said.what == ["failed"] * NEVER_TAKEN + ["given up"] and whole(url) == []
        assert said.lines[-1]["error"] == f"the store has taken no write in {NEVER_TAKEN} tries"
    loop, said, ending = loop_of(uploader(url, tmp_path))
    assert loop.turn() == 0.0
    job.save(tmp_path, 2)
    put_new, tries = Remote.put_new, iter(range(10))

    def away(self: Remote, name: str, content: bytes) -> bool:
        return refuse(self) if next(tries) <= NEVER_TAKEN else put_new(self, name, content)

    monkeypatch.setattr(Remote, "put_new", away)
    ending.set()
    loop.run()
    assert said.what == ["mirrored", *["failed"] * (NEVER_TAKEN + 1), "mirrored"] and whole(url) == [2, 1]


def test_while_other_nodes_lack_files_of_the_newest_an_older_checkpoint_becomes_whole(
    url: str, tmp_path: Path, job: Job
) -> None:
    cluster = Cluster(tmp_path)
    for step in (5, 7):
        cluster.save(job, step)
    a, b = (uploader(url, tmp_path / host, host=host) for host in "ab")
    loop, said, _ = loop_of(a)
    assert loop.turn() == 1.0 and said.what == []
    b.copy(tmp_path / "b" / "iter_0000005")
    assert loop.turn() == 0.0 and whole(url) == [5] and said.lines[-1]["behind_steps"] == 2
    b.copy(tmp_path / "b" / "iter_0000007")
    assert b.newest == 5, "it knows what another node has made whole"
    assert loop.turn() == 0.0 and whole(url) == [7, 5]


def test_a_store_without_conditional_puts_costs_a_warning(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Remote, "_put_new", lambda self, path, content: True)
    loop, said, _ = loop_of(uploader(url, tmp_path))
    assert loop.turn() == 1.0 and loop.turn() == 1.0 and said.what == ["not conditional"]


def big_job(job: Job) -> Job:
    return Job({**job.tensors, "model.big": torch.randn(12 << 20, generator=torch.Generator().manual_seed(1))})


class Agent:
    """A mirror of an agent, on this thread."""

    def __init__(self, tmp_path: Path, checkpoints: Path, end_s: float = 60.0) -> None:
        self.reporter = Reporter(tmp_path / "story.jsonl")
        self.mirror = Mirror(self.reporter, end_s)
        self.directory = tmp_path
        MirrorSource((str(checkpoints),)).write(tmp_path)
        self.mirror.look(tmp_path)

    def story(self) -> list[dict[str, Any]]:
        path = self.directory / "story.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, what: str) -> None:
        def reported() -> bool:
            self.mirror.look(self.directory)
            return any(line["what"] == what for line in self.story())

        until(reported, what, within_s=120)


@pytest.mark.long
def test_the_agent_s_process_copies_dies_in_an_upload_is_started_again_and_finishes(
    s3: S3, s3_url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the middle of a part: nothing looks whole, the parts are removed, and the next process uploads all of it."""
    monkeypatch.setenv("TTP_MIRROR", s3_url)
    monkeypatch.setattr("ttp.launch.attempts.mirror.RESTART_S", 0.01)
    big_job(job).save(tmp_path / "checkpoints", 7, holders=1)
    s3.proxy.carried, s3.proxy.hold_after = 0, 20 << 20
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    until(lambda: s3.proxy.carried > 20 << 20, "the middle of the upload", within_s=120)
    pid = agent.mirror.pid
    assert pid is not None and s3.uploads()
    os.kill(pid, signal.SIGKILL)
    s3.proxy.release()
    assert whole(s3_url) == []
    agent.until("mirrored")
    agent.mirror.finish()
    assert whole(s3_url) == [7] and s3.uploads() == []
    assert "the mirror process ended (status -9)" in caplog.text
    assert [line["what"] for line in agent.story()] == ["aborted", "mirrored"]
    assert not any(
        value in (tmp_path / "story.jsonl").read_text() + caplog.text for value in ("test/secret/key", "test-key-id")
    )


@pytest.mark.long
def test_the_agent_waits_for_the_newest_checkpoint_and_not_longer_than_its_limit(
    s3: S3, s3_url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TTP_MIRROR", s3_url)
    monkeypatch.setattr("ttp.launch.attempts.mirror.LAST_LINES_S", 0.5)
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    agent.mirror.finish()
    assert agent.mirror.pid is None and caplog.text == ""
    s3.proxy.down = True
    job.save(tmp_path / "checkpoints", 7)
    agent = Agent(tmp_path, tmp_path / "checkpoints", end_s=1.0)
    agent.until("failed")
    agent.mirror.finish()
    assert "TTP_MIRROR_END_S (1 s) expired" in caplog.text and whole_after(s3, s3_url) == []
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    agent.mirror.finish()
    assert whole(s3_url) == [7], "what was published is copied before the end"


def whole_after(s3: S3, url: str) -> list[int]:
    s3.proxy.down = False
    return whole(url)


@pytest.mark.long
def test_the_process_stands_still_during_a_fault(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_MIRROR", url)
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    stat = Path(f"/proc/{agent.mirror.pid}/stat")

    def state() -> str:
        return stat.read_text().rpartition(")")[2].split()[0]

    with agent.mirror.paused():
        until(lambda: state() == "T", "a stopped process")
    until(lambda: state() != "T", "a process that goes on")
    agent.mirror.finish()


@pytest.fixture
def folder_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A mirror for the agent's process, which is started again at once."""
    url = f"file://{tmp_path}/mirror"
    monkeypatch.setenv("TTP_MIRROR", url)
    monkeypatch.setattr("ttp.launch.attempts.mirror.RESTART_S", 0.0)
    return url


def test_a_process_that_has_died_before_the_end_copies_the_newest_checkpoint_all_the_same(
    folder_url: str, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    pid = agent.mirror.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_dead(Path(f"/proc/{pid}")), "its death")
    job.save(tmp_path / "checkpoints", 7)
    agent.mirror.finish()
    assert whole(folder_url) == [7] and [line["what"] for line in agent.story()] == ["mirrored"]
    assert "the mirror process ended (status -9)" in caplog.text


def test_a_process_that_dies_while_the_end_is_waited_for_is_started_again(
    folder_url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttp.launch.attempts.mirror.LAST_LINES_S", 0.0)
    caplog.set_level(logging.INFO, "ttp.launch")
    job.save(tmp_path / "checkpoints", 7)
    agent = Agent(tmp_path, tmp_path / "checkpoints")
    pid = agent.mirror.pid
    assert pid is not None
    send = partial(os.kill, pid)
    send(signal.SIGSTOP)

    class Killer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waiting up to") and agent.mirror.pid == pid:
                send(signal.SIGKILL)

    killer = Killer()
    logging.getLogger("ttp.launch").addHandler(killer)
    try:
        agent.mirror.finish()
    finally:
        logging.getLogger("ttp.launch").removeHandler(killer)
    assert whole(folder_url) == [7] and "the mirror process ended (status -9)" in caplog.text


def test_a_process_that_dies_again_and_again_is_not_waited_for(
    folder_url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    job.save(tmp_path / "checkpoints", 7)
    agent, slept = Agent(tmp_path, tmp_path / "checkpoints"), list[float]()
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr("ttp.launch.attempts.mirror.time", clock)
    agent.mirror.finish()
    assert caplog.text.count("the mirror process ended (status 1)") == 5 and len(slept) == 4
    assert "died, or could not be started, 5 times: the newest checkpoint is not in the mirror" in caplog.text
    (line,) = agent.story()
    assert (line["what"], line["behind_steps"]) == ("expired", 7) and "could not be started, 5 times" in line["error"]


_STARTER = """
import sys
from pathlib import Path
from ttp.launch.attempts.mirror import Mirror
mirror = Mirror(end_s=1.0)
mirror.look(Path(sys.argv[1]))
print(mirror.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("url", [pytest.param("s3", marks=pytest.mark.long), "file"], indirect=True)
def test_the_process_dies_with_its_agent_has_a_low_priority_and_is_picked_first_without_memory(
    tmp_path: Path, url: str
) -> None:
    MirrorSource((str(tmp_path / "checkpoints"),)).write(tmp_path)
    environ = {**os.environ, "TTP_MIRROR": url}
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        folder = Path(f"/proc/{pid}")
        until(lambda: (folder / "oom_score_adj").read_text() == "1000\n", "its settings", within_s=120)
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 15
        session = folder / "autogroup"  # where each session has its share of the CPU, nice counts within it alone
        assert not session.exists() or session.read_text().endswith(" nice 15\n")
        os.kill(pid, signal.SIGSTOP)  # as during a fault: it reads no end of its stdin
        agent.kill()
        agent.wait()
        until(lambda: is_dead(folder), "its death")


def is_dead(process: Path) -> bool:
    try:
        return " Z " in (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # its parent has taken its status, maybe just now
        return True
