"""An attempt uses the directories that serve, tries those again that are only full, and leaves all others alone."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from ttp.checkpoint.staging import probe_writable
from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError, NotWritable
from ttp.exchange import launch_file
from ttp.exchange.launch_file import Launch
from ttp.runtime.directory_agreement import Failure, JobDirectories, split_directories
from ttp.session import find_session

FIRST = Settings(enable=False)
RESTART = replace(FIRST, round_number=1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ends_every_session() -> Iterator[None]:
    """No test leaves a session and its locks to the next."""
    yield
    if (session := find_session()) is not None:
        session.close()


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Return what makes the probe of a directory fail from now on; 0: it works again."""
    probe, codes = probe_writable, dict[str, int]()

    def probe_or_fail(directory: str) -> None:
        if code := codes.get(directory, 0):
            error = OSError(code, os.strerror(code), directory)
            raise NotWritable(f"{directory} cannot be written: {error.strerror}") from error
        probe(directory)

    monkeypatch.setattr("ttp.runtime.directory_agreement.probe_writable", probe_or_fail)
    return lambda directory, code: codes.update({str(directory): code})


def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


def new_session(folders: tuple[Path, ...], settings: Settings) -> tuple[ttp.TTPReplicaOptimizer, ttp.Session]:
    """A session of one rank that is at step 1."""
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    session = ttp.start(optimizer, save_dirs=folders, settings=settings)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    return optimizer, session


def test_what_some_rank_could_not_write_is_left_alone_by_all_unless_it_is_only_full() -> None:
    """Full on one rank and broken on another is broken."""
    full, broken = Failure("no room", full=True), Failure("it is broken", full=False)
    found = [{"a": full, "b": full}, {"b": broken, "d": broken}, {}]
    used, serving, reasons = split_directories(["a", "b", "c", "d"], found)
    assert (used, serving) == (("a", "c"), ("c",))
    assert set(reasons) == {"a", "b", "d"}


def test_nothing_is_written_any_more_into_a_directory_that_failed_at_the_start(
    tmp_path: Path, fail: Callable[[Path, int], None]
) -> None:
    """Neither periodic saves nor a dump: what the controller knows of is what the ranks register. It may be back by then."""
    a, b = places(tmp_path)
    fail(a, errno.EIO)
    _, session = new_session((a, b), RESTART)
    fail(a, 0)
    assert session.save() == str(b / "iter_0000001")
    assert session.holder.registration().save_dirs == (str(b),)
    assert not list(a.glob("iter_*"))


