"""What nodes that go leave in the store."""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]

from ttp.launch.rendezvous.departures import left_after, over, tell_left, tell_over


def test_those_that_have_left_are_told_in_order_to_whoever_has_not_heard_of_them() -> None:
    """Each job has its own."""
    store = HashStore()
    assert left_after(store, "j", 0) == ()
    assert [tell_left(store, "j", words) for words in ("a: x", "b: y")] == [1, 2]
    assert left_after(store, "j", 0) == ("a: x", "b: y") and left_after(store, "j", 1) == ("b: y",)
    assert left_after(store, "j", 2) == () == left_after(store, "other", 0)


def test_one_that_has_not_finished_its_words_is_heard_later() -> None:
    """It has its number before its words are there."""
    store = HashStore()
    store.add("ttp/left/j", 1)
    tell_left(store, "j", "b: y")
    assert left_after(store, "j", 0) == ()
    store.set("ttp/left/j/1", "a: x")
    assert left_after(store, "j", 0) == ("a: x", "b: y")


def test_the_first_reason_why_the_job_is_over_stays() -> None:
    """What comes later follows from it."""
    store = HashStore()
    assert over(store, "j") == ""
    tell_over(store, "j", "a: exit code 2")
    tell_over(store, "j", "b: nobody came")
    assert over(store, "j") == "a: exit code 2" and over(store, "k") == ""
