"""`ttp drain NODE` on nodes of network namespaces: the job finishes its step, saves it, and continues without that node. No step is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.test_nodes import MORE_STEPS, WHY_NOT, MakeNodes, assert_stretch, assert_whole, nodes, train_a_little
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.nodes_job import PORT, RENDEZVOUS, NodesJob
from ttp.chaos.observed.training_job import read_jsonl
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.verify import verify
from ttp.launch.endings import REQUEUE_EXIT_CODE

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]

STEPS = ("--training_config.training_iters=150", "--training_config.log_interval=100")


def drain(job: NodesJob, on: Node, store: Node, name: str, *more: str) -> tuple[int, str]:
    """Run the command on a node; return its exit status and what it printed."""
    path = job.output_dir / f"drain-{name}.log"
    words = [name, "--rdzv-endpoint", f"{store.name}:{PORT}", "--rdzv-id", "nodes", *more]
    with open(path, "wb") as output:
        status = on.popen([sys.executable, "-m", "ttp.cli", "drain", *words], output=output).wait(200)
    return status, path.read_text()


def secret_in(folder: Path, text: str) -> str:
    path = folder / f"{text}.secret"
    path.write_text(text * 32)
    path.chmod(0o600)
    return str(path)


def saved_steps(job: NodesJob) -> list[int]:
    return sorted(verify(path).step for path in list_checkpoints([job.output_dir / "checkpoints"]))


def test_a_spare_takes_the_place_of_a_drained_node(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """With the job's secret only. The node's agent ends with 75 when its ranks have saved; nothing is counted as a fault or a restart."""
    a, b, c = nodes(3)
    (tmp_path / "job").mkdir()
    secret, other = secret_in(tmp_path, "a"), secret_in(tmp_path, "b")
    launcher = ("--secret-file", secret, "--max-restarts", "0")
    with NodesJob(
        tmp_path / "job", (c, a, b), spares=(c,), stores=(c,), overrides=arguments(*STEPS), launcher=launcher
    ) as job:
        train_a_little(job, 0)
        leaves = job.node_of_rank(3)
        stays = a if leaves is b else b
        leaves.throttle(2)  # the job must not be over before
        status, said = drain(job, stays, c, leaves.name, "--secret-file", other)
        assert status == 2 and "invalid secret on this node" in said
        before = job.last_step()
        status, said = drain(job, stays, c, leaves.name, "--secret-file", secret, "--reason", "a new cable")
        assert (status, said.splitlines()[-1]) == (0, f"{leaves.name} has left the job"), said
        leaves.clear()
        assert job.wait(timeout_s=200) == {c.name: 0, stays.name: 0, leaves.name: REQUEUE_EXIT_CODE}, job.console_tail(
            60
        )
    assert f"{leaves.name} is drained: a new cable" in job.console(leaves)
    assert f"a node has left: {leaves.name} is drained: a new cable" in job.console(stays)
    assert f"{c.name}, a spare, takes the place of {leaves.name}" in job.console(c)
    assert len(job.starts()) == 2 and saved_steps(job)[0] >= before
    end = read_jsonl(job.output_dir / "log" / "story.jsonl")[-1]
    assert (end["result"], end["steps_lost"], end["faults"], end["notices"]) == ("succeeded", 0, 1, 1)
    assert_whole(job, whole_job(4, *STEPS))


def test_a_job_goes_on_with_fewer_nodes_without_the_drained_one(tmp_path: Path, nodes: MakeNodes) -> None:
    """3 nodes, `--nnodes 2:3`, no spare: what follows is a job of that size from the step that was saved. Then another one is drained: too few
    remain, and all ask to be started again."""
    three = nodes(3)
    options = arguments(*MORE_STEPS)
    launcher = ("--rdzv-conf", RENDEZVOUS.replace("join_timeout=240", "join_timeout=30"))
    with NodesJob(tmp_path / "job", three, nnodes="2:3", overrides=options, launcher=launcher) as job:
        train_a_little(job, 0)
        leaves = next(node for node in three[1:] if node is not job.node_of_rank(0))
        first = [node for node in three if node is not leaves]
        assert drain(job, three[0], three[0], leaves.name)[0] == 0
        assert job.wait(leaves) == {leaves.name: REQUEUE_EXIT_CODE}
        train_a_little(job, 1)
        assert len(job.pids()) == 4
        (step,) = [step for step in saved_steps(job) if step]
        last = job.last_step()
        assert drain(job, three[0], three[0], first[1].name)[0] == 0
        assert set(job.wait(*first, timeout_s=200).values()) == {REQUEUE_EXIT_CODE}, job.console_tail(60)
        assert "too few nodes joined within 30 s" in job.console(first[0])
    assert job.leftovers() == []
    assert_stretch(job, tmp_path / "from_nothing", 6, options, None, 0, step)
    assert saved_steps(job)[-1] >= last
    del job
