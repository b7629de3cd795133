"""The matrix has every cell once, goes on where it was, and its shards are parts of one whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttp.chaos import demo, kills
from ttp.chaos.cell import MatrixCase
from ttp.chaos.cli import main
from ttp.chaos.faults.inject import POINTS
from ttp.chaos.faults.scenario import FaultSpec, Moment
from ttp.chaos.folder import MARK, taken
from ttp.chaos.matrix import (
    IN_STEP,
    ROLES,
    MatrixPlan,
    cells,
    command,
    next_batch,
    open_cells,
    ordered,
    read_lines,
    run_matrix,
    table,
)
from ttp.chaos.node_cells import FIELDS, RANKS_PER_NODE
from ttp.chaos.observed.recorder import Record
from ttp.chaos.run.campaign import write_baseline
from ttp.errors import ConfigError


def put_down(output: Path, cell: MatrixCase, **fields: Any) -> None:
    line = {"cell": cell.name, "kind": cell.kind, "happened": True, "blows": 1, "as_expected": True, "outcome": "saved"}
    line |= {"stages_ms": {"first_new_step": 4000.0}, **fields}
    with open(output / "cells.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def test_every_cell_is_there_once_and_run_twice_makes_at_least_five_hundred_faults() -> None:
    """Every death at every point of a step to every role; names tell them apart."""
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) and 2 * len(names) >= 500
    expected = {f"{kind}/{point}/{role}" for kind in IN_STEP for point in POINTS for role in ROLES}
    assert expected <= set(names)
    assert {"kill_controller/in turn/controller", "kill_controller/in turn/and a rank"} <= set(names)


def test_the_cells_of_nodes_are_a_matrix_of_their_own() -> None:
    """Every fault of a node in training and at each stage of a dump, to the node with rank 0 and to the other; the neighbour that
    dies first is on the node that is hit, so that the other node can save."""
    made = cells("nodes")
    names = [cell.name for cell in made]
    assert len(names) == len(set(names)) == 4 * 2 * (1 + 6)
    assert {cell.fault.kind for cell in made} == {"kill", *FIELDS} and not set(names) & {cell.name for cell in cells()}
    for cell in made:
        (hit,) = [fault for fault in (cell.fault, *cell.fault.then) if fault.kind in FIELDS]
        assert hit.ranks == ((0,) if cell.role == "first" else (3,))
        if cell.fault.then:
            assert cell.fault.ranks[0] // RANKS_PER_NODE == hit.ranks[0] // RANKS_PER_NODE
    words = command(nodes=True)
    assert words[words.index("--nproc-per-node") + 1] == "2" and "{endpoints}" in words
    assert "{endpoints}" not in command()
    assert ordered(MatrixPlan(output=Path(), which="nodes"))[0] in made
    assert "| lose_node in a dump | 12 | 0 |" in table([], "nodes")


def test_the_first_cells_are_one_of_each_kind() -> None:
    """So a short run is a fair sample."""
    kinds = {cell.kind for cell in cells()}
    first = ordered(MatrixPlan(output=Path()))[: len(kinds)]
    assert {cell.kind for cell in first} == kinds


def test_no_cell_comes_after_one_that_costs_a_controller_while_all_train() -> None:
    """The next fault might come before another standby is there; the next job has one from its start."""
    todo, jobs = ordered(MatrixPlan(output=Path(), repeat=2)), []
    before = list(todo)
    while todo:
        jobs.append(next_batch(todo, 8))
        todo = todo[len(jobs[-1]) :]
    assert [cell for job in jobs for cell in job] == before and max(map(len, jobs)) == 8
    idle = {"kill_controller/training/controller", "stop_controller/training/controller"}
    assert not idle & {cell.name for job in jobs for cell in job[:-1]}
    assert idle <= {job[-1].name for job in jobs}


def test_an_interrupted_run_keeps_its_baseline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run of the matrix compares with it, and makes none."""
    given = []

    def interrupted(scenario: object, words: object, folder: Path, *, baseline: Path | None, **_: object) -> Any:
        given.append(baseline)
        folder.mkdir()
        if baseline is None:
            (folder / "baseline.json").write_text("{}")
        yield None
        raise KeyboardInterrupt

    monkeypatch.setattr("ttp.chaos.matrix.run_campaign", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(run_matrix(MatrixPlan(output=tmp_path, limit=1)))
    assert given == [None, tmp_path / "baseline.json"]


def test_shards_are_parts_of_one_whole() -> None:
    """No cell is in two, none in none."""
    whole = sorted(cell.name for cell in ordered(MatrixPlan(output=Path(), repeat=2)))
    parts = [ordered(MatrixPlan(output=Path(), repeat=2, shard=(index, 3))) for index in range(3)]
    assert sorted(cell.name for part in parts for cell in part) == whole


def test_what_was_run_is_not_run_again_and_what_did_not_happen_is(tmp_path: Path) -> None:
    """A cell is open until it has happened as often as it should."""
    plan = MatrixPlan(output=tmp_path, repeat=2)
    one, other = ordered(plan)[:2]
    put_down(tmp_path, one)
    put_down(tmp_path, other, happened=False)
    left = [cell.name for cell in open_cells(plan)]
    assert len(left) == 2 * len(cells()) - 1 and left.count(one.name) == 1 and left.count(other.name) == 2


def test_the_table_counts_what_was_run_and_what_was_not_expected(tmp_path: Path) -> None:
    """A row a kind, and a sum."""
    one = ordered(MatrixPlan(output=tmp_path))[0]
    put_down(tmp_path, one)
    put_down(tmp_path, one, as_expected=False, outcome="unsaved", **{"blows": 2})
    rows = table(read_lines(tmp_path)).splitlines()
    (row,) = [row for row in rows if row.startswith(f"| {one.kind} |")]
    assert "| 1 | 3 | 1 saved, 1 unsaved | 1 | 4.0 |" in row
    assert rows[-1] == f"| **all** | {len(cells())} | 1 | 3 | | 1 | |"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["matrix", "--shard", "3/3"], "--shard: got '3/3', expected I/N"),
        (["matrix", "--kinds", "burn"], "--kinds: got 'burn', expected some of kill"),
        (["run", "nowhere.yaml", "--", "true"], "nowhere.yaml: no such file"),
        (["check", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["report", "nowhere.json"], "expected the result.json of a campaign"),
    ],
)
def test_wrong_usage_has_status_2_and_names_what_was_expected(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert expected in capsys.readouterr().out


def test_a_run_without_a_command_or_over_strange_files_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An output folder that holds something else is not emptied."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("faults: [{fault: kill}]")
    assert main(["check", str(scenario)]) == 0
    assert "kill of rank random: saved" in capsys.readouterr().out
    output = tmp_path / "out"
    assert main(["run", str(scenario), "--output", str(output)]) == 2
    assert "no command: expected the job's after `--`" in capsys.readouterr().out
    (output / "precious").write_text("mine")
    assert main(["run", str(scenario), "--output", str(output), "--", "true"]) == 2
    assert "it holds 'precious', which no campaign makes" in capsys.readouterr().out
    (output / "precious").rename(output / "run_times.csv")
    assert main(["run", str(scenario), "--output", str(output), "--", "true"]) == 2
    assert "it holds 'run_times.csv', which no campaign makes" in capsys.readouterr().out
    assert main(["run", str(scenario), "--output", str(output / "run_times.csv"), "--", "true"]) == 2
    assert "a file, expected a folder" in capsys.readouterr().out
    assert main(["run", str(scenario), "--output", "/proc/none", "--", "true"]) == 2
    assert "expected a folder that can be written and locked" in capsys.readouterr().out
    (output / "run_times.csv").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(scenario), "--output", str(output), "--seed", "-1", "--", "true"])
    assert "--seed: got '-1', expected an integer from 0" in capsys.readouterr().err
    assert main(["run", str(scenario), "--output", str(output), "--", "true"]) == 1
    assert "no rank called ttp.start in run 0" in capsys.readouterr().out, "nothing was judged, so nothing held"
    assert main(["run", str(scenario), "--output", str(output), "--duration", "soon", "--", "true"]) == 2
    assert "--duration: got 'soon', expected seconds" in capsys.readouterr().out
    assert main(["run", str(scenario), "--output", str(output), "--", "no-such-program"]) == 2
    assert "'no-such-program' is not executable" in capsys.readouterr().out


