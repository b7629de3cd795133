"""The file from which an agent learns the controllers of its ranks: what is written is read, and all else is refused in one line."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ttp.config import Settings
from ttp.exchange import controller_file, discovery, launch_file
from ttp.exchange.controller_file import NAME, Controllers
from ttp.exchange.discovery import controller_key
from ttp.exchange.launch_file import Launch
from ttp.launch.attempts.attempt_directory import AttemptDirectory
from ttp.proto.messages import Welcome
from ttp.runtime import job_controller, rank_runtime
from ttp.runtime.rank_runtime import Protection
from ttp.runtime.state_provider import StepStates

GOOD: dict[str, Any] = {"addresses": ["host:8000", "[::1]:8001"], "pid": 12, "log_dir": "/output/log"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A later writing takes the place of the earlier one, and leaves nothing else behind."""
    assert controller_file.read(tmp_path) is None
    for known in (Controllers((), 0, "/l"), Controllers(("host:8000", "[::1]:8001"), 12, "/output/ü")):
        controller_file.write(tmp_path, known)
        assert controller_file.read(tmp_path) == known
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Expecting value"),
        ("[]", "controllers"),
        ("[" * 100_000, "nested too deep"),
        ("x" * (controller_file.MOST_BYTES + 1), "at most"),
        *(
            (json.dumps(GOOD | changed), named)
            for changed, named in (
                ({"addresses": "host:8000"}, "addresses"),
                ({"addresses": ["host"]}, "addresses[0]"),
                ({"addresses": ["a:1", ":8000"]}, "addresses[1]"),
                ({"addresses": ["host:0"]}, "addresses[0]"),
                ({"addresses": ["host:65536"]}, "addresses[0]"),
                ({"addresses": ["host:٣"]}, "addresses[0]"),
                ({"addresses": ["ho\nst:8000"]}, "addresses[0]"),
                ({"addresses": ["\ud800:8000"]}, "addresses[0]"),
                ({"addresses": ["h" * 300 + ":8000"]}, "addresses[0]"),
                ({"pid": -1}, "pid"),
                ({"pid": 2**31}, "pid"),
                ({"pid": True}, "pid"),
                ({"log_dir": "log"}, "log_dir"),
                ({"log_dir": "/\0"}, "log_dir"),
                ({"log_dir": "/" + "x" * 5000}, "log_dir"),
            )
        ),
        (json.dumps({name: GOOD[name] for name in ("addresses", "pid")}), "log_dir"),
    ],
)
def test_what_no_rank_writes_is_refused_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises((ValueError, OSError)) as refusal:
        controller_file.read(tmp_path)
    said = str(refusal.value)
    assert named in said and said.isprintable() and len(said) < 600


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing writes to it: reading it would never end."""
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(OSError, match="regular file"):
        controller_file.read(tmp_path)


class Registers(Exception):
    """A rank is about to register with its controller."""


def registers(*arguments: object, **options: object) -> Any:
    raise Registers


class Welcomed:
    """A processor whose controller has two standbys."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.preempted = None

    def start(self) -> None: ...

    def wait_welcomed(self, timeout_s: float) -> Welcome:
        return Welcome(0, 1, 1.0, 3.0, "any 1 of 2 ranks", ("one:8001", "two:8002"))


