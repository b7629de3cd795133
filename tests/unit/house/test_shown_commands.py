"""Every command that the documents show works: it is run here, or a named test runs it."""

from __future__ import annotations

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
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import shown
from tests.proofs import PARSED, RUN, TESTED, WARNED, Proof
from tests.reach import said_by
from tests.shown import ROOT
from tests.unit.chaos.test_judge import campaign
from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.signing import make_keys, save_signed
from tests.unit.runtime.test_replay import EVENTS, record
from ttp import cli
from ttp.chaos.report.result_json import write_result
from ttp.checkpoint.format import keys
from ttp.launch.arguments import parse
from ttp.trainer.config.schema import ModelConfig, plain
from ttp.trainer.data.tokenizer import BYTES, byte_level_files
from ttp.trainer.model.gpt import build_model

COMMANDS = shown.all_shown()


def test_every_command_has_its_proof_and_every_proof_its_command() -> None:
    """A new command in a document needs an entry in tests/proofs.py; an entry without a command goes."""
    known = [*RUN, *PARSED, *TESTED, *WARNED]
    assert len(set(known)) == len(known), "a command stands in two tables"
    names = [command for command in COMMANDS if shown.is_beginning(command, known)]
    missing = {command: where for command, where in COMMANDS.items() if command not in known and command not in names}
    assert not missing, f"shown, and in no table of tests/proofs.py: {missing}"
    stale = [command for command in known if command not in COMMANDS]
    assert not stale, f"in tests/proofs.py, and in no document: {stale}"


def test_commands_are_found_in_every_form() -> None:
    """Fenced, indented, inline, over several lines, with settings before and comments behind; other languages are left out."""
    text = (
        "```\nA=1 make demo  # a comment\n$ ttp ckpt list x \\\n    --json\noutput of make\n```\n"
        "```python\nmake = 3\nttp start\n```\n\n    python -m a.b c    # yes\n\nSay `pip\ninstall .` or `train.py` or `make`.\n"
    )
    assert shown.shown(text) == ["make demo", "ttp ckpt list x --json", "python -m a.b c", "pip install ."]


def test_a_file_is_a_document_by_its_docstring_or_its_first_comment() -> None:
    """Text files as a whole, of others what explains them; further comments and strings are not documentation."""
    documents = shown.documents()
    assert {"README.md", "docs/ttprun.md", "docs/decisions/0002-scale.md", "examples/ddp/train.py"} <= set(documents)
    for part in (
        "ttp/cli.py",
        "controller/replay.py",
        "processor/gate.py",
        "trainer/plan/estimate.py",
        "benchmarks/gate.py",
    ):
        assert documents[part], f"{part} has no docstring"
    script = shown.shown(documents["examples/gpt/pretrain_gpt.sh"])
    assert set(script) == {"bash examples/gpt/pretrain_gpt.sh", "bash examples/gpt/pretrain_gpt.sh xx.yaml"}
    slurm = shown.shown(documents["examples/slurm/train.sbatch"])
    assert slurm[0].startswith("sbatch examples/slurm/train.sbatch --config") and "scancel --full" in slurm


@pytest.mark.parametrize("command", [*PARSED, *TESTED])
def test_the_named_test_is_there_and_says_what_it_runs(command: str) -> None:
    """Each decisive word of the command, or what is named in its place, stands in the test or in what it uses."""
    proof: Proof = {**PARSED, **TESTED}[command]
    said, words = said_by(proof.test), shown.decisive(command)
    assert words and set(proof.instead) <= set(words), f"{words} need no {dict(proof.instead)}"
    missing = [word for word in words if not shown.says(said, proof.instead.get(word, word))]
    assert not missing, f"{proof.test} does not say {missing}"


@pytest.mark.parametrize("command", WARNED)
def test_a_command_to_avoid_is_shown_as_such(command: str) -> None:
    """In the same line or the next."""
    documents = shown.documents()
    for name in COMMANDS[command]:
        assert re.search(rf"(?i)(never|nothing).*\n?.*{command}|{command}.*\n?.*nothing", documents[name]), name


@pytest.mark.parametrize("command", [command for command in RUN if RUN[command]])
def test_what_is_run_in_a_commands_place_is_that_command(command: str) -> None:
    """The same program, with all its arguments: only placeholders are replaced."""
    assert set(shown.decisive(command)) <= set(shown.decisive(RUN[command]))


