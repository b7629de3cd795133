"""Workers that are forked in several batches: all run, or none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.fork_server.conftest import serving
from ttp.fork_server import client
from ttp.fork_server.client import ForkServer, Program
from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.request import NotForked


def before_second(call: Callable[..., Any], fault: Callable[[], object]) -> Callable[..., Any]:
    """Return the same call, with a fault before its second time."""
    calls: list[int] = []

    def counted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            fault()
        return call(*given)

    return counted


def lose(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)


def interrupt(server: ForkServer) -> None:
    """As a signal to the agent, whose handler raises."""
    raise KeyboardInterrupt("interrupted")


def remove_folder(server: ForkServer) -> None:
    raise FileNotFoundError("no folder")


@pytest.mark.parametrize(
    ("name", "fails", "raised", "why"),
    [
        ("_ask", lose, NotForked, "the fork server was lost"),
        ("_ask", interrupt, KeyboardInterrupt, "interrupted"),
        ("getcwd", remove_folder, NotForked, "the fork server did not fork: no folder"),
    ],
    ids=["the server is lost", "a signal", "no folder"],
)
def test_of_an_attempt_whose_second_batch_fails_the_first_is_ended(
    name: str,
    fails: Callable[[ForkServer], None],
    raised: type[BaseException],
    why: str,
    script: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent executes all of them then: the first batch's ranks would run twice, one of each watched by no agent."""
    forked: list[ForkedChild] = []

    def child(pid: int, args: Sequence[str]) -> ForkedChild:
        forked.append(ForkedChild(pid, args))
        return forked[-1]

    monkeypatch.setattr(client, "ForkedChild", child)
    monkeypatch.setattr(client, "MOST_AT_ONCE", 2)
    args = (sys.executable, "-u", script("import sys; sys.stdout.write('.'); sys.stdin.read()"))
    held, release = os.pipe()
    out, write_end = os.pipe()
    with serving() as server, contextlib.ExitStack() as ends:
        for end in (held, release, out, write_end):  # a worker that was not ended ends then
            ends.callback(os.close, end)

        def fault() -> None:
            for _ in forked:  # a server that is lost sooner may not have let them run
                assert os.read(out, 1) == b"."
            fails(server)

        server.prepare(args, os.environ)
        with monkeypatch.context() as patch, pytest.raises(raised, match=why):
            owner: Any = os if name == "getcwd" else server
            patch.setattr(owner, name, before_second(getattr(owner, name), fault))
            server.fork([Program(args, os.environ, (held, write_end, 2))] * 3)
        assert [one.returncode for one in forked] == [-signal.SIGKILL] * 2
