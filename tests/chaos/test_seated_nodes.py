"""Several nodes, each a network namespace, and a spare one: a node is lost, and the spare takes its place while the others' processes keep running."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.test_in_place_nodes import KEPT_BUSY
from tests.chaos.test_nodes import (
    WHY_NOT,
    MakeNodes,
    assert_whole,
    lines_of,
    nodes,
    published,
    train_a_little,
    wait_for_verdict,
)
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.nodes_job import NodesJob

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]

STEPS = "--training_config.training_iters=500"


def start(
    output: Path,
    nodes: Collection[Node],
    spares: Collection[Node],
    ranks: int,
    stores: Collection[Node] = (),
    **environ: str,
) -> NodesJob:
    """Return a job with so many ranks on each node but the spare ones."""
    return NodesJob(
        output,
        tuple(nodes),
        spares=tuple(spares),
        stores=tuple(stores),
        overrides=arguments(STEPS),
        launcher=("--nproc-per-node", str(ranks)),
        environ={"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30", **environ},  # a loaded machine
    )


def train_with_all_agents(job: NodesJob) -> None:
    """Wait until all agents, the spare ones too, are attached to the controller and have reported: an agent that never has is not known to be lost."""
    train_a_little(job, 0, 1)
    names = {node.name for node in job.nodes}
    job.wait_for(lambda: names <= {line["host"] for line in lines_of(job, 0, "agent_attached")}, "all agents", 60)
    train_a_little(job, 0, 20)


def lost_and_kept(job: NodesJob, nodes: Collection[Node]) -> tuple[Node, Node]:
    """Return the node without rank 0, and that with it."""
    kept = job.node_of_rank(0)
    return next(node for node in nodes if node is not kept), kept


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_spare_takes_the_place_of_a_lost_node_and_the_others_train_on(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, ranks: int
) -> None:
    a, b, spare = nodes(3)
    with start(tmp_path / "job", (a, b, spare), (spare,), ranks) as job:
        train_with_all_agents(job)
        lost, kept = lost_and_kept(job, (a, b))
        before = {rank: pid for rank, pid in job.pids().items() if rank in job.ranks_on(kept)}
        lost.power_off()
        job.wait_for(lambda: bool(lines_of(job, 0, "regrouped")), "a recovery", 60)
        train_a_little(job, 0, 10)
        after = job.pids()
        assert len(after) == 2 * ranks and before.items() <= after.items()
        assert set(job.ranks_on(spare)) == set(after) - set(before)
        assert set(job.wait(kept, spare, timeout_s=240).values()) == {0}, job.console_tail(60)
    assert len(job.starts()) == 1 and not lines_of(job, 0, "write_sent", "refused")
    assert_whole(job, whole_job(2 * ranks, STEPS))


def test_a_node_that_is_cut_off_and_comes_back_waits_as_a_spare_and_takes_the_next_place(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """Its processes run on behind the broken cable until it is back. The node that was a spare is lost then, and the first one has its own place
    again."""
    a, b, spare = nodes(3)
    with start(tmp_path / "job", (a, b, spare), (spare,), 2) as job:
        train_with_all_agents(job)
        lost, kept = lost_and_kept(job, (a, b))
        before = job.ranks_on(kept)
        pids = {rank: pid for rank, pid in job.pids().items() if rank in before}
        lost.unplug()
        job.wait_for(lambda: bool(lines_of(job, 0, "regrouped")), "a recovery", 60)
        train_a_little(job, 0, 10)
        lost.plug()
        job.wait_for(lambda: "waits as a spare one" in job.console(lost), "end of its ranks", 60)
        job.wait_for(lambda: job.console(lost).count("waiting as a spare node") == 1, "its wait", 60)
        train_a_little(job, 0, 10)
        spare.power_off()
        job.wait_for(lambda: len(lines_of(job, 0, "regrouped")) == 2, "the next recovery", 60)
        train_a_little(job, 0, 10)
        assert set(job.ranks_on(lost)) == set(range(4)) - set(before) and pids.items() <= job.pids().items()
        assert set(job.wait(kept, lost, timeout_s=240).values()) == {0}, job.console_tail(60)
    said = job.console(kept)  # the other side may have saved its step behind the broken cable
    assert len(job.starts()) == 1 and "lost    0 steps" in said and said.count("saved   not needed") == 2
    assert_whole(job, whole_job(4, STEPS))


def test_a_seated_node_is_as_any_other(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """A rank of it dies and is replaced there. Then one gets a notice, which ends in a restart: all nodes meet at once, the seated one among them."""
    a, b, spare = nodes(3)
    with start(tmp_path / "job", (a, b, spare), (spare,), 2) as job:
        train_with_all_agents(job)
        lost, kept = lost_and_kept(job, (a, b))
        lost.power_off()
        job.wait_for(lambda: bool(lines_of(job, 0, "regrouped")), "a recovery", 60)
        train_a_little(job, 0, 10)
        victim = job.ranks_on(spare)[0]
        job.kill(victim)
        job.wait_for(lambda: len(lines_of(job, 0, "regrouped")) == 2, "the second recovery", 60)
        train_a_little(job, 0, 10)
        assert victim in job.ranks_on(spare)
        os.kill(job.pids()[victim], signal.SIGTERM)
        wait_for_verdict(job, 0)
        train_a_little(job, 1, 10)
        assert len(job.ranks_on(spare)) == len(job.ranks_on(kept)) == 2
        assert set(job.wait(kept, spare, timeout_s=240).values()) == {0}, job.console_tail(60)
    assert len(job.starts()) == 2
    assert_whole(job, whole_job(4, STEPS))


def test_a_spare_that_is_lost_as_it_takes_a_place_costs_a_checkpoint_and_a_restart(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """Its processes have come, and not all have regrouped. The first lost node is started again, and the two go on."""
    a, b, spare = nodes(3)
    faults = ";".join(KEPT_BUSY.format(rank=rank) for rank in (1, 3))
    with start(tmp_path / "job", (a, b, spare), (spare,), 2, TTP_FAULTS=faults) as job:
        train_with_all_agents(job)
        step = job.last_step()
        lost, kept = lost_and_kept(job, (a, b))
        lost.power_off()
        job.wait_for(lambda: bool(lines_of(job, 0, "replacement_came")), "a process in another's place", 60)
        spare.power_off()
        wait_for_verdict(job, 0)
        lost.plug()
        job.start(lost)
        assert set(job.wait(kept, lost, timeout_s=240).values()) == {0}, job.console_tail(60)
    assert published(job, 0)[0] >= step and not lines_of(job, 0, "regrouped")
    assert_whole(job, whole_job(4, STEPS))


def test_the_store_in_which_the_nodes_have_met_is_lost_with_the_node(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """It is not that of rank 0's node. The spare knows what runs; afterwards a rank gets a notice, and all meet at the next endpoint."""
    a, b, spare = nodes(3)
    with start(tmp_path / "job", (a, b, spare), (spare,), 2, stores=(b, a)) as job:
        train_with_all_agents(job)
        lost, kept = lost_and_kept(job, (a, b))
        assert lost is b, "the first endpoint has the store, and is not rank 0's"
        before = {rank: pid for rank, pid in job.pids().items() if rank in job.ranks_on(kept)}
        lost.power_off()
        job.wait_for(lambda: bool(lines_of(job, 0, "regrouped")), "a recovery", 60)
        train_a_little(job, 0, 10)
        assert before.items() <= job.pids().items() and len(job.ranks_on(spare)) == 2
        os.kill(job.pids()[3], signal.SIGTERM)
        wait_for_verdict(job, 0)
        train_a_little(job, 1, 10)
        assert set(job.wait(kept, spare, timeout_s=240).values()) == {0}, job.console_tail(60)
    assert_whole(job, whole_job(4, STEPS))


