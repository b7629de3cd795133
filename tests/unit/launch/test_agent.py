"""The holding agent where torch's own breaks in the middle."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.unit.launch.test_fresh_store import FixedNodes
from tests.waiting import replace_sleep
from ttp.launch import agent as agent_module
from ttp.launch.agent import BROKEN_ROUNDS, HoldAgent
from ttp.launch.attempts.context import LaunchContext, Workers
from ttp.launch.endings import LOST_STARTS, NeverMet, NotEnded
from ttp.launch.links.controller_client import ControllerLink
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous, JobStore
from ttp.launch.report.exit_status import Recorded
from ttp.launch.watch.processes import exit_status


def no_link(address: str, job_id: str, pids: Mapping[int, int], workers: Workers) -> ControllerLink:
    raise ConnectionError("no controller in this test")


def make_agent(nodes: FixedNodes | None = None, max_restarts: int = 3) -> HoldAgent:
    handler = FreshStoreRendezvous(nodes or FixedNodes(HashStore(), 0, 1), "127.0.0.1", same_keys_every_round=False)
    spec = WorkerSpec(
        role="r",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint="sleep",
        args=("600",),
        max_restarts=max_restarts,
    )
    launching = LaunchContext(
        total_timeout_s=5.0, poll_s=0.002, open_link=no_link, request_shutdown=lambda address: None
    )
    return HoldAgent(spec, DefaultLogsSpecs(), launching)


def test_workers_of_an_attempt_that_broke_in_the_middle_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch forgets those that run when a later one cannot be started; another child of this process is left alone."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    started: list[subprocess.Popen[bytes]] = []

    def broken(self: LocalElasticAgent, worker_group: object) -> dict[int, Any]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        raise OSError("no process left for the second")

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", broken)
    for name in ("TTP_LAUNCHED", "TTP_ATTEMPT", "TTP_ROUND_ID", "TTP_START_ID", "TTP_ATTEMPT_DIR", "TTP_FORK_SERVER"):
        monkeypatch.setenv(name, "")  # put back afterwards
    try:
        with pytest.raises(OSError, match="no process left"):
            make_agent().run()
        assert started[0].wait() == -9
        assert exit_status(other.pid) is None
    finally:
        for child in (other, *started):
            child.kill()
            child.wait()


class LosesNodes(HashStore):
    """A store in which the answers of a node are missing for the first rounds: it died after the round was complete."""

    def __init__(self, missing: str, attempt_module: int) -> None:
        super().__init__()
        self.missing, self.rounds = missing, attempt_module

    def get(self, key: str) -> bytes:
        if self.missing in key and self.rounds:
            self.rounds -= 1
            raise DistStoreError("wait timeout after 60000ms")
        return bytes(super().get(key))


@pytest.mark.parametrize("missing", ["ttp/job_store/", "assigned_ranks"])
def test_a_node_lost_between_the_rendezvous_and_the_ranks_does_not_end_the_others(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet again; when that breaks every time, the error is the store's."""
    monkeypatch.setattr(agent_module, "REJOIN_PAUSE_S", 0.0)
    for attempt_module in (1, BROKEN_ROUNDS):
        nodes = FixedNodes(LosesNodes(missing, attempt_module), 0, 1, prefixed=False)
        agent = make_agent(nodes)
        group = agent.get_worker_group()
        if attempt_module == 1:
            agent._rendezvous(group)
            assert [worker.global_rank for worker in group.workers] == [0, 1] and nodes.rounds == 2
        else:
            with pytest.raises(DistStoreError):
                agent._rendezvous(group)
            assert nodes.rounds == BROKEN_ROUNDS
        assert nodes.calls == [], "the rendezvous stays open for the others"


def test_rounds_that_another_node_has_broken_do_not_make_this_one_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the answers of a node that has left since: that node was the cause."""
    monkeypatch.setattr(agent_module, "REJOIN_PAUSE_S", 0.0)
    nodes = FixedNodes(LosesNodes("assigned_ranks", BROKEN_ROUNDS + 1), 0, 1, prefixed=False)
    agent = make_agent(nodes)
    monkeypatch.setattr(agent._rendezvous_handler, "saw_departure", lambda: nodes.rounds == BROKEN_ROUNDS)
    agent._rendezvous(agent.get_worker_group())
    assert nodes.rounds == BROKEN_ROUNDS + 2


class Left:
    """Stands in for an attempt whose workers here have all exited on the controller's order."""

    cause_known = was_replaced = False

    def lost_ranks_elsewhere(self) -> bool:
        return self.cause_known

    def failed(self) -> bool:
        return True

    def end_given_up(self) -> None: ...
    def hold(self, why: str = "") -> None: ...

    def left_for_others(self) -> bool:
        return True

    def grace_s(self) -> float:
        return 0.0

    def end_workers(self, death_signal: int, grace_s: float) -> None: ...

    def learn(self, statuses: Mapping[int, int], failed: bool) -> None: ...


class WaitingNodes(FixedNodes):
    """Says at each question how many nodes wait."""

    def __init__(self, answers: list[int]) -> None:
        super().__init__(HashStore(), 0, 2)
        self.answers = answers

    def num_nodes_waiting(self) -> int:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.mark.parametrize(
    ("answers", "cause_known", "counts"),
    [([0, 0, 1], False, False), ([0], False, True), ([0, 1], True, True), ([1], True, False)],
    ids=["seen late", "none waits", "a rank was lost", "seen"],
)
def test_a_restart_for_another_node_does_not_count_even_if_its_ranks_left_first(
    answers: list[int], cause_known: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node's agent drained its ranks first. No such news is waited for where the controller has named a lost rank as the cause."""
    monkeypatch.setattr(agent_module, "NEWS_S", 0.3 if answers == [0] else 30.0)
    monkeypatch.setattr(Left, "cause_known", cause_known)
    failed = RunResult(state=WorkerState.FAILED)
    monkeypatch.setattr(HoldAgent, "_ask_torch", lambda self, group: failed)
    monkeypatch.setattr(HoldAgent, "_put_cause_first", lambda self, result, attempt: result)
    judged: list[RunResult] = []
    monkeypatch.setattr(HoldAgent, "_decide_restart", lambda self, attempt, result, restarts: judged.append(result))
    agent = make_agent(WaitingNodes(answers))
    agent._attempt = Left()  # type: ignore[assignment]
    result = agent._monitor_workers(agent.get_worker_group())
    assert (result.state is WorkerState.FAILED) == counts and bool(judged) == counts


def test_a_node_whose_worker_has_not_ended_leaves_before_it_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is another node's then: two workers would share a device. torch gives up a worker in uninterruptible sleep."""
    agent = make_agent()
    left: list[str] = []
    monkeypatch.setattr(agent._rendezvous_handler, "leave", left.append)
    with subprocess.Popen(["sleep", "600"]) as child:
        agent._pids = {5: child.pid}
        with pytest.raises(
            NotEnded, match=rf"rank 5 of the last attempt did not end after SIGKILL \(pids {child.pid}\)"
        ):
            agent._rendezvous(agent.get_worker_group())
        assert len(left) == 1 and str(child.pid) in left[0]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        agent._rendezvous(agent.get_worker_group())
    assert len(left) == 1


def test_the_rendezvous_must_give_fresh_stores() -> None:
    """torch's handler alone would fail the first restart."""
    spec = WorkerSpec(role="r", local_world_size=1, rdzv_handler=FixedNodes(HashStore(), 0, 1), entrypoint="true")
    launching = LaunchContext(
        total_timeout_s=5.0, poll_s=0.002, open_link=no_link, request_shutdown=lambda address: None
    )
    with pytest.raises(TypeError, match="needs a FreshStoreRendezvous, got FixedNodes"):
        HoldAgent(spec, DefaultLogsSpecs(), launching)


class LostStart(Left):
    """Stands in for an attempt whose agents did not reach each other."""

    fault = None

    def __init__(self, lost: str, unreached: str, had_controller: bool = False) -> None:
        self.lost_node, self.unreached_store, self.had_controller = lost, unreached, had_controller

    def living(self) -> list[int]:
        return [0, 1]

    def drain(self, why: str) -> None: ...


UNREACHED = "the workers' store on node 0, a:41234, (timed out)"


@pytest.mark.parametrize(
    ("lost", "unreached", "most"),
    [("no heartbeat from node 1", "", 2 * LOST_STARTS), ("", UNREACHED, LOST_STARTS)],
    ids=["the others", "the node that is cut off"],
)
def test_attempts_whose_nodes_never_reach_each_other_end(
    lost: str, unreached: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not counted as restarts. The node that cannot reach the workers' store leaves first; an attempt whose nodes met begins
    the count anew."""
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, group: None)
    agent = make_agent(FixedNodes(HashStore(), 0, 1))
    group = agent.get_worker_group()

    def start(attempt: LostStart) -> None:
        agent._attempt = attempt  # type: ignore[assignment]
        agent._stop_workers(group)
        agent._rendezvous(group)

    for _ in range(most - 1):
        start(LostStart(lost, unreached))
    start(LostStart("", "", had_controller=True))
    for _ in range(most - 1):
        start(LostStart(lost, unreached))
    with pytest.raises(
        NeverMet, match=rf"{most} attempts in a row.*{'a:41234' if unreached else 'node 1'}.*--local-addr"
    ):
        start(LostStart(lost, unreached))


class Others:
    """Stands in for the way to the other nodes."""

    over = restarts = lost = failed = ""
    all_have_succeeded = False

    def __init__(self, **said: str) -> None:
        self.published: list[str] = []
        vars(self).update(said)

    def publish_succeeded(self) -> None:
        self.published.append("succeeded")

    def publish_restart(self, words: str) -> None:
        self.published.append("restarts")

    def publish_failed(self, words: str) -> None:
        self.published.append("failed")


class Ended(Left):
    """Stands in for a round whose workers have ended."""

    had_controller = True

    def __init__(self, peers: Others) -> None:
        self.peers = peers
        self.raised: dict[int, Recorded] = {}
        self.next = ""

    def outcome(self) -> str:
        return "rank 0: exit code 3"

    refused = ""
    left_on_a_notice = True

    ends_the_job = False

    def refusal(self, new_step: bool) -> str:
        return "" if new_step and not self.ends_the_job else self.refused

    def made_a_step(self, ask: Callable[[], bool | None]) -> bool | None:
        return None if self.left_on_a_notice else ask()

    took_s = 1.0

    def lasted_s(self) -> float:
        return self.took_s


class StaticNodes(FixedNodes):
    """Says that its backend is torchrun's static one."""

    def __init__(self) -> None:
        super().__init__(HashStore(), 0, 2)

    def get_backend(self) -> str:
        return "static"


def test_a_restart_for_another_node_and_one_of_its_own_are_counted_in_one_place() -> None:
    """A static job counts another node's restart as its own. When its own workers fail then, no restart remains, and
    the others learn of it."""
    agent = make_agent(StaticNodes(), max_restarts=1)
    went = agent._after_success(Ended(Others(restarts="b has failed")), RunResult(state=WorkerState.SUCCEEDED))  # type: ignore[arg-type]
    assert went.state is WorkerState.UNHEALTHY
    agent._remaining_restarts -= 1  # as torch's loop does for it
    attempt = Ended(Others())
    agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 1)  # type: ignore[arg-type]
    assert attempt.peers.published == ["failed"] and attempt.next == "no restart left (of 1)"


def test_restarts_are_numbered_as_torch_counts_them() -> None:
    agent = make_agent(max_restarts=2)
    for number in (1, 2):
        attempt = Ended(Others())
        agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 2)  # type: ignore[arg-type]
        assert attempt.peers.published == ["restarts"] and attempt.next == f"restart {number} of 2"
        agent._remaining_restarts -= 1


