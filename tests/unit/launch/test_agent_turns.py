"""The agent's single turns, with a round of the test: whom it waits for, whom it makes room for, and what a signal at the end leaves."""

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


class Watched(Led):
    """Also remembers that it was asked to end those that cannot leave."""

    def end_given_up(self) -> None:
        self.done.append("end_given_up")


@pytest.mark.parametrize("also", [{}, {"lost": "nothing was heard of node 1"}])
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
    assert result.state is WorkerState.HEALTHY and nodes.answers == [1] and others.told == ["succeeded"]


@pytest.mark.parametrize(("controller", "left"), [(True, True), (False, False)])
def test_ranks_make_room_for_a_node_only_where_a_controller_saves_them(controller: bool, left: bool) -> None:
    """Without one they would lose what they have trained."""
    agent = make_agent(WaitingNodes([1]))
    round_: Any = Led([])
    round_.has_controller = controller
    round_.succeeded = lambda: False
    assert agent._makes_room(round_) is left
    assert round_.done == (["take_leave"] if left else [])


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_that_cannot_leave_are_looked_for_until_one_has_failed(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the hold does that."""
    monkeypatch.setattr(agent_module, "NEWS_S", 0.0)
    agent = make_agent(WaitingNodes([1] if failed else [0]))
    round_: Any = Watched([])
    round_.failed = lambda: failed
    agent._round = round_
    assert agent._monitor_workers(agent.get_worker_group()).state is WorkerState.HEALTHY
    assert round_.done == (["hold"] if failed else ["end_given_up"])


class LastRound:
    """Stands in for a round at whose end a signal comes, once."""

    def __init__(self, came: BaseException | None) -> None:
        self.done: list[str] = []
        self.came = came

    def living(self) -> list[int]:
        return [0]

    def led_by_now(self) -> bool:
        return True

    def told_to_end(self, name: str) -> None:
        self.done.append(f"told {name}")

    def take_leave(self) -> None:
        self.done.append("take_leave")
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
        ("", None, ["take_leave", "close patiently"], False),
        ("SIGTERM", None, ["told SIGTERM", "take_leave", "close patiently"], False),
        ("", TERM, ["take_leave", "close patiently"], True),
        ("SIGTERM", TERM, ["told SIGTERM", "take_leave", "close patiently"], False),
        ("", KeyboardInterrupt(), ["take_leave", "end_at_once", "close at once"], True),
        ("SIGTERM", KeyboardInterrupt(), ["told SIGTERM", "take_leave", "end_at_once", "close at once"], False),
    ],
)  # fmt: skip
def test_whatever_signal_comes_at_the_end_the_start_is_closed_once_and_leaves_no_directory(
    notice: str, came: BaseException | None, done: list[str], comes_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes out at last, but where torch raises the notice itself."""
    ended: list[str] = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda self, *of, **more: ended.append("torch"))
    agent = make_agent()
    inner: Any = agent
    round_ = LastRound(came)
    inner._round = round_
    inner._notices = SimpleNamespace(name=notice, insisted=False, leaving=contextlib.nullcontext)
    inner._attempt_directory = SimpleNamespace(remove=lambda: ended.append("directory"))
    with pytest.raises(type(came)) if comes_out and came is not None else contextlib.nullcontext():
        agent._shutdown(signal.SIGTERM)
    assert round_.done == done and ended == ["torch", "directory"]
    agent._shutdown(signal.SIGTERM)
    assert round_.done == done and ended == ["torch", "directory", "torch"], "the start has ended"
