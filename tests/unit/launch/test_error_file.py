"""A worker's exception is recorded where the agent reads it, without torch's `@record`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttp.controller import process
from ttp.launch.report.exit_status import exception_text, traceback_text

RAISING = """
import sys
from ttp.exchange import error_file
def hook(kind, exc, trace): print("hook", kind.__name__)
sys.excepthook = hook
error_file.install()
error_file.install()
def fail(depth):
    if depth: again(depth - 1)
    raise {error}
def again(depth):
    fail(depth)
fail(int(sys.argv[1]))
"""


def run(path: Path, error: str = "ValueError('boom')", depth: int = 0, status: int = 1, **environ: str) -> str:
    """Run a script that raises, with `path` as its error file, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", RAISING.format(error=error), str(depth)],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def test_an_exception_is_recorded_as_torchs_handler_does(tmp_path: Path) -> None:
    """torch reads it back; the hook that was there before is called; the directory has no other file."""
    path = tmp_path / "error.json"
    assert run(path) == "hook ValueError\n"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert exception_text(failure) == f"ValueError: boom (traceback: {path})"
    assert "in fail" in traceback_text(failure) and traceback_text(failure).endswith("    ValueError: boom")
    assert [entry.name for entry in tmp_path.iterdir()] == ["error.json"]


def test_a_very_long_traceback_is_quoted_at_its_ends(tmp_path: Path) -> None:
    """The file has all of it, the report its beginning and its end."""
    path = tmp_path / "error.json"
    run(path, depth=90)
    trace = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert len(trace.splitlines()) > 180
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    quoted = traceback_text(failure).splitlines()
    assert len(quoted) == 61 and "lines ..." in quoted[30]
    assert quoted[-1] == "    ValueError: boom"


def test_only_failures_of_the_script_are_recorded(tmp_path: Path) -> None:
    """An interrupt; an error file that `@record` has written; a job with ENABLE_TTP=False."""
    path = tmp_path / "error.json"
    run(path, error="KeyboardInterrupt()", status=-signal.SIGINT)
    assert not path.exists()
    run(path, ENABLE_TTP="False")
    assert not path.exists()
    path.write_text("{}")
    run(path)
    assert path.read_text() == "{}"


IMPORTING = """
import os, sys
import ttp
if sys.argv[1] == "own hook":  # as a library that prints tracebacks in colours
    sys.excepthook = lambda kind, exc, trace: None
    ttp.exchange.error_file.install()
elif sys.argv[1] == "fork" and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) != 1)
raise ValueError("boom")
"""


@pytest.mark.parametrize(
    ("how", "leads", "launched", "recorded"),
    [
        ("plain", True, "1", True),
        ("own hook", True, "1", True),
        ("fork", True, "1", False),
        ("plain", False, "1", False),
        ("plain", True, "", False),
    ],
    ids=["worker", "a hook of its own", "a worker's forked child", "what a worker has started", "no ttprun"],
)
def test_a_worker_that_fails_before_it_calls_ttp_is_recorded(
    tmp_path: Path, how: str, leads: bool, launched: str, recorded: bool
) -> None:
    """From `import ttp` on, in the process that ttprun has started: it leads its session."""
    path = tmp_path / "error.json"
    subprocess.run(
        [sys.executable, "-c", IMPORTING, how],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path), "TTP_LAUNCHED": launched},
        start_new_session=leads,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert path.exists() == recorded
    assert not recorded or json.loads(path.read_text())["message"]["message"] == "ValueError: boom"


def test_a_controller_does_not_write_into_the_error_file_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads a session, too, and has the same environment to find ttp."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/error.json")
    assert "TORCHELASTIC_ERROR_FILE" not in process._environment()


def test_an_unwritable_place_changes_nothing(tmp_path: Path) -> None:
    """The traceback still goes where it went, and the exit status stays."""
    assert run(tmp_path / "missing" / "error.json") == "hook ValueError\n"


def test_somebody_may_be_called_before_the_end() -> None:
    """Once, with the exception, before the traceback is printed; not where the process ends by itself."""
    code = """
from ttp.exchange import error_file
for _ in range(2):
    error_file.before_end(lambda exc: print("held for", exc, flush=True))
{end}
"""
    for end, expected in (("raise ValueError('boom')", ["held for boom"]), ("raise SystemExit(1)", []), ("", [])):
        done = subprocess.run(
            [sys.executable, "-c", code.format(end=end)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout.splitlines() == expected
        assert ("ValueError: boom" in done.stderr) == bool(expected)