def test_a_restart_that_depends_on_this_nodes_health_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, attempt = make_agent(max_restarts=2), Ended(Others())
    monkeypatch.setattr(agent.seat, "condition", lambda: "; if its disk works")
    agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 2)  # type: ignore[arg-type]
    assert attempt.next == "restart 1 of 2; if its disk works"


def test_nothing_is_started_again_when_the_job_has_failed_on_another_node() -> None:
    """It cannot go on without that node, which has closed the rendezvous."""
    agent = make_agent(max_restarts=2)
    attempt = Ended(Others(failed="b has failed (rank 0: signal SIGKILL)"))
    agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 2)  # type: ignore[arg-type]
    assert agent._remaining_restarts == 0 and attempt.peers.published == []
    assert (
        attempt.next == "no restart: b has failed (rank 0: signal SIGKILL)"
        and attempt.next[12:] in agent.failure_reason
    )


@pytest.mark.parametrize(
    ("said", "left", "why"),
    [
        ({"restarts": "b has failed"}, 0, "b has failed, and this node has no restart left"),
        ({"lost": "no heartbeat from node 1"}, 3, "no heartbeat from node 1"),
        ({}, 3, "workers on other nodes did not finish within 0 s"),
        ({"over": "b has failed for good"}, 3, "b has failed for good"),
    ],
)
def test_a_node_that_has_succeeded_says_why_it_waits_for_no_other(
    said: dict[str, str], left: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and it ends at once unless it learns nothing."""
    monkeypatch.setattr(agent_module, "OTHERS_S", 0.3)
    logger = logging.getLogger(
        "ttp.launch"
    )  # which the launcher's own set-up, in another test, may have given a handler
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    agent = make_agent(StaticNodes())
    agent._remaining_restarts = left
    result = RunResult(state=WorkerState.SUCCEEDED)
    assert agent._after_success(Ended(Others(**said)), result) is result  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        f"all workers on this node succeeded; not waiting for other nodes: {why}"
    ]


class Led(Left):
    """Stands in for a round whose workers live under a controller; remembers what was asked of it."""

    had_controller = has_controller = True
    fault = None
    lost_node = unreached_store = ""

    def __init__(self, settling: list[bool] | None = None) -> None:
        self.done: list[str] = []
        self.answers = settling or []

    def failed(self) -> bool:
        return False

    def living(self) -> list[int]:
        return [] if "drain" in self.done else [0, 1]

    def settling(self) -> bool:
        return self.answers.pop(0)

    def hold(self, why: str = "") -> None:
        self.done.append("hold")

    def drain(self, why: str) -> None:
        self.done.append("drain")

    def end_workers(self, death_signal: int, grace_s: float) -> None:
        self.done.append("end_workers")

    def learn(self, statuses: Mapping[int, int], failed: bool) -> None:
        self.done.append(f"learn {dict(statuses)} {failed}")


def test_a_node_that_torch_alone_has_seen_wait_is_made_room_for_by_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came between this agent's check and torch's, in one tick: the ranks save and exit, and are not held for all of TTP_OT."""
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, group: None)
    agent = make_agent(WaitingNodes([0, 1]))
    attempt = Led()
    agent._attempt = attempt  # type: ignore[assignment]
    group = agent.get_worker_group()
    assert agent._monitor_workers(group).state is WorkerState.HEALTHY
    assert agent._rendezvous_handler.num_nodes_waiting() == 1, "as torch sees it then"
    agent._stop_workers(group)
    assert attempt.done == ["drain"]


