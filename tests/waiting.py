"""Waiting for what another process or thread does, where it gives no other sign: one bounded wait for all tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

LONG_S = 30.0
"""Nothing that is waited for takes so long: a wait that does is a failure. It says nothing of how long it takes."""
_LOOK_S = 0.005


def until(condition: Callable[[], object], what: str = "a condition", within_s: float = LONG_S) -> None:
    """Return as soon as the condition holds; fail, with `what` was waited for, after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited for {within_s:g} s: {what}"
        time.sleep(_LOOK_S)


def replace_sleep(monkeypatch: pytest.MonkeyPatch, instead: Callable[[float], object]) -> None:
    """Call `instead` where this thread would sleep. Threads that an earlier test has left sleep as they do."""
    ours, sleep = threading.get_ident(), time.sleep
    monkeypatch.setattr(
        time, "sleep", lambda seconds: instead(seconds) if threading.get_ident() == ours else sleep(seconds)
    )
