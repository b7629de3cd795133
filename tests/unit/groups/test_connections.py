"""When the connections that gloo leaves open can bring nothing more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ttp.groups import connections as module
from ttp.groups.connections import Connections

Look = Callable[..., bool]
Loops = dict[str, tuple[bool, int]]
"""By thread: whether it runs, and its ticks so far."""


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Return a function that looks once, with these loops, at one open connection on which so many bytes wait."""
    known = Connections()
    known._inodes = frozenset({7})
    monkeypatch.setattr(module, "_sockets", lambda: {7: 3, 8: 4})

    def once(loops: Loops, unread: int = 100) -> bool:
        monkeypatch.setattr(module, "_threads", lambda named: loops if named == "gloo_tcp_loop" else {})
        monkeypatch.setattr(module, "_unread", lambda descriptor: {3: unread, 4: 0}[descriptor])
        return known.without_memory()

    return once


def test_a_loop_that_spins_and_takes_nothing_has_nowhere_to_write(look: Look) -> None:
    assert not look({"1": (True, 50)}), "the first look"
    assert not look({"1": (True, 52)})
    assert look({"1": (True, 53)})
    assert look({"1": (True, 53), "2": (False, 9)}), "the other one has nothing to do"


@pytest.mark.parametrize(
    "loops",
    [
        {"1": (True, 51)},  # it waits for its turn
        {"1": (True, 90), "2": (True, 7)},  # the other one does
        {"1": (False, 50)},  # an open connection that was shut down wakes its loop
        {"2": (True, 7)},  # not known yet
        {},
    ],
)
def test_no_loop_that_may_still_read_is_taken_for_one_that_spins(loops: Loops, look: Look) -> None:
    assert not look({"1": (True, 50)} if "1" in loops else {}) and not look(loops)


def test_what_was_taken_meanwhile_begins_the_wait_anew(look: Look) -> None:
    assert not look({"1": (True, 50)}, 100)
    assert not look({"1": (True, 60)}, 90)
    assert not look({"1": (True, 62)}, 90)
    assert look({"1": (True, 63)}, 90)
