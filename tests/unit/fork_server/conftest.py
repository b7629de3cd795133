"""Fork servers under test, and what is run by them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ttp.fork_server.client import ForkServer, Listener, Program

END_S = 60.0


@contextlib.contextmanager
def serving(
    modules: Sequence[str] = ("json",), listener: Listener | None = None, environ: dict[str, str] | None = None
) -> Iterator[ForkServer]:
    server = ForkServer(modules, listener)
    server.start({**os.environ, **(environ or {})})
    try:
        yield server
    finally:
        server.close()


def run(server: ForkServer, *program: str, folder: Path, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Fork `python -u program` and return its status and what it wrote."""
    args = [sys.executable, "-u", *program]
    variables = {**os.environ, **(environ or {})}
    server.prepare(args, variables)
    with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
        [child] = server.fork([Program(tuple(args), variables, (0, out.fileno(), err.fileno()))])
        status = child.wait(END_S)
        return status, (folder / "out").read_text(), (folder / "err").read_text()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        return "script.py"

    return write


def module(folder: Path, name: str, text: str) -> dict[str, str]:
    (folder / "lib").mkdir(exist_ok=True)
    (folder / "lib" / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(folder / "lib")}


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(holds: Callable[[], Any], within_s: float = END_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
