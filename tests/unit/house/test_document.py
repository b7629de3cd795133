"""docs/protocol.md says what the code does: its generated tables are fresh; the times of docs/timeouts.md are the code's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import document
from tests.shown import ROOT
from ttp.controller.core.facts.state import EDGES, Running
from ttp.controller.core.transitions import TABLES
from ttp.proto.messages import Heartbeat

TEXT = document.DOCUMENT.read_text(encoding="utf-8")


def test_generated_tables_are_not_stale() -> None:
    """`make docs` writes them anew."""
    assert document.parts(TEXT) == document.NAMES
    assert document.render(TEXT) == TEXT, "docs/protocol.md is stale: run make docs"


def test_a_changed_handler_makes_the_document_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event less in one stage, and the tables differ."""
    monkeypatch.delitem(TABLES[Running].on, Heartbeat)
    assert document.render(TEXT) != TEXT


def test_a_changed_transition_makes_the_document_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transition less, and the tables differ."""
    monkeypatch.delitem(EDGES, next(iter(EDGES)))
    assert document.render(TEXT) != TEXT


def test_the_readme_says_what_was_tested_and_what_has_not_run() -> None:
    """Both from docs/results.json."""
    text, results = (
        document.README.read_text(encoding="utf-8"),
        json.loads(document.RESULTS.read_text(encoding="utf-8")),
    )
    selftests = document.selftests()
    assert document.render_tested(text, results, selftests) == text, "README.md is stale: run make docs"
    ran = [{**found, "torch": "3.0", "nodes": "machines"} for found in results]
    assert "on CUDA with nccl, torch 3.0, nodes as machines" in document.render_tested(text, ran, selftests)
    assert "not run" not in document.render_tested("**Tested**: ", ran, selftests)


def test_the_readme_says_on_which_device_a_self_test_has_passed() -> None:
    """And only there; docs/selftest.md lists every report."""
    results = json.loads(document.RESULTS.read_text(encoding="utf-8"))
    report: dict[str, Any] = {
        "verdict": "passed", "device": {"type": "cuda", "name": "a card", "driver": "580.1"}, "torch": "3.0", "ttp": "0.1.0", "ranks": 2, "checks": [],
    }  # fmt: skip
    line = document.render_tested("**Tested**: ", results, [report])
    assert "on CUDA, torch 3.0" in line and "NPU: not run, [test yours]" in line
    failed = document.render_tested("**Tested**: ", results, [{**report, "verdict": "incomplete"}])
    assert "CUDA and NPU: not run, [test yours]" in failed
    assert "| cuda: a card | 580.1 | 3.0 | 0.1.0 | 2 | passed | - | - | - |" in document.selftest_table([report])
    text = document.SELFTEST.read_text(encoding="utf-8")
    assert document.selftests() and document.render_selftests(text) == text, "docs/selftest.md is stale: run make docs"


def test_every_time_of_the_code_is_listed_with_its_value_and_nothing_else_is() -> None:
    """A new constant needs its reason in the document; a changed one needs it anew."""
    expected = document.timing_constants()
    assert len(expected) > 40
    listed = document.listed_constants(document.TIMEOUTS.read_text(encoding="utf-8"))
    assert {key: listed.get(key) for key in expected} == expected
    extra = sorted(set(listed) - set(expected))
    assert not extra, f"listed but not in the code: {extra}"


def test_the_number_of_tests_that_need_a_browser_is_that_of_the_file() -> None:
    written = (document.DOCUMENT.parent / "checking.md").read_text(encoding="utf-8")
    tests = (ROOT / "tests" / "unit" / "status_page" / "test_in_a_browser.py").read_text(encoding="utf-8")
    assert (
        tests.count("@pytest.mark.skipif(PROGRAM is None") == 5 and "its five tests in a browser are skipped" in written
    )
