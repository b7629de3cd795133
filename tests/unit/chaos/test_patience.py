"""The first signal ends a campaign, a later one the waiting for its end; what is taken down is not disturbed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from ttp.chaos import demo, kills, kills_in_place
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.nodes.namespaces import Terminated


@pytest.mark.parametrize(("signum", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_the_first_signal_raises_and_the_second_one_ends_the_waiting(
    signum: signal.Signals, kind: type[BaseException]
) -> None:
    """Nothing raises any more once something has; the handlers of before are back at the end."""
    before = signal.getsignal(signum)
    with InterruptGuard() as patience:
        with pytest.raises(kind):
            signal.raise_signal(signum)
        assert not patience.over
        signal.raise_signal(signum)
        signal.raise_signal(signal.SIGINT)
        assert patience.over
        patience.ending()
        patience.ended()
    assert signal.getsignal(signum) is before


def test_a_signal_while_a_run_is_taken_down_comes_when_that_is_done() -> None:
    """It ends the waiting at once, and raises afterwards; the next one does not."""
    with InterruptGuard() as patience:
        patience.ending()
        signal.raise_signal(signal.SIGINT)
        assert patience.over
        with pytest.raises(KeyboardInterrupt):
            patience.ended()
        signal.raise_signal(signal.SIGINT)


def test_an_undisturbed_end_leaves_everything_as_it_was() -> None:
    """The next run of the same campaign is ended by its first signal, too."""
    with InterruptGuard() as patience:
        for _ in range(2):
            patience.ending()
            patience.ended()
        assert not patience.over
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A shell's background job is not ended by the Ctrl-C that is meant for another one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptGuard() as patience:
            signal.raise_signal(signal.SIGINT)
        assert not patience.over
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_no_handler() -> None:
    """Only the main thread may; elsewhere no signal is received, and no thread is disturbed."""
    found = []

    def enter() -> None:
        with InterruptGuard():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("program", "where", "options"),
    [(kills, kills, []), (kills, kills_in_place, ["--in-place"]), (demo, demo, [])],
    ids=["kills", "in place", "demo"],
)
def test_a_harness_that_is_signalled_ends_its_job(
    program: ModuleType,
    where: ModuleType,
    options: list[str],
    signum: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job that stayed would hold the port of the next one."""
    ended = []

    @contextmanager
    def job(*args: object, **settings: object) -> Iterator[None]:
        try:
            signal.raise_signal(signum)
            yield
        finally:
            ended.append(signum)

    monkeypatch.setattr(where, "TrainingJob", job)
    assert program.main([*options, "--output", str(tmp_path / "out")]) == 130
    assert ended == [signum] and "everything that was started has been ended" in capsys.readouterr().out
