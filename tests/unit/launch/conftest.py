"""What every test of the launcher finds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """The launcher's logger is as it was, whatever a test's own launcher has set up: its handler writes to a stream that is gone."""
    logger = logging.getLogger("ttp.launch")
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])
