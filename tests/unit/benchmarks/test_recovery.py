"""What the benchmark of recoveries reports: models of the asked size, a fit that finds what made the times, and what missed the limit."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.recovery import (
    BYTES,
    LAYERS,
    REPLICAS,
    STAGES,
    VOCABULARY,
    WORDS,
    WRITTEN_FIRST,
    OneKill,
    fit,
    hidden_size,
    report,
    stamped,
)
from tests.shown import ROOT
from ttp.chaos.verdict.recoveries import BY_CHECKPOINT, IN_PLACE


def kill(ranks: int, megabytes: float, took_s: float, taken: str = IN_PLACE, asked: str = "", why: str = "") -> OneKill:
    return OneKill(ranks, megabytes * 1e6, asked or taken, taken, why, {"seen": 0.01, "new step": took_s})


@pytest.mark.parametrize(("ranks", "megabytes"), list(itertools.product((2, 3, 4), (1, 5, 50, 200))))
def test_each_rank_holds_about_what_is_asked_for(ranks: int, megabytes: float) -> None:
    width = hidden_size(megabytes * 1e6, ranks)
    parameters = 16 * LAYERS * width**2 + 2 * VOCABULARY * width
    assert parameters * BYTES * REPLICAS / ranks == pytest.approx(megabytes * 1e6, rel=0.15)


def test_the_fit_finds_what_made_the_times() -> None:
    draw = random.Random(7)
    cells = itertools.product((2, 3, 4), (5.0, 50.0, 200.0), range(10))
    kills = [kill(n, mb, 0.2 + 0.002 * mb + 0.03 * n + draw.gauss(0, 0.005)) for n, mb, _ in cells]
    a, b, c, off = fit(kills)
    assert a == pytest.approx(0.2, abs=0.01) and b * 1e6 == pytest.approx(0.002, rel=0.05)
    assert c == pytest.approx(0.03, rel=0.1)
    assert off < 0.01


def test_what_did_not_vary_has_no_share() -> None:
    a, b, c, _ = fit([kill(2, 5.0, took_s) for took_s in (0.2, 0.3, 0.4)])
    assert (round(a, 6), b, c) == (0.3, 0.0, 0.0)


def test_the_tables_have_medians_and_what_missed_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Slower in place than by a restart; a kill that was not in place is a restart's, with its reason."""
    kills = [kill(2, 5.0, took_s) for took_s in (0.2, 0.3, 0.4)] + [kill(3, 5.0, 1.5) for _ in range(2)]
    kills += [kill(ranks, 5.0, 1.0, BY_CHECKPOINT) for ranks in (2, 3) for _ in range(2)]
    kills.append(kill(3, 5.0, 1.2, BY_CHECKPOINT, asked=IN_PLACE, why="rank 1 died"))
    assert report(kills) == ["in place, 3 ranks, 5.0 MB: 1.50"]
    text = capsys.readouterr().out
    assert "0.300 (0.200 to 0.400, 3)" in text and "0.30" in text
    assert "1.000 (1.000 to 1.200, 3)" in text
    assert "not in place: 3 ranks, 5.0 MB: rank 1 died" in text and text.count("fit of") == 2


def test_the_document_has_the_stages_that_are_printed() -> None:
    """In their order, by the words of the table."""
    document = (ROOT / "docs" / "how_in_place_works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| .* \|$", document.partition("## How long it takes")[2], re.MULTILINE)
    assert rows == [WORDS.get(stage, stage) for stage in STAGES[IN_PLACE]]


def test_what_is_written_first_is_another_way_with_its_own_moment(capsys: pytest.CaptureFixture[str]) -> None:
    kills = [kill(2, 5.0, 0.3), kill(2, 5.0, 0.4, WRITTEN_FIRST), kill(2, 5.0, 1.0, BY_CHECKPOINT)]
    for one, stage in zip(kills, ("regrouped", "published", "published"), strict=True):
        one.stages_s[stage] = one.took_s / 2
    assert report(kills) == []
    text = capsys.readouterr().out
    assert "0.30, 0.40" in text and text.count("in memory alone until: published") == 2
    assert "in memory alone until: replicas compared, gates opened, 0.150" in text


def test_the_slowest_rank_counts_within_the_recovery(tmp_path: Path) -> None:
    lines = [
        ("groups", 99.0),
        ("groups", 100.2),
        ("groups", 100.3),
        ("groups", 102.0),
        ("filled", 100.4),
        ("script", 99.9),
    ]
    text = "".join(json.dumps({"stage": stage, "unix_s": unix_s}) + "\n" for stage, unix_s in lines)
    (tmp_path / "stamps.jsonl").write_text(text)
    found = stamped(tmp_path, 100.0, 1.0)
    assert {stage: round(since_s, 6) for stage, since_s in found.items()} == {"groups": 0.3, "filled": 0.4}