def start_rank(
    attempt_dir: Path,
    log_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    world_size: int,
    processor: Callable[..., Any] = registers,
) -> None:
    """Have the first rank of a node of its own start until it registers, or listens for SIGTERM if its processor is `Welcomed`, with a
    controller at `host:8000` in process 12."""

    process = SimpleNamespace(address="host:8000", pid=12)
    optimizer = SimpleNamespace(
        current_step=0,
        lane=SimpleNamespace(ordered=False),
        attach=lambda gate, attempt: None,
        device=torch.device("cpu"),
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if rank:
        store.set(controller_key(0), "host:8000 12")
    monkeypatch.setattr(job_controller, "start_job_controller", lambda *arguments: process)
    monkeypatch.setattr(rank_runtime, "Processor", processor)
    monkeypatch.setattr(rank_runtime, "Notice", lambda reported: SimpleNamespace(listen=registers))
    monkeypatch.setattr(discovery, "check_name", lambda address, rank: None)
    settings = Settings(
        launched=True,
        tls=False,
        attempt_dir=str(attempt_dir),
        local_rank=0,
        node_rank=rank,
        nodes=world_size,
        one_node=world_size == 1,
        master_port=store.port,
        standbys=0,
    )
    with pytest.raises(Registers):
        holder: Any = SimpleNamespace(optimizer=optimizer, step_states=StepStates())
        Protection(holder, settings, log_dir, rank, world_size)


@pytest.mark.parametrize(
    ("rank", "world_size", "addresses", "pid"),
    [(0, 2, ("host:8000",), 12), (1, 2, ("host:8000",), 0), (0, 1, (), 12)],
)
def test_the_first_rank_of_a_node_writes_the_file_before_it_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, addresses: tuple[str, ...], pid: int
) -> None:
    """No controller leads ranks whose agent cannot find it. The only rank of a job has its controller to itself."""
    start_rank(tmp_path, tmp_path / "log", monkeypatch, rank, world_size)
    assert controller_file.read(tmp_path) == Controllers(addresses, pid, str(tmp_path / "log"))


def test_the_file_has_the_standbys_as_soon_as_the_job_has_assembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent follows the ranks to the one that takes over, though the store is slow."""
    start_rank(tmp_path, tmp_path / "log", monkeypatch, 0, 2, Welcomed)
    known = controller_file.read(tmp_path)
    assert known == Controllers(("host:8000", "one:8001", "two:8002"), 12, str(tmp_path / "log"))


def test_a_file_that_cannot_be_written_costs_a_warning_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is not there in the rank's container, say."""
    start_rank(tmp_path / "elsewhere", tmp_path / "log", monkeypatch, 0, 2)
    (line,) = [record.getMessage() for record in caplog.records if "TTP_ATTEMPT_DIR" in record.getMessage()]
    assert line.startswith(f"TTP_ATTEMPT_DIR={tmp_path}/elsewhere cannot be written (No such file or directory)")


def test_an_attempts_directory_is_its_users_own_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt has another one; where none can be made, that is a warning."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = AttemptDirectory()
    first = directory.make()
    assert first is not None and first.parent == tmp_path and first.stat().st_mode & 0o777 == 0o700
    controller_file.write(first, Controllers((), 0, "/l"))
    second = directory.make()
    assert second not in (None, first) and list(tmp_path.iterdir()) == [second]
    directory.remove()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert directory.make() is None
    assert "through the workers' store alone" in caplog.text


@pytest.mark.parametrize("name", ["a" * 31, "a" * 33, "A" * 32, "/" * 32, "\u0661" * 32, 7])
def test_what_names_no_launch_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / launch_file.NAME).write_text(json.dumps({"name": name, "began_after": 3}))
    with pytest.raises(ValueError, match=r"^name: got .*, expected (32 hexadecimal digits|a string)"):
        launch_file.read(tmp_path)


def test_the_next_attempts_directory_has_what_the_ranks_wrote_of_their_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also behind an attempt that wrote nothing; a file that says something else costs the last known one nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory, launch = AttemptDirectory(), Launch("a" * 32, 40)
    first = directory.make()
    assert first is not None and launch_file.read(first) is None
    launch_file.write(first, launch)
    directory.remove()
    for _ in range(2):
        later = directory.make()
        assert later is not None and launch_file.read(later) == launch
        (later / launch_file.NAME).write_text('{"name": "../x", "began_after": 1}')
    assert (
        "cannot read which launch this attempt belonged to: name: got '../x', expected 32 hexadecimal digits"
        in caplog.text
    )
    with monkeypatch.context() as patch:
        patch.setattr(launch_file, "write", Mock(side_effect=OSError("no space")))
        last = directory.make()
    assert last is not None and list(last.iterdir()) == [] and "(no space)" in caplog.text
    later = directory.make()
    assert later is not None and launch_file.read(later) == launch
    directory.remove()
