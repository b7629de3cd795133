"""Several nodes, each a network namespace: a rank dies and all others keep running, on its node and on the others. What cannot be done in place,
as a node that is lost or cut off, ends in a checkpoint and a restart: no step is lost, and no two sides train on."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
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
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.verify import verify

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]

MORE_STEPS = "--training_config.training_iters=200"
"""For faults from outside: the job must not be over before."""
KEPT_BUSY = "slow:rank={rank},point=protected,for=3,again=1"
"""The process that takes a rank's place needs so long: the job is in the middle of a recovery meanwhile."""


def start(
    output: Path, nodes: Collection[Node], ranks: int, *overrides: str, faults: str = "", **environ: str
) -> NodesJob:
    """Return a job with so many ranks on each node."""
    launcher = ("--nproc-per-node", str(ranks))
    environ = {"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30", "TTP_FAULTS": faults, **environ}  # a loaded machine
    return NodesJob(output, tuple(nodes), overrides=arguments(*overrides), launcher=launcher, environ=environ)


def finish(job: NodesJob, timeout_s: float = 200.0) -> None:
    assert set(job.wait(timeout_s=timeout_s).values()) == {0}, job.console_tail(60)


def assert_recovered(job: NodesJob, victims: Collection[int], times: int | None = None) -> None:
    """Demand that all of the job's faults ended in place: the victims have other processes, all other ranks have theirs, and nothing was written."""
    assert len(job.starts()) == 1, job.console_tail(60)
    lines = job.journal(0)
    processes: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        if line["event"] in ("registered", "replacement_came") and line["pid"] not in processes[line["rank"]]:
            processes[line["rank"]].append(line["pid"])
    assert {rank for rank, pids in processes.items() if len(pids) > 1} == set(victims)
    events = [line["event"] for line in lines]
    assert "write_sent" not in events and (times is None or events.count("regrouped") == times)
    last = max(int(line["step"]) for line in job.metrics() if "loss" in line)
    assert [path.name for path in (job.output_dir / "checkpoints").glob("iter_*")] == [f"iter_{last:07d}"]


