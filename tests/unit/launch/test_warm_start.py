"""torch's own starting of processes, with workers that are forked."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, api, start_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.waiting import until
from ttp.fork_server.client import ForkServer
from ttp.launch import warm_start
from ttp.launch.torch_names import HANDLER_NAMES
from ttp.launch.warm_start import forking
from ttp.launch.watch.processes import exit_status

END_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore:.*_io.FileIO.*log", "ignore:unclosed file.*log:ResourceWarning")
"""torch never closes the log files of workers that have ended."""
SCRIPT = """
import os, sys
rank = os.environ["RANK"]
print("out", rank, "imported" if "wave" in AT_START else "not", os.getppid(), flush=True)
print("err", rank, file=sys.stderr)
sys.exit(int(sys.argv[1]) if rank == "1" else 0)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A server; the handlers that torch installs as it starts processes are taken back."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    }
    server = ForkServer(["wave"])
    server.start(os.environ)
    yield server
    server.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(tmp_path: Path, program: list[str], interpreter: str = sys.executable) -> PContext:
    (tmp_path / "script.py").write_text("AT_START = set(__import__('sys').modules)" + SCRIPT)
    environ = {rank: {"RANK": str(rank)} for rank in range(2)}
    logs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)
    args = {rank: tuple(program) for rank in range(2)}
    return start_processes("trainer", interpreter, args, environ, logs)


@pytest.mark.parametrize("status", [0, 5])
def test_torch_starts_forked_workers_as_it_starts_others(tmp_path: Path, server: ForkServer, status: int) -> None:
    """Log files, statuses and failures are torch's; the workers have the imports, and this process for a parent."""
    script = str(tmp_path / "script.py")
    with forking(server) as begun:
        workers = start(tmp_path, ["-u", script, str(status)])
        pids = workers.pids()
    assert not begun.reason and len(set(pids.values())) == 2
    # Else torch, which sees one fail, sends the other one SIGTERM as it exits.
    until(lambda: all(exit_status(pid) is not None for pid in pids.values()), "both to exit")
    result = workers.wait(END_S)
    assert result is not None and result.is_failed() == bool(status)
    assert {rank: (failure.exitcode, failure.pid) for rank, failure in result.failures.items()} == (
        {1: (status, pids[1])} if status else {}
    )
    for rank in range(2):
        assert Path(result.stdouts[rank]).read_text() == f"out {rank} imported {os.getpid()}\n"
        assert Path(result.stderrs[rank]).read_text() == f"err {rank}\n"


def test_what_cannot_be_forked_is_executed(tmp_path: Path, server: ForkServer) -> None:
    with forking(server) as begun:
        workers = start(tmp_path, ["-u", "-c", "import os; print(os.environ['RANK'])"])
        assert len(workers.pids()) == 2
    assert "option -c is for a new interpreter" in begun.reason
    result = workers.wait(END_S)
    assert result is not None and [Path(result.stdouts[rank]).read_text() for rank in range(2)] == ["0\n", "1\n"]


def test_torch_ends_an_attempt_whose_program_cannot_be_executed(tmp_path: Path, server: ForkServer) -> None:
    """Its processes have ended for torch, those that were not tried, too."""
    with forking(server):
        workers = start(tmp_path, ["-u", "-m", "this"], "/no/such")
        with pytest.raises(FileNotFoundError, match="/no/such"):
            workers.pids()
    workers.close()
    for handler in workers.subprocess_handlers.values():  # type: ignore[attr-defined]
        for file in (handler._stdout, handler._stderr):
            file.close()


def test_torch_has_its_own_way_back_afterwards(server: ForkServer) -> None:
    before = api.get_subprocess_handler  # type: ignore[attr-defined]
    with pytest.raises(KeyError), forking(server):
        assert api.get_subprocess_handler is not before  # type: ignore[attr-defined]
        raise KeyError
    assert api.get_subprocess_handler is before  # type: ignore[attr-defined]


def test_the_private_names_of_torchs_handler_are_listed_and_there() -> None:
    """torch calls the overridden method, and the attributes hold its log files."""
    source = inspect.getsource(SubprocessHandler)
    for private in HANDLER_NAMES:
        assert f"self.{private.name}" in source
    used = set(re.findall(r"(?:self|super\(\))\.(_[a-z]+)", inspect.getsource(warm_start.forking)))
    assert used == {private.name for private in HANDLER_NAMES}
