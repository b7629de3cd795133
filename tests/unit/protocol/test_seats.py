"""A node that is lost, and a spare one in its place: when it is given up, who is asked, and what becomes of its processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, registration, report
from ttp.controller.core import machine
from ttp.controller.core.dump import lost_nodes
from ttp.controller.core.dump.regroup import agent_of
from ttp.controller.core.facts.events import EarlierLives, LookFor, Send, Supersede, TurnAway
from ttp.controller.core.facts.state import Stage, Work
from ttp.errors import ProtocolError
from ttp.processor.core.events import Connected
from ttp.processor.core.events import Send as Says
from ttp.processor.core.state import LinkState
from ttp.proto.limits import check_upward
from ttp.proto.messages import (
    NO_PROCESS,
    AgentHello,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Freeze,
    Heartbeat,
    Phase,
    Registration,
    Regroup,
    Regrouped,
    Replace,
    ReplaceFailed,
    StandbyReport,
    TakePlaces,
    Thaw,
    Vouch,
    WorkerExit,
    WriteOrder,
)

HALVES = ((0, 2), (1, 3))
NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
LEASE_S = 3.0
READY = Phase.READY


def able(rank: int, host: str = "", **changed: object) -> Registration:
    return replace(registration(rank, HALVES), regroups=True, host=host or NODES[rank], **changed)  # type: ignore[arg-type]


def job(spares: tuple[str, ...] = ("c",), places: int = 2, vouched: bool = True, **settings: float) -> ControllerBench:
    """Two nodes of two ranks each, in training, and spare ones."""
    bench = ControllerBench(HALVES, assembled=False, in_place_s=20.0, lease_s=LEASE_S, **settings)
    bench.say(AgentHello("a", (0, 1), (100, 101)), AgentHello("b", (2, 3), (102, 103)))
    bench.say(*(AgentHello(host, (), (), places) for host in spares))
    bench.say(*(able(rank) for rank in range(4)))
    if vouched:
        bench.say(Vouch((0, 1), (100, 101)), Vouch((2, 3), (102, 103)))
    assert bench.at(Stage.RUNNING)
    return bench


def lose(bench: ControllerBench, others: tuple[int, ...] = (0, 1), vouched: bool = False) -> None:
    """A node is silent for a lease; the others have the step before. `vouched`: its agent is there."""
    bench.wait(2.1, senders=others)
    assert bench.at(Stage.FREEZING)
    bench.say(*(report(rank, bench.state.freeze_id, READY, 7) for rank in others))
    if vouched:
        bench.say(Vouch((2, 3), (NO_PROCESS, NO_PROCESS)))
    bench.wait(LEASE_S - bench.now, senders=others)


def seated(spares: tuple[str, ...] = ("c",)) -> ControllerBench:
    bench = job(spares)
    lose(bench)
    assert bench.at(Stage.REGROUPING)
    return bench


def whole(spares: tuple[str, ...] = ("c",)) -> ControllerBench:
    """All train on, ranks 2 and 3 on the spare node."""
    bench = seated(spares)
    bench.say(*(able(rank, "c", pid=200 + rank, vacant=1) for rank in (2, 3)))
    bench.say(*(Regrouped(rank, 1) for rank in range(4)))
    assert bench.at(Stage.RUNNING) and bench.state.generation == 1
    return bench


def test_a_spare_node_takes_the_places_and_all_train_on() -> None:
    bench = job()
    lose(bench)
    assert bench.said_to_agents(TakePlaces) == {"c": [TakePlaces((2, 3), 1)]} and not bench.said_to_agents(Replace)
    assert bench.logged("take_places_sent") == [{"host": "c", "ranks": (2, 3), "lost": "b", "freeze_id": 1}]
    order = Regroup(1, 6, (2, 3), bench.sent(Regroup)[0].record)
    assert bench.sent(Regroup) == {0: order, 1: order} and not bench.sent(WriteOrder)
    for rank in (2, 3):
        bench.say(able(rank, "c", pid=200 + rank, vacant=1), after=1.0)
        assert bench.sent(Regroup) == {rank: order}
    bench.say(*(Regrouped(rank, 1) for rank in range(4)))
    assert bench.sent(Thaw) == dict.fromkeys(range(4), Thaw(1)) and bench.at(Stage.RUNNING)
    known = [member.registration for member in bench.state.members.table]
    assert [registration.host for registration in known if registration is not None] == ["a", "a", "c", "c"]


def test_the_next_fault_of_its_ranks_is_the_spare_nodes() -> None:
    bench = whole()
    bench.say(WorkerExit(3, 203, "signal SIGKILL", 0.0))
    bench.say(*(report(rank, 2, READY, 9) for rank in (0, 1, 2)))
    assert bench.said_to_agents(Replace) == {"c": [Replace(3, 0, 2)]}


@pytest.mark.parametrize(
    ("spares", "places", "why"),
    [((), 2, "there is none"), (("c",), 1, "it has too little room"), (("c",), 4, "it would start too many")],
)
def test_without_a_spare_of_its_size_the_step_is_written(spares: tuple[str, ...], places: int, why: str) -> None:
    bench = job(spares, places)
    lose(bench)
    assert bench.at(Stage.WRITING), why
    assert bench.logged("not_in_place")[0]["reason"] == "a fault of kind silent" and not bench.said_to_agents(
        TakePlaces
    )


def test_a_node_whose_agent_reports_is_not_lost() -> None:
    bench = job()
    lose(bench, vouched=True)
    assert bench.at(Stage.WRITING) and not bench.said_to_agents(TakePlaces)


def test_rank_0s_node_is_never_given_up() -> None:
    bench = job()
    lose(bench, others=(2, 3))
    assert bench.at(Stage.WRITING) and not bench.said_to_agents(TakePlaces)


def test_a_rank_that_was_seen_to_end_goes_with_its_node() -> None:
    bench = job()
    bench.say(WorkerExit(3, 103, "signal SIGKILL", 0.0))
    bench.say(*(report(rank, 1, READY, 7) for rank in (0, 1)))
    bench.wait(LEASE_S - bench.now, senders=(0, 1))
    assert [sent["ranks"] for sent in bench.logged("take_places_sent")] == [(2, 3)]


def test_a_spare_that_cannot_start_a_process_has_the_step_written() -> None:
    bench = seated()
    bench.say(ReplaceFailed("c", 2, 1, "no room"))
    assert bench.logged("regroup_failed")[0]["reason"] == "no process for rank 2: no room"
    bench.say(*(report(rank, 2, READY, 7) for rank in (0, 1)))
    assert bench.at(Stage.WRITING) and set(bench.orders()) == {0, 1}


# --- those that come back ---


@pytest.mark.parametrize(
    "again", [able(2), able(2, pid=999), able(2, vacant=0, generation=0)], ids=["it", "another", "old"]
)
def test_a_process_of_a_node_that_was_given_up_is_not_let_in(again: Registration) -> None:
    """While the others regroup, and afterwards."""
    for bench in (seated(), whole()):
        why = machine.refusal(bench.state, again)
        assert f"process {again.pid} on b is of generation 0 of the job's groups, which are in 1" in why
        with pytest.raises(ProtocolError, match="its process was given up, and another one has that place"):
            bench.say(again)


def test_those_in_their_places_and_those_that_stay_are_let_in() -> None:
    bench = whole()
    for member in (able(0, generation=1, regrouped=1), able(2, "c", pid=202, generation=1, regrouped=1)):
        assert machine.refusal(bench.state, member) == ""
        bench.say(member)
    assert bench.at(Stage.RUNNING)


def test_an_agent_of_a_node_that_was_given_up_ends_its_processes() -> None:
    """It alone gets the order; it may come as a spare, and take a place again."""
    bench = whole()
    bench.say(AgentHello("b", (2, 3), (102, 103)))
    (order,) = bench.said_to_agents(Exit)["b"]
    assert "other processes are in its ranks' places" in order.reason and not bench.sent(Exit)
    assert [agent.host for agent in bench.state.agents] == ["a", "c"]
    bench.say(AgentHello("b", (), (), 2))
    assert bench.state.agents[-1].places == 2 and not bench.said_to_agents(Exit)


def test_an_exit_of_an_earlier_process_means_nothing() -> None:
    bench = whole()
    bench.say(WorkerExit(2, 102, "exit code 75", 0.0))
    assert bench.at(Stage.RUNNING)


def test_what_an_earlier_stream_leaves_behind_ends_nothing_here() -> None:
    """Its own is another one's since; the driver distinguishes them."""
    bench = seated()
    assert not bench.state.members.table[2].attached
    bench.close(2, 3)
    assert bench.at(Stage.REGROUPING)


