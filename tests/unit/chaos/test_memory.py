"""Growth of a rank's memory is distinguished from warm-up, noise, hogs and level shifts; what is read of a process is its own."""

from __future__ import annotations

import math
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ttp.chaos.observed.leaks import (
    LEAST_SAMPLES,
    LEAST_STEPS,
    MIB,
    MOST_SAMPLES,
    WARM_UP_STEPS,
    Curve,
    Sample,
    growth_of,
)
from ttp.chaos.observed.leaks import own_bytes as own

BASE_MIB = 230.0
STEPS_A_SAMPLE = 12


def curve(mib_at: Callable[[int], float], samples: int = 100, every: int = STEPS_A_SAMPLE, begin: int = 1) -> Curve:
    """Return a rank that was looked at so often; a sample a second."""
    made = Curve((1, 0), 0, 70)
    for number in range(samples):
        step = begin + number * every
        made.add(Sample(float(number), step, int((BASE_MIB + mib_at(step)) * MIB)))
    return made


def grown(made: Curve, *faulted: tuple[float, float]) -> float:
    growth = growth_of(made, faulted)
    assert growth is not None
    return growth.mib


@pytest.mark.parametrize("kib_a_step", [8, 64, 4096])
def test_a_tensor_kept_each_step_is_reported_by_its_size(kib_a_step: int) -> None:
    """In MiB for 1,000 steps, through an allocator's noise of a MiB, whatever step the attempt began with."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    leak = curve(lambda step: kib_a_step * (step - 900) / 1024 + rng.uniform(-0.5, 0.5), samples=200, begin=900)
    assert grown(leak) == pytest.approx(kib_a_step * 1000 / 1024, rel=0.25)


def test_what_is_made_in_the_first_steps_is_not_a_growth() -> None:
    """Gradients, moments and buffers: 300 MiB within the warm-up."""
    assert grown(curve(lambda step: 300.0 * min(1.0, step / WARM_UP_STEPS), every=2)) == 0.0


def test_caches_that_fill_slowly_are_not_growth() -> None:
    """They rise for a third of the attempt, or ever less: the last third has no slope worth a word."""
    assert grown(curve(lambda step: 60.0 * min(1.0, step / 400))) == 0.0
    assert grown(curve(lambda step: 60.0 * (1 - math.exp(-step / 150)))) < 1.0


def test_one_level_that_changes_is_not_a_growth() -> None:
    """A dump's buffers that stay, wherever in the attempt it comes."""
    for place in range(100):
        assert grown(curve(lambda step, place=place: 80.0 * (step > place * STEPS_A_SAMPLE))) == 0.0  # type: ignore[misc]


def test_noise_is_not_a_growth() -> None:
    """A random walk of pages that come and go within 6 MiB, in a hundred short attempts: none is near the default limit."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        assert grown(curve(lambda step: rng.uniform(0.0, 6.0), samples=30, every=4)) == 0.0


def test_a_hog_of_the_harness_is_not_the_trainers() -> None:
    """What is held while a fault is under way does not count, and the leak beside it still does."""

    def hog(moment_s: int) -> float:
        return 512.0 if 40 <= moment_s <= 75 else 0.0

    assert grown(curve(lambda step: hog(step // STEPS_A_SAMPLE)), (40.0, 75.0)) == 0.0
    leak = curve(lambda step: hog(step // STEPS_A_SAMPLE) + 0.0625 * step)
    assert grown(leak, (40.0, 75.0)) == pytest.approx(62.5, rel=0.05)


def test_an_attempt_that_is_too_short_is_not_judged() -> None:
    """Too few looks, or too few steps, however steep."""
    assert growth_of(Curve((1, 0), 0, 70)) is None
    assert growth_of(curve(lambda step: step, samples=LEAST_SAMPLES - 1)) is None
    assert growth_of(curve(lambda step: step, samples=WARM_UP_STEPS + LEAST_STEPS - 1, every=1)) is None
    assert growth_of(curve(lambda step: step, samples=WARM_UP_STEPS + LEAST_STEPS + 2, every=1)) is not None


def test_a_long_curve_is_thinned_out_and_judged_alike() -> None:
    """Days of training take no more room than minutes, and the growth is the same."""
    long = curve(lambda step: 0.0625 * step, samples=40_000, every=3)
    assert MOST_SAMPLES // 3 < len(long.samples) <= MOST_SAMPLES
    assert long.samples[-1].step > 0.95 * 40_000 * 3
    assert grown(long) == pytest.approx(62.5, rel=0.01)


def test_a_rank_that_stands_is_not_looked_at_again() -> None:
    """One sample a step at most; a process that is gone gives none."""
    mine = Curve((1, 0), 0, os.getpid())
    mine.look(1.0)
    assert mine.samples == []
    mine.step = 5
    mine.look(2.0)
    mine.look(3.0)
    assert [(sample.unix_s, sample.step) for sample in mine.samples] == [(2.0, 5)]
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        child.wait()
    gone = Curve((1, 0), 0, child.pid, step=5)
    gone.look(4.0)
    assert gone.samples == []


def test_memory_is_what_a_process_holds_for_itself(tmp_path: Path) -> None:
    """32 MiB that are filled count; 32 MiB of a file that are read through a mapping do not."""
    before = own(os.getpid())
    assert before is not None
    kept = bytearray(os.urandom(1) * (32 * MIB))
    filled = own(os.getpid())
    path = tmp_path / "tokens"
    path.write_bytes(bytes(32 * MIB))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[place] for place in range(0, len(mapped), 4096)) == 0
        read = own(os.getpid())
    assert filled is not None and read is not None and len(kept) == 32 * MIB
    assert filled - before > 30 * MIB
    assert abs(read - filled) < 4 * MIB


def test_a_zombie_holds_nothing() -> None:
    """Its status has no sizes: it is gone."""
    with subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert own(child.pid) is None
