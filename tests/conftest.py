"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_not_ignored() -> Iterator[None]:
    """Ctrl-C is as in a terminal, here and in what tests start, also where a shell has started the tests in the background: it has its
    jobs ignore SIGINT then."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
