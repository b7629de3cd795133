"""A keeper that ends while it carries out an order: another one does, and copies that cannot be saved stay for the next attempt."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.unit.copies.test_keeper import Node, check, copy, node
from ttp.copies.memory import own, received
from ttp.launch.attempts.copies import Copies, KeeperLost

__all__ = ["node"]
"""A fixture that pytest uses by itself: an agent, and the ranks that the test plays."""


@pytest.mark.parametrize(("what", "done"), [("write", False), ("publish", True)])
def test_a_keeper_that_is_killed_while_it_saves_a_step_costs_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, what: str, done: bool
) -> None:
    """Before it has begun, or when all is done but its answer."""
    first = node.attach(0, ("a", "b"))
    assert copy(first, 3, 1, ("a", "b"))["why"] == ""
    real, killed = node.copies._order, list[str]()

    def order(request: Any) -> dict[str, Any]:
        if request["do"] == what and not killed:
            killed.append(what)
            if done:
                real(request)
            node.kill_keeper()
        return real(request)

    monkeypatch.setattr(node.copies, "_order", order)
    check(node.begin(1, [0], store=HashStore()), 3)
    assert killed == [what] and sorted(path.name for path in node.folder.glob("iter_*")) == ["iter_0000003"]
    first.close()


class Losing(Copies):
    """An agent whose keepers, which the test plays, have copies of rank 1 and end while they write."""

    def __init__(self, cause: OSError | None) -> None:
        super().__init__()
        self.cause, self.started, self.ordered = cause, 0, list[str]()
        self._owner.obtain(received(1), 4096, 4096)
        self._owner.obtain(own(0), 4096, 4096)

    def _start(self, server: Any) -> None:
        self.started += 1

    def _order(self, order: Any) -> dict[str, Any]:
        self.ordered.append(order["do"])
        if order["do"] == "offers":
            offer = {"name": received(1), "rank": 1, "attempt": 0, "step": 78, "slot": 0, "groups": ["g"]}
            return {"offers": [offer], "groups": {"0": ["g"]}, "directories": ["/checkpoints"], "newest": 70}
        raise KeeperLost("the copy keeper was lost") from self.cause


def begin(agent: Copies, attempt: int, ranks: list[int]) -> set[str]:
    """Begin an attempt that saves nothing; return what memory is there then."""
    assert agent.begin("job", attempt, HashStore(), 0, 1, "host", None, ranks) is None
    return set(agent._owner.all())


def test_copies_that_cannot_be_saved_stay_while_the_next_attempt_needs_the_same_memory() -> None:
    """Its ranks would be refused what others hold."""
    agent = Losing(None)
    begin(agent, 0, [0])
    agent._owner.obtain(received(1), 4096, 4096)
    assert begin(agent, 1, [0]) == {own(0), received(1)}
    assert begin(agent, 2, [0]) == {own(0), received(1)}
    assert begin(agent, 3, [0, 2]) == {own(0)}
    agent.close()


def test_an_agent_has_each_order_carried_out_by_one_more_keeper_only(caplog: pytest.LogCaptureFixture) -> None:
    agent = Losing(None)
    begin(agent, 1, [0])
    assert agent.ordered == ["offers", "write", "write", "discard", "discard"]
    assert agent.started == 5, "one that is known to be lost is followed before its order is given"
    assert "the copy keeper was lost; starting another one" in caplog.messages
    assert "step 78 could not be saved from copies in /checkpoints: the copy keeper was lost" in caplog.messages
    agent.close()


def test_a_keeper_that_gives_no_answer_in_time_is_not_followed_by_another_one() -> None:
    """The other nodes have waited as long as they do."""
    agent = Losing(TimeoutError())
    begin(agent, 1, [0])
    assert agent.ordered == ["offers", "write", "discard"]
    agent.close()


def test_an_agent_without_copies_starts_no_keeper() -> None:
    agent = Losing(None)
    agent._owner.drop({own(0), received(1)})
    begin(agent, 1, [0])
    assert agent.started == 0 and agent.ordered == []
    agent.close()
