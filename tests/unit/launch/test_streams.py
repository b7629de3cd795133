"""Streams that take every text, whatever has become of what is behind them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rich.console import Console

from ttp.launch import streams

PROGRAM = """
import logging, os, subprocess, sys
from ttp.launch.streams import make_streams_last, replace_lost
make_streams_last()
from rich.console import Console
logging.basicConfig(level=logging.INFO)
sys.stdin.readline()
for number in range(3):
    print("line", number, "x" * 20_000)
    logging.info("line %d", number)
    Console(file=sys.stderr).print(f"[red]line {number}")
    print("line", number, file=sys.stderr, flush=True)
sys.stdout.flush()
replace_lost()
child = "import sys; print(1, flush=True); print(1, file=sys.stderr, flush=True)"
sys.exit(40 + subprocess.run([sys.executable, "-c", child]).returncode)
"""


@pytest.mark.parametrize("closed", ["", "1", "2", "12"])
def test_a_program_outlives_the_reader_of_its_output(closed: str) -> None:
    """It ends with its own status, with nothing raised by print, logging or rich; so does a child that it starts later."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        for number, pipe in (("1", child.stdout), ("2", child.stderr)):
            if number in closed:
                pipe.close()
        child.stdin.write("\n")
        child.stdin.flush()
        out = child.stdout.read() if "1" not in closed else ""
        err = child.stderr.read() if "2" not in closed else ""
        assert child.wait() == 40, err
    assert "Traceback" not in err
    if "1" not in closed:
        assert [line.split()[0] for line in out.splitlines()] == ["line"] * 3 + ["1"]
    if "2" not in closed:
        assert err.count("line 2") == 3 and err.endswith("1\n")


@pytest.mark.parametrize("redirected", ["2>/dev/full", ">/dev/full 2>&1", "2>&-", ">&- 2>&-", "2>&1 | head -c 1"])
def test_a_full_or_closed_place_costs_the_text_alone(redirected: str) -> None:
    """Also when Python flushes its streams at its end: it would end with 120 there."""
    program = PROGRAM.partition("replace_lost()\nchild")[0] + "\nsys.exit(41)"
    script = f'{{ "$0" -c "$1"; echo $? >&3; }} {redirected}'
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1; {script} >/dev/null" if "|" in redirected else f"exec 3>&1; {script}",
         sys.executable, program],
        input="\n", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "41", done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_full_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not fit is left out, and nothing of it is kept for later."""
    read_end, write_end = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    kept = os.dup(write_end)
    try:
        stream = streams._text_stream(write_end, "utf-8", "strict")
        os.dup2(full, write_end)
        print("lost", file=stream, flush=True)
        os.dup2(kept, write_end)
        print("kept", file=stream, flush=True)
        assert os.read(read_end, 100) == b"kept\n"
    finally:
        for descriptor in (read_end, write_end, full, kept):
            os.close(descriptor)


def test_such_a_stream_is_still_what_it_was() -> None:
    """rich and others ask for its descriptor, its encoding and whether it is a terminal."""
    read_end, write_end = os.pipe()
    try:
        stream = streams._text_stream(write_end, "latin-1", "replace")
        assert (stream.fileno(), stream.encoding, stream.errors, stream.isatty()) == (
            write_end, "latin-1", "replace", False)  # fmt: skip
        Console(file=stream).print("é")
        stream.flush()
        assert os.read(read_end, 100) == "é\n".encode("latin-1")
    finally:
        os.close(read_end)
        os.close(write_end)
