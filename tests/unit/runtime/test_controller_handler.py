"""The controller's handler, with a machine of the test: which stream a message goes to, in which order, and what ends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.controller import handler as handlers
from ttp.controller.core.facts.events import (
    ControllerSettings,
    Effect,
    Event,
    Finish,
    HeartbeatBatch,
    Journal,
    Received,
    Send,
    StreamClosed,
    Tell,
    TurnAway,
)
from ttp.controller.core.facts.state import Stage
from ttp.controller.handler import (
    Addressed,
    Handler,
    RankLink,
    StatusAsked,
    StopAsked,
    StopIfNeverUsed,
    StreamEnded,
    StreamMessages,
)
from ttp.errors import ProtocolError
from ttp.proto.codec import CodecError
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    Downward,
    Exit,
    Finished,
    Freeze,
    Heartbeat,
    KeepAlive,
    Phase,
    Published,
    Registration,
    Thaw,
    Upward,
    WorkerExit,
    WriteOrder,
)

DEATH = WorkerExit(2, 102, "signal SIGKILL", 0.0)
CAUSE = Cause(CauseKind.EXITED, (2,), "signal SIGKILL")
ORDER = WriteOrder(1, 3, "/c", "iter_0000003_tmp_1_1_1", ())


class Link(RankLink):
    """One stream: what is done with it, in its order."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.cannot_carry: type = type(None)

    def send(self, messages: Sequence[Addressed]) -> None:
        if any(isinstance(message, self.cannot_carry) for _, message in messages):
            raise CodecError("too long")
        self.done.append(list(messages))

    def reject(self, text: str) -> None:
        self.done.append(text)

    def finish(self) -> None:
        self.done.append("finishes")


class Bench:
    """A handler whose machine orders what the test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.received: list[Event] = []
        self.orders: Callable[[Event], Sequence[Effect]] = lambda event: ()
        self.stage = Stage.RUNNING
        self.refuses = ""
        """Why no process that registers is the one in its rank's place; empty: each is."""
        self.leads_earlier_ones = False
        self.generation = 0
        self.registered: list[Registration | None] = [None] * 4
        self.logged: list[str] = []
        self.status: list[Any] = []
        journal: Any = SimpleNamespace(
            wants_state=False, starting_state=lambda state: None, input=lambda now, event: None,
            write_event=lambda unix_s, monotonic_s, event, fields: self.logged.append(event),
        )  # fmt: skip
        settings = ControllerSettings("job", 1, 4, heartbeat_s=1.0, lease_s=3.0)
        self.handler = Handler(
            settings,
            journal,
            look_for=lambda address: None,
            supersede=lambda address, generation, look: None,
            clock=lambda: self.now,
        )

    def initial(self, settings: ControllerSettings, now: float) -> Any:
        return self._state()

    def _state(self) -> Any:
        table = [SimpleNamespace(registration=known) for known in self.registered]
        return SimpleNamespace(stage=self.stage, generation=self.generation, members=SimpleNamespace(table=table))

    def refusal(self, state: Any, message: Registration) -> str:
        return self.refuses

    def leads_earlier(self, state: Any, message: Registration) -> bool:
        return self.leads_earlier_ones

    def next_deadline(self, state: Any) -> None:
        return None

    def transition(self, state: Any, event: Event, now: float) -> tuple[Any, Sequence[Effect]]:
        self.received.append(event)
        return self._state(), self.orders(event)

    def receives(self, link: Link, *messages: Upward) -> None:
        self.handler.take(StreamMessages(((link, messages),)))

    def comes(self, *ranks: int) -> Link:
        """Return a new stream on which these ranks have registered."""
        link = Link()
        self.receives(link, *(Registration(rank, 4, "host", 100 + rank, (), 0, ("/c",), "{}") for rank in ranks))
        return link

    def flushes(self, later_s: float = 0.0) -> None:
        """Advance, so many seconds later."""
        due = self.handler.due()
        self.now += later_s
        self.handler.advance(due)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(handlers, "machine", made)
    made.handler.begin()
    return made


def test_what_was_gathered_for_a_stream_goes_out_before_it_is_ended_for_a_new_one(bench: Bench) -> None:
    """In one input: rank 0 is written to, and comes anew."""
    old = bench.comes(0)
    bench.orders = lambda event: (Send((0,), Thaw(1)),) if event == Received(DEATH) else ()
    new = Link()
    bench.receives(new, DEATH, Registration(0, 4, "host", 100, (), 0, ("/c",), "{}"))
    bench.flushes()
    assert old.done == [[((0,), Thaw(1))], "finishes"] and new.done == []


