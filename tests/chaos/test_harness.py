"""`ttp chaos` on real jobs: what it does happens, what it says of it is so, and it is not content with a job that loses something."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import shown
from tests.chaos.conftest import SMALL
from ttp.chaos import matrix
from ttp.chaos.cli import main
from ttp.chaos.fixture import RunChaos, chaos
from ttp.chaos.nodes.namespaces import why_not

__all__ = ["chaos"]

ROOT = Path(__file__).resolve().parents[2]
TTPRUN = (sys.executable, "-m", "ttp.launch", "--max-restarts", "100", "--ttp-futile-starts", "0")
TRAINER = ("-m", "ttp.trainer", "--config", "gpt_tiny", *SMALL, "--training_config.output_dir", "{output}")
TIMES = {"TTP_HANG_FLOOR_S": "3", "TTP_HANG_START_S": "45"}


def trainer(ranks: int, steps: int, *overrides: str) -> list[str]:
    iters = f"--training_config.training_iters={steps}"
    return [*TTPRUN, "--nproc-per-node", str(ranks), *TRAINER, iters, *overrides]


@pytest.mark.long
def test_a_kill_at_a_point_of_a_step_is_done_seen_and_judged(chaos: RunChaos) -> None:
    """Another person's trainer, by way of the fixture: the injection is where it was expected, nothing is lost, all bits are equal."""
    script = str(ROOT / "examples" / "own_trainer" / "train.py")
    command = [*TTPRUN, "--nproc-per-node", "2", script, "--steps", "400", "--save-dir", "{output}/checkpoints"]
    campaign = chaos(command, [{"fault": "kill", "rank": 1, "step": 40, "point": "updating"}], seed=1)
    (incident,) = campaign.incidents
    (firing,) = incident.firings
    assert (
        firing.kind == "kill"
        and firing.point == "updating"
        and firing.step >= 40
        and firing.whom.startswith("rank 1 (pid ")
    )
    assert incident.outcome == "saved" and incident.lost == 0 and incident.saved_step in (firing.step - 1, firing.step)
    assert 0 < incident.stages_ms["seen"] < incident.stages_ms["published"] < incident.stages_ms["first_new_step"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_documents_campaign_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of README.md and docs/chaos.md, word by word, three random kills in a run of 4,000 steps."""
    text = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8")
    (line,) = [line for line in shown.shown(text) if line.startswith("ttp chaos run")]
    words = shlex.split(line)
    assert words[2:5] == ["run", "examples/chaos/kills.yaml", "--"] and words[5] == "ttprun"
    monkeypatch.chdir(ROOT)
    output = tmp_path / "out"
    launcher = [sys.executable, "-m", "ttp.launch"]
    status = main([*words[2:4], "--output", str(output), "--", *launcher, *words[6:]])
    assert status == 0, capsys.readouterr().out[-6000:]
    content = json.loads((output / "result.json").read_text())
    assert [incident["outcome"] for incident in content["incidents"]] == ["saved"] * 3
    assert (output / "report.html").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_of_each_kind_is_survived_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of every kind, on the bundled trainer: each happens, each is reported, and there is one report."""
    output = tmp_path / "out"
    scenario = ROOT / "examples" / "chaos" / "kinds.yaml"
    count = len(yaml.safe_load(scenario.read_text())["faults"])
    words = ["run", str(scenario), "--output", str(output)]
    status = main([*words, "--", *trainer(4, 1400)])
    logged = capsys.readouterr().out
    assert status == 0, logged[-6000:]
    content = json.loads((output / "result.json").read_text())
    assert content["good"] and content["fired"] >= content["faults"] == count
    assert {incident["outcome"] for incident in content["incidents"]} >= {
        "saved",
        "unharmed",
        "fell_back",
        "relaunched",
    }
    page = (output / "report.html").read_text()
    assert page.count("<svg") == 4 and f"Held: {count} faults" in page


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_that_loses_its_steps_is_not_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kills of both holders: refused, which is reported as such; where `saved` was demanded, the status is 1."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("{seed: 4, faults: [{fault: kill, rank: [0, 1], expect: [saved]}]}")
    output = tmp_path / "out"
    assert main(["run", str(scenario), "--output", str(output), "--", *trainer(2, 120)]) == 1
    (incident,) = json.loads((output / "result.json").read_text())["incidents"]
    assert incident["outcome"] in ("refused", "unsaved") and incident["lost"] > 0
    assert "VIOLATED" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("other", "state"), [("", "held"), (" + 100 * (guard.resumed is not None)", "violated")])
