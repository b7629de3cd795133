"""The self-test's command: what is wrong with its input, its report, and its end when the time is over."""

from __future__ import annotations

import json
import subprocess
import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

from ttp import cli
from ttp.chaos.observed.training_job import JobError, marked
from ttp.errors import ConfigError
from ttp.selftest import main as command
from ttp.selftest import probe_process
from ttp.selftest.device_probe import kind_of
from ttp.selftest.jobs import Jobs
from ttp.selftest.report import (
    FAILED,
    INCOMPLETE,
    MEASURED,
    NOT_APPLICABLE,
    NOT_RUN,
    PASSED,
    Check,
    as_json,
    as_text,
    verdict,
)
from ttp.text.console import open_console


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([PASSED, MEASURED, NOT_APPLICABLE], PASSED),
        ([PASSED, FAILED, NOT_RUN], FAILED),
        ([PASSED, NOT_RUN], INCOMPLETE),
        ([MEASURED, NOT_APPLICABLE], INCOMPLETE),
        ([], INCOMPLETE),
    ],
)
def test_the_whole_passed_only_if_all_that_means_something_was_run(statuses: list[str], expected: str) -> None:
    assert verdict([Check(str(number), status) for number, status in enumerate(statuses)]) == expected


def test_report_says_device_driver_and_versions_and_each_checks_figures() -> None:
    about = {"device": {"type": "cuda", "name": "a card", "driver": "580.1"}, "torch": "2.13", "ttp": "0.1.0"}
    report = as_json(about, [Check("kill", FAILED, "a step was lost", {"lost": 1})])
    text = as_text(report)
    assert report["verdict"] == FAILED and json.loads(json.dumps(report)) == report
    for part in (
        "self-test: failed",
        "a card",
        "580.1",
        "2.13",
        "0.1.0",
        "failed          kill: a step was lost",
        "lost 1",
    ):
        assert part in text


def test_a_device_that_is_not_there_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing was started."""
    assert command.main(["--device", "npu", "--output", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().out
    assert "ttp.selftest: --device is 'npu': the torch plug-in torch_npu is not installed" in printed
    with pytest.raises(ConfigError, match="--device: got 'toaster', expected auto, cuda, "):
        kind_of("toaster")


def test_the_command_ttp_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["selftest", "--help"])
    assert ended.value.code == 0 and "--device" in capsys.readouterr().out


def test_a_folder_of_something_else_is_not_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "it holds 'thesis.tex', which no self-test makes" in capsys.readouterr().out
    assert (tmp_path / "thesis.tex").exists()
    assert command.main(["--output", str(tmp_path / "thesis.tex")]) == 2


def test_ranks_are_as_many_as_there_are_devices() -> None:
    """Two where that means something; the CPU takes any number, and more than there are devices share one."""
    assert [command.ranks_of(None, count) for count in (0, 1, 2, 8)] == [(2, False), (1, False), (2, False), (2, False)]
    assert [command.ranks_of(asked, 1) for asked in (1, 3)] == [(1, False), (3, True)]
    assert command.ranks_of(5, 0) == (5, False) and command.ranks_of(2, 8) == (2, False)


def test_when_the_time_is_over_the_report_is_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not called passed: nothing of what was not run."""
    assert command.main(["--device", "cpu", "--minutes", "0.001", "--output", str(tmp_path / "out")]) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert report["verdict"] == INCOMPLETE and set(found.values()) == {NOT_APPLICABLE, NOT_RUN} and len(found) == 8
    assert "the time was over (not begun); give more with --minutes" in (tmp_path / "out" / "report.txt").read_text()
    assert "INCOMPLETE" in capsys.readouterr().out


def test_a_job_that_runs_when_the_time_is_over_is_ended(tmp_path: Path) -> None:
    """With all its processes."""
    checks: list[Check] = []
    jobs = Jobs(tmp_path, "cpu", 2, 1, 0, (), open_console(), time.monotonic() + 3.0)
    command._run_jobs(open_console(), jobs, checks)
    assert (tmp_path / "killed" / "console.log").exists() and len(checks) == 7
    assert {check.status for check in checks} == {NOT_RUN}
    assert not list(marked(f"ttp-job:{tmp_path / 'killed'}"))


class Broken:
    """Jobs of which the second part fails, with an error of the harness or one that nothing foresaw."""

    def __init__(self, error: Exception, until_monotonic_s: float) -> None:
        self._error = error
        self.until_monotonic_s = until_monotonic_s

    def parts(self) -> Any:
        return (
            ("one", ("a",), lambda: [Check("a", PASSED)]),
            ("two", ("b", "c"), self._fail),
            ("three", ("d",), lambda: [Check("d", PASSED)]),
        )

    def _fail(self) -> list[Check]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"), [(JobError("no step"), "no step"), (KeyError("unix_s"), "KeyError: 'unix_s'")]
)
def test_a_part_that_breaks_is_in_the_report(error: Exception, reason: str) -> None:
    """The others are run, unless the time is over."""
    checks: list[Check] = []
    jobs: Any = Broken(error, inf)
    command._run_jobs(open_console(), jobs, checks)
    assert [check.status for check in checks] == [PASSED, FAILED, NOT_RUN, PASSED] and checks[1].reason == reason
    late: list[Check] = []
    jobs.until_monotonic_s = 0.0
    command._run_jobs(open_console(), jobs, late)
    assert [(check.name, check.status) for check in late] == [(name, NOT_RUN) for name in "abcd"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "import sys; sys.stderr.write('driver: no answer'); sys.exit(3)",
            "ended with 3, expected 0: driver: no answer",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11, expected 0"),
        ("import time; time.sleep(60)", "did not end within 2 s"),
    ],
)
def test_a_device_whose_probe_crashes_or_hangs_has_a_report(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a report says most."""
    run = subprocess.run
    monkeypatch.setattr(probe_process, "PROBE_S", 2.0)
    monkeypatch.setattr(
        "ttp.selftest.probe_process.subprocess.run", lambda argv, **rest: run([argv[0], "-c", program], **rest)
    )
    assert command.main(["--device", "cuda", "--output", str(tmp_path / "out")]) == command.BAD
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"] == FAILED and report["device"]["type"] == "cuda"
    assert reason in report["checks"][0]["reason"] and report["checks"][1]["status"] == NOT_RUN
