"""Every command that README.md and docs/*.md show works: it is run here, or a named test runs it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests import shown
from tests.shown import PARSED, ROOT, RUN, TESTED, Proof
from tests.unit.chaos.test_judge import campaign
from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.runtime.test_replay import EVENTS, record
from ttp import cli
from ttp.chaos.result import write_result
from ttp.checkpoint import keys
from ttp.launch.arguments import parse
from ttp.trainer.config import ModelConfig, plain
from ttp.trainer.model import build_model
from ttp.trainer.tokenizer import BYTES, byte_level_files

COMMANDS = shown.all_shown()


def test_every_command_has_its_proof_and_every_proof_its_command() -> None:
    """A new command in a document needs an entry in tests/shown.py; an entry without a command goes."""
    known = [*RUN, *PARSED, *TESTED]
    assert len(set(known)) == len(known), "a command stands in two tables"
    names = [command for command in COMMANDS if shown.is_beginning(command, known)]
    missing = {command: where for command, where in COMMANDS.items() if command not in known and command not in names}
    assert not missing, f"shown, and in no table of tests/shown.py: {missing}"
    stale = [command for command in known if command not in COMMANDS]
    assert not stale, f"in tests/shown.py, and in no document: {stale}"


def test_commands_are_found_in_every_form() -> None:
    """Fenced, indented, inline, over several lines, with settings before and comments behind; other languages are left out."""
    text = (
        "```\nA=1 make demo  # a comment\n$ ttp ckpt list x \\\n    --json\noutput of make\n```\n"
        "```python\nmake = 3\nttp start\n```\n\n    python -m a.b c    # yes\n\nSay `pip\ninstall .` or `train.py` or `make`.\n"
    )
    assert shown.shown(text) == ["make demo", "ttp ckpt list x --json", "python -m a.b c", "pip install ."]


@pytest.mark.parametrize("command", [*PARSED, *TESTED])
def test_the_named_test_is_there_and_runs_it(command: str) -> None:
    """The function exists, and the words that show what it runs stand in its file."""
    proof: Proof = {**PARSED, **TESTED}[command]
    file, _, function = proof.test.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    tests = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert function in tests, f"{file} has no test {function}"
    assert proof.evidence in source, f"{file} does not say {proof.evidence!r}"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("ttprun")])
def test_the_launchers_parser_takes_every_line(command: str) -> None:
    """As it stands, without what is in brackets; `--help` ends with 0."""
    words = shlex.split(re.sub(r"\[[^]]*\]", "", command))[1:]
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        return
    assert command in PARSED
    script = parse(words).training_script
    assert script in ("loop.py", "train.py", "ttp.trainer") or (ROOT / script).is_file()


def test_make_runs_what_there_is() -> None:
    """Every target that a document shows is in the Makefile; what its recipe runs exists, `make test` all but the long tests."""
    targets = sorted({words[1] for command in COMMANDS if (words := command.split())[0] == "make"})
    assert {"demo", "test", "chaos", "bench", "soak"} <= set(targets)
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"make {target}: {done.stderr}"
        modules = re.findall(r"-m ([\w.]+)", done.stdout)
        assert modules and all(module == "long" or importlib.util.find_spec(module) for module in modules), modules
        if target == "test":
            assert 'pytest tests --ignore tests/chaos -m "not long"' in done.stdout
            assert 'pytest tests/chaos -m "not long"' in done.stdout


def test_the_environment_that_make_makes_is_activated() -> None:
    """`python` is then the environment's."""
    if not (ROOT / ".venv/bin/activate").exists():
        pytest.skip("this checkout has no .venv: `make` makes one")
    line = "source .venv/bin/activate && command -v python"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and ".venv" in os.path.realpath(os.path.dirname(done.stdout.strip())), done


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the output of a small run, another one with the same bits, text, a tokenizer, a journal, and a campaign's result."""
    folder = tmp_path_factory.mktemp("prepared")
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)
    model = build_model(config, 0, torch.device("cpu"))
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[keys.model_key(name)] = parameter.detach()
        tensors[keys.optim_state_key(name, "exp_avg")] = torch.zeros_like(parameter)
    layout = {"model_config": plain(config), "tokenizer": BYTES}
    for step in (39, 40, 41, 42):
        Job(tensors).save(folder / "output" / "checkpoints", step, layout=layout)
    Job(tensors).save(folder / "other" / "checkpoints", 42, holders=2, layout=layout)
    cluster = Cluster(folder / "nodes", own_folder="checkpoints")
    for step in (39, 40, 41, 42):
        cluster.save(Job(tensors), step)
    (folder / "my_texts").mkdir()
    (folder / "my_texts" / "a.txt").write_text("a text of few words\n" * 9)
    for name, content in byte_level_files().items():
        (folder / name).write_text(json.dumps(content))
    (folder / "output" / "log").mkdir()
    record(folder / "output" / "log" / "journal_0.jsonl", EVENTS)
    write_result(campaign(folder))
    return folder


def run_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line in this process, from its first word on; return its exit status."""
    broken_pipe = signal.getsignal(signal.SIGPIPE)  # some programs let `| head` end them; the tests must outlive theirs
    try:
        if words[0] == "ttp":
            return cli.main(words[1:])
        assert words[:2] == ["python", "-m"], words
        monkeypatch.setattr(sys, "argv", words[2:])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        signal.signal(signal.SIGPIPE, broken_pipe)
    return 0


@pytest.mark.parametrize("command", RUN)
def test_it_runs_as_it_stands(
    command: str,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a copy of the prepared folder; its status is 0 and it says something."""

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", ended)  # a program's own way out must not end the tests
    threads = torch.get_num_threads()
    folder = shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(folder)
    line = (RUN[command] or command).format(
        scenarios=ROOT / "tests" / "simulation" / "scenarios", examples=ROOT / "examples"
    )
    torch.set_num_threads(1)
    try:
        status = run_line(shlex.split(line), monkeypatch)
    finally:
        torch.set_num_threads(threads)
    told = capsys.readouterr()
    assert status == 0, told.out + told.err
    assert told.out + told.err
