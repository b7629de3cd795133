"""Which controllers take over from this one, and what its journal has of a job whose shards are copied in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, registration
from ttp.controller.core.facts.state import Restoring


@pytest.mark.parametrize(
    ("own", "lost", "expected"),
    [
        ("a", (), ("b", "c", "d")),
        ("b", (), ("c", "d")),
        ("b", ("c",), ("d",)),
        ("d", (), ()),
        ("first", ("a",), ("b", "c", "d")),
    ],
)
def test_those_behind_it_in_the_list_that_have_not_ended(
    own: str, lost: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    state = ControllerBench().state
    state = replace(
        state,
        settings=replace(state.settings, address=own),
        successors=("a", "b", "c", "d"),
        restoring=Restoring(frozenset(lost)),
    )
    assert state.standbys == expected


@pytest.mark.parametrize("copies", [True, False])
def test_the_journal_says_where_shards_are_copied(copies: bool) -> None:
    job = ControllerBench(assembled=False)
    for rank in range(4):
        job.say(replace(registration(rank), copies=copies))
    (fields,) = job.logged("assembled")
    assert fields.get("copied", "absent") == (True if copies else "absent")