# --- controllers ---


def test_a_controller_to_which_earlier_processes_have_come_first_forgets_them() -> None:
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(able(2, controllers=("s0", "s1"), job_groups=2))
    assert bench.at(Stage.GATHERING) and looked_for(bench) == [LookFor(("s0",))]
    bench.say(able(0, controllers=("s0", "s1"), job_groups=2, generation=1, regrouped=1))
    assert bench.logged("earlier_process") == [{"rank": 2, "host": "b", "pid": 102}]
    table = bench.state.members.table
    assert table[2].registration is None and table[0].attached and bench.state.members.attached == 1
    bench.say(able(2, "c", pid=202, job_groups=2, generation=1, regrouped=1))
    assert table[2].dead is None and bench.state.members.attached == 2


def looked_for(bench: ControllerBench) -> list[LookFor]:
    return [effect for effect in bench.effects if isinstance(effect, LookFor)]


def test_earlier_controllers_are_looked_for_again_with_a_later_generation() -> None:
    """The one that leads it has led on when only an earlier process had come."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(able(2, controllers=("s0", "s1"), job_groups=2))
    bench.say(able(3, controllers=("s0", "s1"), job_groups=2))
    assert not looked_for(bench)
    bench.say(able(0, controllers=("s0", "s1"), job_groups=2, generation=1))
    assert looked_for(bench) == [LookFor(("s0",))]
    bench.take(EarlierLives("s0"))
    assert Supersede("s0", 1) in bench.effects
    bench.say(able(1, controllers=("s0", "s1"), job_groups=2, generation=1, regrouped=1))
    assert not looked_for(bench)


def test_where_only_processes_on_a_lost_node_have_come_it_turns_them_away_and_stands_by_again() -> None:
    """The earlier controller leads a later generation; should it die, those in their places come here."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(AgentHello("b", (2, 3), (102, 103)))
    bench.say(able(2, controllers=("s0", "s1"), job_groups=2), able(3, controllers=("s0", "s1"), job_groups=2))
    bench.close(3)  # its stream broke a moment ago: it is turned away all the same
    bench.take(EarlierLives("s0", 1))
    assert bench.at(Stage.STANDBY)
    assert [effect.processes for effect in bench.effects if isinstance(effect, TurnAway)] == [((2, 102), (3, 103))]
    assert not [effect for effect in bench.effects if isinstance(effect, Supersede | Send)]
    bench.say(Heartbeat(2, READY, 8))
    bench.close(2)
    bench.wait(100.0, senders=())
    with pytest.raises(ProtocolError, match="its process was given up"):
        bench.say(able(2, controllers=("s0", "s1"), job_groups=2))
    assert bench.at(Stage.STANDBY)
    now = {"controllers": ("s0", "s1"), "job_groups": 2, "generation": 1, "regrouped": 1}
    bench.say(*(able(rank, "c" if rank > 1 else "", pid=200 + rank, **now) for rank in range(4)))
    assert bench.logged("took_over")[0]["ranks"] == (0, 1, 2, 3) and bench.at(Stage.FREEZING)
    assert bench.state.members.alive == 4


