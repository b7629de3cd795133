"""One training job over several nodes (`ttp.chaos.nodes.namespaces`): an agent on each, started, lost and started again one by one.

The job's output folder is shared by all nodes, like a network file system that no pulled cable cuts off; its checkpoint
folder may be each node's own.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttp import files
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.training_job import JobError, Observed

PORT = 29400
RENDEZVOUS = "join_timeout=240,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
"""A lost node is out of the rendezvous after three seconds, a node that comes is waited for four."""
END_S = 30.0


class NodesJob(Observed):
    """`ttprun --rdzv-endpoint node-a,node-b,... -m ttp.trainer ...` on each of `nodes`.

    Use as a context manager: leaving it ends what still runs. `start` launches a node's agent, also one that was lost.
    """

    def __init__(
        self,
        output_dir: Path,
        nodes: Sequence[Node],
        *,
        nnodes: str = "",
        stores: Sequence[Node] = (),
        spares: Sequence[Node] = (),
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        own_checkpoints: bool = False,
        program: Sequence[str] = ("-m", "ttp.trainer"),
    ) -> None:
        """nnodes: MIN:MAX (default: all but the spares). stores: the nodes that may hold the rendezvous' store, in order (default: all). spares: those
        of the nodes that wait as spares.
        own_checkpoints: every node has a disk of its own for `output_dir/checkpoints`."""
        super().__init__(output_dir)
        self.nodes = tuple(nodes)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        """The last agent of each node, by the node's name."""
        self._own_checkpoints = own_checkpoints
        self._spares = {node.name for node in spares}
        endpoint = ",".join(f"{node.name}:{PORT}" for node in stores or nodes)
        self._command = [
            *(sys.executable, "-m", "ttp.launch", "--nnodes", nnodes or str(len(nodes) - len(spares))),
            *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            *("--rdzv-id", "nodes", "--rdzv-conf", RENDEZVOUS, *launcher, *program, "--config", "gpt_tiny"),
            *("--training_config.output_dir", str(output_dir), *overrides),
        ]
        self._environ = {"TTP_IN_PLACE": "False", "OMP_NUM_THREADS": "1", "TTP_TEST_MARK": self.mark, **(environ or {})}

    def __enter__(self) -> NodesJob:
        for node in self.nodes:
            self.start(node)
        return self

    def __exit__(self, *exc: object) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    agent.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        for node in self.nodes:
            node.kill_all()
        for agent in self.agents.values():
            agent.wait()

    def start(self, node: Node) -> None:
        """Launch the node's agent. What it prints is added to its console file."""
        private = {}
        if self._own_checkpoints:
            shared, own = self.output_dir / "checkpoints", self.disk(node)
            shared.mkdir(exist_ok=True)
            own.mkdir(parents=True, exist_ok=True)
            private = {shared: own}
        with open(self._console(node), "ab", opener=files.opener) as console:
            command = list(self._command)
            if node.name in self._spares:
                command.insert(command.index("--nnodes"), "--spare-node")
            self.agents[node.name] = node.popen(command, environ=self._environ, private=private, output=console)

    def disk(self, node: Node) -> Path:
        """Return where this node's own checkpoint folder is, seen from outside."""
        return self.output_dir / "disks" / node.name

    def ranks_on(self, node: Node) -> list[int]:
        """Return the ranks of the newest attempt that run on this node."""
        here = set(node.pids())
        return sorted(rank for rank, pid in self.pids().items() if pid in here)

    def node_of_rank(self, rank: int) -> Node:
        return next(node for node in self.nodes if rank in self.ranks_on(node))

    def ended(self) -> str:
        statuses = {name: agent.poll() for name, agent in self.agents.items()}
        if any(status is None for status in statuses.values()):
            return ""
        return ", ".join(f"{name}: status {status}" for name, status in statuses.items())

    def wait(self, *nodes: Node, timeout_s: float = 300.0) -> dict[str, int]:
        """Wait for the agents of these nodes (all unless given) and return their exit statuses by name."""
        deadline = time.monotonic() + timeout_s
        statuses = {}
        for node in nodes or self.nodes:
            try:
                statuses[node.name] = self.agents[node.name].wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise JobError(
                    f"{node.name}: its agent did not end within {timeout_s:.0f} s\n{self.console_tail()}"
                ) from None
        return statuses

    def console(self, node: Node) -> str:
        """Return all that the node's agents and ranks printed."""
        path = self._console(node)
        return path.read_text(errors="replace") if path.exists() else ""

    def console_tail(self, lines: int = 40) -> str:
        tails = [f"--- {node.name}\n" + "\n".join(self.console(node).splitlines()[-lines:]) for node in self.nodes]
        return "\n".join(tails)

    def _console(self, node: Node) -> Path:
        return self.output_dir / f"console-{node.name}.log"