def test_the_end_of_a_process_that_was_turned_away_is_not_that_of_the_one_in_its_place(bench: Bench) -> None:
    """Refused as it registers, or sent away when it was known that others are in their places; and the agents do not overhear that."""
    agent, here = Link(), bench.comes(2, 3)
    bench.registered[3] = Registration(3, 4, "host", 103, (), 0, ("/c",), "{}")
    bench.receives(agent, AgentHello("host", (2, 3), (102, 103)))
    bench.orders = lambda event: (
        (TurnAway(((1, 101), (2, 102)), "its place is another's"),) if event == Received(DEATH) else ()
    )
    bench.receives(agent, DEATH)
    bench.flushes()
    assert here.done == [[((2,), Exit(75, "its place is another's"))]] and not agent.done
    bench.orders = lambda event: ()
    bench.refuses = "other processes are there"
    bench.receives(Link(), Registration(3, 4, "lost", 99, (), 0, ("/c",), "{}"))
    ends = [
        WorkerExit(1, 101, "x", 0.0),
        WorkerExit(2, 102, "exiting", 0.0),
        WorkerExit(2, 102, "exit code 75", 0.0),
        WorkerExit(3, 99, "x", 0.0),
    ]
    before = len(bench.received)
    bench.receives(agent, *ends)
    assert len(bench.received) == before
    bench.registered[2] = Registration(2, 4, "host", 102, (), 0, ("/c",), "{}")  # another host's process of that number
    bench.receives(agent, WorkerExit(3, 103, "x", 0.0))
    bench.receives(agent, ends[2])
    assert len(bench.received) == before + 2


def test_the_end_of_a_process_on_another_node_is_not_that_of_the_one_with_the_same_pid(bench: Bench) -> None:
    """A lost node comes back, and each node counts its own pids. Where no agent has the name that the rank registered, any is believed."""
    lost, spare, unnamed = Link(), Link(), Link()
    bench.registered[2] = Registration(2, 4, "spare", 102, (), 0, ("/c",), "{}")
    bench.receives(lost, AgentHello("lost", (2,), (102,)), DEATH)
    assert bench.received[-1] == Received(DEATH)
    bench.receives(spare, AgentHello("spare", (2,), (102,)))
    bench.received.clear()
    bench.receives(lost, DEATH)
    assert not bench.received
    bench.receives(spare, DEATH)
    bench.receives(unnamed, DEATH)
    assert bench.received == [Received(DEATH)] * 2


@pytest.mark.parametrize("rank", [-1, 4])
def test_the_end_of_a_rank_that_the_job_does_not_have_is_the_machines_to_refuse(bench: Bench, rank: int) -> None:
    death = WorkerExit(rank, 103, "exit code 1", 0.0)
    bench.receives(Link(), death)
    bench.handler._turned_away.add((rank, 103))
    bench.receives(Link(), death)
    assert bench.received == [Received(death)] * 2


def test_a_process_that_has_not_its_ranks_place_exits_and_nothing_else_changes(bench: Bench) -> None:
    """It alone: launchers overhear the order to exit that all ranks get, and this one is not theirs."""
    agent, here = Link(), bench.comes(0)
    bench.receives(agent, AgentHello("host", (0,), (100,)))
    bench.refuses, earlier, before = "other processes are there", Link(), len(bench.received)
    bench.receives(earlier, Registration(0, 4, "lost", 99, (), 0, ("/c",), "{}"))
    bench.flushes()
    assert earlier.done == [[((0,), Exit(75, "other processes are there"))]] and here.done == agent.done == []
    assert bench.handler.routes[0] is here and len(bench.received) == before and "earlier_process" in bench.logged


def test_a_process_of_a_later_generation_is_sent_nothing_by_a_controller_of_earlier_ones(bench: Bench) -> None:
    bench.comes(1)
    bench.leads_earlier_ones, later, before = True, Link(), len(bench.received)
    bench.receives(later, Registration(0, 4, "host", 99, (), 0, ("/c",), "{}"))
    bench.flushes()
    assert later.done == [] and 0 not in bench.handler.routes and "later_process" in bench.logged
    assert len(bench.received) == before and not bench.handler.finished


