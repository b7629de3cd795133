"""An attempt on one node: two real workers with their Attempt, and a fake controller."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.waiting import until
from ttp.exchange.discovery import controller_key
from ttp.launch.attempts.attempt import Attempt
from ttp.launch.attempts.context import LaunchContext, Workers
from ttp.launch.attempts.replacements import Forker
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.report.reporter import Reporter
from ttp.proto.messages import CauseKind

DEADLINE_S = 30.0
START_ID = f"none-of-the-kind-{os.getpid()}"
"""Another run of these tests on this machine has its own controllers."""


class LineToController:
    """A link whose controller can be taken away."""

    def __init__(self) -> None:
        self.there = True
        self.leader = ""
        self.lease_s = 0.0
        self.looks = 0
        """So often was it asked whether there is a controller."""
        self.silent: frozenset[int] = frozenset()
        self.decided = True
        self.asked = 0
        self.sent_away_monotonic_s: float | None = None
        self.frozen_by: CauseKind | None = None
        self.exits: list[tuple[int, int, str]] = []
        self.replacements: list[tuple[int, int]] = []
        self.refusals: list[tuple[int, int, str]] = []

    @property
    def attached(self) -> bool:
        self.looks += 1
        return self.there

    @attached.setter
    def attached(self, there: bool) -> None:
        self.there = there

    def given_up(self) -> frozenset[int] | None:
        self.asked += 1
        return self.silent if self.decided else None

    def worker_exit(self, rank: int, pid: int, text: str) -> None:
        self.exits.append((rank, pid, text))

    def replaced(self, rank: int, pid: int) -> None:
        self.replacements.append((rank, pid))

    def replace_failed(self, rank: int, freeze_id: int, error: str) -> None:
        self.refusals.append((rank, freeze_id, error))

    def add_controllers(self, addresses: Sequence[str]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def silent_store() -> Iterator[int]:
    """Yield the port of a store that takes connections and never answers."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()  # else one that came just now would stay open
    for connection in taken:
        connection.close()


class RunningAttempt:
    """Two workers on this node, and their round."""

    def __init__(
        self,
        total_timeout_s: float,
        controller: bool,
        reporter: Reporter | None = None,
        nodes: int = 1,
        port: int | None = None,
        attempt_dir: Path | None = None,
        forker: Forker | None = None,
    ) -> None:
        """`port`: where the launcher looks for the workers' store, if not where it is. `attempt_dir`: for the file of the controllers."""
        self.line = LineToController()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if controller:
            self.store.set(controller_key(0), f"127.0.0.1:1 {os.getpid()}")
        code = "import sys; sys.exit(int(sys.stdin.readline()))"
        self.workers = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(2)]
        self.attempt = Attempt(
            LaunchContext(
                total_timeout_s=total_timeout_s,
                poll_s=0.002,
                open_link=self.open_link,
                request_shutdown=lambda address: None,
                reporter=reporter,
            ),
            job_id="job",
            job_store=JobStore("127.0.0.1", port or self.store.port, 0),
            start_id=START_ID,
            attempt_dir=attempt_dir,
            pids={rank: worker.pid for rank, worker in enumerate(self.workers)},
            nodes=nodes,
            hosts_rank_zero=reporter is not None,
            forker=forker,
        )
        if controller:
            self.until_led()
        self.held = threading.Thread(target=self.attempt.hold)

    def open_link(self, address: str, job_id: str, pids: Mapping[int, int], workers: Workers) -> LineToController:
        self.agent = workers
        return self.line

    def until_led(self) -> None:
        until(lambda: self.attempt.has_controller, "a controller")

    def fail_one(self) -> None:
        """Kill rank 1 and hold rank 0 from then on."""
        self.workers[1].send_signal(signal.SIGKILL)
        until(self.attempt.failed, "the death to be seen")
        self.held.start()

    def leave(self, status: int, rank: int = 0) -> None:
        stdin = self.workers[rank].stdin
        assert stdin is not None
        stdin.write(f"{status}\n".encode())
        stdin.flush()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        if self.held.ident is not None:
            self.held.join(DEADLINE_S)
        self.attempt.close()
        for worker in self.workers:
            with worker:
                worker.wait()