def test_a_trainer_that_goes_on_with_other_data_is_distinguished_from_one_that_does_not(
    tmp_path: Path, other: str, state: str
) -> None:
    """DDP in barrier mode, which itself reports neither a loss nor a norm, and which does not save its last step. The fault comes
    behind the last periodic checkpoint; in one of the two the data's order is another one after a restart."""
    example = (ROOT / "examples" / "ddp" / "train.py").read_text()
    save = next(line for line in example.splitlines(keepends=True) if "guard.save()" in line)
    script = tmp_path / "train.py"
    script.write_text(
        example.replace(save, "")
        .replace("sampler.set_epoch(epoch)", f"sampler.set_epoch(epoch{other})")
        .replace("clip=clip, save_dirs", "clip=clip, save_interval=300, save_dirs")
    )
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("{seed: 4, faults: [{fault: kill, rank: 1, step: 330, point: updating}]}")
    command = [*TTPRUN, "--nproc-per-node", "2", str(script), "--epochs", "35", "--save-dir", "{output}/checkpoints"]
    output = tmp_path / "out"
    status = main(["run", str(scenario), "--output", str(output), "--", *command])
    content = json.loads((output / "result.json").read_text())
    verdicts = {one["name"].split()[0]: one for one in content["verdicts"]}
    assert (verdicts["I3"]["state"], verdicts["I12"]["state"]) == (state, state), verdicts
    assert status == (1 if state == "violated" else 0)
    if state == "held":
        assert verdicts["I3"]["text"].endswith("the newest checkpoints' tensors: the same bits")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kept", "state"), [("torch.ones(1 << 14)", "violated"), ("None", "held")])
def test_a_trainer_that_keeps_a_tensor_a_step_is_distinguished_from_one_that_does_not(
    tmp_path: Path, kept: str, state: str
) -> None:
    """64 KiB a step in the example trainer, at ten milliseconds a step: each attempt's growth is 62.5 MiB in 1,000 steps and
    what the trainer needs by itself. With the same line and no tensor it is not a twentieth of that."""
    example = (ROOT / "examples" / "own_trainer" / "train.py").read_text()
    line = "optimizer.zero_grad()\n"
    assert example.count(line) == 1
    script = tmp_path / "train.py"
    leak = f"optimizer.__dict__.setdefault('kept', []).append({kept}); __import__('time').sleep(0.01)\n"
    script.write_text(example.replace(line, line + " " * 12 + leak))
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("{seed: 4, faults: [{fault: kill, rank: 1, step: 1500}]}")
    command = [*TTPRUN, "--nproc-per-node", "2", str(script), "--steps", "2700", "--save-dir", "{output}/checkpoints"]
    output = tmp_path / "out"
    status = main(["run", str(scenario), "--no-compare", "--output", str(output), "--", *command])
    content = json.loads((output / "result.json").read_text())
    verdict = next(one for one in content["verdicts"] if one["name"] == "memory")
    assert (verdict["state"], status) == (state, 1 if state == "violated" else 0), verdict
    curves = content["memory"]
    assert {(curve["start"], curve["rank"]) for curve in curves} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for curve in curves:
        assert curve["growth_mib"] is not None
        assert 55 < curve["growth_mib"] < 80 if state == "violated" else curve["growth_mib"] < 10


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_soak_starts_runs_until_its_time_is_over(tmp_path: Path) -> None:
    """Faults at random moments, a run after the other, each compared with the same baseline run."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("{seed: 4, faults: [{fault: kill}, {fault: kill, point: updating}, {fault: slow, for_s: 0.5}]}")
    output = tmp_path / "out"
    words = ["run", str(scenario), "--output", str(output), "--duration", "40", "--faults-per-hour", "700"]
    assert main([*words, "--", *trainer(2, 1500)]) in (0, 3)
    content = json.loads((output / "result.json").read_text())
    assert content["good"] and content["faults"] >= 2 and len(content["laps"]) >= 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted by root only")
def test_a_disk_that_is_full_for_real_falls_through_to_the_next(tmp_path: Path) -> None:
    """The dying gasp is in the second directory."""
    output = tmp_path / "out"
    words = ["run", str(ROOT / "examples" / "chaos" / "full_disk.yaml"), "--output", str(output)]
    save_dirs = "--training_config.save_dirs=[{disk},{output}/second]"
    assert main([*words, "--", *trainer(4, 300, save_dirs)]) == 0
    (incident,) = json.loads((output / "result.json").read_text())["incidents"]
    assert incident["firings"][0]["whom"].endswith("/disk") and incident["outcome"] == "saved"


RENDEZVOUS = "join_timeout=240,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"


def on_nodes(nnodes: str, steps: int) -> list[str]:
    """Return the bundled trainer's command for each of several nodes, a rank each."""
    places = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "{endpoints}"]
    iters = f"--training_config.training_iters={steps}"
    return [*TTPRUN, *places, "--rdzv-conf", RENDEZVOUS, "--nproc-per-node", "1", *TRAINER, iters]