def test_a_test_says_what_stands_in_its_helpers_and_fixtures_and_not_in_their_docstrings() -> None:
    """Names are followed through the tests; a test that is not collected is refused."""
    said = said_by("tests/chaos/test_slurm.py::test_a_killed_rank_comes_back_and_a_cancelled_job_is_saved")
    assert shown.says(said, "sbatch") and shown.says(said, "slurm/train.sbatch") and "requeued" not in said
    assert shown.says("x --steps=3", "--steps") and not shown.says("--steps-more a--steps", "--steps")
    for wrong in (
        "tests/nowhere.py::test_a",
        "tests/chaos/test_slurm.py::test_b",
        "tests/chaos/conftest.py::run_to_end",
    ):
        with pytest.raises(LookupError, match=r"expected a function|has no test"):
            said_by(wrong)


def test_decisive_words_are_what_is_run_and_its_flags() -> None:
    """Not values, placeholders or what is in brackets."""
    for command, words in {
        "ttprun --nproc-per-node 2 examples/ddp/train.py --lr=1 [--x]": "ttp.launch --nproc-per-node ddp/train.py --lr",
        "ttp chaos run a/b/kills.yaml -- python -m ttp.trainer": "ttp.chaos.cli run a/b/kills.yaml ttp.trainer",
        "python -m a.b to-hf IN out/put": "a.b to-hf",
        "make demo KILL_RANK=0": "make demo KILL_RANK",
    }.items():
        assert shown.decisive(command) == words.split()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("ttprun")])
def test_the_launchers_parser_takes_every_line(command: str) -> None:
    """As it stands, without what is in brackets; `--help` ends with 0."""
    words = shlex.split(shown.without_options(command))[1:]
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        return
    assert command in PARSED
    script = parse(words).training_script
    assert script in ("loop.py", "train.py", "ttp.trainer", "./wrap.sh") or (ROOT / script).is_file()


def test_make_runs_what_there_is() -> None:
    """Every target that a document shows is in the Makefile; what its recipe runs exists, `make test` all but the long tests."""
    targets = sorted({words[1] for command in COMMANDS if (words := command.split())[0] == "make"})
    assert {"demo", "test", "chaos", "bench", "soak"} <= set(targets)
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"make {target}: {done.stderr}"
        modules = re.findall(r"-m ([\w.]+)", done.stdout)
        assert (modules or target == "check") and all(
            module == "long" or importlib.util.find_spec(module) for module in modules
        ), modules
        for path, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", done.stdout):
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
        if target in ("newest", "chaos"):
            assert "grep -v '^torch=='" in done.stdout and "--upgrade torch" in done.stdout
            assert (
                done.stdout.count("::test_") == 2 and "build/newest_torch/bin/python -m ttp.chaos.demo" in done.stdout
            )
        if target == "test":
            assert 'pytest tests -m "not long"' in done.stdout


@pytest.mark.parametrize(
    ("target", "programs"),
    [("chaos", ("ttp.chaos.kills", "ttp.cli chaos matrix")), ("soak", ("ttp.chaos.kills", "tests.model.pairs"))],
)
def test_real_and_searched_faults_are_run_by_restart_and_in_place(target: str, programs: Sequence[str]) -> None:
    """With the same bounds, and with results in folders of their own."""
    given = ["KILLS=7", "SEED=3", "MATRIX_ARGS=--minutes 9", "PAIRS_ARGS=--workers 5"]
    done = subprocess.run(
        ["make", "-n", target, *given], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    for program in programs:
        lines = [line for line in done.stdout.splitlines() if f"-m {program} " in line]
        assert ["--in-place" in line for line in lines] == [False, True], done.stdout
        bounds = {
            "ttp.chaos.kills": ("--kills 7", "--seed 3"),
            "ttp.cli chaos matrix": ("--minutes 9",),
            "tests.model.pairs": ("--workers 5",),
        }[program]
        assert all(bound in line for line in lines for bound in bounds), lines
    kills = [line for line in done.stdout.splitlines() if "-m ttp.chaos.kills " in line]
    assert ["--output output/kills-in-place" in line for line in kills] == [False, True]


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
    save_signed(Job(tensors), folder / "signed" / "checkpoints", 42, make_keys(folder, "job7"))
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


@pytest.mark.parametrize("command", [command for command in COMMANDS if shown.options(command)])
def test_every_flag_in_brackets_is_known_to_its_program(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its help lists them."""
    assert run_line([*shlex.split(shown.without_options(command))[:3], "--help"], monkeypatch) == 0
    output = capsys.readouterr().out
    assert [flag for flag in shown.options(command) if not shown.says(output, flag)] == []


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
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    assert output.out + output.err