def test_a_controller_that_takes_over_with_earlier_processes_ends_no_other(bench: Bench) -> None:
    bench.comes(0)
    bench.generation = 7
    bench.receives(Link(), DEATH)
    finished = []
    for generation in (6, 7):
        bench.handler.take(StopAsked("superseded", generation))
        finished.append(bench.handler.finished)
    assert finished == ["", "superseded"] and "stays" in bench.logged


def test_an_order_to_end_that_comes_too_late_is_not_obeyed(bench: Bench) -> None:
    """Its sender may have given up the ranks here."""
    bench.comes(0)
    bench.handler.take(StopAsked("superseded", 0, until_s=bench.now - 0.001))
    finished = [bench.handler.finished]
    bench.handler.take(StopAsked("superseded", 0, until_s=bench.now))
    assert [*finished, bench.handler.finished] == ["", "superseded"] and "stays" in bench.logged


def test_a_stream_that_still_carries_another_rank_is_not_ended(bench: Bench) -> None:
    old = bench.comes(0, 1)
    bench.comes(0)
    assert old.done == []
    bench.comes(1)
    assert old.done == ["finishes"]


def test_what_was_gathered_for_a_stream_that_has_ended_is_dropped(bench: Bench) -> None:
    link = bench.comes(0)
    bench.orders = lambda event: (Send((0,), Thaw(1)),) if event == Received(DEATH) else ()
    bench.receives(Link(), DEATH)
    bench.handler.take(StreamEnded(link))
    bench.flushes()
    assert link.done == [] and bench.received[-1] == StreamClosed((0,))


def test_an_agent_that_came_back_is_not_lost_with_its_old_stream(bench: Bench) -> None:
    """The old one's end is noticed late. What the agents receive goes to the new one."""
    old, new, other = Link(), Link(), Link()
    for link, host in ((old, "a"), (other, "b"), (new, "a")):
        bench.receives(link, AgentHello(host, (0,), (100,)))
    bench.handler.take(StreamEnded(old))
    assert not [event for event in bench.received if isinstance(event, StreamClosed)]
    bench.orders = lambda event: (Tell(("a", "c"), Thaw(1)),)
    bench.receives(new, DEATH)
    bench.flushes()
    assert new.done == [[((), Thaw(1))]] and old.done == other.done == []
    bench.orders = lambda event: ()
    bench.handler.take(StreamEnded(new))
    assert bench.received[-1] == StreamClosed((), "a")


def test_one_message_that_the_wire_cannot_carry_keeps_no_other_back(bench: Bench) -> None:
    link = bench.comes(0, 1)
    link.cannot_carry = Freeze
    bench.orders = lambda event: (Send((0,), Freeze(1, CAUSE)), Send((1, 3), Thaw(1)))
    bench.receives(Link(), DEATH)
    bench.flushes()
    assert link.done == [[((1,), Thaw(1))]] and bench.logged == ["not_sent"]


def test_an_order_for_a_rank_without_a_stream_is_skipped(bench: Bench) -> None:
    link = bench.comes(0)
    bench.orders = lambda event: (Send((1,), ORDER), Send((0,), ORDER))
    bench.receives(link, Finished(0))
    bench.flushes()
    assert link.done == [[((0,), ORDER)]] and bench.logged == []


def test_every_stream_gets_one_beat_a_heartbeat(bench: Bench) -> None:
    """However many ranks it carries; the agents' too."""
    ranks, agent = bench.comes(0, 1, 2), Link()
    bench.receives(agent, AgentHello("a", (0,), (100,)))
    bench.flushes(1.0)
    assert ranks.done == agent.done == [[((), KeepAlive())]]
    bench.flushes(0.5)
    assert ranks.done == agent.done == [[((), KeepAlive())]]
    bench.flushes(0.5)
    assert ranks.done == agent.done == [[((), KeepAlive())]] * 2


def test_a_beat_overtakes_nothing(bench: Bench) -> None:
    """A rank's first message must be its welcome."""
    link = bench.comes(0)
    bench.orders = lambda event: (Send((0,), ORDER),) if event == Received(Finished(0)) else ()
    bench.receives(link, Finished(0))
    bench.flushes(1.0)
    assert link.done == [[((0,), ORDER)], [((), KeepAlive())]]


