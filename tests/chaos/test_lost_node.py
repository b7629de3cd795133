"""Without a spare: those that are left of a job meet at once, and a node that comes back later has a place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import arguments
from tests.chaos.test_nodes import lines_of, published, slowly, train_a_little, wait_for_verdict
from ttp.chaos.nodes.namespaces import Node, Nodes, why_not
from ttp.chaos.observed.nodes_job import NodesJob
from ttp.chaos.verdict.timeline import by_step

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]

ANEW = "has begun anew, without nodes that are lost"
TORCHS_TIMES = ("--rdzv-conf", "join_timeout=240")
"""No `last_call_timeout`: the job does not say how long it waits for more nodes."""
STEPS = ("--training_config.training_iters=900", "--training_config.log_interval=100")


@pytest.fixture
def three() -> Iterator[tuple[Node, ...]]:
    with Nodes(3) as nodes:
        yield nodes


def test_two_of_three_meet_at_once_and_take_the_lost_node_in_again(tmp_path: Path, three: tuple[Node, ...]) -> None:
    """`--nnodes 2:3`: the node without rank 0 is lost. The meeting of the two is for them; after a rank of theirs has died they meet once more, and then
    with the node that is back. No step is lost."""
    options = {"nnodes": "2:3", "overrides": arguments(*STEPS), "launcher": TORCHS_TIMES}
    with NodesJob(tmp_path / "faulted", three, **options) as job:  # type: ignore[arg-type]
        train_a_little(job, 0)
        first = job.node_of_rank(0)
        lost = next(node for node in three if node is not first)
        lost.power_off()
        wait_for_verdict(job, 0)
        train_a_little(job, 1)
        assert len(job.pids()) == 4 and ANEW in job.console(first)
        job.kill(3)
        train_a_little(job, 2)
        assert len(job.pids()) == 4
        with slowly(job, lost):
            lost.plug()
            job.start(lost)
            train_a_little(job, 3)
        assert len(job.pids()) == 6
        assert set(job.wait(timeout_s=240).values()) == {0}, job.console_tail(60)
    assert [len(published(job, start)) for start in range(3)] == [1, 1, 1] and not lines_of(job, 0, "refused")
    assert sorted(by_step(job.metrics())) == list(range(1, 901))
    assert job.leftovers() == []
