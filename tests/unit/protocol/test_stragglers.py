"""Which ranks are named stragglers: those that are slower for long, and no others."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import median

import pytest

from benchmarks.stragglers import MEANS_S, NOISES, RANKS, SLOWED_AT, false_alarms, found_after, sizes
from tests.shown import ROOT
from ttp.controller import stragglers as module
from ttp.controller.stragglers import (
    CROWD,
    KEPT,
    MARGIN,
    MOST_NAMED,
    OVER,
    SLOW,
    WINDOW,
    Change,
    StragglerWatch,
    _others,
)

Times = Callable[[int, int], float]
"""(rank, step) -> its own time."""


class Ranks:
    """Ranks that beat once a step, a second long, each a little later than the one before."""

    def __init__(self, count: int, workloads: Callable[[int], str] = lambda rank: "model") -> None:
        self.watch = StragglerWatch(1.0)
        self.count, self.step, self.changes = count, 0, list[Change]()
        for rank in range(count):
            self.watch.join(rank, f"n{rank // 2}", 100 + rank, workloads(rank))

    def do(self, steps: int, times: Times, silent: frozenset[int] = frozenset()) -> list[Change]:
        """Do so many steps; return what changed in them."""
        before = len(self.changes)
        for _ in range(steps):
            self.step += 1
            for rank in range(self.count):
                now = self.step + rank / (2 * self.count)
                if rank not in silent:
                    self.watch.take(rank, self.step, times(rank, self.step), now)
                self.changes += self.watch.look(now)
        return self.changes[before:]


def judged(own: list[list[float]]) -> list[Change]:
    """Return what is found in these times, by step and rank."""
    return Ranks(len(own[0])).do(len(own), lambda rank, step: own[step - 1][rank])


def slow(which: int, factor: float = 1.2) -> Times:
    return lambda rank, step: factor if rank == which else 1.0


def even(rank: int, step: int) -> float:
    return 1.0


@pytest.mark.parametrize("count", [2, 3, 8, 65])
def test_a_slower_rank_is_named_within_200_steps_and_no_more_when_it_is_not(count: int) -> None:
    """With its node, how much slower it is, and since when."""
    ranks = Ranks(count)
    assert ranks.do(100, even) == []
    (found,) = ranks.do(200, slow(count - 1))
    assert not found.over and 100 < found.step <= 100 + 200
    one = found.straggler
    assert (one.rank, one.host) == (count - 1, f"n{(count - 1) // 2}")
    assert (one.ratio, one.own_s, one.others_s) == pytest.approx((1.2, 1.2, 1.0)) and 80 <= one.since_step <= 112
    (status,) = ranks.watch.slowest()
    assert status.rank == count - 1 and status.ratio == pytest.approx(1.2) and status.steps == 300 - one.since_step
    (ended,) = ranks.do(200, even)
    assert ended.over == module.AS_FAST and ended.straggler.rank == count - 1 and ranks.watch.named == {}


def test_what_passes_and_what_is_small_is_not_named() -> None:
    """A rank that is slow for a while, now and then, by a little, or by milliseconds; and one that is faster than the others."""
    assert Ranks(4).do(1000, lambda rank, step: 3.0 if rank == 1 and step % 400 < (SLOW - 2) * WINDOW else 1.0) == []
    assert Ranks(4).do(1000, lambda rank, step: 100.0 if rank == 1 and step % 3 == 0 else 1.0) == []
    assert Ranks(4).do(1000, slow(1, MARGIN - 0.01)) == []
    assert Ranks(4).do(1000, lambda rank, step: 0.01 if rank == 1 else 0.006) == []
    assert Ranks(4).do(1000, slow(1, 0.5)) == []


def test_a_rank_that_is_slow_in_half_of_its_windows_stays_what_it_is() -> None:
    """Between OVER and SLOW nothing changes: the log does not fill with a rank that is at the margin."""
    half = [True] * (KEPT // 2) + [False] * (KEPT - KEPT // 2)
    assert OVER < sum(half) < SLOW
    ranks = Ranks(4)

    def times(rank: int, step: int) -> float:
        return 1.3 if rank == 2 and half[step // WINDOW % KEPT] else 1.0

    assert ranks.do(2000, times) == []
    assert len(ranks.do(WINDOW * KEPT, slow(2))) == 1
    assert ranks.do(2000, times) == [] and [*ranks.watch.named] == [2]


def test_ranks_with_another_part_of_the_model_are_not_compared() -> None:
    """The stages of a pipeline take different times; and of some it is not known what they do."""

    def stages(rank: int) -> str:
        return f"stage {rank % 2}"

    assert Ranks(8, stages).do(500, lambda rank, step: 2.0 if rank % 2 else 1.0) == []
    found = Ranks(8, stages).do(500, lambda rank, step: (2.0 if rank % 2 else 1.0) * (1.2 if rank == 5 else 1.0))
    assert [change.straggler.rank for change in found] == [5] and found[0].straggler.ratio == pytest.approx(1.2)
    assert Ranks(8, lambda rank: "").do(500, slow(3)) == []


def test_a_cluster_whose_ranks_differ_anyway_has_no_stragglers() -> None:
    """Half of the nodes are of an older kind; or every rank has a pace of its own. One that is far from them is named all the same."""
    assert Ranks(16).do(1000, lambda rank, step: 1.3 if rank % 2 else 1.0) == []

    def spread(rank: int, step: int) -> float:
        return 1.0 + 0.02 * rank

    def far(rank: int, step: int) -> float:
        return 3.0 if rank == 7 else spread(rank, step)

    assert Ranks(16).do(1000, spread) == []
    assert [change.straggler.rank for change in Ranks(16).do(1000, far)] == [7]


@pytest.mark.parametrize(("count", "windows"), [(2, SLOW), (CROWD - 1, SLOW), (CROWD, SLOW + 1)])
def test_among_many_ranks_it_takes_a_window_more(count: int, windows: int) -> None:
    """One of many is slow by chance more often. All numbers are such that 20 % more is named within 200 steps."""
    ranks = Ranks(count)
    ranks.do(100, even)
    (found,) = ranks.do(200, slow(1))
    assert found.step - found.straggler.since_step == windows * WINDOW
    assert found.step <= 100 + WINDOW * (windows + 1) < 100 + 200


def test_not_more_than_some_are_named() -> None:
    ranks = Ranks(400)
    ranks.do(WINDOW * (SLOW + 1), lambda rank, step: 1.5 + rank / 1e4 if rank >= 300 else 1.0)
    assert sorted(ranks.watch.named) == [*range(400 - MOST_NAMED, 400)], "the slowest"
    assert [each.rank for each in ranks.watch.slowest()] == [*range(399, 399 - MOST_NAMED, -1)]


def test_a_window_costs_little_more_where_all_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of ranks are slow in every window, and none stands out: the spread is looked at once a window, not once a rank."""
    looks = []

    def far(ratios: Collection[float]) -> float:
        looks.append(len(ratios))
        return spread(ratios)

    spread = module._far
    monkeypatch.setattr(module, "_far", far)
    ranks = Ranks(1000)
    assert ranks.do(20 * WINDOW, lambda rank, step: 0.5 + rank / 1000) == []
    assert len(ranks.watch._windows) > 300 and len(looks) <= 20


