"""The agent's single turns, with a fake attempt: which nodes it waits for, which it restarts for, and what a signal at the end does."""

from __future__ import annotations

import contextlib
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from tests.unit.launch.test_agent import Ended, Led, Others, WaitingNodes, make_agent
from ttp.launch import agent as agent_module
from ttp.launch.endings import Drained
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous


class Watched(Led):
    """Also remembers that it was asked to end those that cannot leave."""

    def end_given_up(self) -> None:
        self.done.append("end_given_up")


@pytest.mark.parametrize("also", [{}, {"lost": "no heartbeat from node 1"}])
def test_a_node_that_has_succeeded_starts_again_with_another_only_once_that_one_waits(
    also: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher is silent for as long as it starts anew: it is not lost. A rendezvous before it has come would be torch's end of
    the job here."""
    monkeypatch.setattr(agent_module, "NEWS_LOOK_S", 0.0)
    nodes = WaitingNodes([0, 0, 0, 1])
    agent = make_agent(nodes)
    others = Others(restarts="b has failed", **also)
    result = agent._after_success(Ended(others), RunResult(state=WorkerState.SUCCEEDED))  # type: ignore[arg-type]
    assert result.state is WorkerState.HEALTHY and nodes.answers == [1] and others.published == ["succeeded"]


@pytest.mark.parametrize(("controller", "left"), [(True, True), (False, False)])
def test_ranks_make_room_for_a_node_only_where_a_controller_saves_them(controller: bool, left: bool) -> None:
    """Without one they would lose what they have trained."""
    agent = make_agent(WaitingNodes([1]))
    attempt: Any = Led([])
    attempt.has_controller = controller
    attempt.succeeded = lambda: False
    assert agent._drained_for_node(attempt) is left
    assert attempt.done == (["drain"] if left else [])


@pytest.mark.parametrize("not_left", ["", "TTP_OT (60 s) expired"])
def test_the_error_of_a_drained_node_has_why_its_ranks_have_not_left(
    not_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error has the reason; it leaves all the same."""
    monkeypatch.setattr(FreshStoreRendezvous, "drain", "a cable")
    agent = make_agent(WaitingNodes([0]))
    attempt: Any = Led([])
    attempt.has_controller, attempt.succeeded, attempt.drain = True, lambda: False, lambda why: not_left
    with pytest.raises(Drained) as caught:
        agent._leave_if_drained(attempt)
    assert "is drained: a cable" in str(caught.value)
    assert ("its ranks were killed before they had left" in str(caught.value)) is bool(not_left)
    assert not_left in str(caught.value)


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_that_cannot_leave_are_looked_for_until_one_has_failed(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the hold does that."""
    monkeypatch.setattr(agent_module, "NEWS_S", 0.0)
    agent = make_agent(WaitingNodes([1] if failed else [0]))
    attempt: Any = Watched([])
    attempt.failed = lambda: failed
    agent._attempt = attempt
    assert agent._monitor_workers(agent.get_worker_group()).state is WorkerState.HEALTHY
    assert attempt.done == (["hold"] if failed else ["end_given_up"])


class LastRound:
    """Stands in for a round at whose end a signal comes, once."""

    def __init__(self, came: BaseException | None) -> None:
        self.done: list[str] = []
        self.came = came

    def living(self) -> list[int]:
        return [0]

    def led_by_now(self) -> bool:
        return True

    def note_signal(self, name: str) -> None:
        self.done.append(f"signal {name}")

    def drain(self) -> None:
        self.done.append("drain")
        if self.came is not None:
            raise self.came

    def end_at_once(self) -> None:
        self.done.append("end_at_once")

    def close(self, patient: bool, notice: Any) -> None:
        self.done.append(f"close {'patiently' if patient else 'at once'}")


TERM = SignalException("SIGTERM", signal.SIGTERM)


@pytest.mark.parametrize(
    ("notice", "came", "done", "comes_out"),
    [
        ("", None, ["drain", "close patiently"], False),
        ("SIGTERM", None, ["signal SIGTERM", "drain", "close patiently"], False),
        ("", TERM, ["drain", "close patiently"], True),
        ("SIGTERM", TERM, ["signal SIGTERM", "drain", "close patiently"], False),
        ("", KeyboardInterrupt(), ["drain", "end_at_once", "close at once"], True),
        ("SIGTERM", KeyboardInterrupt(), ["signal SIGTERM", "drain", "end_at_once", "close at once"], False),
    ],
)  # fmt: skip
def test_whatever_signal_comes_at_the_end_the_attempt_is_closed_once_and_leaves_no_directory(
    notice: str, came: BaseException | None, done: list[str], comes_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes out at last, but where torch raises the notice itself."""
    ended: list[str] = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda self, *of, **more: ended.append("torch"))
    agent = make_agent()
    inner: Any = agent
    attempt = LastRound(came)
    inner._attempt = attempt
    inner._signals = SimpleNamespace(name=notice, forced=False, leaving=contextlib.nullcontext)
    inner._attempt_directory = SimpleNamespace(remove=lambda: ended.append("directory"))
    with pytest.raises(type(came)) if comes_out and came is not None else contextlib.nullcontext():
        agent._shutdown(signal.SIGTERM)
    assert attempt.done == done and ended == ["torch", "directory"]
    agent._shutdown(signal.SIGTERM)
    assert attempt.done == done and ended == ["torch", "directory", "torch"], "the attempt has ended"


@pytest.mark.parametrize("holding", [False, True])
def test_a_node_that_was_replaced_ends_its_workers_and_begins_anew_as_a_spare(
    holding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it learns that while it holds them. Nothing is published of it, as the job trains on."""

    class Replaced(Watched):
        was_replaced = not holding
        next = ""

        def failed(self) -> bool:
            return True

        def hold(self, why: str = "") -> None:
            super().hold()
            self.was_replaced = True

    attempt = Replaced([])
    monkeypatch.setattr(FreshStoreRendezvous, "become_spare", lambda self: attempt.done.append("become_spare"))
    agent = make_agent(WaitingNodes([0]))
    agent._attempt = attempt  # type: ignore[assignment]
    assert agent._monitor_workers(agent.get_worker_group()).state is WorkerState.HEALTHY
    assert attempt.done == ["hold"] * holding + ["end_workers", "become_spare"]
    assert attempt.next == "this node was lost, and another one has its place"


def test_an_attempt_that_has_recovered_is_watched_on() -> None:
    """Even where another process has failed in the same moment: torch would end the survivors for it, the next turn holds them."""

    class Recovered(Watched):
        def failed(self) -> bool:
            return True

        def hold(self, why: str = "") -> bool:  # type: ignore[override]
            super().hold()
            return True

    agent, attempt = make_agent(WaitingNodes([0])), Recovered([])
    agent._attempt = attempt  # type: ignore[assignment]
    assert agent._monitor_workers(agent.get_worker_group()).state is WorkerState.HEALTHY
    assert attempt.done == ["hold"]
