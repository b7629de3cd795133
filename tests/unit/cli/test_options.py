"""Numbers on every command line: within bounds, or refused in one line before anything is made or removed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttp.chaos import cli, demo, kills
from ttp.chaos.folder import MARK
from ttp.checkpoint.cli.main import parser as ckpt_parser
from ttp.controller.__main__ import parse as controller_parse
from ttp.inputs.options import above_zero, whole
from ttp.launch.arguments import make_parser
from ttp.launch.rendezvous.multi_endpoint import main as stores_main

CONTROLLER = ["--job-id", "j", "--journal", "j.jsonl"]


def ttprun(argv: list[str]) -> object:
    return make_parser().parse_args([*argv, "train.py"])


WRONG = ("", "x", "nan", "-7", "1" * 5000, str(10**20), "²", "1e3", "0x10", "1_0", " 1")
PARSERS: dict[str, tuple[Callable[[list[str]], object], list[str]]] = {
    "chaos run --seed": (cli.parser().parse_args, ["run", "x.yaml", "--seed"]),
    "chaos matrix --repeat": (cli.parser().parse_args, ["matrix", "--repeat"]),
    "chaos matrix --per-job": (cli.parser().parse_args, ["matrix", "--per-job"]),
    "chaos matrix --limit": (cli.parser().parse_args, ["matrix", "--limit"]),
    "chaos matrix --seed": (cli.parser().parse_args, ["matrix", "--seed"]),
    "kills --kills": (kills.parse, ["--kills"]),
    "kills --ranks": (kills.parse, ["--ranks"]),
    "kills --seed": (kills.parse, ["--seed"]),
    "kills --twice": (kills.parse, ["--twice"]),
    "kills --spare": (kills.parse, ["--spare"]),
    "demo --ranks": (demo.parse, ["--ranks"]),
    "demo --steps": (demo.parse, ["--steps"]),
    "demo --seed": (demo.parse, ["--seed"]),
    "ckpt prune --keep": (ckpt_parser().parse_args, ["prune", "x", "--keep"]),
    "ckpt diff --limit": (ckpt_parser().parse_args, ["diff", "a", "b", "--limit"]),
    "ttprun --ttp-futile-starts": (ttprun, ["--ttp-futile-starts"]),
    "stores --port": (stores_main, ["--port"]),
    "controller --world-size": (controller_parse, [*CONTROLLER, "--world-size"]),
    **{
        f"controller {name}": (controller_parse, [*CONTROLLER, "--world-size", "2", name])
        for name in ("--port", "--term", "--standby", "--standbys", "--guardian")
    },
}
TIMES: dict[str, tuple[Callable[[list[str]], object], list[str]]] = {
    "chaos run --faults-per-hour": (cli.parser().parse_args, ["run", "x.yaml", "--faults-per-hour"]),
    "chaos matrix --minutes": (cli.parser().parse_args, ["matrix", "--minutes"]),
    "ttprun --ttp-ot": (ttprun, ["--ttp-ot"]),
    "ttprun --ttp-death-poll": (ttprun, ["--ttp-death-poll"]),
    "controller --lease-s": (controller_parse, [*CONTROLLER, "--world-size", "2", "--lease-s"]),
}


def refused(parse: Callable[[list[str]], object], argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(argv)
    line = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and ": error: argument --" in line and "expected " in line and len(line) < 300, line


@pytest.mark.parametrize("name", PARSERS)
def test_an_integer_out_of_bounds_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse, before = PARSERS[name]
    for text in WRONG:
        refused(parse, [*before[:-1], f"{before[-1]}={text}"], capsys)


@pytest.mark.parametrize("name", TIMES)
def test_a_time_out_of_bounds_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that is none, too: nothing is above it and nothing below."""
    parse, before = TIMES[name]
    for text in ("nan", "inf", "-inf", "0", "-1", "x", "", "1e300", "1" * 5000):
        refused(parse, [*before[:-1], f"{before[-1]}={text}"], capsys)


def test_a_poll_of_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The watch would do nothing else."""
    refused(ttprun, ["--ttp-death-poll=1e-320"], capsys)


def test_a_number_within_its_bounds_is_taken() -> None:
    assert [whole(1, 5)(text) for text in ("1", "5", "03")] == [1, 5, 3] and whole(-3)("-3") == -3
    assert above_zero("seconds", 5.0)("2.5") == 2.5
    for read, text in ((whole(1, 5), "6"), (whole(1, 5), "0"), (above_zero("seconds", 5.0), "5.1")):
        with pytest.raises(ArgumentTypeError):
            read(text)


@pytest.mark.parametrize("tool", [kills, demo])
def test_a_folder_with_other_things_is_not_emptied(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever `--output` names: only what these tools make is removed."""
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "killed").mkdir()
    assert tool.main(["--output", str(tmp_path), "--ranks", "2"]) == 2
    assert "which holds 'killed' and no .ttp_chaos" in capsys.readouterr().out.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "thesis.tex"]
    (tmp_path / MARK).touch()
    assert tool.main(["--output", str(tmp_path), "--ranks", "2"]) == 2
    assert "it holds 'thesis.tex'" in capsys.readouterr().out.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARK, "killed", "thesis.tex"]
