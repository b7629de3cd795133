"""The benchmark of other systems: finished steps, what a kill cost, and the tables, from lines and values that are given."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import environments, report
from benchmarks.peers.__main__ import PARAMETERS, arguments, missed, turns
from benchmarks.peers.steps import WARM_UP, Recovery, Step, StepFiles, Steps, recovery, spread, stayed, step_times
from benchmarks.peers.systems import OWN, SYSTEMS, WORKERS, Job, Process, System, own_python
from benchmarks.peers.trial import Trial
from ttp.chaos.observed.training_job import marked
from ttp.version import VERSION


def line(step: int, rank: int, unix_s: float, *, ranks: int = 2, attempt: str = "0", pid: int = 0) -> dict[str, Any]:
    return {"step": step, "rank": rank, "ranks": ranks, "attempt": attempt, "pid": pid or 10 + rank, "unix_s": unix_s}


def finished(number: int, unix_s: float, *pids: int, attempt: str = "0") -> Step:
    return Step(number, attempt, len(pids), frozenset(pids), unix_s)


# --- finished steps ---


def test_a_step_is_finished_when_its_last_rank_is() -> None:
    steps = Steps()
    steps.add([line(1, 0, 5.0)])
    assert steps.finished == []
    steps.add([line(2, 0, 6.0), line(1, 1, 5.5)])
    assert steps.finished == [finished(1, 5.5, 10, 11)]


def test_a_step_that_is_trained_again_does_not_count_the_ranks_of_the_first_time() -> None:
    """A survivor reported step 3; after the restart one rank alone has."""
    steps = Steps()
    steps.add([line(3, 0, 1.0), line(3, 1, 9.0, attempt="1", pid=21)])
    assert steps.finished == []
    steps.add([line(3, 0, 9.5, attempt="1", pid=20)])
    assert [step.number for step in steps.finished] == [3]


def test_a_recovery_in_place_does_not_count_the_process_that_was_killed() -> None:
    """It had reported a step that no survivor has a record of; the others and the process in its place train it again, in the same attempt."""
    steps = Steps()
    steps.add([line(2, rank, 1.0, attempt="0 after step 0") for rank in (0, 1)])
    steps.add([line(3, 1, 2.0, attempt="0 after step 0"), line(3, 0, 3.0, attempt="0 after step 2")])
    assert [step.number for step in steps.finished] == [2]
    steps.add([line(3, 1, 3.5, attempt="0 after step 2", pid=30)])
    assert steps.finished[1:] == [finished(3, 3.5, 10, 30, attempt="0 after step 2")]
    assert recovery(steps.finished, 2.5, 11, 2) == Recovery(back_s=1.0, lost=0, new_s=1.0, full_s=1.0)


def test_the_process_of_a_rank_is_that_of_its_newest_line() -> None:
    steps = Steps()
    steps.add([line(3, 0, 9.0, attempt="1", pid=20), line(3, 0, 1.0)])
    assert steps.pids == {0: 20}


def test_lines_are_read_once_and_only_when_whole(tmp_path: Path) -> None:
    files = StepFiles(tmp_path)
    (tmp_path / "steps_10.jsonl").write_text(json.dumps(line(1, 0, 1.0)) + "\n" + json.dumps(line(2, 0, 2.0)))
    (tmp_path / "steps_11.jsonl").write_text(json.dumps(line(1, 1, 1.5)) + "\n")
    assert files.look().finished == [finished(1, 1.5, 10, 11)]
    with open(tmp_path / "steps_10.jsonl", "a") as file:
        file.write("\n")
    with open(tmp_path / "steps_11.jsonl", "a") as file:
        file.write(json.dumps(line(2, 1, 2.5)) + "\n")
    assert [step.number for step in files.look().finished] == [1, 2]


# --- what a kill cost ---


def test_a_step_that_the_killed_rank_had_reported_needed_no_recovery() -> None:
    """Its last survivor finished it after the kill."""
    steps = [finished(4, 1.0, 1, 2, 3), finished(5, 2.1, 1, 2, 3), finished(6, 5.0, 1, 2)]
    assert recovery(steps, 2.0, 3, 3) == Recovery(back_s=3.0, lost=0, new_s=3.0, full_s=None)


def test_a_step_that_all_had_finished_around_the_kill_is_lost_when_it_is_trained_again() -> None:
    again = [finished(5, 6.0, 7, 8, attempt="1"), finished(6, 7.0, 7, 8, attempt="1")]
    steps = [finished(4, 1.0, 1, 3), finished(5, 2.1, 1, 3), *again]
    assert recovery(steps, 2.0, 3, 2) == Recovery(back_s=4.0, lost=1, new_s=5.0, full_s=4.0)


def test_steps_that_are_trained_again_are_lost_until_a_new_one_is_finished() -> None:
    again = [finished(number, 10.0 + number, 7, 8, attempt="1") for number in range(3, 7)]
    steps = [finished(number, number / 10, 1, 2) for number in range(1, 6)]
    assert recovery([*steps, *again], 1.0, 2, 2) == Recovery(back_s=12.0, lost=3, new_s=15.0, full_s=12.0)


def test_a_step_in_flight_that_is_rolled_forward_is_not_lost() -> None:
    """Step 6 was never reported by all; training went on with 7."""
    steps = [finished(5, 0.5, 1, 2), finished(7, 3.0, 7, 8, attempt="1")]
    assert recovery(steps, 1.0, 2, 2) == Recovery(back_s=2.0, lost=0, new_s=2.0, full_s=2.0)


def test_all_ranks_are_back_with_the_first_step_of_as_many() -> None:
    steps = [finished(5, 0.5, 1, 2, 3), finished(6, 2.0, 1, 2), finished(7, 4.0, 1, 2, 9)]
    assert recovery(steps, 1.0, 3, 3) == Recovery(back_s=1.0, lost=0, new_s=1.0, full_s=3.0)


def test_without_a_step_after_a_kill_there_was_not_any_recovery() -> None:
    assert recovery([finished(5, 0.5, 1, 2)], 1.0, 2, 2) == Recovery(None, None, None, None)


@pytest.mark.parametrize(
    ("after", "kept"),
    [((1, 2), True), ((1, 2, 9), True), ((1, 8, 9), False), ((7, 8, 9), False)],
    ids=["fewer", "in place", "one of the others too", "restart"],
)
def test_whether_the_others_keep_their_processes_is_seen_from_the_first_step_after(
    after: tuple[int, ...], kept: bool
) -> None:
    """The last step before counts, though its last survivor finished it after the kill."""
    steps = [finished(4, 0.5, 1, 3), finished(5, 2.1, 1, 2, 3), finished(6, 5.0, *after), finished(7, 6.0, 1, 2, 9)]
    assert stayed(steps, 2.0, 3) is kept
    assert stayed(steps[:2], 2.0, 3) is None and stayed(steps[2:], 2.0, 3) is None


def test_the_step_time_is_of_the_first_attempt_with_all_ranks_after_the_warm_up() -> None:
    alone = [finished(number, number, 1) for number in range(1, 4)]
    steps = [finished(number, 10.0 + number / 2, 1, 2) for number in range(4, 4 + WARM_UP + 3)]
    gap = finished(90, 50.0, 1, 2)
    later = [finished(number, 60.0 + number, 1, 2, attempt="1") for number in range(91, 99)]
    assert step_times([*alone, *steps, gap, *later], 999.0, 2) == [0.5, 0.5]
    assert step_times([*alone, *steps], steps[-1].unix_s, 2) == [0.5]


def test_the_spread_is_median_least_and_most() -> None:
    assert spread([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)
    assert spread([]) is None


# --- tables ---


def kill(
    back_s: float | None, *, place: int = 0, lost: int = 0, full_s: float | None = None, **known: bool
) -> dict[str, Any]:
    found = {"back_s": back_s, "lost": None if back_s is None else lost, "new_s": back_s, "full_s": full_s}
    return {"rank": 1, "ranks": 3, "place": place, "recovery": found, "ended": False, **known}


def job(
    system: str, *kills: dict[str, Any], victim: str = "others", step_s: float = 0.02, error: str = "", ranks: int = 3
) -> dict[str, Any]:
    steps = [] if error else [step_s] * 3
    return {"system": system, "victim": victim, "kills": list(kills), "step_s": steps, "error": error, "ranks": ranks}


def values(*jobs: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": 7, "torch": "2.13.0", "cores": 2, "load": [1.0, 2.0], "ranks": 3, "parameters": PARAMETERS, "jobs": list(jobs),
        "not_installed": {"dlrover": "ERROR: no wheel"}, "versions": dict.fromkeys(SYSTEMS, "1"), "saves": dict.fromkeys(SYSTEMS, "-"),
    }  # fmt: skip


FOUND = values(
    job("plain", victim="", step_s=0.01),
    job("plain", victim="", step_s=0.004, ranks=2),
    job("torchrun", kill(6.0, lost=10, full_s=6.5), kill(None, place=1)),
    job("torchrun", kill(8.0, lost=4, full_s=8.5), kill(7.0, place=1, lost=1, full_s=7.5)),
    job("torchrun", kill(9.0, full_s=9.0), victim="0"),
    job("nvrx", kill(1.0)),
    job("torchft", error="RuntimeError: no quorum"),
)


def test_a_row_has_survivors_medians_and_the_second_kills_alone() -> None:
    row = report.recovery_row(FOUND, "torchrun")
    assert row[1:4] == ["3 of 4", "7.00 (6.00-8.00)", "4 (1-10)"]
    assert row[5:] == ["7.50 (6.50-8.50), 3 of 4", "-", "1 of 2", "1 of 1, 9.00 (9.00-9.00) s"]


def test_a_system_that_replaces_no_rank_never_has_all_again() -> None:
    row = report.recovery_row(FOUND, "nvrx")
    assert row[5:] == ["never: fewer ranks go on", "-", "-", "-"]


def test_a_row_counts_the_kills_after_which_the_others_kept_running() -> None:
    """Those of rank 0 too; where nothing followed it is not known."""
    jobs = [
        job("ttp_in_place", kill(0.4, stayed=True), kill(0.9, stayed=False)),
        job("ttp_in_place", kill(0.5, stayed=True), victim="0"),
    ]
    found = values(*jobs, job("ttp", kill(0.9, stayed=False), kill(None)))
    assert report.RECOVERY_HEADS[6] == "others kept running"
    assert [report.recovery_row(found, name)[6] for name in report.ran(found)] == ["2 of 3", "0 of 1"]


def test_the_step_time_is_compared_with_plain_ddp() -> None:
    assert report.step_row(FOUND, "torchrun")[4:] == ["10.0", "20.0", "2.00", "2.00"]


def test_what_did_not_begin_is_named_with_its_error_and_has_no_row() -> None:
    assert report.missing(FOUND) == {
        "DLRover": "ERROR: no wheel",
        "torchft, default: 1 of 1 jobs": "RuntimeError: no quorum",
    }
    assert report.ran(FOUND) == ["torchrun", "nvrx"]
    for text in (report.markdown(FOUND), report.console(FOUND)):
        assert "RuntimeError: no quorum" in text and "ERROR: no wheel" in text


def test_the_document_has_the_tables_between_its_marks() -> None:
    document = "before\n<!-- peers -->\nold\n<!-- end -->\nafter"
    written = report.written(document, FOUND)
    assert written == f"before\n<!-- peers -->\n{report.markdown(FOUND)}\n<!-- end -->\nafter"


def test_the_picture_is_the_same_for_the_same_values() -> None:
    assert report.picture(FOUND) == report.picture(FOUND)


def test_an_earlier_run_is_written_into_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m benchmarks.peers --write-docs` does with its own; without the option the document remains as it is."""
    main = importlib.import_module("benchmarks.peers.__main__")
    monkeypatch.setattr(main, "ROOT", tmp_path)
    monkeypatch.setattr(main, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(main, "DOCUMENT", tmp_path / "docs" / "comparison.md")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "comparison.md").write_text("<!-- peers -->\n<!-- end -->\n")
    (tmp_path / "earlier.json").write_text(json.dumps(FOUND))
    assert main.main(["--report", str(tmp_path / "earlier.json")]) == 0
    assert (tmp_path / "docs" / "comparison.md").read_text() == "<!-- peers -->\n<!-- end -->\n"
    assert main.main(["--report", str(tmp_path / "earlier.json"), "--write-docs"]) == 0
    assert report.markdown(FOUND) in (tmp_path / "docs" / "comparison.md").read_text()
    assert (tmp_path / "docs" / "pictures" / "peers.svg").read_text() == report.picture(FOUND)
    assert json.loads((tmp_path / "output" / "7.json").read_text()) == FOUND