def test_a_standby_that_no_rank_has_come_to_sends_no_beat(bench: Bench) -> None:
    """An agent that has come to it by mistake would take it for the active controller."""
    agent = Link()
    bench.stage = Stage.STANDBY
    bench.receives(agent, AgentHello("a", (0,), (100,)))
    bench.flushes(1.0)
    assert agent.done == []


@pytest.mark.parametrize(
    ("message", "ranks"), [(Freeze(1, CAUSE), (0, 1)), (Exit(75, "step 3 is saved"), (0,)), (Thaw(1), (0, 1))]
)  # fmt: skip
def test_the_agents_overhear_that_the_ranks_are_frozen_train_on_and_leave(
    bench: Bench, message: Downward, ranks: tuple[int, ...]
) -> None:
    """Once: a rank whose heartbeat crosses the message has it repeated, and in a large job many do."""
    rank, agent = bench.comes(0), Link()
    bench.receives(agent, AgentHello("a", (0,), (100,)))
    for recipients in (ranks, (0,)):
        bench.orders = lambda event, recipients=recipients: (Send(recipients, message),)  # type: ignore[misc]
        bench.receives(agent, DEATH)
        bench.flushes()
    assert rank.done == [[((0,), message)]] * 2
    assert agent.done == [[((), message)]]
    bench.orders = lambda event: (Send((0,), ORDER), Send((0,), Freeze(2, CAUSE)))
    bench.receives(agent, DEATH)
    bench.flushes()
    assert agent.done[1:] == [[((), Freeze(2, CAUSE))]], "another message is news"


def test_what_stands_in_one_envelope_is_received_in_its_order(bench: Bench) -> None:
    """Heartbeats side by side are one event, and those of ranks that are on another stream now none."""
    beats = [Heartbeat(rank, Phase.DONE, step) for rank, step in ((0, 1), (1, 1), (0, 2))]
    link = bench.comes(0, 1)
    bench.comes(2)
    bench.received.clear()
    bench.receives(link, beats[0], beats[1], Finished(1), Heartbeat(2, Phase.DONE, 9), beats[2])
    assert bench.received == [HeartbeatBatch((beats[0], beats[1])), Received(Finished(1)), Received(beats[2])]


def test_a_heartbeat_that_is_not_allowed_silences_no_other_rank(bench: Bench) -> None:
    """They came together, from processes that have nothing to do with each other."""
    beats = [Heartbeat(rank, Phase.DONE, 1) for rank in range(3)]
    link = bench.comes(0, 1, 2)

    def refuse(event: Event) -> Sequence[Effect]:
        if beats[1] in (event.messages if isinstance(event, HeartbeatBatch) else (getattr(event, "message", None),)):
            raise ProtocolError("not allowed")
        return [Journal("taken", {})]

    bench.orders = refuse
    bench.logged.clear()
    bench.receives(link, *beats)
    assert bench.received[-3:] == [Received(beat) for beat in beats]
    assert bench.logged == ["taken", "protocol_error", "taken"]


@pytest.mark.parametrize(
    ("stage", "comes", "leaves"),
    [(Stage.STANDBY, False, True), (Stage.ASSEMBLING, False, True), (Stage.ASSEMBLING, True, False), (Stage.RUNNING, False, False)],
)  # fmt: skip
def test_a_controller_that_no_rank_will_come_to_leaves_only_without_ranks(
    bench: Bench, stage: Stage, comes: bool, leaves: bool
) -> None:
    if comes:
        bench.comes(0)
    bench.stage = stage
    bench.handler.begin()
    bench.handler.take(StopIfNeverUsed("the launcher is gone"))
    assert bench.handler.finished == ("the launcher is gone" if leaves else "")


def test_the_first_reason_to_end_is_the_one_that_is_given(bench: Bench) -> None:
    bench.orders = lambda event: (Finish("all ranks have left"),)
    bench.receives(Link(), DEATH)
    bench.handler.take(StopAsked("asked to"))
    assert bench.handler.finished == "all ranks have left"


