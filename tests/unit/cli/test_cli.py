"""The command `ttp` hands a command line on to the tool that it names, and says what there is where it names none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ttp
from ttp import cli


def test_the_rest_of_the_command_line_and_the_exit_status_are_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool gets its own words only, and its exit status is the command's."""
    got: list[list[str]] = []
    tool = types.ModuleType("a_tool")

    def main(words: list[str]) -> int:
        got.append(words)
        return 7

    tool.__dict__["main"] = main
    monkeypatch.setitem(sys.modules, "a_tool", tool)
    monkeypatch.setitem(cli.TOOLS, "some", cli.Tool("a_tool", "a tool"))
    assert cli.main(["some", "thing", "--help"]) == 7
    assert got == [["thing", "--help"]]


def test_an_unknown_tool_is_refused_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names what was got and what was expected; the status is 2."""
    assert cli.main(["caos"]) == 2
    output = capsys.readouterr().err
    assert "got 'caos', expected one of chaos, ckpt" in output and "ttp chaos" in output


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """What a report of a defect begins with."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ttp {ttp.__version__}\n"


def test_help_lists_the_tools_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """`ttp --help` loads no tool."""
    assert cli.main(["--help"]) == 0
    assert "ttp ckpt" in capsys.readouterr().out
    assert cli.main([]) == 2


TTP = "ttp.cli"
SHELL_SAYS_141 = -signal.SIGPIPE


@pytest.mark.parametrize(
    ("module", "words", "status"),
    [
        (TTP, ("--help",), 1),
        (TTP, ("chaos", "faults"), 1),
        pytest.param(TTP, ("chaos", "matrix", "--table"), 1, marks=pytest.mark.long),
        (TTP, ("ckpt", "--help"), 1),
        ("ttp.checkpoint", ("--help",), 1),
        ("ttp.controller.replay", ("--help",), SHELL_SAYS_141),
        ("ttp.trainer", ("--help",), SHELL_SAYS_141),
        pytest.param("ttp.trainer", ("--plan", "--world-size", "8"), SHELL_SAYS_141, marks=pytest.mark.long),
        pytest.param("ttp.trainer.prepare", ("--help",), SHELL_SAYS_141, marks=pytest.mark.long),
    ],
)
def test_a_reader_that_has_gone_ends_a_command_without_a_traceback(
    tmp_path: Path, module: str, words: tuple[str, ...], status: int
) -> None:
    """`ttp ... | head`: also where Python writes the last of it at its end."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (status, "")


def test_another_broken_pipe_is_an_error_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout has its reader: what broke was something else."""

    def broken(argv: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_do", broken)
    with pytest.raises(BrokenPipeError):
        cli.main([])
