"""Slow ranks of an attempt, for people: when one is named and when that is over, from the controllers' journal lines of the same names.

Owns which events there are and how they are worded: of each rank an end for each begin, whatever becomes of its controller. Pure: journal
lines in, events and text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttp.launch.report.journals import Line

NAMED, OVER = "straggler", "straggler_over"
NEW_CONTROLLER = "another controller leads, and measures all ranks anew"
ENDED = "the attempt has ended"

Event = tuple[str, Mapping[str, Any]]
"""(NAMED or OVER, its fields)."""


def slow_rank_events(start: int, lines: Sequence[Line], *, ended: bool) -> list[Event]:
    """Return those of an attempt, in order; `ended`: it has, and nothing is slow any more."""
    found: list[Event] = []
    named: dict[int, Mapping[str, Any]] = {}

    def all_over(why: str) -> None:
        for fields in named.values():
            found.append((OVER, {"start": start, **fields, "why": why}))
        named.clear()

    for line in lines:
        event, fields = line["event"], line["fields"]
        if event == "took_over":
            all_over(NEW_CONTROLLER)
        elif event == NAMED:
            named[fields["rank"]] = fields
            found.append((NAMED, {"start": start, **fields}))
        elif event == OVER and named.pop(fields["rank"], None) is not None:
            found.append((OVER, {"start": start, **fields}))
    if ended:
        all_over(ENDED)
    return found


def slow_rank_text(event: str, fields: Mapping[str, Any]) -> str:
    """Return one event as a line."""
    who = f"rank {fields['rank']} on node {fields['host']}"
    if event == OVER:
        return f"{who}: over at step {fields['step']}: {fields['why']}"
    times = f"{fields['own_s']:.3g} s, theirs {fields['others_s']:.3g} s"
    return f"{who}: {fields['ratio']:.2f} times the others' own time of a step ({times}) since step {fields['since_step']}; they wait for it"
