"""MindFormers' page on its dynamic-graph GPT, followed as it stands: its YAML, its script and its arguments, on CPU with a small model."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.test_schedulers import Script
from tests.ports import free_port
from ttp.chaos.observed.training_job import read_jsonl

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt"
SCRIPT = str(GPT / "pretrain_gpt.sh")
DOCUMENT = Path(__file__).resolve().parents[1] / "unit" / "trainer" / "mindformers_gpt.yaml"
SMALL = (
    "--model_config.num_layers=2",
    "--model_config.hidden_size=32",
    "--model_config.ffn_hidden_size=64",
    "--model_config.num_attention_heads=2",
    "--model_config.seq_length=32",
    "--training_config.device=cpu",
)
STEP_LINE = re.compile(
    r"train: Epoch:0, Step:(\d+), Loss: \d+\.\d+, Finite_grads: True, Loss_scale: 4096\.0,"
    r" Learning_rate: \(\d\.\d{6}e-\d\d,\d\.\d{6}e-\d\d,\), Time: \d+\.\d\d ms"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the page's data set and xx.yaml, its YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "text.txt").write_text("to be or not to be, that is the question " * 300)
    (tmp_path / "xx.yaml").write_text(DOCUMENT.read_text())
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> str:
    """Run `bash pretrain_gpt.sh` to its end and return what it has printed."""
    own = {"MASTER_PORT": str(free_port()), **variables}
    with Script(folder, "bash", SCRIPT, *arguments, **own) as script:
        assert script.wait() == 0, script.text
        assert script.leftovers() == []
        return script.text


def steps(path: Path) -> list[int]:
    return [int(match[1]) for match in map(STEP_LINE.fullmatch, path.read_text().splitlines()) if match]


@pytest.mark.long
def test_the_documents_command_goes_on_after_a_kill(folder: Path) -> None:
    """`bash pretrain_gpt.sh xx.yaml` with two visible devices: a rank is killed, no step is lost, and the tree of logs and its lines
    are the page's."""
    kill = "kill:rank=1,step=5,point=updating"
    text = run(folder, "xx.yaml", *SMALL, ASCEND_RT_VISIBLE_DEVICES="0,1", TTP_FAULTS=kill)
    assert "rank 1: signal SIGKILL" in text and re.search(r"^lost +0 steps", text, re.M)
    log = folder / "output" / "log"
    for rank in (0, 1):
        info = (log / f"rank_{rank}" / "info.log").read_text()
        assert len(re.findall(r" dp 2 \| pp 1 \| tp 1 \| sp False \| vpp None$", info, re.M)) == 2
        assert (log / f"rank_{rank}" / "error.log").exists()
    assert sorted(set(steps(log / "rank_0" / "info.log"))) == list(range(1, 11))
    lines = [line["step"] for line in read_jsonl(folder / "output" / "metrics.jsonl") if "step" in line]
    assert sorted(lines) == list(range(1, 11)), "a step was trained twice, or not at all"
    for attempt in (0, 1):
        (printed,) = folder.glob(f"msrun_log/*/attempt_{attempt}/0/stdout.log")
        assert steps(printed)


@pytest.mark.long
def test_the_script_starts_with_its_own_configuration(folder: Path) -> None:
    """`bash pretrain_gpt.sh`: one device, pretrain_gpt_7B.yaml beside the script, a log folder that is made anew."""
    (folder / "msrun_log").mkdir()
    (folder / "msrun_log" / "old").write_text("")
    run(folder, *SMALL, "--training_config.training_iters=2")
    assert not (folder / "msrun_log" / "old").exists()
    info = (folder / "output" / "log" / "rank_0" / "info.log").read_text()
    assert "dp 1 | pp 1 | tp 1 | sp False | vpp None" in info and "sequences of 32 tokens" in info
    assert steps(folder / "output" / "log" / "rank_0" / "info.log") == [1, 2]