@pytest.mark.long
@pytest.mark.nodes
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason="no nodes on this machine")
def test_every_fault_of_two_nodes_costs_no_step_and_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example: a slow cable is not a fault; a partition, a lost node and a killed launcher are saved; all is compared with an
    baseline run on two nodes; no namespace remains."""
    output = tmp_path / "out"
    words = ["run", str(ROOT / "examples" / "chaos" / "nodes.yaml"), "--output", str(output)]
    assert main([*words, "--", *on_nodes("2", 500)]) == 0, capsys.readouterr().out[-6000:]
    content = json.loads((output / "result.json").read_text())
    kinds = {one["firings"][0]["kind"]: (one["outcome"], one["lost"]) for one in content["incidents"]}
    assert kinds == {
        "delay": ("unharmed", 0), "partition": ("saved", 0), "lose_node": ("saved", 0), "kill_agent": ("saved", 0)
    }  # fmt: skip
    states = {verdict["name"].split()[0]: verdict["state"] for verdict in content["verdicts"]}
    assert states["I3"] == states["I12"] == "held", "a baseline run of two nodes was compared"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"ttp-{os.getpid()}-" not in listed


@pytest.mark.long
@pytest.mark.nodes
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason="no nodes on this machine")
def test_a_slow_cable_and_a_lost_node_are_survived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three nodes of namespaces of which two are enough; one of them gets slow, another one is lost and started anew."""
    output = tmp_path / "out"
    scenario = tmp_path / "scenario.yaml"
    faults = "[{fault: delay, node: 1, ms: 20, for_s: 4}, {fault: lose_node, node: 2}]"
    scenario.write_text(f"{{seed: 5, nodes: 3, faults: {faults}}}")
    words = ["run", str(scenario), "--no-compare", "--output", str(output)]
    assert main([*words, "--", *on_nodes("2:3", 600)]) == 0, capsys.readouterr().out[-6000:]


