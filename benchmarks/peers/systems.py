"""The systems: what each needs installed, how its job is started, how often it saves.

Owns the table SYSTEMS, and the exact versions. A system without packages runs in the environment of the benchmark itself.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
TORCH = "2.13.0"
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun 2.13 gives the workers of a restart the store of the last attempt, where gloo finds the old addresses: they never meet."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a start needs to know: the interpreter of the system's environment, how many ranks, where the job writes."""

    python: Path
    ranks: int
    folder: Path

    def program(self, name: str) -> str:
        """Return a command of the system's environment."""
        return str(self.python.parent / name)


@dataclass(frozen=True, slots=True)
class Process:
    command: list[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class System:
    title: str
    saves: str
    """What it saves and when, for the table."""
    start: Callable[[Job], list[Process]]
    package: str = ""
    """With its exact version."""
    also: tuple[str, ...] = ()
    """What it imports and does not depend on."""
    ranks: int = 0
    """How many it must have; 0: as many as all."""
    refills: bool = True
    """Whether a killed rank is replaced."""
    environ: Mapping[str, str] = field(default_factory=dict)


def worker(name: str) -> str:
    return str(WORKERS / f"with_{name}.py")


def torchrun(name: str) -> Callable[[Job], list[Process]]:
    def start(job: Job) -> list[Process]:
        options = ["--standalone", "--nproc-per-node", str(job.ranks), "--max-restarts", "1000"]
        return [Process([str(job.python), "-m", "torch.distributed.run", *options, worker(name)])]

    return start


def ttprun(job: Job) -> list[Process]:
    options = ["--nproc-per-node", str(job.ranks), "--max-restarts", "1000"]
    return [Process([str(job.python), "-m", "ttp.launch", *options, worker("ttp")])]


def ft_launcher(job: Job) -> list[Process]:
    options = [f"--nproc-per-node={job.ranks}", "--max-restarts=1000", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--ft-initial-rank-heartbeat-timeout=30", "--ft-rank-heartbeat-timeout=15"]
    return [Process([job.program("ft_launcher"), *options, worker("ft_launcher")])]


def nvrx_in_process(job: Job) -> list[Process]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.ranks)}
    return [
        Process([str(job.python), worker("nvrx")], {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(job.ranks)
    ]


def torchft(*lighthouse: str) -> Callable[[Job], list[Process]]:
    def start(job: Job) -> list[Process]:
        port = free_port()
        options = ["--bind", f"[::]:{port}", "--min_replicas", "1", "--quorum_tick_ms", "100"]
        options += ["--join_timeout_ms", "10000", *lighthouse]
        first = Process([job.program("torchft_lighthouse"), *options])
        address = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "NUM_REPLICA_GROUPS": str(job.ranks)}
        groups = [
            Process(
                torchrun("torchft")(Job(job.python, 1, job.folder))[0].command, {**address, "REPLICA_GROUP_ID": str(i)}
            )
            for i in range(job.ranks)
        ]
        return [first, *groups]

    return start


def dlrover(job: Job) -> list[Process]:
    """Start its master as well: `dlrover-run --standalone` of 0.6.1 cannot start one with torch 2.13."""
    port, name = str(free_port()), job.folder.name
    master = [
        str(job.python),
        "-m",
        "dlrover.python.master.main",
        "--port",
        port,
        "--node_num",
        "1",
        "--job_name",
        name,
    ]
    options = ["--standalone", f"--nproc_per_node={job.ranks}", "--max_restarts=1000"]
    place = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": name}
    return [
        Process([*master, "--platform", "local"]),
        Process([job.program("dlrover-run"), *options, worker("dlrover")], place),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


EVERY = "every {every} steps"
NVRX = "nvidia-resiliency-ext==0.4.1"
TORCHFT = "torchft-nightly==2026.10.26"
SYSTEMS: dict[str, System] = {
    "ttp_in_place": System("TTP, in place", "at the fault, if needed", ttprun, environ={"TTP_IN_PLACE": "unrehearsed"}),
    "ttp": System("TTP, by restart", "at the fault", ttprun, environ={"TTP_IN_PLACE": "False"}),
    "torchrun": System("torchrun + DCP", f"{EVERY}, synchronous", torchrun("dcp"), environ=NEW_STORE),
    "torchrun_async": System(
        "torchrun + DCP, async", f"{EVERY}, async", torchrun("dcp"), environ={**NEW_STORE, "PEERS_SAVE": "async"}
    ),
    "nvrx": System("NVRx in process", f"{EVERY}, by rank 0", nvrx_in_process, NVRX, refills=False),
    "ft_launcher": System("NVRx ft_launcher + DCP", f"{EVERY}, synchronous", ft_launcher, NVRX, environ=NEW_STORE),
    "torchft": System("torchft, default", "nothing: replicas", torchft(), TORCHFT),
    "torchft_tuned": System(
        "torchft, 0.5 s heartbeat timeout", "nothing: replicas", torchft("--heartbeat_timeout_ms", "500"), TORCHFT
    ),
    "dlrover": System("DLRover", "in memory, every step", dlrover, "dlrover[k8s,torch]==0.6.1", ("protobuf",), environ=NEW_STORE),
    "lm_resiliency": System(
        "lm-resiliency", "in memory, every step", torchrun("lm_resiliency"), "lm-resiliency==0.2.0", ranks=2, environ=NEW_STORE
    ),
}  # fmt: skip
OWN = ("ttp_in_place", "ttp")
"""One program: the survivors keep running, or all processes restart."""
PLAIN = System("plain DDP", "nothing", torchrun("dcp"), environ={**NEW_STORE, "PEERS_SAVE": "none"})
"""What the step time is compared with; nothing is killed."""


def own_python() -> Path:
    return Path(os.path.abspath(sys.executable))
