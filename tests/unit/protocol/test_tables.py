"""The transition tables are whole: every stage says what each event means to it, or that it may not come."""

from __future__ import annotations

import typing

import pytest

from ttp.controller.core.facts import events as controller_events
from ttp.controller.core.facts.per_rank import PerRank
from ttp.controller.core.facts.state import EDGES, STAGES, Assembling, Over, Running, goto
from ttp.controller.core.machine import initial
from ttp.controller.core.transitions import TABLES
from ttp.processor.core import events as processor_events
from ttp.processor.core import transitions as processor
from ttp.processor.core.state import RankMode
from ttp.proto import messages as m


def controller_kinds() -> set[type]:
    return {
        *typing.get_args(m.Upward),
        controller_events.HeartbeatBatch,
        controller_events.StreamClosed,
        controller_events.EarlierLives,
        controller_events.Tick,
    }


def processor_kinds() -> set[type]:
    return {*typing.get_args(m.Downward), *typing.get_args(processor_events.Event)} - {processor_events.Received}


def test_what_the_controllers_table_leaves_out() -> None:
    """Before the first freeze no rank can answer one, before the welcome none sends heartbeats, and a controller that is the first takes over from none. In
    training only the answer to an order to regroup can still be under way: with the thaw all ranks are out of the fault. To a standby what ranks have
    sent that it has turned away may still come."""
    absent = {(s.name.value, k.__name__) for s in STAGES for k in controller_kinds() - TABLES[s].on.keys()}
    answers = {m.RolledForward, m.Regrouped, m.Written, m.Published, m.StepFailed}
    beats = {m.Heartbeat, controller_events.HeartbeatBatch}
    assert absent == {
        *(("assembling", kind.__name__) for kind in (*answers, m.StateReport, *beats, controller_events.EarlierLives)),
        *(("running", kind.__name__) for kind in answers - {m.Regrouped}),
    }


def test_what_the_processors_table_leaves_out() -> None:
    """A rank in training neither rolls forward nor regroups, and Replace and TakePlaces are for agents."""
    absent = {(s.value, k.__name__) for s in RankMode for k in processor_kinds() if (s, k) not in processor.TRANSITIONS}
    to_agents = {(mode.value, kind) for mode in RankMode for kind in ("Replace", "TakePlaces")}
    assert absent == {("training", "RollForwardDone"), ("training", "RegroupDone"), *to_agents}


def test_no_pair_is_named_twice() -> None:
    assert sum(len(modes) for modes, _, _ in processor._ROWS) == len(processor.TRANSITIONS)


def test_goto_takes_listed_transitions_only() -> None:
    """These events end a stage; nothing ends the last one."""
    settings = controller_events.ControllerSettings("job", 0, 1)
    state = goto(initial(settings, 0.0), Running())
    assert state.at == Running() and goto(state, Over("all ranks have finished")).at.reason
    with pytest.raises(ValueError, match="stage running is never followed by assembling"):
        goto(state, Assembling(0.0))
    assert {stage for stage in STAGES if not any(before is stage for before, _ in EDGES)} == {Over}


def test_a_rank_table_is_a_value() -> None:
    for size in (0, 1, 7, 8, 9, 63, 64, 65, 1000):
        table = PerRank.filled(size, 0)
        for rank in range(size):
            table = table.put(rank, rank * rank)
        assert list(table) == [rank * rank for rank in range(size)] == [table[rank] for rank in range(size)]
        assert table.ranks(lambda value: value % 2 == 1) == tuple(range(1, size, 2)) and len(table) == size
        again = PerRank.filled(size, 0)
        for rank in reversed(range(size)):
            again = again.put(rank, rank * rank)
        assert again == table and hash(again) == hash(table)
