"""How a process that takes a lost one's place comes to its job's controller."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from ttp.config import Settings, ordered_by, replaces
from ttp.controller.journal import set_aside_earlier
from ttp.errors import ConfigError, NotWritable
from ttp.exchange import discovery
from ttp.runtime import job_controller
from ttp.runtime.job_controller import JobController
from ttp.runtime.rank_runtime import Protection
from ttp.runtime.standby import Standbys
from ttp.runtime.state_provider import StepStates


def test_it_comes_to_the_controller_that_had_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the first one, whose address the store still has; neither does rank 0 start another one."""
    monkeypatch.setattr(discovery, "find", lambda *_: "127.0.0.1:4000")
    monkeypatch.setattr(JobController, "store", lambda self: None)
    for value, address in (("7 127.0.0.1:4001", "127.0.0.1:4001"), ("7", "127.0.0.1:4000")):
        monkeypatch.setenv("TTP_VACANT", value)
        for rank in (0, 1):
            assert JobController(Settings(), tmp_path, rank, 2).open(1.0) == address
        assert replaces() == 7
    assert list(tmp_path.iterdir()) == []


def test_rank_0_moves_an_earlier_launch_s_files_of_its_attempt_before_the_controller_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the attempts before it are this launch's."""
    names = ["journal_{}.jsonl", "standby_{}_2.jsonl", "last_step_{}.json", "saved_alone_{}.json", "times_{}.jsonl"]
    foreign = "journal_old.jsonl"

    def stop(*_: object) -> None:
        found.append({path.name for path in tmp_path.iterdir() if path.is_file()})
        raise NotWritable("stop")

    monkeypatch.setattr(job_controller, "start_job_controller", stop)
    found: list[set[str]] = []
    for attempt in (0, 2):
        for name in names:
            for number in (0, 2):
                (tmp_path / name.format(number)).touch()
        for name in ("journal_10.jsonl", foreign):
            (tmp_path / name).touch()
        with pytest.raises(NotWritable):
            JobController(Settings(round_number=attempt), tmp_path, 0, 1).open(1.0)
    of_first = {foreign, *(name.format(0) for name in names)}
    assert found == [{foreign, *(name.format(2) for name in names[2:])}, of_first]
    assert len([path for path in (tmp_path / "earlier").iterdir() if path.name.endswith("_saved_alone_0.json")]) == 1


def test_a_standby_that_is_started_meanwhile_keeps_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be moved as an earlier launch's, and no report would have what the standby saves."""
    store, settings = HashStore(), Settings(one_node=True)
    monkeypatch.setattr(JobController, "store", lambda self: store)
    waits, begun, journal = threading.Event(), threading.Event(), tmp_path / "standby_0_1.jsonl"
    together: list[bool] = []

    def start_controller(*_: object) -> SimpleNamespace:
        together.append(begun.wait(20.0))
        return SimpleNamespace(address="host:1", pid=12)

    monkeypatch.setattr(job_controller, "start_job_controller", start_controller)
    journal.write_text("of an earlier launch")
    find = discovery.find

    def move_late(log_dir: Path, attempt: int) -> None:
        assert waits.wait(60.0)
        set_aside_earlier(log_dir, attempt)

    def look(*given: Any, **options: Any) -> str:
        waits.set()
        return find(*given, **options)

    monkeypatch.setattr(job_controller, "set_aside_earlier", move_late)
    monkeypatch.setattr(discovery, "find", look)

    def start_standby(self: Standbys, place: int, store: Store) -> str:
        journal.write_text(f"of standby {place}")
        waits.set()
        begun.set()
        raise NotWritable("seen")

    monkeypatch.setattr(Standbys, "first", start_standby)
    first = threading.Thread(target=lambda: JobController(settings, tmp_path, 0, 2).open(60.0))
    first.start()
    lane, optimizer = SimpleNamespace(ordered=False), SimpleNamespace(current_step=0, device=torch.device("cpu"))
    optimizer.lane, optimizer.attach = lane, lambda gate, attempt: None
    with pytest.raises(NotWritable, match="seen"):
        Protection(SimpleNamespace(optimizer=optimizer, step_states=StepStates()), settings, tmp_path, 1, 2)  # type: ignore[arg-type]
    first.join()
    assert together == [True], "the standby does not wait for the first controller's start"
    assert journal.read_text() == "of standby 1"
    assert [path.read_text() for path in (tmp_path / "earlier").iterdir()] == ["of an earlier launch"]


def test_the_variable_is_checked() -> None:
    assert (replaces({}), ordered_by({})) == (0, "")
    with pytest.raises(ConfigError, match="invalid TTP_VACANT="):
        replaces({"TTP_VACANT": "x 127.0.0.1:4000"})
