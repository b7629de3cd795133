"""Controllers that are wrong on purpose in publishing where each host has directories of its own."""

from __future__ import annotations

from typing import Any

import pytest

from ttp.controller.core import stages
from ttp.controller.core.dump import publishing, roll_forward
from ttp.controller.core.dump.finish import leave
from ttp.controller.core.dump.publishing import start_publishing
from ttp.controller.core.facts.events import Journal
from ttp.controller.core.facts.state import Publishing, Writing
from ttp.controller.core.transitions import TABLES
from ttp.proto.messages import Published

Patch = pytest.MonkeyPatch


def published_after_the_first_place(patch: Patch) -> None:
    places, published = publishing._places, publishing.published

    def wrong(state: Any, answer: Any, now: float, out: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(publishing, "_places", lambda state: places(state)[:1])
            return published(state, answer, now, out)

    _on_published(patch, wrong)


def lost_hosts_files_are_not_written_again(patch: Patch) -> None:
    """A host without a rank that could publish is passed over."""
    places, advance = publishing._places, publishing._advance

    def there(state: Any) -> tuple[str, ...]:
        alive = {publishing._place_of(state, rank) for rank in _living(state)}
        return tuple(place for place in places(state) if place in alive)

    def wrong(state: Any, now: float, out: Any) -> Any:
        state = advance(state, now, out)
        dump = state.dump
        if dump is None or not dump.published_places or not dump.published_places.issuperset(there(state)):
            return state
        return _says_published(state, dump.order.directory, now, out)

    patch.setattr(publishing, "_places", there)
    patch.setattr(publishing, "_advance", wrong)


def publisher_of_another_host(patch: Patch) -> None:
    """The lowest rank that lives is ordered to publish every host's piece."""
    order = publishing._order_publish
    patch.setattr(
        publishing, "_order_publish", lambda state, able, now, out: order(state, _living(state)[:1], now, out)
    )


def _living(state: Any) -> list[int]:
    return [rank for rank in range(state.settings.world_size) if roll_forward.is_holder(state, rank)]


def piece_of_an_earlier_write_counts(patch: Patch) -> None:
    """A host that has published stays done when all is written anew."""
    published, start, done = publishing.published, start_publishing, set[tuple[float, str]]()

    def remembers(state: Any, answer: Any, now: float, out: Any) -> Any:
        done.add((state.fault.began, publishing._place_of(state, answer.rank)))
        return published(state, answer, now, out)

    def wrong(state: Any, now: float, out: Any) -> Any:
        if all((state.fault.began, place) in done for place in publishing._places(state)):
            dump = state.dump
            return _says_published(state, dump.directories[dump.attempt], now, out)
        return start(state, now, out)

    _on_published(patch, remembers)
    patch.setattr(stages, "start_publishing", wrong)


def refusal_takes_the_directory(patch: Patch) -> None:
    """A rank that could not publish a step that it has not writes no other step there either."""

    def wrong(state: Any, place: str, ranks: list[int], now: float, out: Any) -> Any:
        return publishing._written_anew(state, ranks, f"node {place} could not publish", now, out)

    patch.setattr(publishing, "_without_node", wrong)


def _on_published(patch: Patch, wrong: Any) -> None:
    for stage in (Writing, Publishing):
        patch.setitem(TABLES[stage].on, Published, wrong)


def _says_published(state: Any, directory: str, now: float, out: Any) -> Any:
    step = state.dump.decision.step
    out.append(Journal("published", {"rank": 0, "step": step, "path": f"{directory}/iter_{step:07d}"}))
    return leave(state, "published", now, out)
