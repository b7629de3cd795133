"""A script that is not there: no worker is started for it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.unit.launch.test_agent import make_agent
from ttp.launch.endings import NotStarted


def test_a_script_that_is_not_there_is_refused_before_any_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In torch's order of things Python would be started first, and say so once a rank."""
    asked: list[object] = []
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda self, group: asked.append(group))
    monkeypatch.setattr("ttp.launch.attempts.signals.ShutdownSignals.install", lambda self: None)
    agent = make_agent()
    for script, refused in ((str(tmp_path), False), (str(tmp_path / "nosuch.py"), True), ("", False)):
        monkeypatch.setattr(agent, "_launching", replace(agent._launching, script=script))
        with pytest.raises(NotStarted, match=r"nosuch.py' \(no such file") if refused else nullcontext():
            agent._start_processes(agent.get_worker_group())
    assert len(asked) == 2
