"""Nodes with checkpoint directories of their own (`TTP_SHARED_DIRS=False`): nodes are lost, with and without their disks."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.test_nodes import (
    LAST,
    MORE_STEPS,
    STEPS,
    WHY_NOT,
    MakeNodes,
    assert_whole,
    nodes,
    published,
    slowly,
    train_a_little,
    wait_for_verdict,
)
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.nodes_job import NodesJob
from ttp.checkpoint.format.durable import step_directory_name
from ttp.checkpoint.format.manifest import Manifest, read_manifest
from ttp.exchange import saved_alone
from ttp.exchange.launch_file import is_name
from ttp.runtime.standby import last_term_of

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]


def piece(job: NodesJob, node: Node, step: int) -> Manifest:
    return read_manifest(job.disk(node) / step_directory_name(step))


def files_on(job: NodesJob, node: Node, step: int) -> set[str]:
    return {path.name for path in (job.disk(node) / step_directory_name(step)).glob("*.distcp")}


@pytest.mark.long
def test_a_job_on_nodes_with_their_own_disks_loses_nothing(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """A rank dies; then a node with its disk; then the node with rank 0 and the active controller. Each node has its own
    ranks' files only; a restart says what it moves; all bits are the baseline job's."""
    a, b = nodes(2)
    environ = {"TTP_SHARED_DIRS": "False"}
    with NodesJob(
        tmp_path / "faulted", (a, b), overrides=arguments(*STEPS), own_checkpoints=True, environ=environ
    ) as job:
        before = []
        train_a_little(job, 0)
        before.append(job.kill(3).after_step)
        wait_for_verdict(job, 0)
        train_a_little(job, 1)
        (first,) = published(job, 0)
        assert piece(job, a, first).attempt == piece(job, b, first).attempt
        assert {file.name for file in piece(job, a, first).files if file.rank in (0, 1)} <= files_on(job, a, first)

        lost, left = (b, a) if job.node_of_rank(0) is a else (a, b)
        before.append(job.last_step())
        lost.power_off()
        wait_for_verdict(job, 1)
        shutil.rmtree(job.disk(lost))
        lost.plug()
        job.start(lost)
        train_a_little(job, 2)
        (second,) = published(job, 1)
        assert files_on(job, lost, second) <= files_on(job, left, second)
        assert f"from node {left.name} to node {lost.name}" in job.console(a) + job.console(b)

        lost = job.node_of_rank(0)
        before.append(job.last_step())
        lost.power_off()
        wait_for_verdict(job, 2)
        lost.plug()
        job.start(lost)
        assert job.wait(timeout_s=200) == {"node-a": 0, "node-b": 0}, job.console_tail(60)
    for start, step in enumerate(before):
        assert published(job, start)[0] >= step, (start, step)
    launches = {piece(job, node, step).launch for node in (a, b) for step in (second, LAST)}
    assert len(launches) == 1 and is_name(launches.pop()), "one, over all restarts and for the node that came later"
    assert job.final()["step"] == LAST
    assert not list((job.output_dir / "checkpoints").iterdir()), "nothing is shared"
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
def test_fewer_nodes_gather_what_they_have_and_share_it_with_one_that_comes(tmp_path: Path, nodes: MakeNodes) -> None:
    """3 nodes, `--nnodes 2:3`: one is lost with its disk, four ranks go on from the files of the two others, cut anew; the
    node comes back with an empty disk and is given what its ranks read."""
    three = nodes(3)
    options = arguments(*MORE_STEPS, "--training_config.save_interval=450")
    environ = {"TTP_SHARED_DIRS": "False"}
    with NodesJob(
        tmp_path / "faulted", three, nnodes="2:3", overrides=options, own_checkpoints=True, environ=environ
    ) as job:
        train_a_little(job, 0)
        step, lost = job.last_step(), job.node_of_rank(5)
        lost.power_off()
        wait_for_verdict(job, 0)
        shutil.rmtree(job.disk(lost))
        train_a_little(job, 1)
        assert len(job.pids()) == 4
        (first,) = published(job, 0)
        assert first >= step
        with slowly(job, lost):
            lost.plug()
            job.start(lost)
            train_a_little(job, 2)
        assert len(job.pids()) == 6
        assert files_on(job, lost, published(job, 1)[0]), "the node that is back was given what it reads"
        assert set(job.wait(timeout_s=200).values()) == {0}, job.console_tail(60)
    saved = [piece(job, node, 900) for node in three]
    assert {manifest.cause.kind.value for manifest in saved} == {"periodic"} and len({m.attempt for m in saved}) == 1
    assert "iB, from node" in job.console(three[0]) + job.console(three[1])
    resumed = f"resumed from {job.output_dir}/checkpoints/{step_directory_name(first)} at step {first} "
    assert resumed in job.console_tail(1000)
    assert job.leftovers() == []


@pytest.mark.long
def test_ranks_without_a_controller_leave_a_piece_of_one_checkpoint_on_each_node(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """The only controller is killed, and one rank gets a preemption notice: all four save the step, and both nodes go on behind it."""
    a, b = nodes(2)
    environ = {"TTP_SHARED_DIRS": "False", "TTP_STANDBYS": "0"}
    with NodesJob(
        tmp_path / "faulted", (a, b), overrides=arguments(*STEPS), own_checkpoints=True, environ=environ
    ) as job:
        train_a_little(job, 0)
        (controller,) = job.controller_pids().values()
        os.kill(controller, signal.SIGKILL)
        job.wait_for_step(job.last_step() + 2)
        job.kill(3, signal.SIGTERM)
        train_a_little(job, 1)
        account = saved_alone.read(job.output_dir / "log", 0, 0.0)
        assert account is not None and not account.error and account.noticed == (3,), job.console_tail(80)
        pieces = [piece(job, node, account.step) for node in (a, b)]
        assert {(one.attempt, one.term) for one in pieces} == {(pieces[0].attempt, last_term_of(0))}
        assert files_on(job, a, account.step) and files_on(job, b, account.step)
        assert job.wait(timeout_s=200) == {"node-a": 0, "node-b": 0}, job.console_tail(60)
        assert "no controller led the ranks" in job.console(a) + job.console(b)
    assert_whole(job, whole_job(4, *STEPS))