@pytest.mark.parametrize(
    ("jobs", "failed"),
    [
        ([job("ttp", kill(1.0)), job("torchrun", kill(None))], 0),
        ([job("ttp", kill(1.0), kill(None))], 1),
        ([job("ttp", kill(1.0, lost=1))], 1),
        ([job("ttp", error="E")], 1),
        ([job("ttp", kill(1.0)), job("ttp_in_place", kill(0.4, lost=1), kill(None))], 2),
    ],
)
def test_only_a_kill_that_ttp_did_not_survive_whole_is_a_failure(jobs: list[dict[str, Any]], failed: int) -> None:
    assert len(missed(values(*jobs))) == failed


# --- the runner ---


def test_each_round_has_every_system_once_and_plain_ddp_for_each_number_of_ranks() -> None:
    options = arguments(["--runs", "2", "--rank-0-runs", "1"])
    order = turns(options, ["ttp", "nvrx", "lm_resiliency"], random.Random(3))
    assert sorted(order[:5]) == sorted(order[5:10]) != order[:5]
    assert sorted(order[:5]) == [
        ("lm_resiliency", "others", 2), ("nvrx", "others", 3), ("plain", "", 2), ("plain", "", 3), ("ttp", "others", 3),
    ]  # fmt: skip
    assert sorted(order[10:]) == [("lm_resiliency", "0", 2), ("nvrx", "0", 3), ("ttp", "0", 3)]


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--systems", "ttp,horovod"])
    assert "no system horovod: expected some of ttp_in_place, ttp, torchrun" in capsys.readouterr().err


