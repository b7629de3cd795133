"""Streams that take every text, whatever has become of what is behind them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from ttp.text import streams

PROGRAM = """
import logging, os, subprocess, sys
from ttp.text.streams import make_streams_last, replace_lost
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


@pytest.mark.parametrize("said", ["-u", "PYTHONUNBUFFERED"])
def test_an_unbuffered_program_keeps_nothing_back(said: str) -> None:
    """Neither a text without an end of line nor bytes: all is there when the process is killed a moment later."""
    program = """
import os, signal, sys
from ttp.text.streams import make_streams_last
make_streams_last()
print("a text", end="")
sys.stdout.buffer.write(b", bytes")
print("an error", end="", file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, *(["-u"] if said == "-u" else []), "-c", program]
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    set_ = {"PYTHONUNBUFFERED": "1"} if said != "-u" else {}
    done = subprocess.run(command, capture_output=True, text=True, env=unset | set_)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "a text, bytes", "an error")


def test_an_unbuffered_stream_writes_the_rest_of_what_was_taken_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal in the middle of a long write to a pipe: the rest follows, before the next text."""
    written: list[bytes] = []

    class Small(streams._LastingFile):
        def write(self, content: Any) -> int:
            with memoryview(content) as view:
                written.append(bytes(view[:4]))
            return len(written[-1])

    monkeypatch.setattr(streams, "_LastingFile", Small)
    like = io.TextIOWrapper(io.BytesIO(), write_through=True)
    stream = streams._text_stream(streams.STDERR, "utf-8", "strict", like)
    print("one text", end="", file=stream)
    assert written == [b"one ", b"text"]


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
