"""What processes hold is read as it is, and what adds up with every recovery is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ttp.chaos.observed.process_census import LEAST_LOOKS, Held, adding_up, look_at, look_at_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


CHILD = """
import os, threading
print("begun", flush=True)
input()
opened, block = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)], bytearray(os.urandom(1 << 25))
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("grown", flush=True)
input()
"""


def test_descriptors_threads_and_memory_are_counted() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CHILD], **pipes) as child:
        assert child.stdin is not None and child.stdout is not None
        seen = []
        for word in ("begun", "grown"):
            assert child.stdout.readline() == f"{word}\n"
            seen.append(look_at(child.pid))
            child.stdin.write("\n")
            child.stdin.flush()
    before, after = seen
    assert before is not None and after is not None and before.identity == after.identity
    assert (after.descriptors - before.descriptors, after.threads - before.threads) == (5, 1)
    assert 31 <= after.mib - before.mib <= 40


def test_a_process_that_has_ended_is_not_there() -> None:
    """Neither while it is a zombie nor after."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look_at(child.pid) is None
    child.wait()
    assert look_at_all([(child.pid, "true"), (os.getpid(), "me")])[0].command == "me"


def looks(grown: Callable[[int], tuple[float, float, float]], count: int = 40) -> list[list[Held]]:
    series = []
    for number in range(count):
        descriptors, threads, mib = grown(number)
        series.append([Held(7, 1, "worker", int(descriptors), int(threads), mib)])
    return series


@pytest.mark.parametrize("name", ["descriptors", "threads", "MiB"])
def test_what_adds_up_is_found_and_named(name: str) -> None:
    rise = {"descriptors": (1, 0, 0), "threads": (0, 1, 0), "MiB": (0, 0, 2)}[name]
    draw = random.Random(5)
    series = looks(lambda n: (50 + rise[0] * n, 20 + rise[1] * n, 200 + rise[2] * n + draw.random()))
    (line,) = adding_up(series)
    assert f"{name} more with each of 40 recoveries" in line and line.startswith("pid 7 (worker): ")


def test_what_is_made_late_does_not_add_up() -> None:
    """A few lines that stay, in either half; and what goes up and down."""
    for late in (5, 15, 25, 35):

        def grown(number: int, late: int = late) -> tuple[float, float, float]:
            return 50 + 20 * (number > late), 20 + number % 3, 200 + 40 * (number > late)

        assert adding_up(looks(grown)) == []


def test_what_goes_up_and_down_does_not_add_up() -> None:
    """Sixteen looks up, a fall, sixteen looks up: every half rises."""
    assert adding_up(looks(lambda n: (50 + n % 20, 20 + n % 20, 200 + 3 * (n % 20)))) == []


def test_a_process_that_was_replaced_is_another_one() -> None:
    """The same number, begun at another time: neither was seen often enough."""
    series = looks(lambda n: (50 + n, 20, 200), 2 * LEAST_LOOKS - 2)
    half = LEAST_LOOKS - 1
    assert adding_up(series)
    renewed = [
        [Held(7, 1 + (place >= half), "worker", one.descriptors, 20, 200.0)] for place, (one,) in enumerate(series)
    ]
    assert adding_up(renewed) == []