def test_a_system_that_pip_does_not_install_gives_pips_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path / "peers")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "constraints.txt").touch()
    system = System("None", "-", lambda job: [], "no-such-package==1.0")
    with pytest.raises(environments.NotInstalled, match="No matching distribution found"):
        environments.python_of(system)
    assert not (tmp_path / "peers" / "no_such_package" / "installed.txt").exists()


def test_every_process_of_a_trial_is_killed_and_its_shared_memory_removed(tmp_path: Path) -> None:
    """The child has outlived its parent, and is in another session."""
    shared = "from multiprocessing.shared_memory import SharedMemory; shared = SharedMemory(create=True, size=64)"
    child = f"{shared}; import time; print(shared.name, flush=True); time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], stdout=open('child', 'w'), start_new_session=True)"
    system = System("None", "-", lambda job: [Process([sys.executable, "-c", f"import subprocess, sys; {start}"])])
    written = tmp_path / "job" / "child"
    with Trial(system, own_python(), 1, tmp_path / "job", 20) as trial:
        trial.start()
        deadline = time.monotonic() + 60.0
        while not (trial.ended() and written.exists() and written.read_text().endswith("\n")):
            assert time.monotonic() < deadline
        segment = Path("/dev/shm") / written.read_text().strip()
        assert list(marked(trial.mark)) and segment.exists()
    assert not list(marked(trial.mark)) and not segment.exists()


def test_the_toy_model_has_as_many_parameters_as_the_document_says(tmp_path: Path) -> None:
    code = "import toy; print(sum(p.numel() for p in toy.build().parameters()))"
    environ = {
        "PEERS_FOLDER": str(tmp_path),
        "PEERS_SAVE_EVERY": "1",
        "PEERS_LAST_STEP": "1",
        "PYTHONPATH": str(WORKERS),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == PARAMETERS


def test_the_two_rows_of_ttp_are_one_program_and_one_version() -> None:
    """What differs is whether it may continue in place; the environment of whoever measures changes neither."""
    one, other = (SYSTEMS[name] for name in OWN)
    assert one.start is other.start and environments.version_of(one) == environments.version_of(other) == VERSION
    assert (one.environ["TTP_IN_PLACE"], other.environ["TTP_IN_PLACE"]) == ("unrehearsed", "False")


def test_every_system_starts_a_worker_that_is_there(tmp_path: Path) -> None:
    for name, system in SYSTEMS.items():
        commands = [process.command for process in system.start(Job(own_python(), 3, tmp_path))]
        scripts = {word for command in commands for word in command if word.endswith(".py")}
        assert scripts and all(Path(script).is_file() for script in scripts), name