@pytest.mark.long
@pytest.mark.nodes
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason="no nodes on this machine")
def test_ranks_of_two_nodes_are_replaced_and_a_lost_node_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged from outside: only the lost ranks have other processes, the next step is the next one, nothing is published but for the node."""
    monkeypatch.setenv("TTP_IN_PLACE_S", "30")  # a loaded machine
    output, scenario = tmp_path / "out", tmp_path / "scenario.yaml"
    faults = "{fault: kill, rank: 1}, {fault: raise, rank: 0, point: updating}, {fault: lose_node, rank: 1}, {fault: kill, rank: 0, point: done}"
    scenario.write_text(f"{{seed: 5, nodes: 2, growth_mib: 64, faults: [{faults}]}}")
    words = ["run", str(scenario), "--in-place", "--output", str(output)]
    assert main([*words, "--", *on_nodes("2", 400)]) == 0, capsys.readouterr().out[-6000:]
    content = json.loads((output / "result.json").read_text())
    outcomes = [(one["outcome"], one["lost"]) for one in content["incidents"]]
    assert outcomes == [("in_place", 0), ("in_place", 0), ("saved", 0), ("in_place", 0)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_part_of_the_matrix_is_run_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Two cells, then two more: none twice."""
    words = ["matrix", "--output", str(tmp_path), "--per-job", "2", "--limit", "2", "--kinds", "kill,term,slow"]
    assert main(words) == 0
    first = {line["cell"] for line in matrix.read_lines(tmp_path)}
    assert main(words) == 0
    lines = matrix.read_lines(tmp_path)
    assert len(lines) == 4 and first < {line["cell"] for line in lines} and all(line["as_expected"] for line in lines)


@pytest.mark.long
def test_a_part_of_the_matrix_in_place_needs_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed, raises or stands still in training is replaced, or comes back; only a new process that dies as it starts costs one."""
    monkeypatch.setenv("TTP_IN_PLACE_S", "30")  # a loaded machine
    words = ["matrix", "--in-place", "--output", str(tmp_path), "--limit", "4", "--repeat", "1"]
    assert main([*words, "--kinds", "kill,raise,kill of a new process,stop"]) == 0
    found = {line["kind"]: line for line in matrix.read_lines(tmp_path)}
    assert {kind: line["outcome"] for kind, line in found.items() if kind in ("kill", "raise", "stop")} == {
        "kill": "in_place",
        "raise": "in_place",
        "stop": "in_place",
    }
    assert not any(line["finding"] for line in found.values()) and all(line["as_expected"] for line in found.values())


@pytest.mark.long
def test_a_job_that_was_to_come_back_in_place_and_did_not_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that takes no part in it is saved and restarted, as ever; the report says that no process was replaced."""
    scenario = tmp_path / "kill.yaml"
    scenario.write_text("{seed: 5, faults: [{fault: kill, rank: 1, after_steps: 5}]}")
    script = str(ROOT / "examples" / "own_trainer" / "train.py")
    command = [*TTPRUN, "--nproc-per-node", "2", script, "--steps", "400", "--save-dir", "{output}/checkpoints"]
    assert main(["run", str(scenario), "--in-place", "--output", str(tmp_path / "out"), "--", *command]) == 0
    content = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [incident["outcome"] for incident in content["incidents"]] == ["saved"]
    assert len(content["findings"]) == 1 and "saved, expected in_place: " in content["findings"][0]
    assert "finding: fault 1" in capsys.readouterr().out


@pytest.mark.long
def test_ranks_are_replaced_after_another_controller_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process comes to the controller that leads, though the job's store has the first one's address; twice, and rank 0's as well."""
    monkeypatch.setenv("TTP_IN_PLACE_S", "30")  # a loaded machine
    scenario = tmp_path / "takeover.yaml"
    kills = ", ".join(f"{{fault: kill, rank: {rank}}}" for rank in (1, 0, 1))
    scenario.write_text(f"{{seed: 5, faults: [{{fault: kill_controller}}, {kills}]}}")
    output = tmp_path / "out"
    assert main(["run", str(scenario), "--in-place", "--output", str(output), "--", *trainer(2, 300)]) == 0
    content = json.loads((output / "result.json").read_text())
    assert [incident["outcome"] for incident in content["incidents"]] == ["unharmed", *["in_place"] * 3]