def test_no_ratio_is_infinite() -> None:
    """Whatever a rank reports as measured."""
    ranks = Ranks(3)
    changes = ranks.do(20 * WINDOW, lambda rank, step: 1e9 if rank == 2 else 5e-324)
    assert changes and all(math.isfinite(each.straggler.ratio) for each in changes)


def test_a_rank_that_is_silent_holds_no_window_up() -> None:
    """A window is judged without those that do not come to its end in time, but not by the minority."""
    silent = frozenset({0})
    assert [c.straggler.rank for c in Ranks(4).do(300, slow(3), silent)] == [3]
    assert Ranks(4).do(300, slow(3), frozenset({0, 1, 2})) == []
    assert Ranks(5).do(300, slow(3), frozenset({0, 1, 2})) == []


def test_another_process_in_a_ranks_place_begins_anew() -> None:
    """And one that only attaches again does not; one that has finished is not named any more."""
    ranks = Ranks(4)
    ranks.do(200, slow(3))
    ranks.watch.join(3, "n1", 103, "model")
    assert [*ranks.watch.named] == [3]
    ranks.watch.join(3, "n9", 555, "model")
    (over,) = ranks.do(WINDOW * (SLOW - 1), slow(3))
    assert ranks.watch.named == {} and (over.straggler.host, over.step, over.over) == ("n1", 200, module.REPLACED)
    (again,) = ranks.do(3 * WINDOW, slow(3))
    assert again.straggler.host == "n9" and not again.over
    ranks.watch.leave(3)
    (over,) = ranks.watch.look(0.0)
    assert (over.straggler.host, over.over) == ("n9", module.FINISHED)
    assert ranks.watch.named == {} and ranks.watch.slowest() == () and ranks.do(100, slow(3), frozenset({3})) == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 0.0])