def started(folder: Path, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment that the script gives to `ttprun`, which only notes them here."""
    fake = folder / "bin" / "ttprun"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > given\nenv -0 > environ\n')
    fake.chmod(0o755)
    environ = {"PATH": f"{fake.parent}:{os.environ['PATH']}", **variables}
    subprocess.run(["bash", SCRIPT, *arguments], cwd=folder, env=environ, check=True)
    pairs = (entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry)
    return (folder / "given").read_text().splitlines(), {key: value for key, value in pairs}


def test_the_script_gives_each_visible_device_a_rank(folder: Path) -> None:
    """On one node and on the second of two; GPUs are the same devices, and variables that are set stay as they are."""
    words, environ = started(folder, "xx.yaml", "--more", ASCEND_RT_VISIBLE_DEVICES="4,5,6")
    assert words[:5] == ["--worker_num", "3", "--local_worker_num=3", "--master_addr=127.0.0.1", "--node_rank=-1"]
    assert words[5:9] == ["--master_port=8828", "--log_dir=msrun_log", "--join=True", "--cluster_time_out=300"]
    assert words[9:] == [str(GPT / "pretrain_gpt.py"), "--config_path=xx.yaml", "--more"]
    assert environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert (environ["HCCL_BUFFSIZE"], environ["HCCL_EXEC_TIMEOUT"]) == ("200", "600")
    second = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"}
    words, environ = started(folder, **second, ASCEND_RT_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="2,3")
    assert words[:5] == ["--worker_num", "4", "--local_worker_num=2", "--master_addr=10.0.0.1", "--node_rank=1"]
    assert words[5] == "--master_port=7000" and environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.long
def test_a_port_that_is_taken_is_refused_with_its_number(folder: Path) -> None:
    """In one line, and nothing is started."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with Script(folder, "bash", SCRIPT, "xx.yaml", *SMALL, MASTER_PORT=port) as script:
            assert script.wait() == 1
            assert script.leftovers() == []
    assert "Traceback" not in script.text and port in script.text, script.text


@pytest.mark.long
def test_the_script_takes_a_rank_table_and_several_nodes(folder: Path) -> None:
    """As scripts for several nodes do: a table for this node; a number of nodes and this node's own."""
    table = folder / "hccl.json"
    devices = '{"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}'
    table.write_text(f'{{"server_list": [{{"server_id": "127.0.0.1", "device": [{devices}]}}]}}')
    few = "--training_config.training_iters=2"
    assert "rank table" in run(folder, "xx.yaml", *SMALL, few, RANK_TABLE_FILE=str(table))
    more = ("--training_config.training_iters=4", "--parallel_config.tensor_model_parallel_size=2")
    text = run(folder, "xx.yaml", *SMALL, *more, NNODES="1", NODE_RANK="0", ASCEND_RT_VISIBLE_DEVICES="4,5")
    assert "dp 1 | pp 1 | tp 2 | sp False | vpp None" in text and "at step 2" in text


@pytest.mark.long
@pytest.mark.parametrize("numbered", [True, False], ids=["with NODE_RANK", "without"])
def test_two_nodes_train_through_the_script(folder: Path, numbered: bool) -> None:
    """`NNODES=2` on each of two nodes in one folder of a shared disk; without NODE_RANK they number themselves. A rank is killed: no step is
    lost, and both nodes' logs are there."""
    common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "TTP_FAULTS": "kill:rank=2,step=5,point=updating"}
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(2):
            console = folder / f"node{number}"
            console.mkdir()
            own = {"NODE_RANK": str(number)} if numbered else {}
            nodes.append(stack.enter_context(Script(console, "bash", SCRIPT, "xx.yaml", *SMALL, **common, **own)))
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.text for node in nodes)
        assert [node.leftovers() for node in nodes] == [[], []]
    assert any(re.search(r"^lost +0 steps", node.text, re.M) for node in nodes)
    for rank in range(4):
        info = (folder / "output" / "log" / f"rank_{rank}" / "info.log").read_text()
        assert len(re.findall(r" dp 4 \| pp 1 \| tp 1 \| sp False \| vpp None$", info, re.M)) == 2
    lines = [line["step"] for line in read_jsonl(folder / "output" / "metrics.jsonl") if "step" in line]
    assert sorted(lines) == list(range(1, 11)), "a step was trained twice, or not at all"
    for attempt in (0, 1) if numbered else (0,):
        assert len(list(folder.glob(f"msrun_log/*/attempt_{attempt}/*/stdout.log"))) == 4


def test_the_python_script_takes_the_documents_arguments(folder: Path) -> None:
    """`--config_path`, `--run_cmd` and `--model_type`; alone as one rank. A file that is not there is refused in a line."""
    (folder / "run.yaml").write_text(DOCUMENT.read_text().replace("model_config:", "small:"))
    command = [sys.executable, str(GPT / "pretrain_gpt.py")]
    own = ("--run_cmd", "bash run.sh", "--model_type=small", "--training_config.training_iters=2")
    done = subprocess.run([*command, "--config_path", "run.yaml", *own, *SMALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run command: bash run.sh\n")
    assert steps(folder / "output" / "log" / "rank_0" / "info.log") == [1, 2]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("ttp.trainer: --config pretrain_gpt.yaml: no such file")