def test_a_directory_that_was_full_at_the_start_is_tried_again(
    tmp_path: Path, fail: Callable[[Path, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock is held, so that no other rank writes there, and room comes back."""
    a, b = places(tmp_path)
    fail(a, errno.ENOSPC)
    with caplog.at_level(logging.WARNING, logger="ttp"):
        _, session = new_session((a, b), RESTART)
    assert "No space left on device; room is looked for at every save" in caplog.text
    assert session.holder.registration().save_dirs == (str(a), str(b))
    assert session.save() == str(a / "iter_0000001")


def test_the_next_attempt_uses_it_again(tmp_path: Path, fail: Callable[[Path, int], None]) -> None:
    """Somebody has corrected it meanwhile."""
    a, b = places(tmp_path)
    fail(a, errno.EIO)
    _, session = new_session((a, b), RESTART)
    session.close()
    fail(a, 0)
    _, session = new_session((a, b), replace(RESTART, round_number=2))
    assert session.save() == str(a / "iter_0000001")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_journals_go_to_the_first_directory_that_serves(
    tmp_path: Path, fail: Callable[[Path, int], None], code: int
) -> None:
    """A dead first directory must not keep a restart from having a controller."""
    a, b = places(tmp_path)
    _, session = new_session((a, b), FIRST)
    assert session.log_dir == a / "ttp_log"
    session.close()
    fail(a, code)
    _, session = new_session((a, b), replace(RESTART, enable=True))
    assert session.log_dir == b / "ttp_log" and (b / "ttp_log" / "journal_1.jsonl").exists()
    assert not (a / "ttp_log").exists()
    ttp.ttp_to_persist(lambda: None)()  # the controller leaves when all have returned


def test_a_restart_without_any_directory_is_refused_with_a_reason(
    tmp_path: Path, fail: Callable[[Path, int], None]
) -> None:
    """Full ones do not count as serving: the journals, too, want a place. The locks are given back."""
    a, b = places(tmp_path)
    fail(a, errno.ENOSPC)
    fail(b, errno.EIO)
    with pytest.raises(NotWritable, match=r"rank 0: .*a cannot be written: No space left"):
        JobDirectories([str(a), str(b)], RESTART, 0, CPU)
    fail(b, 0)
    JobDirectories([str(a), str(b)], RESTART, 0, CPU).release()


def test_a_keepers_refusal_names_its_node(tmp_path: Path) -> None:
    """Where nodes have directories of their own, the same name is another directory on each."""
    directories = JobDirectories([str(tmp_path)], replace(FIRST, shared_dirs=False, host="node-x"), 0, CPU)
    with pytest.raises(CheckpointError, match=r"^node node-x: resume: got 'nonsense'"):
        directories.candidates("nonsense")
    directories.release()


def test_ranks_with_different_rehearsals_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would leave different steps, and wait for each other."""
    monkeypatch.setattr(
        "ttp.runtime.directory_agreement.exchange_json",
        lambda value, device: [value, [True, "b", 0, ["", None], 5, ""]],
    )
    with pytest.raises(ConfigError, match=r"TTP_REHEARSE: got every:N with N of \[0, 5\] \(0: not set\)"):
        JobDirectories([str(tmp_path)], FIRST, 0, CPU)


def test_ranks_with_different_choices_about_replicas_that_differ_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some would compare before a save, a collective that the others never enter."""
    others = [[True, "b", 0, ["", None], 0, choice] for choice in ("stop", "report", "stop")]
    monkeypatch.setattr("ttp.runtime.directory_agreement.exchange_json", lambda value, device: [value, *others])
    with pytest.raises(
        ConfigError,
        match=r"on_divergence: got 'stop' on ranks 1, 3, 'report' on rank 0, expected the same on all ranks",
    ):
        JobDirectories([str(tmp_path)], FIRST, 0, CPU, "report")


def of_three_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings, rank: int, launches: list[list[Any]]
) -> JobDirectories:
    """One of three ranks' view, on nodes a, a, b. launches: what each knows of their launch."""
    starts = zip("aab", (3, 7, 1), launches, strict=True)
    others = [[False, host, start, launch, 0, ""] for host, start, launch in starts]

    def exchange(value: Any, device: torch.device) -> list[Any]:
        return others if len(value) == 6 and isinstance(value[0], bool) else [value] * 3

    with monkeypatch.context() as patch:
        patch.setattr("ttp.runtime.directory_agreement.exchange_json", exchange)
        patch.setattr("ttp.runtime.directory_agreement.check_same", lambda *arguments: None)
        directories = JobDirectories([str(folder)], settings, rank, CPU)
    directories.release()
    return directories


@pytest.mark.parametrize(("rank", "leader"), [(0, 0), (1, 0), (2, 2)])
def test_nodes_with_their_own_directories_agree_on_the_highest_attempt_and_each_has_a_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, leader: int
) -> None:
    """A node that is new has seen no attempt: its number would take parts of an earlier attempt for newer ones."""
    settings = replace(FIRST, shared_dirs=False, host="ab"[rank // 2])
    launches = [[name * 32, None] for name in "def"]
    directories = of_three_ranks(tmp_path, monkeypatch, settings, rank, launches)
    assert directories.store.launch == "d" * 32 and directories.store.began_after is None, "rank 0 names a new launch"
    assert (directories.store.start, directories.store.leader, directories.store.node) == (7, leader, settings.host)
    assert directories.keeps == (rank == leader) and directories.node == f"node {settings.host}: "


def test_a_restart_goes_on_with_its_launch_and_a_new_node_takes_it_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new node's rank is the first: what it would name a new launch does not count. Its agent gets it for the next attempt."""
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    settings = replace(RESTART, shared_dirs=False, host="a", attempt_dir=str(attempt))
    known = Launch("e" * 32, 40)
    directories = of_three_ranks(
        tmp_path / "saved", monkeypatch, settings, 0, [["d" * 32, None], ["e" * 32, 40], ["e" * 32, 40]]
    )
    assert Launch(directories.store.launch, directories.store.began_after or 0) == known
    directories.begin_launch(70)
    assert launch_file.read(attempt) == known, "it began after step 40, whatever its restarts go on from"
    launch_file.write(attempt, Launch("c" * 32, 5))
    first = JobDirectories([str(tmp_path / "saved")], settings, 0, CPU)
    first.release()
    assert (first.store.launch, first.store.began_after) == ("c" * 32, 5), "as this node's agent has it"


def test_a_first_attempt_leaves_what_the_launch_began_from_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank a node writes it. A file that cannot be read or written is a warning; shared directories need none."""
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    settings = replace(FIRST, shared_dirs=False, host="a", attempt_dir=str(attempt))
    launches = [[name * 32, None] for name in "def"]
    of_three_ranks(tmp_path / "saved", monkeypatch, settings, 1, launches).begin_launch(70)
    assert launch_file.read(attempt) is None, "rank 0 of this node does"
    directories = of_three_ranks(tmp_path / "saved", monkeypatch, settings, 0, launches)
    directories.begin_launch(70)
    assert launch_file.read(attempt) == Launch("d" * 32, 70)
    assert not caplog.records
    (attempt / launch_file.NAME).write_text("{}")
    again = JobDirectories([str(tmp_path / "saved")], settings, 0, CPU)
    again.release()
    assert again.store.began_after is None and "cannot read which launch" in caplog.text
    (attempt / launch_file.NAME).unlink()
    attempt.rmdir()
    again.begin_launch(0)
    assert "node a: a restart may not know" in caplog.text


def test_without_ttprun_no_attempt_knows_the_launch_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun's agent has no directory for it, and the working directory is not one."""
    monkeypatch.chdir(tmp_path)
    settings = replace(RESTART, shared_dirs=False, host="a")
    for _ in range(2):
        directories = JobDirectories([str(tmp_path / "saved")], settings, 0, CPU)
        directories.begin_launch(70)
        directories.release()
        assert directories.store.began_after is None and not (tmp_path / launch_file.NAME).exists()
        launch_file.write(tmp_path / "saved", Launch("c" * 32, 5))
        monkeypatch.chdir(tmp_path / "saved")


def test_where_all_nodes_share_directories_launches_have_no_names(tmp_path: Path) -> None:
    """What is whole is whole for all of them from the beginning."""
    directories = JobDirectories([str(tmp_path / "saved")], replace(FIRST, attempt_dir=str(tmp_path)), 0, CPU)
    directories.begin_launch(70)
    directories.release()
    assert launch_file.read(tmp_path) is None
