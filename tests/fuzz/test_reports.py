"""Journals, reports and kept results as later readers find them, a value of any kind in them: shown, or refused in one line."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.test_files import changed, one_line
from tests.unit.status import jobs
from ttp.launch.report.journals import read_journals
from ttp.launch.report.story_file import read_events
from ttp.status import history
from ttp.status.main import main as status_main

settings.load_profile("fuzz")

OTHER: tuple[bytes, ...] = (b"[" * 100_000, b"1" * 5000, b"\xff\xfe", b"\0", b"{}", b"null", b"")
"""Lines of something else."""


def a_job(folder: Path) -> None:
    """Write what a job leaves that was killed once, recovered once, and has ended."""
    jobs.journal(folder, 0, *jobs.comes(0.0), (3.0, "freeze_sent", {"freeze_id": 1, "ranks": [0], "kind": "silent", "culprits": [1], "text": "x"}),
                 (4.5, "thawed", {"freeze_id": 1, "ranks": [0, 1]}), jobs.incident(8.0, 2.0, 20, in_place=True),
                 (8.0, "thawed", {"freeze_id": 2, "ranks": [0, 1]}), jobs.incident(12.0, 1.0, 40))  # fmt: skip
    jobs.journal(folder, 1, *jobs.comes(20.0), (30.0, "finished", {"ranks": 2}))
    jobs.journal(folder, 1, *jobs.comes(20.0), (25.0, "took_over", {"ranks": 2}), place=1)
    copies = (15.0, "copies", {"start": 0, "step": 44, "path": "/c/iter_0000044", "steps_lost": 1})
    again = (22.0, "again", {"start": 1, "steps": 3})
    jobs.report(
        folder, jobs.start(0, 1.0), jobs.fault(0, 11.0, 40), copies, jobs.start(1, 21.0), again, jobs.end(31.0, 50, 50)
    )


def spoil(path: Path, rng: random.Random) -> None:
    """Change one or several lines of a file."""
    lines: list[Any] = path.read_bytes().splitlines()
    for _ in range(rng.choice((1, 1, 1, 3))):
        place = rng.randrange(len(lines))
        if rng.random() < 0.2:
            lines[place] = rng.choice((*OTHER, rng.randbytes(30), lines[place][: rng.randrange(len(lines[place]) + 1)]))
        else:
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # not an object any more
                lines[place] = json.dumps(changed(json.loads(lines[place]), rng)).encode()
    path.write_bytes(b"\n".join(lines) + rng.choice((b"\n", b"\n", b"")))


@contextlib.contextmanager
def a_spoilt_job(rng: random.Random) -> Any:
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as name:
        folder = Path(name)
        a_job(folder)
        for path in rng.sample(sorted(folder.iterdir()), rng.choice((1, 1, 2))):
            spoil(path, rng)
        yield folder


def read_report(folder: Path) -> None:
    for line in read_events(folder / "story.jsonl"):
        assert isinstance(line["event"], str)


def read_lines(folder: Path) -> None:
    for attempt in (0, 1):
        for line in read_journals(folder, attempt, 0.0):
            assert isinstance(line["event"], str) and isinstance(line["fields"], dict) and line["unix_s"] >= 0.0


@pytest.mark.parametrize("read", [read_report, read_lines])
@given(rng=st.randoms(use_true_random=True))
def test_lines_are_read_or_refused_in_one_line(read: Callable[[Path], None], rng: random.Random) -> None:
    with a_spoilt_job(rng) as folder:
        try:
            read(folder)
        except (OSError, ValueError) as error:
            one_line(error)


@given(st.randoms(use_true_random=True))
def test_a_jobs_files_are_known_or_passed_over_with_a_note(rng: random.Random) -> None:
    with a_spoilt_job(rng) as folder:
        known = history.read(folder)
    for note in known.notes:
        assert "\n" not in note


@pytest.mark.parametrize("options", [["--json"], [], ["--ranks"]], ids=["json", "text", "ranks"])
@given(rng=st.randoms(use_true_random=True))
def test_the_status_of_a_job_is_shown_whatever_its_files_hold(options: list[str], rng: random.Random) -> None:
    out, error = io.StringIO(), io.StringIO()
    with a_spoilt_job(rng) as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = status_main([str(folder), *options])
    assert status in (0, 1) and out.getvalue() and not error.getvalue()
    if options == ["--json"]:
        assert json.loads(out.getvalue())["status"] == status
