"""Leftover ranks that are ended, without processes: whom a signal goes to, and whose reason still holds by then."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.launch.attempts import leftover_ranks
from ttp.launch.attempts.leftover_ranks import LeftoverRanks, StuckRanks


class Node:
    """Two ranks: 0 is its worker, process 70; 1 is process 171, started by the shell 71."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.living = [0, 1]
        self.behind = {1: 171}
        self.stopped: set[int] = set()
        self.silent: frozenset[int] | None = frozenset()
        self.asked = 0
        self.killed: list[int] = []
        self.signalled: list[int] = []
        self.on_stacks: Callable[[], None] = lambda: None
        self.ended: set[int] = set()
        self.vacant: set[int] = set()
        shells: Any = SimpleNamespace(
            pids={1: 171}, running=lambda: dict(self.behind), signal=lambda ranks, number: self.signalled.extend(ranks)
        )
        watch: Any = SimpleNamespace(living=lambda: list(self.living), wait_all=self.wait_all)
        client: Any = SimpleNamespace(
            connected=True, given_up=self.given_up, log_dir=Path("/log"), sent_away_monotonic_s=None
        )
        self.client = client
        self.leftover_ranks = LeftoverRanks({0: 70, 1: 71}, shells, watch, client, self.ended, lambda: set(self.vacant))

    def wait_all(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return not [rank for rank in self.living if rank not in self.ended]

    def given_up(self) -> frozenset[int] | None:
        self.asked += 1
        return self.silent

    def looks(self, later_s: float = 2.0) -> None:
        """Look for ranks that cannot leave, so many seconds later; the controller has sent all away at 1000 s."""
        self.now += later_s
        self.leftover_ranks.end_given_up(1000.0)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    clock = SimpleNamespace(monotonic=lambda: made.now)

    def signal_workers(pids: Iterable[int], number: signal.Signals) -> None:
        assert number is signal.SIGKILL
        made.killed.extend(pids)

    def ask(log_dir: Path, ranks: Mapping[int, int]) -> None:
        made.on_stacks()

    monkeypatch.setattr(leftover_ranks, "time", clock)
    monkeypatch.setattr(leftover_ranks, "StuckRanks", lambda asks: StuckRanks(asks, clock=lambda: made.now))
    monkeypatch.setattr(leftover_ranks, "signal_workers", signal_workers)
    monkeypatch.setattr(leftover_ranks, "ask", ask)
    monkeypatch.setattr(leftover_ranks, "is_stopped", lambda pid: pid in made.stopped)
    return made


def test_a_rank_behind_a_shell_is_ended_and_its_shell_leaves_by_itself(node: Node) -> None:
    """It has the rank's exit code to hand on. A stopped shell could not."""
    node.silent = frozenset({0, 1})
    node.looks(0.0)
    assert node.killed == []
    node.looks()
    assert node.killed == [70] and node.signalled == [1] and node.ended == {0, 1}


def test_a_stopped_shell_is_ended_with_its_rank(node: Node) -> None:
    node.stopped = {70, 171, 71}
    node.looks(0.0)
    assert node.killed == [70, 71] and node.signalled == [1]


def test_a_rank_that_was_silent_and_has_ended_meanwhile_leaves_its_shell_alone(node: Node) -> None:
    """While the stacks were written. The shell may clean up."""
    node.silent = frozenset({0, 1})
    node.on_stacks = node.behind.clear
    node.looks(0.0)
    node.looks()
    assert node.killed == [70] and node.signalled == [] and node.ended == {0}


def test_a_rank_that_crashes_as_it_writes_its_stacks_counts_as_killed_by_the_launcher(node: Node) -> None:
    """Its interpreter was not held any more: the handler may crash then. No report names it as a failure of its own."""
    node.silent = frozenset({0, 1})
    node.on_stacks = lambda: node.living.remove(0)
    node.looks(0.0)
    node.looks()
    assert node.ended == {0, 1}


def test_a_rank_that_goes_on_while_the_stacks_are_written_is_not_ended(node: Node) -> None:
    node.stopped = {70, 171}
    node.on_stacks = lambda: node.stopped.discard(70)
    node.looks(0.0)
    assert node.killed == [] and node.signalled == [1] and node.ended == {1}


def test_who_was_ended_is_not_ended_again(node: Node) -> None:
    """It takes a moment until its end is seen."""
    node.living, node.stopped = [0], {70}
    node.looks(0.0)
    node.looks()
    node.leftover_ranks.end_all_stopped(0.0)
    node.leftover_ranks.end_stopped()
    assert node.killed == [70]


def test_once_the_controller_has_answered_it_is_not_asked_again_and_no_other_rank_is_ended(node: Node) -> None:
    """Who is stopped later may go on."""
    node.looks(0.0)
    node.looks()
    assert node.asked == 1
    node.stopped = {70, 171}
    for _ in range(3):
        node.looks()
    assert node.asked == 1 and node.killed == []


def test_a_controller_that_does_not_say_that_all_is_decided_is_asked_again_until_it_is_late(node: Node) -> None:
    """Then those that are stopped are ended, and it is not asked any more."""
    node.silent = None
    for _ in range(3):
        node.looks()
    asked = node.asked
    assert asked >= 2
    node.stopped = {70, 171}
    node.looks(leftover_ranks.ANSWERS_S)
    assert node.asked == asked and node.killed == [70] and node.signalled == [1]


def test_a_process_that_holds_nothing_is_ended_soon_after_the_order_to_exit(node: Node) -> None:
    """It was started in a lost rank's place, and no controller leads it: it receives no order. The other one is waited for."""
    node.behind, node.silent = {}, None
    node.vacant, node.client.sent_away_monotonic_s = {0}, node.now
    assert not node.leftover_ranks.wait_or_kill(grace_s=5.0, left_s=5.0)
    assert node.killed == [70] and node.ended == {0} and node.now == pytest.approx(1005.0)


@pytest.mark.parametrize("sent", [None, 1000.0])
def test_a_process_that_holds_nothing_is_waited_for_while_it_may_be_needed(node: Node, sent: float | None) -> None:
    """Without an order to exit, or within the second that the others take."""
    node.behind, node.vacant, node.client.sent_away_monotonic_s = {}, {0}, sent
    assert not node.leftover_ranks.wait_or_kill(grace_s=0.9, left_s=0.9)
    assert node.killed == []
