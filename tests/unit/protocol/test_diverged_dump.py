"""A controller to which ranks report digests: whom it has replaced, who writes and publishes, and when it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, only, report
from tests.unit.protocol.test_regroup import IN_PLACE_S, able
from ttp.controller.core.facts.events import Send
from ttp.controller.core.facts.state import Stage
from ttp.proto.incident import read_incident
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    Digest,
    Exit,
    FaultReport,
    Phase,
    PublishOrder,
    Regroup,
    Regrouped,
    Replace,
    StepFailed,
    Thaw,
)

THREE = ((0, 1, 2),)
WRONG = 1


def job(in_place_s: float = IN_PLACE_S, repairs: bool = True) -> ControllerBench:
    bench = ControllerBench(THREE, assembled=False, in_place_s=in_place_s)
    for rank in range(3):
        bench.say(AgentHello(f"host{rank}", (rank,), (100 + rank,)), able(rank, THREE, repairs=repairs))
    assert bench.at(Stage.RUNNING)
    return bench


def says(bench: ControllerBench, rank: int, kind: CauseKind) -> None:
    bench.say(FaultReport(rank, Cause(kind, (rank,), f"{kind.value} of rank {rank}"), ""))


def reports(bench: ControllerBench, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    group = bench.state.coverage.groups[0].group_id
    for rank in ranks:
        digests = (Digest(group, 5 + (rank == WRONG), 3),)
        bench.say(replace(report(rank, bench.state.freeze_id, Phase.DONE, 7), digests=digests))


def found(**settings: Any) -> ControllerBench:
    bench = job(**settings)
    says(bench, WRONG, CauseKind.DIVERGED)
    reports(bench)
    return bench


def test_the_wrong_rank_is_replaced_although_it_lives() -> None:
    bench = found()
    assert bench.logged("wrong_replicas") == [{"freeze_id": 1, "ranks": (WRONG,)}]
    assert set(bench.sent(Regroup)) == {0, 2}
    known = bench.state.members.table[WRONG].registration
    assert known is not None and bench.said_to_agents(Replace) == {"host1": [Replace(WRONG, known.pid, 1)]}


def test_what_a_wrong_rank_still_reports_ends_no_recovery() -> None:
    """It may report its own fault last; the others' are of the same cause."""
    bench = job(in_place_s=20.0)
    says(bench, 0, CauseKind.PEER_ERROR)
    reports(bench)
    bench.wait(bench.state.settings.lease_s + 0.1, senders=(0, 1, 2))  # no culprit is known
    assert bench.at(Stage.REGROUPING), "the digests are enough"
    says(bench, WRONG, CauseKind.DIVERGED)
    assert bench.at(Stage.REGROUPING)
    says(bench, 2, CauseKind.EXCEPTION)
    assert not bench.at(Stage.REGROUPING), "another's own fault is one"


def test_the_replacement_counts_like_any_other() -> None:
    bench = found()
    bench.say(able(WRONG, THREE, vacant=1, pid=999, repairs=True))
    assert bench.state.fault is not None and not bench.state.fault.wrong
    for rank in range(3):
        bench.say(Regrouped(rank, 1))
    assert bench.at(Stage.RUNNING) and set(bench.sent(Thaw)) == {0, 1, 2}
    (incident,) = map(read_incident, bench.logged("incident"))
    assert incident.kind == "diverged" and incident.in_place and [one.rank for one in incident.culprits] == [WRONG]


def test_without_replacements_the_right_ones_write() -> None:
    bench = found(in_place_s=0.0)
    orders = bench.orders()
    assert set(orders) == {0, 2} and not bench.said_to_agents(Replace)
    bench.all_write(orders)
    rank, order = bench.publish_order()
    for other in (rank, 2 - rank):
        assert other != WRONG
        bench.say(StepFailed(other, order.freeze_id, "publish", order.tmp_name, "no room"))
    asked = {
        who for effect in only(bench.effects, Send) if isinstance(effect.message, PublishOrder) for who in effect.ranks
    }
    assert WRONG not in asked and bench.at(Stage.WRITING), "the next directory, by the others"
    assert set(bench.orders()) == {0, 2}


