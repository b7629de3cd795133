"""Waits that can be left: for an operation that never ends, as gloo's of a message that is half way when its connection breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ttp.errors import AbortedCollective
from ttp.groups import polled_wait
from ttp.groups.polled_wait import wait_for
from ttp.groups.process_groups import GROUPS

LONG_S = 30.0


class Operation:
    """Ends when `end` is set, with `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.end = threading.Event()
        self.waited = threading.Event()
        self.error = error

    def end_when_waited_for(self) -> None:
        assert self.waited.wait(LONG_S)
        self.end.set()

    def is_completed(self) -> bool:
        return self.end.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.end.wait(LONG_S)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def pollable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(GROUPS, "pollable", True)
    monkeypatch.setattr(GROUPS, "_left", False)
    monkeypatch.setattr(polled_wait, "_waiter", None)
    yield


def ended(error: Exception | None = None) -> Operation:
    operation = Operation(error)
    operation.end.set()
    return operation


def left(operation: Operation) -> threading.Thread:
    """Leave the groups once somebody waits for the operation."""

    def leave() -> None:
        assert operation.waited.wait(LONG_S)
        GROUPS._left = True

    thread = threading.Thread(target=leave)
    thread.start()
    return thread


def test_an_operation_that_never_ends_is_left() -> None:
    operation = Operation()
    thread = left(operation)
    with pytest.raises(AbortedCollective, match="this step is given up"):
        wait_for([ended(), operation, ended()])
    thread.join()
    operation.end.set()


def test_after_a_wait_that_was_left_the_next_one_is_waited_for_as_ever() -> None:
    """The thread that waits for the first operation is given up with it."""
    stuck = Operation()
    thread = left(stuck)
    with pytest.raises(AbortedCollective):
        wait_for([stuck])
    thread.join()
    GROUPS._left = False
    following = Operation()
    threading.Thread(target=following.end_when_waited_for).start()
    wait_for([following])
    assert following.end.is_set() and not stuck.end.is_set()
    stuck.end.set()


def test_what_an_operation_raises_is_raised_and_its_others_stay_held() -> None:
    """gloo reads nothing more of a message whose handle is gone, and never closes its connection then."""
    failing, other = Operation(RuntimeError("Connection closed by peer")), Operation()
    threading.Thread(target=failing.end_when_waited_for).start()
    with pytest.raises(RuntimeError, match="closed by peer") as raised:
        wait_for([failing, other])
    trace, held = raised.value.__traceback__, False
    while trace is not None:
        held |= any(other in value for value in trace.tb_frame.f_locals.values() if isinstance(value, list))
        trace = trace.tb_next
    assert held


def test_groups_that_cannot_be_left_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GROUPS, "pollable", False)
    operation = ended()
    wait_for([operation])
    assert operation.waited.is_set() and polled_wait._waiter is None