def test_a_node_that_was_cut_off_for_long_goes_back_to_where_the_job_is(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """Its ranks have left behind the broken cable, and its agent has opened another endpoint. When it is back, it waits as a spare node; and it has a
    place by a restart when the node that had its place is lost, and a rank of the other one is stopped."""
    a, b, spare = nodes(3)
    with start(tmp_path / "job", (a, b, spare), (spare,), 2, stores=(a, b)) as job:
        train_with_all_agents(job)
        lost, kept = lost_and_kept(job, (a, b))
        kept.throttle(2)
        lost.unplug()
        job.wait_for(lambda: bool(lines_of(job, 0, "regrouped")), "a recovery", 60)
        job.wait_for(lambda: "moving the rendezvous" in job.console(lost), "another endpoint", 120)
        lost.plug()
        job.wait_for(lambda: job.console(lost).count("waiting as a spare node") == 1, "its wait", 60)
        train_a_little(job, 0, 10)
        assert len(job.starts()) == 1 and "takes the place" not in job.console(lost)
        kept.clear()
        spare.power_off()
        os.kill(job.pids()[1], signal.SIGSTOP)
        wait_for_verdict(job, 0)
        train_a_little(job, 1, 10)
        assert len(job.ranks_on(lost)) == len(job.ranks_on(kept)) == 2
        assert set(job.wait(kept, lost, timeout_s=240).values()) == {0}, job.console_tail(60)
    assert len(job.starts()) == 2
    assert "lost    0 steps" not in job.console(kept), (
        "what the lost side has saved is older than what was trained since"
    )
    assert_whole(job, whole_job(4, STEPS))
