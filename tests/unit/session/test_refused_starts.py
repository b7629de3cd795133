"""Starts that are refused: by name, at once, in one line, and with nothing left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import ttp
from ttp.config import Settings
from ttp.controller.process import start_controller
from ttp.errors import ConfigError, ControllerError, NotWritable
from ttp.runtime import standby
from ttp.session import find_session

ON = Settings(enable=True)
OFF = Settings(enable=False)


def new_optimizer() -> ttp.TTPReplicaOptimizer:
    return ttp.TTPReplicaOptimizer(torch.nn.Linear(8, 4).named_parameters(), replicas=1, lr=0.05)


@pytest.mark.parametrize("enable", [True, False])
def test_a_start_before_the_process_group_is_refused_at_once_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enable: bool
) -> None:
    """Each rank would take itself for a job of one, and all of them would write into one directory."""
    optimizer = new_optimizer()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"ttp.start was called without a process group: got WORLD_SIZE=2, .* of 2 ranks"
    ):
        ttp.start(optimizer, save_dirs=[tmp_path / "a"], settings=Settings(enable=enable))
    assert find_session() is None and not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="the replica optimizer was called without a process group: got WORLD_SIZE=2"):
        new_optimizer()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        ttp.start(optimizer, save_dirs=[tmp_path / "a"], settings=Settings(enable=enable))
    monkeypatch.setenv("WORLD_SIZE", "1")
    ttp.start(optimizer, save_dirs=[tmp_path / "a"], settings=OFF).close()


def test_a_taken_port_is_a_configuration_error_at_the_first_start_and_a_fault_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a restart an earlier attempt's controller may still have it."""
    monkeypatch.setattr(standby, "start_controller", partial(start_controller, port_wait_s=0.1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for number, kind, said in (
            (0, ConfigError, f"invalid TTP_CONTROLLER_PORT={port}: the"),
            (1, ControllerError, "the"),
        ):
            settings = replace(ON, controller_port=port, round_number=number)
            with pytest.raises(kind, match=rf"^{said} controller cannot listen on 127.0.0.1:{port}: the port is taken"):
                ttp.start(new_optimizer(), save_dirs=[tmp_path / str(number)], settings=settings)


def test_a_log_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    optimizer = new_optimizer()
    for number in (0, 1):
        with pytest.raises(NotWritable, match=rf"log directory {tmp_path}/file/log cannot be written: Not a directory"):
            ttp.start(
                optimizer,
                save_dirs=[tmp_path / str(number)],
                log_dir=tmp_path / "file" / "log",
                settings=replace(ON, round_number=number),
            )


REFUSED = """
import sys, torch, ttp
module = torch.nn.Linear(2, 2)
if sys.argv[1] == "start":
    ttp.start(ttp.TTPReplicaOptimizer(module.named_parameters(), replicas=1, lr=0.1), save_dirs=[sys.argv[2]])
else:
    ttp.protect(module, torch.optim.SGD(module.parameters(), lr=0.1), save_dirs=[sys.argv[2]])
"""


@pytest.mark.parametrize("call", [pytest.param("start", marks=pytest.mark.long), "protect"])
def test_a_refused_start_ends_in_one_line_and_its_error_file_has_the_traceback(tmp_path: Path, call: str) -> None:
    """The message says what to correct; where ttp raised it helps no user."""
    (tmp_path / "file").touch()
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    arguments = [sys.executable, "-c", REFUSED, call, str(tmp_path / "file" / "saves")]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        f"ttp: error: NotWritable: checkpoint directory {tmp_path}/file/saves cannot be used"
    )
    assert len(ended.stderr.splitlines()) == 1
    assert "ttp.errors.NotWritable" in (tmp_path / "error.json").read_text()