@pytest.mark.long
def test_ranks_killed_on_each_node_in_turn_are_replaced_there(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """2 nodes x 2 ranks: one beside the controller, and one on the other node."""
    faults = "kill:rank=1,step=7,point=record;kill:rank=2,step=14,point=backward"
    with start(tmp_path / "job", nodes(2), 2, faults=faults) as job:
        finish(job)
    assert_recovered(job, {1, 2}, 2)
    assert_whole(job, whole_job(4))


def test_the_only_rank_of_a_node_is_replaced_there(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """Its agent waits for the controller's order with no process to watch. Rank 0, too, which the others had met at first."""
    # Both agents know the controller, and that a step has ended, when rank 1 is killed.
    slow = "slow:rank=1,step=6,point=backward,for=3"
    faults = f"{slow};kill:rank=1,step=7,point=ready;kill:rank=0,step=14,point=gathering"
    with start(tmp_path / "job", nodes(2), 1, faults=faults) as job:
        finish(job)
    assert_recovered(job, {0, 1}, 2)
    assert_whole(job, whole_job(2))


@pytest.mark.long
def test_three_nodes_with_a_rank_each(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    faults = ";".join(
        f"kill:rank={rank},step={5 + 6 * rank},point={point}"
        for rank, point in enumerate(("record", "backward", "done"))
    )
    with start(tmp_path / "job", nodes(3), 1, faults=faults) as job:
        finish(job)
    assert_recovered(job, {0, 1, 2}, 3)
    assert_whole(job, whole_job(3))


@pytest.mark.long
@pytest.mark.parametrize("point", ["backward", "ready", "record", "updating", "done", "gathering"])
def test_a_death_at_every_point_of_a_step(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, point: str) -> None:
    """Of rank 0 and of a rank of the other node that holds another shard, at once."""
    faults = f"kill:rank=0,step=9,point={point};kill:rank=3,step=9,point={point}"
    with start(tmp_path / "job", nodes(2), 2, faults=faults) as job:
        finish(job)
    assert_recovered(job, {0, 3})
    assert_whole(job, whole_job(4))


@pytest.mark.long
@pytest.mark.parametrize(("point", "victims"), [("backward", ()), ("updating", (1,))])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_that_raises(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, ranks: int, point: str, victims: tuple[int, ...]
) -> None:
    """A process that has lost its state is ended and replaced, also where it is the only one of its node."""
    with start(tmp_path / "job", nodes(2), ranks, faults=f"raise:rank=1,step=9,point={point}") as job:
        finish(job)
    assert_recovered(job, victims, 1)
    assert_whole(job, whole_job(2 * ranks))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_and_its_controller_at_once(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, ranks: int) -> None:
    """The standby on the other node has the newest step written: no process in rank 0's place has come to it, whose groups others may have."""
    with start(tmp_path / "job", nodes(2), ranks, MORE_STEPS) as job:
        train_a_little(job, 0, 20)
        os.kill(job.controller_pids()[0], signal.SIGKILL)
        job.kill(0)
        finish(job)
    assert lines_of(job, 0, "took_over")
    [line] = lines_of(job, 0, "not_in_place")
    assert line["reason"] == "rank 0's process has never come to this controller: others may train on elsewhere"
    assert len(job.starts()) == 2 and len(lines_of(job, 0, "published")) == 1
    assert_whole(job, whole_job(2 * ranks, MORE_STEPS))


@pytest.mark.long
def test_all_ranks_of_a_node_die_and_its_agent_lives(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """The standby that one of them had started lives on, and takes over later."""
    with start(tmp_path / "job", nodes(2), 2, MORE_STEPS) as job:
        train_a_little(job, 0, 10)
        for rank in (2, 3):
            job.kill(rank)
        train_a_little(job, 0, 10)
        os.kill(job.controller_pids()[0], signal.SIGKILL)
        train_a_little(job, 0, 10)
        finish(job)
    assert lines_of(job, 0, "took_over")
    assert_recovered(job, {2, 3})
    assert_whole(job, whole_job(4, MORE_STEPS))


@pytest.mark.long
@pytest.mark.parametrize("with_rank_0", [True, False])
@pytest.mark.parametrize("recovering", [False, True])
def test_a_lost_node_costs_a_checkpoint_and_a_restart(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, with_rank_0: bool, recovering: bool
) -> None:
    """2 nodes x 2 ranks, and the node is started again. Also while one of its ranks is being replaced: the other node holds all shards."""
    a, b = nodes(2)
    victim = 1 if with_rank_0 else 3
    with start(tmp_path / "job", (a, b), 2, MORE_STEPS, faults=KEPT_BUSY.format(rank=victim)) as job:
        train_a_little(job, 0, 10)
        step, node = job.last_step(), job.node_of_rank(victim)
        if recovering:
            job.kill(victim)
            job.wait_for(lambda: bool(lines_of(job, 0, "replacement_came")), "a recovery", 60)
        node.power_off()
        wait_for_verdict(job, 0)
        node.plug()
        job.start(node)
        finish(job)
    assert published(job, 0)[0] >= step and not lines_of(job, 0, "regrouped")
    assert_whole(job, whole_job(4, MORE_STEPS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "recovering"), [(None, False), *((victim, when) for victim in (0, 1, 2) for when in (False, True))]
)
def test_a_pulled_cable_never_leaves_two_sides_that_train(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, victim: int | None, recovering: bool
) -> None:
    """2 nodes x 2 ranks: each side has a controller, and a holder of every shard. One cable is pulled, alone or as a rank of either side dies,
    or while that rank is being replaced. Neither side opens its gates; both save the step, and train on only together, with the cable back."""
    a, b = nodes(2)
    faults = "" if victim is None else KEPT_BUSY.format(rank=victim)
    with start(tmp_path / "job", (a, b), 2, MORE_STEPS, faults=faults) as job:
        train_a_little(job, 0, 10)
        step = job.last_step()
        if not recovering:
            a.unplug()
        if victim is not None:
            job.kill(victim)
        if recovering:
            job.wait_for(lambda: bool(lines_of(job, 0, "replacement_came")), "a recovery", 60)
            a.unplug()
        job.wait_for(lambda: not (job.ranks_on(a) or job.ranks_on(b)), "leave of all ranks", 120)
        steps = [verify(path).step for path in list_checkpoints([job.output_dir / "checkpoints"])]
        assert len(job.journals()) == 1, "a side started again by itself"
        assert not lines_of(job, 0, "regrouped")
        a.plug()
        finish(job)
    assert steps and max(steps) >= step
    assert len(steps) == len(set(steps)) and max(steps) - min(steps) <= 1
    assert_whole(job, whole_job(4, MORE_STEPS))
