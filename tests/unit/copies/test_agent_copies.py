"""The agent's part in copies, without a keeper's process."""

from __future__ import annotations

import socket

import pytest

from tests.high_descriptors import high_socket
from ttp.fork_server import frames
from ttp.identity.own import socket_name
from ttp.launch.attempts.copies import Copies


def test_an_agent_with_many_open_files_looks_after_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, started = Copies(), list[object]()
    monkeypatch.setattr(agent, "_start", started.append)
    agent._ranks = high_socket(agent._ranks)
    agent.look(None)
    assert not started
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(socket.AF_UNIX) as rank:
        agent._orders, agent._begins = high_socket(ours), True
        rank.connect(socket_name(agent.address))
        agent.look(None)
        assert started and agent._begins
        frames.send(theirs, {})
        agent.look(None)
        assert not agent._begins
        agent.close()
