"""A job on one node under the real agent: its workers are forked by a real fork server, its controller is the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from tests.unit.launch.attempts import LineToController
from tests.unit.launch.test_fresh_store import FixedNodes
from tests.waiting import until
from ttp.exchange.discovery import controller_key
from ttp.fork_server.client import ForkServer
from ttp.fork_server.servers import ForkServers
from ttp.launch.agent import HoldAgent
from ttp.launch.attempts.attempt import Attempt
from ttp.launch.attempts.context import LaunchContext, Workers
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.report.reporter import Reporter
from ttp.launch.watch.processes import read_stat
from ttp.proto.messages import Replace

VARIABLES = ("TTP_LAUNCHED", "TTP_ATTEMPT", "TTP_ROUND_ID", "TTP_START_ID", "TTP_ATTEMPT_DIR", "TTP_FORK_SERVER",
             "TTP_IDENTITY", "TTP_COPIES", "TTP_RELAY_SOCKET", "TTP_VACANT")  # fmt: skip
SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
out, rank, pid = Path(sys.argv[1]), os.environ["RANK"], os.getpid()

def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

others = [int(path.name.split("_")[2]) for path in out.glob(f"begun_{rank}_*")]
error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
said = {
    "beside": [other for other in others if runs(other)], "environ": dict(os.environ), "parent": os.getppid(),
    "error_file": os.path.exists(error_file), "argv": sys.argv,
}
extra = {"py_callstack": "", "timestamp": "0"}
Path(error_file).write_text(json.dumps({"message": {"message": f"Error: of process {pid}", "extraInfo": extra}}))
if "helper" in sys.argv:
    said["helper"] = subprocess.Popen(["sleep", "600"]).pid
print(f"rank {rank}, process {pid}", flush=True)
print(f"errors of process {pid}", file=sys.stderr, flush=True)
os.mkfifo(out / f"exit_{pid}")
(out / "making").mkdir(exist_ok=True)
(out / "making" / str(pid)).write_text(json.dumps(said))
os.rename(out / "making" / str(pid), out / f"begun_{rank}_{pid}")
os._exit(int(open(out / f"exit_{pid}").readline()))
"""
"""It says what it finds, and exits with the status that is written to its pipe."""


class OneNode(FixedNodes):
    """No other node ever waits."""

    def __init__(self) -> None:
        super().__init__(HashStore(), 0, 1)

    def num_nodes_waiting(self) -> int:
        return 0


class RunningJob:
    """Two workers, their agent on a thread of its own, and the test in the controller's place."""

    def __init__(
        self,
        out: Path,
        *arguments: str,
        total_timeout_s: float = 60.0,
        max_restarts: int = 2,
        reporter: Reporter | None = None,
        warm: bool = True,
        monitor_s: float = 0.02,
    ) -> None:
        """`arguments`: of the script. `warm`: the workers are forked."""
        self.out = out
        self.line = LineToController()
        self.workers: Workers | None = None
        script = out / "script.py"
        script.write_text(SCRIPT)
        self.servers = ForkServers()
        self.servers.workers = ForkServer(("json",))
        self.servers.begin(os.environ)
        self.rendezvous = FreshStoreRendezvous(OneNode(), "127.0.0.1", same_keys_every_round=False)
        spec = WorkerSpec(
            role="trainer",
            local_world_size=2,
            rdzv_handler=self.rendezvous,
            entrypoint=sys.executable,
            args=("-u", str(script), str(out), *arguments),
            max_restarts=max_restarts,
            monitor_interval=monitor_s,
        )
        launching = LaunchContext(
            total_timeout_s=total_timeout_s,
            poll_s=0.002,
            open_link=self._open_link,
            request_shutdown=lambda address: None,
            reporter=reporter,
            fork_servers=self.servers if warm else None,
        )
        logs = DefaultLogsSpecs(log_dir=str(out / "logs"), redirects=Std.ALL)
        self.agent = HoldAgent(spec, logs, launching)
        self.result: RunResult | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.pids = {rank: self.process(rank) for rank in range(2)}
        store = self.rendezvous.job_store
        client = TCPStore(store.host, store.port, is_master=False)
        client.set(controller_key(store.round_number), f"127.0.0.1:1 {os.getpid()}")
        until(lambda: self.agent._attempt is not None and self.attempt.has_controller, "a controller")

    def _open_link(self, address: str, job_id: str, pids: Mapping[int, int], workers: Workers) -> LineToController:
        self.workers = workers
        return self.line

    def _run(self) -> None:
        try:
            self.result = self.agent.run()
        except BaseException as error:
            self.error = error

    @property
    def attempt(self) -> Attempt:
        attempt = self.agent._attempt
        assert attempt is not None
        return attempt

    def process(self, rank: int, *after: int) -> int:
        """Wait for a process of a rank besides those that have been there before, and return it."""
        until(lambda: self._processes(rank) - set(after), f"a process of rank {rank} besides {after}")
        (pid,) = self._processes(rank) - set(after)
        return pid

    def _processes(self, rank: int) -> set[int]:
        return {int(path.name.split("_")[2]) for path in self.out.glob(f"begun_{rank}_*")}

    def said(self, rank: int, pid: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.out / f"begun_{rank}_{pid}").read_text())
        return said

    def exit(self, pid: int, status: int) -> None:
        (self.out / f"exit_{pid}").write_text(f"{status}\n")

    def kill(self, rank: int) -> None:
        """Kill a rank's process, and wait until the agent has seen it end."""
        os.kill(self.attempt.pids[rank], signal.SIGKILL)
        until(lambda: rank in (deaths := self.attempt.deaths()) and deaths[rank].settled, "its end to be seen")

    def order(self, rank: int, pid: int = 0, freeze_id: int = 1) -> None:
        assert self.workers is not None
        self.workers.take(Replace(rank, pid, freeze_id))

    def replaced(self, rank: int, freeze_id: int = 1) -> int:
        """Kill a rank's process, have it replaced, and return the other one."""
        before = self._processes(rank)
        self.kill(rank)
        self.order(rank, freeze_id=freeze_id)
        pid = self.process(rank, *before)
        until(lambda: not self.attempt.failed(), "the death to be forgotten")
        return pid

    def succeed(self) -> None:
        """Have all workers exit with status 0, and wait for the agent's end."""
        for rank in range(2):
            self.exit(self.attempt.pids[rank], 0)
        self.thread.join(60.0)

    def _has_ended(self) -> bool:
        """Kill the workers, also those of an attempt that has just begun; return whether the agent has ended."""
        for path in self.out.glob("begun_*"):
            pid = int(path.name.split("_")[2])
            with contextlib.suppress(ProcessLookupError):
                if (stat := read_stat(pid)) is not None and stat.session == pid:
                    os.killpg(pid, signal.SIGKILL)
        return not self.thread.is_alive()

    def close(self) -> None:
        self.agent._remaining_restarts = 0
        until(self._has_ended, "the agent's end")
        self.servers.close()
        handlers = getattr(self.agent._pcontext, "subprocess_handlers", {})
        for file in (each for handler in handlers.values() for each in (handler._stdout, handler._stderr)):
            file.close()  # torch closes none of workers that have ended


@contextlib.contextmanager
def running_job(out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **options: Any) -> Iterator[RunningJob]:
    """Yield a job whose workers run; end it afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # put back afterwards
    job = RunningJob(out, *arguments, **options)
    try:
        yield job
    finally:
        job.close()
