"""What nodes that go leave in the store."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from ttp.launch.rendezvous import waiting_spare
from ttp.launch.rendezvous.departures import (
    departures_after,
    end,
    over,
    publish_departure,
    publish_over,
    publish_success,
)
from ttp.launch.rendezvous.multi_endpoint import Endpoint


def test_departures_are_read_in_order_from_a_number_on() -> None:
    """Each job has its own."""
    store = HashStore()
    assert departures_after(store, "j", 0) == ()
    assert [publish_departure(store, "j", words) for words in ("a: x", "b: y")] == [1, 2]
    assert departures_after(store, "j", 0) == ("a: x", "b: y") and departures_after(store, "j", 1) == ("b: y",)
    assert departures_after(store, "j", 2) == () == departures_after(store, "other", 0)


def test_a_departure_whose_reason_is_not_written_yet_is_read_later() -> None:
    """It has its number before its words are there."""
    store = HashStore()
    store.add("ttp/left/j", 1)
    publish_departure(store, "j", "b: y")
    assert departures_after(store, "j", 0) == ()
    store.set("ttp/left/j/1", "a: x")
    assert departures_after(store, "j", 0) == ("a: x", "b: y")


def test_the_first_reason_why_the_job_is_over_stays() -> None:
    """What comes later follows from it."""
    store = HashStore()
    assert over(store, "j") == ""
    publish_over(store, "j", "a: exit code 2")
    publish_over(store, "j", "b: no node came")
    assert over(store, "j") == "a: exit code 2" and over(store, "k") == ""


class EndsMeanwhile(HashStore):
    """A store of a job that fails and then succeeds when its end has been looked for once."""

    def check(self, keys: list[str]) -> bool:
        found = bool(super().check(keys))
        if keys[0].startswith(("ttp/over/", "ttp/succeeded/")):
            publish_over(self, "j", "a: exit code 2")
            publish_success(self, "j", "node-b")
        return found


def test_a_job_that_fails_and_then_succeeds_between_two_reads_has_not_succeeded() -> None:
    """A job that has failed on a node has not succeeded, whatever a later node publishes."""
    store = EndsMeanwhile()
    assert end(store, "j") == ("a: exit code 2", False)
    assert end(store, "j") == ("a: exit code 2", True)


def test_a_spare_node_that_looks_meanwhile_takes_the_job_for_failed() -> None:
    given_up = threading.Event()
    given_up.set()
    entry: Any = None  # is not renewed
    place = Endpoint("127.0.0.1", 1)
    view = waiting_spare._look(EndsMeanwhile(), run_id="j", entry=entry, place=place, given_up=given_up)
    assert (view.over, view.succeeded) == ("a: exit code 2", False)
