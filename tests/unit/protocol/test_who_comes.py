"""What a controller sends to ranks and agents that come in the middle, and what it notes of them."""

from __future__ import annotations

from tests.unit.protocol.bench import ControllerBench, registration
from tests.unit.protocol.test_controller_members import killed
from tests.unit.protocol.test_hangs import hang, trained
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import AgentHello, CauseKind, Freeze


def test_a_rank_that_attaches_again_learns_why_gates_are_closed() -> None:
    """The death, and not the suspicion before it."""
    bench = ControllerBench()
    bench.close(3)
    assert bench.at(Stage.FREEZING) and bench.sent(Freeze)[0].cause.kind is CauseKind.SILENT
    bench.say(killed(3), registration(0))
    (freeze,) = bench.sent(Freeze).values()
    assert freeze.cause.kind is CauseKind.EXITED and "SIGKILL" in freeze.cause.text


def test_a_rank_that_attaches_again_learns_of_a_hang_that_is_not_proved_yet() -> None:
    bench = trained()
    hang(bench)
    assert bench.at(Stage.FREEZING) and bench.state.fault is not None and not bench.state.fault.causes
    bench.say(registration(0, pid=100))
    assert bench.sent(Freeze)[0].cause == bench.state.fault.unproven


def test_an_agent_is_noted_with_the_places_that_it_has_for_ranks_of_other_nodes() -> None:
    bench = ControllerBench()
    bench.say(AgentHello("a", (0, 1), (100, 101)), AgentHello("spare", (), (), 2))
    assert bench.logged("agent_attached") == [
        {"host": "a", "ranks": (0, 1)},
        {"host": "spare", "ranks": (), "places": 2},
    ]


def test_a_death_is_noted_with_how_long_ago_the_last_heartbeat_came() -> None:
    bench = ControllerBench()
    bench.wait(1.0)
    before = bench.state.members.table[3].received_at
    bench.say(killed(3), after=0.25)
    (death,) = bench.logged("death_seen")
    assert death["heard_s"] == round(bench.now - before, 3) > 0.0