def test_torch_is_not_asked_about_a_worker_that_has_begun_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would reap it and end its peers at once; functions (`--run-path`) are asked about all the time, but for that moment."""
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=-9, error_file="/nonexistent")
    failed = RunResult(state=WorkerState.FAILED, failures={1: failure})
    results = [RunResult(state=WorkerState.HEALTHY), failed]
    monkeypatch.setattr(HoldAgent, "_ask_torch", lambda self, group: results.pop(0))
    monkeypatch.setattr(HoldAgent, "_put_cause_first", lambda self, result, attempt: result)
    monkeypatch.setattr(HoldAgent, "_decide_restart", lambda self, attempt, result, restarts: None)
    agent = make_agent(WaitingNodes([0]))
    agent._always_ask_torch = True
    attempt = Led(settling=[False, True, False])
    agent._attempt = attempt  # type: ignore[assignment]
    group = agent.get_worker_group()
    assert agent._monitor_workers(group).state is WorkerState.HEALTHY and attempt.done == ["learn {} False"]
    assert agent._monitor_workers(group).state is WorkerState.HEALTHY and len(results) == 1
    assert agent._monitor_workers(group) is failed and attempt.done[-1] == "learn {1: -9} True"


@pytest.mark.parametrize(
    ("new_step", "took_s", "final"),
    [(False, 1.0, True), (False, 3600.0, True), (True, 1.0, False), (True, 3600.0, False), (None, 1.0, False)],
)
def test_a_refusal_is_final_however_long_the_attempt_took_if_it_made_no_new_step(
    new_step: bool | None, took_s: float, final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later it is a failure as any other: the configuration was good enough to train with."""
    agent = make_agent(max_restarts=3)
    monkeypatch.setattr(agent._rendezvous_handler, "_job_store", JobStore("h", 1, 0))
    monkeypatch.setattr(agent._rendezvous_handler, "job_store_has", lambda key: new_step)
    attempt = Ended(Others())
    attempt.refused, attempt.left_on_a_notice = "exit code 2 means an invalid command line or configuration", False
    attempt.took_s, attempt.had_controller = took_s, False
    agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 3)  # type: ignore[arg-type]
    assert attempt.peers.published == (["failed"] if final else ["restarts"])
    assert (agent._remaining_restarts == 0) is final
    assert attempt.next == (
        "no restart: exit code 2 means an invalid command line or configuration" if final else "restart 1 of 3"
    )


@pytest.mark.parametrize("new_step", [False, True, None])
def test_what_ends_the_job_is_final_after_new_steps_too(new_step: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent(max_restarts=3)
    monkeypatch.setattr(agent._rendezvous_handler, "_job_store", JobStore("h", 1, 0))
    monkeypatch.setattr(agent._rendezvous_handler, "job_store_has", lambda key: new_step)
    attempt = Ended(Others())
    attempt.refused, attempt.ends_the_job, attempt.left_on_a_notice = "ReplicasDiffer ends the job", True, False
    agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 3)  # type: ignore[arg-type]
    assert agent._remaining_restarts == 0 and attempt.peers.published == ["failed"]
    assert attempt.next == "no restart: ReplicasDiffer ends the job"


def test_an_attempt_is_reported_before_the_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait may be half a minute, and whoever reads wants to know at once."""
    done: list[str] = []
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, group: done.append("the attempt is closed"))
    replace_sleep(monkeypatch, lambda pause_s: done.append(f"waits {pause_s:g} s"))
    agent = make_agent(max_restarts=3)
    monkeypatch.setattr(agent._rendezvous_handler, "_job_store", JobStore("h", 1, 0))
    monkeypatch.setattr(agent._rendezvous_handler, "job_store_has", lambda key: False)
    attempt = Ended(Others())
    attempt.left_on_a_notice = False
    agent._decide_restart(attempt, RunResult(state=WorkerState.FAILED), 3)  # type: ignore[arg-type]
    agent._stop_workers(agent.get_worker_group())
    agent._stop_workers(agent.get_worker_group())
    assert done == ["the attempt is closed", "waits 1 s", "the attempt is closed", "waits 0 s"]