def test_the_first_rank_of_a_later_generation_has_the_others_waited_for_anew() -> None:
    """A process on a lost node had come long before."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(*(able(rank, controllers=("s0", "s1"), job_groups=2) for rank in (2, 3)))
    bench.wait(0.9 * LEASE_S, senders=(2, 3))
    now: dict[str, object] = {"controllers": ("s0", "s1"), "job_groups": 2, "generation": 1, "regrouped": 1}
    bench.say(able(0, "", **now))
    bench.wait(0.9 * LEASE_S, senders=(0,))
    assert bench.at(Stage.GATHERING)
    bench.say(able(1, "", **now), *(able(rank, "c", pid=200 + rank, **now) for rank in (2, 3)))
    assert bench.logged("took_over")[0]["absent"] == ()


@pytest.mark.parametrize("on_order", [False, True])
def test_a_node_that_is_given_up_takes_its_standby_with_it(on_order: bool) -> None:
    """Another one is asked for once all train on."""
    bench = ControllerBench(HALVES, assembled=False, in_place_s=20.0, lease_s=LEASE_S, standbys=2)
    bench.say(AgentHello("a", (0, 1), (100, 101)), AgentHello("b", (2, 3), (102, 103)), AgentHello("c", (), (), 2))
    bench.say(*(able(rank, standby={1: "a:1", 3: "" if on_order else "b:1"}.get(rank, "")) for rank in range(4)))
    if on_order:
        bench.say(StandbyReport(3, "b:1", True, ""))
    bench.say(Vouch((0, 1), (100, 101)), Vouch((2, 3), (102, 103)))
    before = bench.state.standbys
    lose(bench)
    assert (before, bench.state.standbys) == (("a:1", "b:1"), ("a:1",))
    assert bench.logged("standby_lost") == [{"rank": 3, "address": "b:1"}]
    bench.say(*(able(rank, "c", pid=200 + rank, vacant=1) for rank in (2, 3)))
    bench.say(*(Regrouped(rank, 1) for rank in range(4)))
    bench.wait(1.0)
    assert bench.logged("standby_asked")


def test_one_process_of_the_generation_that_is_led_is_reason_enough_to_take_over() -> None:
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(able(2, controllers=("s0", "s1"), job_groups=2))
    bench.say(able(0, controllers=("s0", "s1"), job_groups=2, generation=1, regrouped=1))
    bench.take(EarlierLives("s0", 1))
    assert bench.at(Stage.GATHERING) and Supersede("s0", 1) in bench.effects


@pytest.mark.parametrize("first", ["b", "c"])
def test_a_new_controller_asks_the_agent_on_the_host_of_a_ranks_process(first: str) -> None:
    """The agent of a node that was given up names its ranks too."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, in_place_s=20.0, lease_s=LEASE_S, address="s1")
    bench.say(*(AgentHello(host, (2, 3), (0, 0)) for host in (first, "b" if first == "c" else "c")))
    bench.say(AgentHello("a", (0, 1), (100, 101)))
    now = {"controllers": ("s1",), "job_groups": 2, "generation": 1, "regrouped": 1}
    bench.say(*(able(rank, "c" if rank > 1 else "", **now) for rank in range(4)))
    assert agent_of(bench.state, 2) == "c"
    assert agent_of(bench.state, 0) == "a"


