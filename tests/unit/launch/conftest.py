"""What every test of the launcher finds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.couriers import Switchboard
from tests.unit.launch.start import Start
from ttp.launch.attempts import attempt as rounds
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
def short_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that nobody leads are not held for long, and are looked at often."""
    monkeypatch.setattr(rounds, "UNLED_S", 0.6)
    monkeypatch.setattr(rounds, "LOOK_S", 0.02)
    caplog.set_level(logging.INFO, "ttp.launch")


@pytest.fixture
def led(short_times: None) -> Iterator[Start]:
    """Return a start that a controller leads."""
    start = Start(60.0, controller=True)
    yield start
    start.close()


@pytest.fixture
def store() -> TCPStore:
    """The workers' store."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def switchboard() -> Switchboard:
    """Return what makes a courier's links, and keeps them."""
    return Switchboard()


@pytest.fixture
def courier(store: TCPStore, switchboard: Switchboard) -> Iterator[ControllerClient]:
    """Return a courier of round 7 that looks often."""
    made = ControllerClient(
        JobStore("127.0.0.1", store.port, 7), {0: 70, 1: 71}, switchboard, search_s=0.01, recheck_s=0.01
    )
    yield made
    made.close()
