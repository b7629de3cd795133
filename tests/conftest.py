"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("test", suppress_health_check=[HealthCheck.too_slow], deadline=None, print_blob=True)
settings.load_profile("test")  # seconds say nothing on a busy machine

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
"""torch's stores ask DNS for the name of each that connects, 127.0.0.1 too: one lost answer holds all clients of a store up for 5 s."""

HERE = Path(__file__).parent
LONGEST = HERE / "unit/trainer"
"""The folder whose files take longest. They come first: a worker that gets one last is alone with it while the others have ended."""
JOBS = HERE / "chaos"
"""The folder whose files start jobs, which wait as long as they compute. They are spread among the others, with as many at one time, and end before them."""
JOBS_END = 0.8
"""In this part of the whole."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # the process that collects
        gc.disable()  # until all tests are there, hardly anything of which is garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    paths = list(dict.fromkeys(item.path for item in items))
    jobs = [path for path in paths if JOBS in path.parents]
    others = [path for path in paths if JOBS not in path.parents]
    longest = {path for path in paths if LONGEST in path.parents}
    place = {path: JOBS_END * number / len(jobs) for number, path in enumerate(jobs)}
    place |= {path: number / len(others) for number, path in enumerate(others)}
    items.sort(key=lambda item: (item.path not in longest, place[item.path]))


def pytest_collection_finish() -> None:
    """What thousands of tests are made of stays: the garbage collector does not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_not_ignored() -> Iterator[None]:
    """Ctrl-C is as in a terminal, here and in what tests start, also where a shell has started the tests in the background: it has its
    jobs ignore SIGINT then."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    """A handler that a test leaves behind acts on another test, one that has done nothing: SIGPIPE at its default ends the process
    without a word at the next write to a closed socket."""
    watched = signal.valid_signals() - {signal.SIGALRM}  # the tests' time limit, which comes and goes as it likes
    before = {number: signal.getsignal(number) for number in watched}
    yield
    changed = {number: now for number, was in before.items() if (now := signal.getsignal(number)) is not was}
    for number in changed:
        signal.signal(number, before[number])
    assert not changed, f"{request.node.nodeid} has left these handlers behind: {changed}"


@pytest.fixture(autouse=True)
def environment_is_as_it_was() -> Iterator[None]:
    """What a program sets for its children, run in this process, is not inherited by what the next tests start."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