def test_a_time_that_no_clock_measures_is_left_out(wrong: float) -> None:
    ranks = Ranks(4)
    assert ranks.do(300, lambda rank, step: wrong if rank == 1 and step % 2 else 1.0) == []
    assert len(ranks.do(200, slow(2))) == 1


def test_steps_that_are_shorter_than_heartbeats_are_found_as_soon() -> None:
    """Each heartbeat is a window then; a window has no more samples than it may."""
    ranks = Ranks(4)
    watch, found = ranks.watch, list[Change]()
    for beat in range(1, 12):
        for rank in range(4):
            watch.take(rank, 50 * beat, 1.2 if rank == 1 else 1.0, float(beat))
            found += watch.look(float(beat))
    assert [change.straggler.rank for change in found] == [1] and found[0].step <= 50 * (SLOW + 1)
    for _ in range(10 * module.MOST_SAMPLES):
        watch.take(0, 1, 1.0, 99.0)
    assert len(watch._samples[0]) == module.MOST_SAMPLES


def test_the_median_of_the_others_is_what_it_says() -> None:
    """Property, over lists with equal values and without."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(2000):
        values = [float(rng.randrange(rng.choice([3, 1000]))) for _ in range(rng.randrange(2, 30))]
        own = rng.choice(values)
        rest = values.copy()
        rest.remove(own)
        assert _others(sorted(values), own) == median(rest), values


def test_random_series_keep_the_rules() -> None:
    """Property: whatever the ranks report, a named rank was slower than the others' median in SLOW of its newest KEPT windows, by the whole series;
    the unit of time and the order of the ranks change nothing; and nothing raises."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for case in range(30):
        rng = random.Random(f"{seed} {case}")
        count = rng.choice([2, 3, 5, 9])
        bias = [rng.choice([0.9, 1.0, 1.0, 1.05, 1.15, 1.3, 2.0]) for _ in range(count)]
        noise = rng.choice([0.0, 0.05, 0.3])
        own = [[each * rng.lognormvariate(0.0, noise) for each in bias] for _ in range(400)]
        found = judged(own)
        for change in found:
            if change.over:
                continue
            rank, ends = change.straggler.rank, range(WINDOW, 401, WINDOW)
            windows = [
                [median(own[step][each] for step in range(end - WINDOW, end)) for each in range(count)] for end in ends
            ]
            ratios = [window[rank] / median(v for each, v in enumerate(window) if each != rank) for window in windows]
            newest = [ratio for end, ratio in zip(ends, ratios, strict=True) if end <= change.step][-KEPT:]
            assert sum(ratio >= MARGIN for ratio in newest) >= SLOW, (case, ratios)
            assert change.straggler.ratio == pytest.approx(median(r for r in newest if r >= MARGIN))
        doubled = judged([[8.0 * each for each in step] for step in own])
        assert [(c.straggler.rank, c.over, c.step) for c in doubled] == [
            (c.straggler.rank, c.over, c.step) for c in found
        ]
        turned = judged([step[::-1] for step in own])
        assert sorted((count - 1 - c.straggler.rank, c.over) for c in turned) == sorted(
            (c.straggler.rank, c.over) for c in found
        )