def test_a_cell_cannot_ask_for_a_point_that_its_fault_does_not_have() -> None:
    """A rank that is given such a fault would not know when to strike, and the cell would test nothing."""
    with pytest.raises(ValueError, match="kill has no point ''"):
        FaultSpec(kind="kill", ranks=(2,), moment=Moment(event="standby_started"))
    with pytest.raises(ValueError, match="kill_controller has no point 'now', expected none"):
        FaultSpec(kind="kill_controller", point="now")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {MARK}


def test_a_folder_of_an_earlier_campaign_is_emptied(tmp_path: Path) -> None:
    """Unless it is to be kept; an empty one may be there."""
    with taken(tmp_path):
        assert names(tmp_path) == set()
    output = tmp_path / "out" / "chaos"
    with taken(output):
        (output / "run_0").mkdir()
        (output / "baseline.json").write_text("{}")
    with taken(output, keep=True):
        assert names(output) == {"run_0", "baseline.json"}
    with taken(output):
        assert names(output) == set()


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_that_no_campaign_made_is_refused_whatever_its_content_is_called(tmp_path: Path, keep: bool) -> None:
    """A user's own run_1 is not removed, nor written into; one of a matrix may be put together from other ones."""
    (tmp_path / "run_1").mkdir()
    with pytest.raises(ConfigError, match=r"which holds 'run_1' and no \.ttp_chaos"), taken(tmp_path, keep=keep):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run_1"]
    (tmp_path / "cells_2.jsonl").write_text("")
    with taken(tmp_path, keep=True):
        assert names(tmp_path) == {"run_1", "cells_2.jsonl"}


