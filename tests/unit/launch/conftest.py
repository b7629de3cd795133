"""What every test of the launcher finds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.attempts import RunningAttempt
from tests.unit.launch.controller_clients import Switchboard
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.rendezvous.fresh_store import JobStore


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """The launcher's logger is as it was, whatever a test's own launcher has set up: its handler writes to a stream that is gone."""
    logger = logging.getLogger("ttp.launch")
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture
def agents_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each agent sets this variable while it meets the others, and then restores it: of one process, they would take it from each other."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks without a controller are not held for long, and are polled often."""
    monkeypatch.setattr(attempt_module, "UNLED_S", 0.6)
    monkeypatch.setattr(attempt_module, "LOOK_S", 0.02)
    caplog.set_level(logging.INFO, "ttp.launch")


@pytest.fixture
def led(short_times: None) -> Iterator[RunningAttempt]:
    """Return an attempt with a controller."""
    running = RunningAttempt(60.0, controller=True)
    yield running
    running.close()


@pytest.fixture
def store() -> TCPStore:
    """The workers' store."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def switchboard() -> Switchboard:
    """Return what opens a client's links, and keeps them."""
    return Switchboard()


@pytest.fixture
def client(store: TCPStore, switchboard: Switchboard) -> Iterator[ControllerClient]:
    """Return a client of attempt 7 that polls often."""
    made = ControllerClient(
        JobStore("127.0.0.1", store.port, 7), {0: 70, 1: 71}, switchboard, search_s=0.01, recheck_s=0.01
    )
    yield made
    made.close()
