"""Which leftover ranks may be killed once the shutdown is decided."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ttp.launch.attempts.leftover_ranks import PATIENCE_S, StuckRanks, stopped


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stopped_process_is_distinguished_from_one_that_runs_or_has_ended() -> None:
    """By the state that /proc shows of it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pids = {3: process.pid, 4: os.getpid(), 5: 2**22 + 1}
        assert stopped(pids) == {}
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped(pids) == {3: "stopped"}
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        assert stopped(pids) == {}
        process.kill()


def test_the_controller_is_asked_only_about_ranks_that_have_had_a_moment_to_leave() -> None:
    """And seldom: a controller of thousands of ranks answers a launcher at a time."""
    clock, asked = Clock(), []

    def ask() -> frozenset[int]:
        asked.append(clock.now_s)
        return frozenset({1, 2})

    given_up = StuckRanks(ask, clock)
    here = {0: os.getpid(), 1: os.getpid()}
    assert given_up.among(here) == {} and asked == []
    clock.now_s = PATIENCE_S
    assert given_up.among({}) == {} and asked == []
    assert given_up.among(here) == {1: "silent"} and asked == [PATIENCE_S]
    clock.now_s = 1.9 * PATIENCE_S
    assert given_up.among(here) == {}
    clock.now_s = 2 * PATIENCE_S
    assert given_up.among(here) == {1: "silent"} and asked == [PATIENCE_S, 2 * PATIENCE_S]


def test_a_shell_whose_rank_has_left_is_not_asked_about() -> None:
    """The controller has missed the rank, which is gone; the shell may clean up."""
    clock, asked = Clock(), []

    def ask() -> frozenset[int]:
        asked.append(clock.now_s)
        return frozenset({0, 1})

    given_up = StuckRanks(ask, clock)
    clock.now_s = PATIENCE_S
    assert given_up.among({0: os.getpid()}, shells={0}) == {} and asked == []
    assert given_up.among({0: os.getpid(), 1: os.getpid()}, shells={0}) == {1: "silent"}


def test_a_stopped_rank_is_named_at_once_but_only_on_the_controllers_word() -> None:
    """Neither sooner nor on an older word; and the controller is asked no more often for it."""
    clock, asked = Clock(), []
    word: frozenset[int] | None = None

    def ask() -> frozenset[int] | None:
        asked.append(clock.now_s)
        return word

    given_up = StuckRanks(ask, clock)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        here = {0: process.pid, 1: os.getpid()}
        assert given_up.among(here) == {} and asked == [0.0]
        word = frozenset({1})
        clock.now_s = 0.9 * PATIENCE_S
        assert given_up.among(here) == {} and asked == [0.0]
        assert StuckRanks(ask, clock).among(here) == {0: "stopped"}
        clock.now_s = PATIENCE_S
        assert given_up.among(here) == {0: "stopped", 1: "silent"}
        process.kill()