@pytest.mark.parametrize("in_place_s", [0.0, IN_PLACE_S])
def test_a_holder_that_has_reported_no_digest_writes_nothing_and_is_not_replaced(in_place_s: float) -> None:
    """Its gate was shut before it had read a second time: two of three prove what is right, and nothing of the third."""
    bench = job(in_place_s=in_place_s)
    says(bench, 0, CauseKind.EXCEPTION)
    reports(bench, (0, 2))
    bench.say(report(WRONG, bench.state.freeze_id, Phase.DONE, 7))
    assert bench.at(Stage.WRITING) and not bench.logged("wrong_replicas")
    orders = bench.orders()
    assert set(orders) == {0, 2} and not bench.said_to_agents(Replace)
    if in_place_s:
        assert bench.logged("not_in_place")[0]["reason"].startswith(f"rank {WRONG} is not at the step")
    bench.all_write(orders)
    rank, _ = bench.publish_order()
    assert rank != WRONG


def test_the_only_holder_of_another_shard_has_no_proof_for_its_own() -> None:
    """What it holds of one shard may be wrong, so nothing is written without it, and why is said."""
    holders = ((0, 1, 2), (WRONG,))
    bench = ControllerBench(holders, assembled=False)
    for rank in range(3):
        bench.say(AgentHello(f"host{rank}", (rank,), (100 + rank,)), able(rank, holders, repairs=True))
    says(bench, 0, CauseKind.EXCEPTION)
    reports(bench, (0, 2))
    bench.say(report(WRONG, bench.state.freeze_id, Phase.DONE, 7))
    assert bench.at(Stage.EXITING) and "has reported no digest" in bench.logged("refused")[0]["reason"]


def test_a_rank_that_was_proven_wrong_stays_so_in_later_rounds() -> None:
    """No directory takes the step from those that are right, and all are asked again: the disk of the third is not tried."""
    bench = found(in_place_s=0.0)
    while bench.at(Stage.WRITING):
        orders = bench.orders()
        assert orders and WRONG not in orders
        for rank, order in orders.items():
            bench.say(StepFailed(rank, order.freeze_id, "write", order.tmp_name, "I/O error"))
    assert bench.at(Stage.FREEZING) and bench.state.freeze_id == 2
    reports(bench)
    assert bench.at(Stage.EXITING) and not bench.orders()
    assert "rank 1, whose replica is wrong" in bench.logged("refused")[0]["reason"]


@pytest.mark.parametrize("settings", [{"repairs": False}, {"repairs": False, "in_place_s": 0.0}])
def test_ranks_that_ask_for_an_end_have_one(settings: dict[str, Any]) -> None:
    bench = found(**settings)
    assert bench.at(Stage.EXITING) and set(bench.sent(Exit)) == {0, 1, 2}
    assert "replicas differ, and on_divergence='repair' was not asked for" in bench.logged("refused")[0]["reason"]


def test_one_rank_that_does_not_ask_for_repairs_is_enough() -> None:
    bench = ControllerBench(THREE, assembled=False, in_place_s=IN_PLACE_S)
    for rank in range(3):
        bench.say(AgentHello(f"host{rank}", (rank,), (100 + rank,)), able(rank, THREE, repairs=rank != 2))
    says(bench, WRONG, CauseKind.DIVERGED)
    reports(bench)
    assert bench.at(Stage.EXITING)


def test_digests_count_whatever_the_fault_is() -> None:
    """A rank dies as the others learn that they differ: of the two that remain neither is proven right."""
    bench = job()
    says(bench, 2, CauseKind.AGENT_LOST)
    reports(bench, (0, 1))
    bench.close(2)
    bench.wait(bench.state.settings.lease_s + 1.0, senders=(0, 1))
    assert bench.at(Stage.EXITING)
    assert "no majority of holders agrees" in bench.logged("refused")[0]["reason"]
