"""docs/operating.md and docs/errors.md name what the code has: every error with its exit status, every cause, and words that are printed."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

import ttp.chaos.cli
import ttp.checkpoint.cli.main
import ttp.trainer.train
from tests.rooms import product
from ttp import cli, errors
from ttp.proto.messages import CauseKind
from ttp.trainer.__main__ import FOR_THE_RESTART, main

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def part(name: str) -> list[list[str]]:
    """Return the rows of a marked table, as cells."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", ERRORS, re.DOTALL)
    assert found is not None, name
    return [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in found[1].splitlines()[2:]]


def test_every_error_is_listed_with_its_meaning_and_what_to_do() -> None:
    """In the order of ttp/errors.py, and nothing that is not there."""
    expected = [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.TTPError) and kind.__module__ == errors.__name__
    ]
    rows = part("errors")
    assert [row[0].strip("`") for row in rows] == expected
    assert all(len(row) == 4 and len(row[2]) > 10 for row in rows)


def test_the_errors_exit_statuses_are_the_trainers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is raised where the trainer runs; a ControllerError goes through, and the program ends for the restart."""
    for name, status, *_ in part("errors"):
        kind = getattr(errors, name.strip("`"))
        error = kind("why", (0,)) if kind is errors.TornShare else kind("why")

        def fail(*args: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(ttp.trainer.train, "run", fail)
        if kind is errors.ControllerError:
            with pytest.raises(errors.ControllerError):
                main(["--config", "gpt_tiny"])
            assert int(status) == FOR_THE_RESTART
        else:
            assert main(["--config", "gpt_tiny"]) == int(status), name
            assert f"{kind.__name__}: why" in capsys.readouterr().err


def test_every_cause_is_listed() -> None:
    """The kinds that a manifest, an incident report and `ttp ckpt list` show."""
    table = TEXT[TEXT.index("| kind |") : TEXT.index("When *saved* says")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(kind.value for kind in CauseKind)


_STARTED = re.compile(r'^if __name__ == "__main__":', re.MULTILINE)
_INTERNAL = {
    "ttp.controller.__main__": "started by a rank",
    "ttp.chaos.matrix": "`ttp chaos matrix`",
    "ttp.chaos.cli": "`ttp chaos`",
    "ttp.chaos.nodes.slow_cable": "started by `ttp chaos` between nodes",
    "ttp.cli": "`ttp`",
    "ttp.fork_server.request_loop": "started by `ttprun`",
    "ttp.launch.__main__": "`ttprun`",
    "ttp.mirror.copier": "started by `ttprun`",
    "ttp.launch.rendezvous.multi_endpoint": "`ttp.launch.stores`",
    "ttp.selftest.blocked_step": "started by `ttp.selftest`",
    "ttp.selftest.device_probe": "started by `ttp.selftest`",
    "ttp.status_page.__main__": "started by a controller",
    "ttp.trainer.data.prepare": "`ttp.trainer.prepare`",
}


def test_every_command_is_listed_and_nothing_else_is() -> None:
    """Those of `ttp`, of `ttp ckpt` and of `ttp chaos`, with the line that `--help` has of each, and every module that can be started."""
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*?) \|", COMMANDS, re.MULTILINE))
    alone = {f"ttp {name}": cli.TOOLS[name].summary for name in ("status", "drain", "doctor")}
    assert {name: rows.get(name) for name in alone} == alone
    expected = {"ttprun", *alone}
    for tool, parser in (("ckpt", ttp.checkpoint.cli.main.parser()), ("chaos", ttp.chaos.cli.parser())):
        (tools,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        lines = {f"ttp {tool} {line.dest}": line.help for line in tools._choices_actions}
        assert {name: rows.get(name) for name in lines} == lines
        expected |= lines.keys()
    for module, path in product().items():
        if _STARTED.search(path.read_text(encoding="utf-8")) and module not in _INTERNAL:
            expected.add(f"python -m {module.removesuffix('.__main__')}")
    assert rows.keys() == expected


@functools.cache
def said() -> str:
    """Return all texts of the shipped code, each literal in one piece, what is filled in as `...`."""
    texts = []
    for folder in ("ttp", "controller", "processor", "proto", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
    return "\n".join(texts)


def quoted() -> list[str]:
    """Return the words that the two tables of messages quote, between what is filled in."""
    reasons = re.findall(r"^\| (.*?) \|", TEXT[TEXT.index("| reason |") : TEXT.index("## Now and then")], re.MULTILINE)
    cells = [*reasons[2:], *(row[0] for row in part("words"))]
    words = [
        piece.strip(" :") for cell in cells for code in re.findall(r"`([^`]+)`", cell) for piece in code.split("...")
    ]
    return [word for word in words if len(word) > 3]


@pytest.mark.parametrize("word", quoted())
def test_quoted_words_are_said_by_the_code(word: str) -> None:
    """A message that changes has to change here, too."""
    assert word in said()