@pytest.mark.parametrize("event", ["published", "late"])
def test_a_checkpoint_is_in_the_status_once_the_machine_has_accepted_it(
    bench: Bench, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word of a rank that was given up is not."""
    monkeypatch.setattr(handlers, "job_status", lambda state, seen, published, pid, now: published)
    link = bench.comes(0)
    bench.orders = lambda received: (Journal(event, {}),)
    bench.receives(link, Published(0, 1, 3, "/c/iter_0000003"))
    bench.handler.take(StatusAsked(bench.status.append))
    (published,) = bench.status
    assert (published.path if published else "") == ("/c/iter_0000003" if event == "published" else "")


def test_a_ranks_newest_step_time_is_in_the_status_until_another_process_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat without a new step has none."""
    monkeypatch.setattr(handlers, "job_status", lambda state, seen, published, pid, now: (dict(seen.step_times_s), now))
    link = bench.comes(0, 1)
    bench.receives(link, Heartbeat(0, Phase.COMPUTE, 3, step_times_s=(0.5, 0.25)), Heartbeat(1, Phase.COMPUTE, 3))
    bench.receives(link, Heartbeat(0, Phase.READY, 3))
    for wrong in (math.nan, math.inf, -1.0):  # the machine refuses these, and JSON has none
        bench.receives(link, Heartbeat(0, Phase.READY, 3, step_times_s=(wrong,)))
    bench.handler.take(StatusAsked(bench.status.append))
    bench.comes(0)
    bench.receives(Link(), Registration(1, 4, "host", 101, (), 0, ("/c",), "{}", step_times_s=(0.75, 1.0)))
    bench.handler.take(StatusAsked(bench.status.append))
    assert bench.status == [({0: 0.25}, bench.now), ({1: 1.0}, bench.now)]


def test_a_failure_of_the_machine_costs_one_input(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks need their controller."""

    def fails(event: Event) -> Sequence[Effect]:
        raise RuntimeError("a bug")

    link = bench.comes(0, 1)
    bench.orders = fails
    bench.receives(link, Finished(0))
    bench.receives(link, *(Heartbeat(rank, Phase.DONE, 1) for rank in range(2)))
    bench.orders = lambda event: (Send((0,), Thaw(1)),)
    bench.receives(link, Finished(0))
    bench.flushes()
    assert link.done == [[((0,), Thaw(1))]] and bench.logged == ["machine_failed"] * 2 and not bench.handler.finished


def test_a_slow_rank_is_journaled_when_it_is_named_and_when_it_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its node; the machine gets the heartbeats as they are. What ranks measured is in the status, and the newest loss."""
    monkeypatch.setattr(handlers, "job_status", lambda state, seen, published, pid, now: seen)
    link = Link()
    for rank in range(4):
        bench.receives(link, Registration(rank, 4, f"n{rank}", 100 + rank, (), 0, ("/c",), "{}", workload="model"))

    def steps(first: int, last: int, slow: float) -> None:
        for step in range(first, last + 1):
            bench.now += 1.0
            for rank in range(4):
                own = slow if rank == 2 else 1.0
                loss = 1.0 / step if rank == 0 else None
                bench.receives(link, Heartbeat(rank, Phase.COMPUTE, step, own_s=own, waited_s=0.25, loss=loss))

    steps(1, 200, 1.25)
    assert bench.logged == ["straggler"] and len(bench.received) == 4 + 800
    bench.handler.take(StatusAsked(bench.status.append))
    (seen,) = bench.status
    assert dict(seen.shares_s)[2] == (1.25, 0.25) and seen.loss == 1.0 / 200
    ((named),) = seen.stragglers
    assert (named.rank, named.host, named.ratio) == (2, "n2", 1.25)
    steps(201, 400, 1.0)
    assert bench.logged == ["straggler", "straggler_over"]
    for own, waited in ((math.nan, 0.0), (-1.0, 0.0), (1.0, math.inf)):
        bench.receives(link, Heartbeat(2, Phase.COMPUTE, 400, own_s=own, waited_s=waited))
    bench.handler.take(StatusAsked(bench.status.append))
    assert dict(bench.status[-1].shares_s)[2] == (1.0, 0.25), "what no clock measures is left out"
    steps(401, 600, 1.25)
    bench.receives(link, Finished(2))
    bench.handler.take(StatusAsked(bench.status.append))
    assert bench.status[-1].stragglers == () and 2 in bench.status[-1].shares_s
    assert bench.logged == ["straggler", "straggler_over"] * 2, "an end for each begin"
    bench.receives(link, Registration(2, 4, "n9", 999, (), 0, ("/c",), "{}", workload="model"))
    bench.handler.take(StatusAsked(bench.status.append))
    assert 2 not in bench.status[-1].shares_s, "another process's"