def test_the_word_of_an_earlier_processs_end_is_not_held_against_another() -> None:
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(WorkerExit(2, 102, "exit code 75", 0.0))
    bench.say(able(0, controllers=("s0", "s1"), job_groups=2, generation=1, regrouped=1))
    bench.say(able(2, "c", pid=202, job_groups=2, generation=1, regrouped=1))
    assert bench.state.members.table[2].dead is None


@pytest.mark.parametrize(("pid", "counts"), [(202, True), (102, False)])
def test_one_that_comes_just_after_the_takeover_counts_unless_it_is_the_one_that_ended(pid: int, counts: bool) -> None:
    """It was not waited for, as a process of its rank had ended. Of seed 2001138508: no other rank had its shard at the end."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(WorkerExit(2, 102, "exit code 75", 0.0))
    of_now: dict[str, Any] = {"controllers": ("s0", "s1"), "job_groups": 2, "generation": 1, "regrouped": 1}
    bench.say(*(able(rank, **of_now) for rank in (0, 1, 3)))
    assert bench.at(Stage.FREEZING) and bench.state.members.table[2].dead is not None
    bench.say(able(2, "c", pid=pid, **of_now))
    assert (bench.state.members.table[2].dead is None) == counts


def test_a_controller_that_has_decided_with_earlier_processes_takes_no_later_one_in() -> None:
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(*(able(rank, controllers=("s0", "s1"), job_groups=2) for rank in range(4)))
    assert bench.at(Stage.FREEZING) and bench.sent(Freeze)
    later = able(0, job_groups=2, generation=1, regrouped=1)
    assert machine.leads_earlier(bench.state, later)
    with pytest.raises(ProtocolError, match="of a later generation"):
        bench.say(later)
    assert bench.at(Stage.FREEZING)


def test_a_controller_whose_ranks_have_begun_different_generations_opens_no_gate() -> None:
    """Two have made their groups anew while they came here, and the earlier processes in the others' places came first."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(*(able(rank, controllers=("s0", "s1"), job_groups=2, generation=int(rank < 2)) for rank in range(4)))
    assert bench.at(Stage.FREEZING)
    bench.all_report(7, READY)
    assert bench.at(Stage.WRITING) and not bench.sent(Thaw)
    fault = bench.state.fault
    assert fault is not None and "ranks 2, 3 had not begun generation 1" in fault.causes[0].text


