"""A real Slurm of two nodes on one machine: munged, slurmctld and two slurmd, in namespaces of their own.

    if reason := why_not():
        print("no Slurm here:", reason)
    with Slurm() as slurm:
        job = slurm.submit("--time=10", "train.sbatch", ...)
        slurm.run("scancel", job)

All of it, the jobs too, has a namespace of processes whose first one is ended at the `with`'s end, or with this process: nothing can
outlive it. A file system namespace gives the nodes `node1` and `node2` their addresses. Nothing of the machine's own Slurm is used or touched but
its programs. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scancel",
    "scontrol",
    "squeue",
    "sinfo",
    "unshare",
    "setpriv",
)
NODES = ("node1", "node2")
READY_S = 120.0

CONFIGURATION = """
ClusterName=ttp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait_s}
GresTypes=gpu
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=8 Gres=gpu:8 State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.2 NodeHostname={host} Port={ports[2]} CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=usual Nodes=node1,node2 Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes=node1,node2 MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""

INIT = """
set -e
mount --bind {folder}/hosts /etc/hosts
munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key --pid-file={folder}/munge.pid \
    --log-file={folder}/munged.log --seed-file={folder}/munge.seed &
until test -S {folder}/munge.socket; do sleep 0.1; done
slurmctld -D -f {folder}/slurm.conf &
slurmd -D -N node1 -f {folder}/slurm.conf &
slurmd -D -N node2 -f {folder}/slurm.conf &
wait
"""


def why_not() -> str:
    """Say why no Slurm can be run here; empty when one can."""
    if sys.platform != "linux":
        return f"Slurm's namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "Slurm on one machine needs root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not found: install slurm-wlm, munge and util-linux"
    return ""


class Slurm:
    """Slurm's daemons, and its commands."""

    def __init__(self, *, kill_wait_s: int = 30, grace_s: int = 30) -> None:
        """`kill_wait_s`: from SIGTERM to SIGKILL of `scancel`; grace_s: the same of a preemption."""
        self._times = {"kill_wait_s": kill_wait_s, "grace_s": grace_s}
        self.folder = Path(tempfile.mkdtemp(prefix="ttp-slurm-", dir="/tmp"))  # sockets' paths must be short
        self._init: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        folder, host = self.folder, socket.gethostname()
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            for probe in (one, two, three):
                probe.bind(("", 0))
            ports = [probe.getsockname()[1] for probe in (one, two, three)]
        text = CONFIGURATION.format(folder=folder, host=host.split(".")[0], ports=ports, **self._times)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()  # stands for a device: counted, and never opened
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} node1\n127.0.0.2 node2\n")
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool.{node}").mkdir()
        folder.chmod(0o755)  # munge's clients look at the folder of its socket
        with open(folder / "daemons.log", "wb") as log:
            self._init = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc",
                 "bash", "-c", INIT.format(folder=folder)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environ({}),
            )  # fmt: skip
        deadline = time.monotonic() + READY_S
        while self._states() != ["idle", "idle"]:
            assert self._init.poll() is None and time.monotonic() < deadline, f"Slurm did not come up\n{self.logs()}"
            time.sleep(0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._init is not None:
            self._init.send_signal(
                signal.SIGKILL
            )  # its child, the namespace's first process, goes with it; all others with that
            self._init.wait()
            deadline = time.monotonic() + READY_S
            while self.processes():
                assert time.monotonic() < deadline, f"left of Slurm: {self.processes()}"
                time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _environ(self, more: Mapping[str, str]) -> dict[str, str]:
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "SBATCH", "TTP_", "TORCHELASTIC_", "PET_"))
        }
        path = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
        own = {"PATH": path, "SLURM_CONF": f"{self.folder}/slurm.conf", "CLUSTER_MARK": str(self.folder)}
        return {**clean, **own, "OMP_NUM_THREADS": "1", "TTP_HEARTBEAT_S": "0.2", **more}

    def processes(self) -> dict[int, str]:
        """Return all processes of this Slurm and its jobs, zombies apart, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"CLUSTER_MARK={self.folder}".encode() in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:
                continue
        return {pid: command for pid, command in found.items() if command}

    def run(self, *command: str, **environ: str) -> str:
        """Run one of Slurm's commands; return what it prints."""
        done = subprocess.run(command, env=self._environ(environ), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def submit(self, *arguments: str, **environ: str) -> str:
        """Submit a batch script; return the job's number."""
        return self.run("sbatch", "--parsable", *arguments, **environ).strip().split(";")[0]

    def state(self, job: str) -> str:
        """Return a job's state as RUNNING or PENDING."""
        return self.fields(job)["JobState"]

    def fields(self, job: str) -> dict[str, str]:
        """Return all that Slurm says of a job, by name."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _states(self) -> list[str]:
        try:
            return self.run("sinfo", "--noheader", "--Node", "--partition=usual", "--format=%t").split()
        except (RuntimeError, subprocess.TimeoutExpired):
            return []

    def logs(self) -> str:
        """Return the end of every daemon's log."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )
