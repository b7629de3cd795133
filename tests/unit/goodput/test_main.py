"""The command: text, JSON, a job's own times, a picture, and one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.launch.test_reporter_time import Clock, files, first_attempt, second_attempt
from tests.unit.status.jobs import comes, incident, journal
from ttp.exchange import time_marks
from ttp.goodput import main
from ttp.goodput.measured import Measured, measured
from ttp.launch.report.reporter import Reporter


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main.main([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_without_options_published_runs_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    text = capsys.readouterr().out
    assert text.index("published   more than 90 %") < text.index("this system: restart")
    assert (
        text.count("reproduced within five points") == 2
        and "NOT" not in text
        and "arXiv 2407.21783" in text
        and "arXiv 2509.16293" in text
    )


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    runs = asked(capsys)["runs"]
    assert isinstance(runs, list) and [run["name"] for run in runs] == ["llama3", "byterobust"]
    for run in runs:
        assert run["reproduced"] and abs(run["modelled"] - run["published"]) < 0.05 and run["inputs"] and run["ranges"]
        for each in run["strategies"]:
            assert (
                each["steps"] + each["saves"] + each["again"] + each["down"] == pytest.approx(1.0)
                and each["simulated"] is None
            )


def test_a_cluster_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--ranks",
        "1024",
        "--fault",
        "process=1e-5",
        "--fault",
        "node=2e-5",
        "--restart-s",
        "300",
        "--interval-s",
        "1800",
    )
    found = asked(capsys, *given)
    cluster = found["cluster"]
    assert isinstance(cluster, dict) and cluster["ranks"] == 1024 and cluster["times"]["restart_s"] == 300.0
    assert cluster["per_device_hour"] == {"process": 1e-5, "node": 2e-5, "hang": 0.0, "lost": 0.0}
    assert cluster["mean_time_between_s"] == pytest.approx(3600 / (1024 * 3e-5))
    shares = found["strategies"]
    assert isinstance(shares, list) and shares[0]["saved_every_s"] == 1800.0
    assert main.main(list(given)) == 0
    text = capsys.readouterr().out
    assert "1,024 ranks on 128 nodes, a fault every 32.6 h" in text and "restart 300" in text


def test_the_ranks_of_a_node_and_the_lease_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job that sets no lease: it is longer with many ranks."""
    for nodes, lease_s, given in (
        (16, 3.0, ("--ranks", "64", "--nproc-per-node", "4")),
        (1, 3.0, ("--ranks", "4")),
        (4096, 3.0 * 16_384 / 10_000, ("--nproc-per-node", "4")),
    ):
        cluster = asked(capsys, *given)["cluster"]
        assert isinstance(cluster, dict) and (cluster["nodes"], cluster["lease_s"]) == (nodes, pytest.approx(lease_s))
    assert main.main(["--ranks", "4"]) == 0 and "4 ranks on 1 node, a fault every" in capsys.readouterr().out


def test_the_simulation_is_shown_beside_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--like", "llama3", "--simulate", "10", "--days", "20", "--seed", "5")
    shares = asked(capsys, *given)["strategies"]
    assert isinstance(shares, list)
    for each in shares:
        low, high = each["simulated"]["interval"]
        assert low - 0.01 < each["steps"] < high + 0.01 and each["simulated"]["runs"] == 10
    assert main.main(list(given)) == 0
    assert "simulated, 95 %" in capsys.readouterr().out


