"""A standby lives as long as the rank or the launcher that it was started for, and while it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.high_descriptors import high
from ttp.controller.agent_link import request_status
from ttp.controller.journal import read_events
from ttp.controller.parent_watch import Guardians

from .conftest import LONG_S, StartController

Child = subprocess.Popen[bytes]


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Two processes that wait to be ordered to end."""
    made = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    yield made
    for child in made:
        with child:
            child.kill()


def end(child: Child) -> None:
    child.kill()
    child.wait(LONG_S)


def test_one_guardian_is_enough(children: list[Child]) -> None:
    """The rank may die while its launcher lives, and the other way round."""
    guardians = Guardians(tuple(child.pid for child in children))
    assert guardians.alive()
    end(children[0])
    assert guardians.alive()
    end(children[1])
    assert not guardians.alive() and not guardians.alive()


def test_a_guardian_that_is_gone_already_does_not_count(children: list[Child]) -> None:
    """A process that has been reaped has no number any more."""
    end(children[0])
    assert not Guardians((children[0].pid,)).alive()
    assert Guardians((children[0].pid, children[1].pid)).alive()


def test_a_standby_with_many_open_files_knows_its_guardian(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", lambda pid: high(pidfd_open(pid)))
    guardians = Guardians((children[0].pid,))
    assert guardians.alive()
    end(children[0])
    assert not guardians.alive()


def test_without_guardians_none_is_ever_gone() -> None:
    """A controller that was started by hand has no guardian to wait for."""
    assert Guardians(()).alive()
    assert Guardians((os.getpid(),)).alive()


def test_sigterm_does_not_end_a_standby_that_is_guarded(
    new_controller: StartController, children: list[Child], tmp_path: Path
) -> None:
    """A scheduler may send it to every process of a job whose ranks still save; its own rank and launcher dismiss it."""
    standby = new_controller(standby=1, term=2, guardians=(children[0].pid,))
    standby.terminate()
    deadline = time.monotonic() + LONG_S
    while not any(line.event == "stays" for line in read_events(tmp_path / "journal0.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert request_status(standby.address).stage == "standby"
    standby.dismiss()
    assert standby.wait(LONG_S) == 0


def test_sigterm_ends_a_standby_whose_guardians_have_gone(
    new_controller: StartController, children: list[Child]
) -> None:
    """No rank remains to dismiss it: it need not wait for ranks of other nodes."""
    standby = new_controller(standby=1, term=2, guardians=(children[0].pid,), orphan_timeout_s=600.0)
    end(children[0])
    standby.terminate()
    assert standby.wait(LONG_S) == 0


def test_an_idle_standby_ends_after_its_guardians(new_controller: StartController, children: list[Child]) -> None:
    """Not before both are gone; then without an order."""
    pids = tuple(child.pid for child in children)
    standby = new_controller(standby=1, term=2, guardians=pids, orphan_timeout_s=0.2)
    end(children[0])
    assert request_status(standby.address).stage == "standby"
    assert standby.wait(1.5) is None, "one guardian lives"
    end(children[1])
    assert standby.wait(LONG_S) == 0


def test_a_first_controller_that_no_rank_has_come_to_ends_after_the_rank_that_started_it(
    new_controller: StartController, children: list[Child]
) -> None:
    """Rank 0 was killed before it had connected: without a launcher that sweeps, its controller would keep its port for good."""
    controller = new_controller(guardians=(children[0].pid,), orphan_timeout_s=0.2)
    assert controller.wait(1.5) is None, "its rank lives"
    end(children[0])
    assert controller.wait(LONG_S) == 0