def test_a_controller_with_one_that_has_begun_the_later_generation_leads_on() -> None:
    """Another controller was lost while all regrouped: one rank had found the groups whole, and comes late."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(*(able(rank, controllers=("s0", "s1"), job_groups=2, generation=int(rank == 1)) for rank in range(4)))
    assert bench.at(Stage.FREEZING)
    bench.say(able(0, job_groups=2, generation=1, regrouped=1))
    assert bench.at(Stage.FREEZING) and bench.state.generation == 1


def test_the_places_of_an_agent_are_checked() -> None:
    check_upward(AgentHello("c", (), (), 4), 4)
    for wrong in (AgentHello("c", (), (), 5), AgentHello("c", (), (), -1), AgentHello("c", (2,), (102,), 1)):
        with pytest.raises(ProtocolError, match="places"):
            check_upward(wrong, 4)


# --- claims that only a simulated job had shown ---


def test_a_fault_of_a_rank_whose_place_is_being_given_away_means_nothing() -> None:
    bench = seated()
    bench.say(FaultReport(2, Cause(CauseKind.EXCEPTION, (2,), "ValueError: boom"), ""))
    assert bench.at(Stage.REGROUPING)


def test_an_agent_that_has_never_vouched_is_not_known_to_be_lost() -> None:
    bench = job(vouched=False)
    lose(bench)
    assert bench.at(Stage.WRITING)


def test_a_rank_that_may_be_writing_is_not_given_up() -> None:
    bench = job()
    lose(bench)
    dump = bench.state.dump
    assert dump is not None
    order = WriteOrder(1, 6, "/a", "tmp", ())
    state: Any = bench.state.with_dump(replace(dump, work=dump.work.put(2, Work(given=(order,)))))
    assert lost_nodes._all_lost(state, bench.now) == {}


def test_a_spare_node_that_is_lost_as_soon_as_all_train_on_gives_way_to_another() -> None:
    bench = whole(spares=("c", "d"))
    bench.wait(2.1, senders=(0, 1))
    bench.say(*(report(rank, 2, READY, 9) for rank in (0, 1)))
    bench.wait(LEASE_S, senders=(0, 1))
    assert [sent["host"] for sent in bench.logged("take_places_sent")] == ["c", "d"]


@pytest.mark.parametrize("early", [True, False])
def test_a_node_that_was_lost_may_take_a_place_again(early: bool) -> None:
    """Its agent may attach with its new ranks before all have regrouped."""
    bench = whole()
    bench.say(AgentHello("b", (), (), 2))
    bench.wait(2.1, senders=(0, 1))
    bench.say(*(report(rank, 2, READY, 9) for rank in (0, 1)))
    bench.wait(LEASE_S, senders=(0, 1))
    hello = AgentHello("b", (2, 3), (302, 303))
    if early:
        bench.say(hello)
    bench.say(*(able(rank, "b", pid=300 + rank, vacant=2) for rank in (2, 3)))
    bench.say(*(Regrouped(rank, 2) for rank in range(4)))
    if not early:
        bench.say(hello)
    assert not bench.said_to_agents(Exit) and not bench.logged("lost_node_back")
    assert bench.at(Stage.RUNNING) and bench.state.agents[-1].ranks == (2, 3) and bench.state.lost_hosts == {"c"}


def test_without_rank_0s_process_a_new_controller_has_the_step_written() -> None:
    """Others may train on elsewhere, with it."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1", in_place_s=20.0)
    bench.say(AgentHello("a", (0, 1), (100, 101)), AgentHello("b", (2, 3), (102, 103)))
    bench.say(WorkerExit(0, 100, "signal SIGKILL", 0.0), WorkerExit(1, 101, "signal SIGKILL", 0.0))
    bench.say(*(able(rank, controllers=("s0", "s1"), job_groups=2) for rank in (2, 3)))
    bench.all_report(7, READY, ranks=(2, 3))
    assert "rank 0's process has never come" in bench.logged("not_in_place")[0]["reason"]


