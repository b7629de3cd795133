"""`python -m ttp.chaos.kills --in-place` with made-up faults: its exit status, its lines, and what it keeps."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.chaos.test_recoveries import fault
from ttp.chaos import kills, kills_in_place
from ttp.chaos.observed.training_job import TrainingJob
from ttp.chaos.verdict.recoveries import BY_CHECKPOINT, EndedFault
from ttp.chaos.verdict.timeline import RunComparison

Command = Callable[..., int]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs the command line over these faults; nothing is started."""

    def run(
        faults: list[EndedFault],
        *options: str,
        unsaved: int = 0,
        stop: Callable[[object], tuple[int, int]] | None = None,
        finish: Callable[[object], None] = lambda _: None,
    ) -> int:
        @contextmanager
        def job(folder: Path, *_: object) -> Iterator[SimpleNamespace]:
            folder.mkdir(parents=True, exist_ok=True)
            nothing = {name: list for name in ("metrics", "leftovers")}
            yield SimpleNamespace(mark="x", output_dir=folder, final=dict, wait=lambda _: 0, **nothing)

        left = iter(faults)
        monkeypatch.setattr(kills_in_place, "_job", job)
        monkeypatch.setattr(kills_in_place, "_stop", stop or (lambda _: (9, unsaved)))
        monkeypatch.setattr(kills_in_place, "_finish", finish)
        monkeypatch.setattr(kills_in_place, "_fault", lambda *_: next(left))
        monkeypatch.setattr(kills_in_place, "marked", lambda _: [])
        monkeypatch.setattr(kills_in_place, "compare", lambda *_: RunComparison(3, ()))
        output = str(tmp_path / "out")
        return kills.main(["--in-place", "--kills", str(len(faults)), "--seed", "1", "--output", output, *options])

    return run


GIVEN = ("--median-s", "0.5", "--p99-s", "1.5", "--least-in-place", "0.6")


@pytest.mark.parametrize(
    ("faults", "status", "lines"),
    [
        ([fault(ms=400.0), fault(ms=500.0)], 0, ["kept", "kept", "kept"]),
        ([fault(ms=501.0), fault(ms=502.0)], 1, ["missed", "kept", "kept"]),
        ([fault(ms=300.0), fault(ms=310.0), fault(ms=1600.0)], 1, ["kept", "missed", "kept"]),
        ([fault(ms=300.0), fault(BY_CHECKPOINT, ms=400.0)], 1, ["kept", "kept", "missed"]),
    ],
)
def test_a_limit_that_is_missed_is_reported_and_is_the_exit_status(
    faults: list[EndedFault],
    status: int,
    lines: list[str],
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(faults, *GIVEN) == status
    output = capsys.readouterr().out
    found = [line.split(":")[0] for line in output.splitlines() if line.startswith(("kept: ", "missed: "))]
    assert found == lines, output
    content = json.loads((tmp_path / "out" / "kills.json").read_text())
    assert [one["kept"] for one in content["limits"]] == [line == "kept" for line in lines]


def test_without_limits_times_are_only_reported(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([fault(ms=9000.0), fault(BY_CHECKPOINT, ms=9000.0)]) == 0
    output = capsys.readouterr().out
    assert "median 9,000" in output and "kept: " not in output and "missed: " not in output


def test_what_is_wrong_is_not_made_good_by_the_times(command: Command) -> None:
    assert command([fault(ms=100.0, after_step=9)], *GIVEN) == 1


def test_a_step_that_the_last_stop_loses_is_wrong(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([fault(ms=100.0)], unsaved=2) == 1
    assert "wrong: the last stop: 2 steps were lost" in capsys.readouterr().out


def test_what_the_killed_job_leaves_is_found_before_its_next_attempt_clears_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A staging directory, and a file beside torch's own in the temporary folder."""
    staging, temporary = tmp_path / "out" / "killed" / "checkpoints" / "iter_0000009_tmp_1_1_1", tmp_path / "temporary"

    def stop(_: object) -> tuple[int, int]:
        staging.mkdir(parents=True)
        (temporary / "litter").touch()
        (temporary / "torch_own").touch()
        return 9, 0

    def finish(_: object) -> None:
        if staging.exists():
            staging.rmdir()
            (temporary / "litter").unlink()

    temporary.mkdir()
    monkeypatch.setattr("ttp.files.make_temporary", lambda _: temporary)
    assert command([fault(ms=100.0)], stop=stop, finish=finish) == 1
    output = capsys.readouterr().out
    assert f"left behind: {staging.name}" in output and "left behind: litter" in output and "torch_own" not in output


@pytest.mark.parametrize(("saved", "known"), [(7, (7, 0)), (8, (8, 0)), (5, (7, 2)), (None, (7, 7))])
def test_a_stopped_job_ends_at_the_step_that_it_saved(
    saved: int | None, known: tuple[int, int], tmp_path: Path
) -> None:
    signals = list[int]()
    process = SimpleNamespace(send_signal=signals.append)
    if saved is not None:
        for step in (saved - 3, saved):
            (tmp_path / "checkpoints" / f"iter_{step:07d}").mkdir(parents=True)
    job = SimpleNamespace(process=process, wait=lambda _: 1, output_dir=tmp_path, last_step=lambda: 7)
    assert kills_in_place._stop(cast(TrainingJob, job)) == known
    assert signals == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--median-s", "0.5"], "--median-s without --in-place: expected both"),
        (["--least-in-place", "0.9"], "--least-in-place without --in-place: expected both"),
        (["--spare", "0"], "--spare without --in-place: expected both. Add --in-place, or leave it out"),
        (["--twice", "2"], "--twice without --in-place: expected both"),
        (["--in-place", "--ranks", "3", "--spare", "3"], "--spare: got 3, expected a rank of this job, 0 to 2"),
        (["--in-place", "--p99-s", "0"], "got '0', expected seconds above 0, at most 3600"),
        (["--in-place", "--least-in-place", "98"], "got '98', expected a share above 0, at most 1"),
    ],
)
def test_a_limit_that_cannot_be_judged_is_refused(
    options: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        kills.main(options)
    assert ended.value.code == 2 and refused in capsys.readouterr().err
