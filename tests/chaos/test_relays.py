"""Ranks whose `ttprun` carries their streams to the controller: faults end as without, and a `ttprun` that stands still costs nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, RunJob, arguments, run_to_end
from tests.chaos.test_in_place import ON, console, recovered
from tests.chaos.test_kills import assert_equal
from ttp.chaos.observed.training_job import TrainingJob

RELAYED = {**ON, "TTP_RELAY": "True", "TTP_LEASE_S": "20"}
"""A relay may be silent for a fifth of the lease: a busy machine alone makes none so silent."""
LEFT = "nothing received from this node's relay"


def relay_of(pid: int) -> str:
    """Return the socket at which a rank's process was to find its relay."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((each.partition(b"=")[2].decode() for each in variables if each.startswith(b"TTP_RELAY_SOCKET=")), "")


def connections(pid: int) -> set[str]:
    """Return the inodes of a process's sockets that are established TCP connections."""
    links = [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()]
    own = {found[1] for link in links if (found := re.match(r"socket:\[(\d+)\]", str(link)))}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {words[9] for words in lines if words[3] == "01"} & own


def test_a_rank_behind_a_relay_is_replaced(tmp_path: Path, whole_job: RunJob) -> None:
    job = run_to_end(tmp_path / "job", 2, faults="kill:rank=1,step=9,point=record", environ=RELAYED)
    recovered(job)
    assert_equal(job, whole_job(2))
    assert LEFT not in console(job)


def test_a_launcher_that_stands_still_costs_nothing_and_a_rank_that_dies_later_is_replaced(tmp_path: Path) -> None:
    """Its ranks leave its relay, and each connects to the controller itself."""
    more = "--training_config.training_iters=2000"
    with TrainingJob(tmp_path / "job", ranks=2, overrides=arguments(more), environ=RELAYED) as job:
        job.wait_for_step(3)
        pids, controller = job.pids(), job.controller_pids()[0]
        assert all(Path(relay_of(pid)).is_socket() for pid in pids.values())
        through_relay = len(connections(controller))
        job.process.send_signal(signal.SIGSTOP)
        try:
            job.wait_for(lambda: len(connections(controller)) >= through_relay + 2, "each has a connection", JOB_S)
            job.wait_for(lambda: LEFT in console(job), "rank 0 reports that it has left the relay", JOB_S)
            job.wait_for_step(job.last_step() + 3)
        finally:
            job.process.send_signal(signal.SIGCONT)
        job.wait_for_step(job.last_step() + 3)
        (journal,) = job.journals()
        assert not [line for line in journal if line["event"] in ("freeze_sent", "death_seen")]
        job.kill(1)
        job.wait_for(lambda: "training continues after step" in console(job), "the recovery", JOB_S)
        job.wait_for_step(job.last_step() + 3)
        job.process.send_signal(signal.SIGINT)
        job.wait(JOB_S)
    assert len(job.starts()) == 1


@pytest.mark.long
def test_a_controller_that_dies_is_followed_through_the_relay(tmp_path: Path) -> None:
    """The standby has two connections then, as the first one had: the launcher's own, and that of its relay."""
    with TrainingJob(
        tmp_path / "job", ranks=3, overrides=arguments("--training_config.training_iters=2000"), environ=RELAYED
    ) as job:
        job.wait_for_step(3)
        first, standby = (job.controller_pids()[place] for place in (0, 1))
        assert len(connections(first)) == 2
        os.kill(first, signal.SIGKILL)
        job.wait_for(lambda: "took_over" in (line["event"] for line in job.journals()[-1]), "the takeover", JOB_S)
        job.wait_for_step(job.last_step() + 3)
        assert len(connections(standby)) == 2
        job.kill(2)
        job.wait_for(lambda: "training continues after step" in console(job), "the recovery", JOB_S)
        job.wait_for_step(job.last_step() + 3)
        assert LEFT not in console(job) and len(connections(standby)) == 2
        job.process.send_signal(signal.SIGINT)
        job.wait(JOB_S)
    assert len(job.starts()) == 1