def test_a_folder_into_which_a_campaign_writes_is_refused_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same kind or another; nothing in it is removed. When the first one has ended, however, it is free."""
    scenario, output = tmp_path / "scenario.yaml", tmp_path / "out"
    scenario.write_text("faults: [{fault: kill}]")
    run = ["run", str(scenario), "--output", str(output), "--", "no-such-program"]
    with pytest.raises(OSError, match="of the job"), taken(output):
        (output / "run_0").mkdir()
        for words in (run, ["matrix", "--limit", "0", "--output", str(output)]):
            assert main(words) == 2
            assert f"--output: got {output}, in use by another process" in " ".join(capsys.readouterr().out.split())
        for program in (kills, demo):
            assert program.main(["--output", str(output)]) == 2
        assert names(output) == {"run_0"}
        raise OSError("of the job")
    assert main(run) == 2
    assert "'no-such-program' is not executable" in capsys.readouterr().out


@pytest.mark.parametrize("final", ["out/baseline/iter_0000004", ""])
def test_a_baseline_in_the_folder_that_is_emptied_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], final: str
) -> None:
    """Or whose checkpoint is there; with --keep it is taken. One that is none is refused before anything is removed."""
    scenario, output = tmp_path / "scenario.yaml", tmp_path / "out"
    scenario.write_text("faults: [{fault: kill}]")
    with taken(output):
        (output / "baseline" / "iter_0000004").mkdir(parents=True)
    baseline = (tmp_path if final else output) / "baseline.json"
    write_baseline(baseline, Record(world_size=2), tmp_path / final if final else None)
    words = ["run", str(scenario), "--output", str(output), "--baseline", str(baseline)]
    job = ["--", "no-such-program", "{output}"]
    assert main([*words, *job]) == 2
    assert "is in --output" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--keep", *job]) == 2
    assert "'no-such-program' is not executable" in capsys.readouterr().out
    baseline.write_text("{}")
    assert main([*words, *job]) == 2
    assert "expected the baseline.json of a campaign" in " ".join(capsys.readouterr().out.split())
    assert (output / "baseline").is_dir()
