"""The agent's part in copies, without a keeper's process."""

from __future__ import annotations

import errno
import socket
import subprocess
import threading
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

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


def test_a_keeper_that_could_not_begin_is_an_error_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    agent = Copies()
    agent.begin("job/3", 3, HashStore(), 0, 1, "", None, [0])
    agent._orders, theirs = socket.socketpair()
    with theirs:
        frames.send(theirs, {"error": "[Errno 24] Too many open files", "damaged": ""})
        agent._has_begun(agent._orders)
        agent.close()
    assert caplog.messages == [
        "the copy keeper could not begin attempt 3: [Errno 24] Too many open files; no copy leaves this node"
    ]


@pytest.mark.parametrize("fails", ["first socketpair", "second socketpair", "thread", "process"])
def test_a_node_without_room_for_a_keeper_is_an_error_in_one_line_and_the_next_look_tries_again(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent, pairs, make_pair = Copies(), list[Any](), socket.socketpair

    def refuse(*_: object, **__: object) -> Any:
        raise (
            RuntimeError("can't start new thread")
            if fails == "thread"
            else OSError(errno.EMFILE, "Too many open files")
        )

    def socketpair() -> Any:
        if fails.endswith("socketpair") and len(pairs) == ["first", "second"].index(fails.split()[0]):
            refuse()
        pairs.append(make_pair())
        return pairs[-1]

    with socket.socket(socket.AF_UNIX) as rank, monkeypatch.context() as patch:
        rank.connect(socket_name(agent.address))
        patch.setattr(socket, "socketpair", socketpair)
        if fails == "thread":
            patch.setattr(threading.Thread, "start", refuse)
        if fails == "process":
            patch.setattr(subprocess, "Popen", refuse)
        for tries in (1, 2):
            pairs.clear()
            threads = threading.enumerate()
            agent.look(None)
            for thread in threading.enumerate():
                if thread not in threads:
                    thread.join()
            assert all(each.fileno() < 0 for pair in pairs for each in pair)
            assert len(caplog.messages) == tries and agent._orders is None
            assert caplog.messages[-1].startswith("a copy keeper cannot be started: ")
    agent.close()
