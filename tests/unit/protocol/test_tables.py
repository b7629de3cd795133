"""The transition tables are whole: every stage says what each event means to it, or that it may not come."""

from __future__ import annotations

import typing

from ttp.controller.core import transitions as controller
from ttp.controller.core.facts import events as controller_events
from ttp.controller.core.facts.per_rank import PerRank
from ttp.controller.core.facts.state import Stage
from ttp.processor.core import events as processor_events
from ttp.processor.core import transitions as processor
from ttp.processor.core.state import RankMode
from ttp.proto import messages as m


def controller_kinds() -> set[type]:
    return {*typing.get_args(m.Upward), controller_events.Beats, controller_events.StreamClosed, controller_events.Tick}


def processor_kinds() -> set[type]:
    return {*typing.get_args(m.Downward), *typing.get_args(processor_events.Event)} - {processor_events.Received}


def test_what_the_controllers_table_leaves_out() -> None:
    """Before the first freeze nobody can answer one, before the welcome nobody beats, and to a standby nobody speaks
    before he has registered."""
    absent = {(s.value, k.__name__) for s in Stage for k in controller_kinds() if (s, k) not in controller.TRANSITIONS}
    answers = {m.RolledForward, m.Written, m.Published, m.StepFailed}
    beats = {m.Heartbeat, controller_events.Beats}
    later = {m.StateReport, *beats, m.FaultReport, m.Finished, m.Working, m.StandbyReport}
    assert absent == {
        *(("assembling", kind.__name__) for kind in (*answers, m.StateReport, *beats)),
        *(("running", kind.__name__) for kind in answers),
        *(("standby", kind.__name__) for kind in (*answers, *later)),
    }


def test_what_the_processors_table_leaves_out() -> None:
    """A rank that was rolled forward never trains again."""
    absent = {(s.value, k.__name__) for s in RankMode for k in processor_kinds() if (s, k) not in processor.TRANSITIONS}
    assert absent == {("training", "RollForwardDone")}


def test_no_pair_is_named_twice() -> None:
    for rows, table in ((controller._ROWS, controller.TRANSITIONS), (processor._ROWS, processor.TRANSITIONS)):
        assert sum(len(stages) for stages, _, _ in rows) == len(table)


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
