"""The holding agent where torch's own breaks in the middle."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from tests.unit.launch.test_rendezvous import FixedNodes
from ttp.launch.agent import HoldAgent
from ttp.launch.courier import Link
from ttp.launch.processes import exit_status
from ttp.launch.rendezvous import FreshStoreRendezvous
from ttp.launch.round import Launching


def no_link(address: str, job_id: str, pids: Mapping[int, int]) -> Link:
    raise ConnectionError("no controller in this test")


def make_agent() -> HoldAgent:
    handler = FreshStoreRendezvous(FixedNodes(HashStore(), 0, 1), "127.0.0.1", same_keys_every_round=False)
    spec = WorkerSpec(role="r", local_world_size=2, rdzv_handler=handler, entrypoint="sleep", args=("600",))
    launching = Launching(total_timeout_s=5.0, poll_s=0.002, open_link=no_link, request_shutdown=lambda address: None)
    return HoldAgent(spec, DefaultLogsSpecs(), launching)


def test_workers_of_a_start_that_broke_in_the_middle_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch forgets those that run when a later one cannot be started; another child of this process is left alone."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    started: list[subprocess.Popen[bytes]] = []

    def broken(self: LocalElasticAgent, worker_group: object) -> dict[int, Any]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        raise OSError("no process left for the second")

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", broken)
    for name in ("TTP_LAUNCHED", "TTP_ROUND_ID", "TTP_START_ID"):
        monkeypatch.setenv(name, "")  # put back afterwards
    try:
        with pytest.raises(OSError, match="no process left"):
            make_agent().run()
        assert started[0].wait() == -9
        assert exit_status(other.pid) is None
    finally:
        for child in (other, *started):
            child.kill()
            child.wait()


def test_the_rendezvous_must_give_fresh_stores() -> None:
    """torch's handler alone would fail the first restart."""
    spec = WorkerSpec(role="r", local_world_size=1, rdzv_handler=FixedNodes(HashStore(), 0, 1), entrypoint="true")
    launching = Launching(total_timeout_s=5.0, poll_s=0.002, open_link=no_link, request_shutdown=lambda address: None)
    with pytest.raises(TypeError, match="needs a FreshStoreRendezvous, got FixedNodes"):
        HoldAgent(spec, DefaultLogsSpecs(), launching)