def test_on_one_node_a_new_controller_has_rank_0_replaced_without_having_seen_it() -> None:
    """One agent has all ranks: none has a process elsewhere."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1", in_place_s=20.0)
    bench.say(AgentHello("a", (0, 1, 2, 3), (100, 101, 102, 103)), WorkerExit(0, 100, "signal SIGKILL", 0.0))
    bench.say(*(able(rank, "a", controllers=("s0", "s1"), job_groups=2) for rank in (1, 2, 3)))
    bench.all_report(7, READY, ranks=(1, 2, 3))
    assert bench.at(Stage.REGROUPING) and bench.said_to_agents(Replace) == {"a": [Replace(0, 0, bench.state.freeze_id)]}


def test_a_fault_of_a_process_that_was_forgotten_means_nothing() -> None:
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(able(2, controllers=("s0", "s1"), job_groups=2))
    bench.say(able(0, controllers=("s0", "s1"), job_groups=2, generation=1, regrouped=1))
    bench.say(FaultReport(2, Cause(CauseKind.PEER_ERROR, (2,), "connection closed by peer"), ""))
    assert not bench.logged("fault_reported")


def test_a_rank_registers_with_the_generation_that_it_has_begun_and_the_one_that_it_has_found_whole() -> None:
    bench = ProcessorBench(rank=1)
    done = replace(bench.state, regrouped=1)
    begun = replace(done, regrouping=Regroup(4, 6, (2,), None))
    for state, expected in ((done, (1, 1)), (begun, (4, 1))):
        bench.state = replace(state, link=LinkState.CONNECTING)
        bench.take(Connected(registration(1)))
        (sent,) = [
            effect.message
            for effect in bench.effects
            if isinstance(effect, Says) and isinstance(effect.message, Registration)
        ]
        assert (sent.generation, sent.regrouped) == expected