def test_times_of_a_job_of_ones_own_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault was seen at 10.5 s and its dump over at 12; the next step came at 22 s; 159 steps took 30 s; two saves took 3.5 s."""
    files(tmp_path)
    clock = Clock()
    first_attempt(reporter := Reporter(clock=clock), clock, tmp_path)
    second_attempt(reporter, clock, tmp_path)
    known = measured(str(tmp_path))
    assert known["restart_s"] == Measured(10.0, 1) and known["save_s"] == Measured(1.75, 2)
    assert known["detect_s"] == Measured(0.0, 1) and known["step_s"].count == 2
    assert known["step_s"].seconds == pytest.approx(((8.5 - 1.5) / 39 + 30.0 / 159) / 2)
    found = asked(capsys, "--job", str(tmp_path), "--ranks", "64", "--save-s", "9")
    cluster = found["cluster"]
    assert isinstance(cluster, dict)
    times = cluster["times"]
    assert (times["restart_s"], times["load_s"], times["save_s"]) == (10.0, 0.0, 9.0), (
        "what is given is above what was measured"
    )
    assert main.main(["--job", str(tmp_path)]) == 0
    assert "measured in the job: " in (text := capsys.readouterr().out) and "restart (1)" in text


def test_a_recovery_in_place_gives_the_time_to_regroup(tmp_path: Path) -> None:
    at, event, fields = incident(8.0, 2.0, 20, in_place=True)
    fields = {**fields, "took_ms": {"seen": 500.0, "frozen": 100.0, "regrouped": 1400.0, "total": 2000.0}}
    journal(tmp_path, 0, *comes(0.0), (at, event, fields), (50.0, "finished", {"ranks": 2}))
    (tmp_path / "times_0.jsonl").write_text(
        "".join(json.dumps({"unix_s": 1_700_000_000.0 + second, "event": "stepped", "step": step, "took_s": 0.0}) + "\n" for second, step in ((2.0, 1), (9.0, 21)))
    )  # fmt: skip
    assert [mark.step for mark in time_marks.read(tmp_path, 0, 0.0)] == [1, 21]
    known = measured(str(tmp_path))
    assert known["regroup_s"].seconds == pytest.approx(2.5) and known["detect_s"].seconds == pytest.approx(0.5)
    assert (
        known["step_s"].seconds == pytest.approx((48.0 - 3.0) / 20)
        and "restart_s" not in known
        and "dump_s" not in known
    )


@pytest.mark.long
def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "shares.svg"
    assert main.main(["--ranks", "4096", "--plot", str(path)]) == 0
    assert "<svg" in path.read_text()
    assert main.main(["--ranks", "4096", "--plot", "/nowhere/shares.svg"]) == 2
    assert "--plot: cannot write /nowhere/shares.svg: No such file or directory" in capsys.readouterr().err


WRONG = {
    "no number": (["--ranks", "many"], "argument --ranks: got 'many', expected an integer from 1 to 10000000"),
    "no ranks": (["--ranks", "0"], "argument --ranks: got '0', expected an integer from 1"),
    "a negative time": (["--save-s", "-1"], "argument --save-s: got '-1', expected a number from 0 to 1e+09"),
    "nan": (["--ranks", "8", "--restart-s", "nan"], "argument --restart-s: got 'nan', expected a number from 0"),
    "no step": (["--ranks", "8", "--step-s", "0"], "argument --step-s: got '0', expected a number above 0"),
    "a kind": (["--fault", "disk=1e-5"], "argument --fault: got 'disk=1e-5', expected KIND=RATE with one of process, node, hang, lost"),
    "a rate": (["--fault", "node=often"], "argument --fault: got 'often', expected a number from 0 to 1000"),
    "no rate": (["--fault", "node"], "argument --fault: got 'node', expected KIND=RATE"),
    "no ranks of a node": (["--nproc-per-node", "0"], "argument --nproc-per-node: got '0', expected an integer from 1"),
    "a run": (["--like", "gpt5"], "argument --like: invalid choice: 'gpt5'"),
    "a job": (["--job", "/nowhere/job"], "/nowhere/job"),
    "an address": (["--job", "127.0.0.1:9"], "--job: got the address 127.0.0.1:9, expected a folder"),
    "a picture": (["--ranks", "8", "--plot", "shares.txt"], "argument --plot: got 'shares.txt', expected a name that ends in .png, .svg, .pdf"),
    "a picture of nothing": (["--plot", "shares.svg"], "argument --plot: got no cluster, expected one: name --ranks or --like"),
    "too much to draw": (["--ranks", "10000000", "--fault", "node=1", "--simulate", "1000"], "--simulate: got 2.2e+13 faults to draw, expected at most 2e+07"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = WRONG[name]
    try:
        status = main.main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr().err
    assert status == 2 and expected in said and "Traceback" not in said
    assert (
        said.strip().splitlines()[-1].startswith("python -m ttp.goodput: error: ")
        and "error: " in said.strip().splitlines()[-1]
    )


def test_a_folder_without_times_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal(tmp_path, 0, *comes(0.0))
    assert main.main(["--job", str(tmp_path)]) == 2
    assert "has no finished step, save or fault with its times" in capsys.readouterr().err


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "ttp.goodput", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read() and process.wait(60) == 1


def test_the_module_is_a_program_that_loads_no_torch() -> None:
    code = "import sys; from ttp.goodput.main import main; main(['--ranks', '8']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
