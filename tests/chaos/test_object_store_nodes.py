"""Nodes with directories of their own and one mirror: both disks are lost, and the job resumes from what the nodes have copied together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.test_nodes import STEPS, WHY_NOT, MakeNodes, assert_whole, nodes
from ttp.chaos.observed.nodes_job import NodesJob
from ttp.mirror import fetch
from ttp.mirror.remote import Remote

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]
SAVES = "--training_config.save_interval=20"


def test_nodes_that_lose_their_disks_resume_what_they_have_copied_together(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    url = f"file://{tmp_path}/mirror"
    environ = {"TTP_SHARED_DIRS": "False", "TTP_MIRROR": url}
    a, b = nodes(2)
    remote = Remote(url)

    def whole() -> list[int]:
        return [step for step in fetch.steps_of(remote) if remote.read(f"iter_{step:07d}/manifest.json") is not None]

    with NodesJob(
        tmp_path / "lost", (a, b), overrides=arguments(*STEPS, SAVES), own_checkpoints=True, environ=environ
    ) as job:
        job.wait_for(lambda: bool(whole()), "a whole checkpoint in the mirror", 200)
        for node in (a, b):
            node.power_off()
        job.wait(a, b, timeout_s=60)
        step = whole()[0]
        found = fetch.find(remote, step)
        assert found is not None and {file.rank for file in found.manifest.files} == {0, 1, 2, 3}
        for node in (a, b):
            shutil.rmtree(job.disk(node))
            node.plug()
            job.start(node)
        assert job.wait(timeout_s=300) == {"node-a": 0, "node-b": 0}, job.console_tail(60)
        text = job.console(a) + job.console(b)
        assert f"fetched {tmp_path}" in text and f"at step {step} (periodic)" in text and "moved " in text, text
        assert_whole(job, whole_job(4, *STEPS, SAVES))
    assert whole()[0] == 300
    last = fetch.find(remote, 300)
    assert last is not None
    fetch.check_sums(remote, last)
