"""What each rank holds in memory while it trains, and whether it grows with its steps: a leak.

An attempt's rank is a process of its own and has a curve of its own. Owns how memory is read and what counts as growth; judges
nothing else. Only the host's memory is looked at: a device's is not in `/proc`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
PER_STEPS = 1000
"""Growth is reported per so many steps."""
GROWTH_MIB = 32.0
"""The limit that a scenario has when it says nothing: a rank that keeps 32 KiB a step is over it."""
WARM_UP_STEPS = 20
"""The first steps of an attempt are not looked at: optimizer state, buffers and caches are made in them."""
LEAST_SAMPLES, LEAST_STEPS = 24, 60
"""A shorter curve is not judged: its slope would be chance."""
LEAST_RISE_BYTES = 8 * MIB
"""Less, over a whole curve, is what an allocator keeps and gives back by itself."""
MOST_SAMPLES = 240
"""A longer curve is thinned out."""
_OWN = ("RssAnon", "RssShmem", "VmSwap")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a rank."""

    unix_s: float
    step: int
    """The newest step that it had finished."""
    nbytes: int


@dataclass(slots=True)
class Curve:
    """One rank in one attempt."""

    key: tuple[int, int]
    rank: int
    pid: int
    samples: list[Sample] = field(default_factory=list)
    step: int = 0
    """Where the rank stands now."""
    _every: int = 1
    _offered: int = 0

    def look(self, unix_s: float) -> None:
        """Take a sample if the rank has progressed since the last one."""
        if self.samples and self.samples[-1].step >= self.step:
            return
        if self.step and (nbytes := own_bytes(self.pid)) is not None:
            self.add(Sample(unix_s, self.step, nbytes))

    def add(self, sample: Sample) -> None:
        """Keep a sample, or every second, fourth, ... one when there are many."""
        self._offered += 1
        if self._offered % self._every:
            return
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2]
            self._every *= 2


@dataclass(frozen=True, slots=True)
class Growth:
    """What a curve shows."""

    curve: Curve
    mib: float
    """MiB in 1,000 steps; 0 when some stretch of the curve does not rise."""
    first: Sample
    last: Sample

    @property
    def text(self) -> str:
        curve = self.curve
        where = f"attempt {curve.key[1]}" + (f" of launch {curve.key[0]}" if curve.key[0] > 1 else "")
        return f"rank {curve.rank} (pid {curve.pid}) in {where}: {self.mib:,.1f} MiB in 1,000 steps, {_held(self.first)}, {_held(self.last)}"


def _held(sample: Sample) -> str:
    return f"{sample.nbytes / MIB:,.0f} MiB at step {sample.step}"


def own_bytes(pid: int) -> int | None:
    """Return what a process holds for itself, swapped out or not; None: it is gone.

    Without pages of files (`statm` counts them): the kernel takes those back, and a trainer that maps its data has more of
    them with every step.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("Vm", "Rss")))
    found = [int(sizes[name].split()[0]) for name in _OWN if name in sizes]
    return sum(found) * 1024 if "RssAnon" in sizes else None  # a process that ends has none


def growth_of(curve: Curve, faulted: Iterable[tuple[float, float]] = ()) -> Growth | None:
    """Return what a curve shows; None: it is too short to be judged.

    faulted: stretches of time (from, to) in which a fault was under way; a hog's memory is not the trainer's.

    The slope is the median of the slopes of all pairs of samples (Theil-Sen: a third of them may be anywhere). It counts only
    as far as every third of the curve has it: what rises for a while and then stays (caches that fill, a buffer that is made
    late) has none in some third.
    """
    stretches = list(faulted)
    began = curve.samples[0].step if curve.samples else 0
    samples = [
        sample
        for sample in curve.samples
        if sample.step >= began + WARM_UP_STEPS and not any(a <= sample.unix_s <= b for a, b in stretches)
    ]
    if len(samples) < LEAST_SAMPLES or samples[-1].step - samples[0].step < LEAST_STEPS:
        return None
    part = len(samples) // 3
    slope = min(_slope(one) for one in (samples, samples[:part], samples[part : 2 * part], samples[2 * part :]))
    rise = slope * (samples[-1].step - samples[0].step)
    return Growth(
        curve, slope * PER_STEPS / MIB if rise >= LEAST_RISE_BYTES else 0.0, samples[0], samples[-1]
    )  # fmt: skip


def _slope(samples: Sequence[Sample]) -> float:
    """Return the median of the slopes of all pairs, in bytes a step."""
    return statistics.median(
        (later.nbytes - sample.nbytes) / (later.step - sample.step)
        for place, sample in enumerate(samples)
        for later in samples[place + 1 :]
    )
