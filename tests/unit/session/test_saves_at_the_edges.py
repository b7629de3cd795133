"""Saves where something else fails: a directory that refuses to be tidied as well, and one that ends after training has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from tests.unit.session.test_session import OFF, do_steps
from ttp.errors import CheckpointError
from ttp.session import SAVE_AT_MOST_S


def begun(*folders: Path) -> tuple[torch.nn.Module, ttp.TTPReplicaOptimizer, ttp.Session]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    return model, optimizer, ttp.start(optimizer, save_dirs=list(folders), settings=OFF)


def test_a_directory_that_refuses_to_be_tidied_too_falls_through_to_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only its leader would fail, where the other ranks go on to the next directory and wait for it there."""
    model, optimizer, session = begun(tmp_path / "a", tmp_path / "b")
    do_steps(model, optimizer, session, 2)
    (tmp_path / "a" / "iter_0000002_tmp_requested_0_1").write_text("not a directory")
    assert session.save() == str(tmp_path / "b" / "iter_0000002")
    assert "iter_0000002_tmp_requested_0_1, left by a failed write, cannot be removed" in caplog.text
    session.close()


def test_a_save_that_is_given_up_in_such_a_directory_ends_no_recovery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, session = begun(tmp_path / "a")

    def refuse(*where: str) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("ttp.runtime.saves.discard_staging", refuse)
    session._saves.together.give_up((str(tmp_path / "a"), "iter_0000002_tmp_requested_0_1"))
    assert "cannot be removed: [Errno 116] Stale file handle" in caplog.text
    session.close()


class Background:
    """A save that is not waited for, until somebody does."""

    def __init__(self, paused: Callable[[], float | None], pending: int) -> None:
        self.paused, self.pending, self.waited = paused, pending, list[float | None]()

    def look(self) -> None:
        pass

    def finish(self) -> None:
        self.waited.append(self.paused())
        self.pending = 0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("pending", [7, 0])
@pytest.mark.parametrize("end", [ttp.Session.hold_until_all_finish, ttp.Session.close])
def test_the_wait_for_a_last_save_is_not_taken_for_a_hang(
    end: Callable[[ttp.Session], None], pending: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows it, and the disk may take its time; but not for ever."""
    _, _, session = begun(tmp_path)
    within: list[float] = []

    @contextlib.contextmanager
    def pause(at_most_s: float = 0.0) -> Iterator[None]:
        within.append(at_most_s)
        yield
        within.pop()

    monkeypatch.setattr(session, "pause", pause)
    background: Any = Background(lambda: within[-1] if within else None, pending)
    session._saves._background = background
    end(session)
    assert background.waited == ([SAVE_AT_MOST_S] if pending else [])
    session.close()


def test_a_save_that_no_directory_takes_says_so_on_every_rank(tmp_path: Path) -> None:
    model, optimizer, session = begun(tmp_path / "a")
    do_steps(model, optimizer, session, 2)
    (tmp_path / "a" / "iter_0000002_tmp_requested_0_1").write_text("not a directory")
    with pytest.raises(CheckpointError, match="no directory took the requested checkpoint"):
        session.save()
    session.close()