@pytest.mark.parametrize(("ranks", "mean_s"), [(2, 2.0), (8, 2.0), (8, 0.05), (64, 2.0), (64, 0.05)])
def test_noise_names_no_rank_in_ten_thousand_steps(ranks: int, mean_s: float) -> None:
    """Stalls with heavy tails, drift, collections, evaluations on one rank, saves: `benchmarks.stragglers` has more of them."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert false_alarms(seed, ranks, NOISES["usual"], mean_s, {2: 10_000, 8: 4_000, 64: 1_000}[ranks]) <= 1


def test_more_ranks_do_fewer_steps_in_the_benchmark_and_the_document_has_a_row_for_each() -> None:
    assert [sizes(ranks, 5, 10_000) for ranks in (2, 8, 64, 1024)] == [(10_000, 20)] * 3 + [(2_000, 10)]
    assert sizes(10**9, 5, 10_000) == (1, 1)
    text = (ROOT / "docs" / "stragglers.md").read_text(encoding="utf-8")
    for ranks in RANKS:
        steps = 5 * sizes(ranks, 5, 10_000)[0]
        for noise in NOISES:
            for mean_s in MEANS_S:
                row = rf"(?m)^\| {ranks:,} \| {noise} \| {mean_s:g} s \| \d+ in {steps:,}( steps)? \| [\d,]+( steps)?, at most [\d,]+ \|"
                assert re.search(row, text), row
    missed = [
        re.findall(rf"(?m)^\| 2 \| {noise} \| 0.05 s \| .* at most (\d+) \|", text)[0] for noise in ("usual", "loud")
    ]
    rule = (
        f"windows of {WINDOW}.", f"{SLOW} of its newest {KEPT} windows", f"after {SLOW * WINDOW} steps if", f"{OVER} or fewer of its {KEPT} newest",
        f"among {CROWD} ranks or more in {SLOW + 1} of {KEPT}, after {(SLOW + 1) * WINDOW} steps",
    )  # fmt: skip
    assert not [part for part in rule if part not in text]
    assert "up to {} steps in usual noise and {} in loud noise".format(*missed) in text and int(min(missed)) > 200


@pytest.mark.parametrize("ranks", [2, 8])
def test_twenty_percent_are_found_in_noise_within_200_steps(ranks: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    found = [found_after(seed + number, ranks, NOISES["usual"], 2.0, 1.2) for number in range(5)]
    steps = sorted(after if after is not None else 10_000 for after, _ in found)
    assert steps[2] <= 160 and steps[3] <= 200, steps
    assert all(1.1 < ratio < 1.35 for _, ratio in found) and SLOWED_AT > KEPT * WINDOW


def test_ranks_that_differ_from_one_window_to_the_next_do_not_hide_one_that_is_slow() -> None:
    """The spread that counts is the one that lasts."""
    found = Ranks(8).do(
        400, lambda rank, step: 1.3 if rank == 7 else 1.0 + 0.08 * (-1) ** ((step - 1) // WINDOW + rank)
    )
    assert [change.straggler.rank for change in found] == [7]


def test_noise_is_what_the_series_have() -> None:
    """The series can name a rank: without the rule of several windows this noise does."""
    noise = replace(NOISES["loud"], lasting=0.1)
    assert sum(false_alarms(seed, 2, noise, 2.0, 2_000) for seed in range(5)) > 0
