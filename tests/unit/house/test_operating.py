"""docs/operating.md and docs/errors.md name what the code has: every error with its exit status, every cause, every limit, and words that are printed."""

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
from ttp import cli, errors, session
from ttp.config import Settings
from ttp.controller.core.facts import membership, pace
from ttp.hang_limits import HangLimits
from ttp.processor.driver import FREEZE_TIMEOUT_S
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


def limits() -> list[tuple[str, str, str]]:
    """Return situation, limit and setting of each row of "Which limit applies when", as the code has them."""
    ours, large, hang = Settings(), Settings.from_env({"WORLD_SIZE": "10000"}), HangLimits()
    times = {2.0: "twice", 3.0: "three times"}
    pause_s = inspect.signature(session.Session.pause).parameters["at_most_s"].default
    others = f"{hang.factor:g} *slow* steps, {times[pace.PAUSE_FACTOR]} the longest standstill so far"
    return [
        ("a process has ended", "none: seen within milliseconds", ""),
        (
            "a rank is silent: node lost, partition",
            f"{ours.lease_s:g} s ({large.lease_s:g} s with 10,000 ranks that have no relays)",
            "`TTP_LEASE_S`",
        ),
        (
            f"a rank is silent, its agent sees its process running: compiling, or C code holds the interpreter; step {pace.ENOUGH} has",
            f"{membership.VOUCHED_START_FACTOR * ours.vouched_lease_s:g} s",
            f"{times[membership.VOUCHED_START_FACTOR]} `TTP_VOUCHED_LEASE_S`",
        ),
        (f"the same from step {pace.ENOUGH} on", f"{ours.vouched_lease_s:g} s", "`TTP_VOUCHED_LEASE_S`"),
        (
            f"no rank progresses, heartbeats go on; step {pace.ENOUGH} has not",
            f"{hang.start_s:g} s",
            "`TTP_HANG_START_S`",
        ),
        (
            f"the same between step {pace.ENOUGH} and step {pace.MANY}",
            f"the largest of {hang.early_floor_s:g} s, {others}",
            "`TTP_HANG_FLOOR_S`, `TTP_HANG_FACTOR`",
        ),
        (f"the same from step {pace.MANY} on", f"the largest of {hang.floor_s:g} s, {others}", "the same"),
        (
            "an evaluation or save of the trainer's own",
            "as any other standstill: the row above that applies",
            "the same",
        ),
        (
            "`with session.pause(at_most_s):`",
            f"`at_most_s` ({pause_s:g} s by default), then as any other standstill",
            "the trainer",
        ),
        ("`session.save()`, periodic saves", f"{session.SAVE_AT_MOST_S:g} s, then the same", ""),
        ("loading a checkpoint at the start", f"{session.RESUME_AT_MOST_S:g} s, then the same", ""),
        ("an update that does not end while gates close", f"{FREEZE_TIMEOUT_S:g} s", ""),
        ("the whole fault", f"{ours.total_timeout_s:g} s", "`TTP_OT`"),
    ]


def test_which_limit_applies_when_is_what_the_code_has() -> None:
    """Row by row, and the numbers in the paragraphs around the table."""
    text = TEXT.partition("## Which limit applies when")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    for (situation, limit, setting), row in zip(limits(), rows[2:], strict=True):
        assert row[0].startswith(situation) and row[1:] == [limit, setting], row
    hang = HangLimits()
    assert f"*slow* is the {100 * pace.HIGH:g} % quantile of the newest {pace.KEPT}." in text
    assert (
        pace.UNEVEN == 2
        and f"{2 * hang.factor:g} *slow* steps in place of {hang.factor:g} where *slow* is over twice the median"
        in text
    )
    assert f"replaces both {hang.early_floor_s:g} s and {hang.floor_s:g} s" in text
    assert membership.VOUCHED_PART == 1 / 4 and "never exceeds a quarter of `TTP_OT`" in " ".join(text.split())
