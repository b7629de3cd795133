"""A stand-in for Slurm's commands, for tests of a batch script where no Slurm is installed.

Installed under the names `srun`, `scontrol` and `scancel`. As srun it starts one process for each node of SLURM_JOB_NODELIST
(names with commas between, all addresses of this host), with the variables that slurmd sets for a task, ends all of them by SIGKILL when it
gets SIGTERM, as srun does, and ends with the highest exit status. As scontrol it knows `show hostnames LIST`, `show job JOB` and `requeue JOB`, as
scancel `--signal=TERM JOB`, which goes to every process of the step. Each was compared with Slurm 22.05 (`slurm_cluster.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType


def srun(arguments: list[str]) -> int:
    """Run the command on every node."""
    while arguments and arguments[0].startswith("--"):
        arguments = arguments[1:]
    nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
    tasks: list[subprocess.Popen[bytes]] = []

    def abort(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, abort)
    for node, name in enumerate(nodes):
        place = {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(node),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": "0",
            "SLURMD_NODENAME": name,
        }
        tasks.append(subprocess.Popen(arguments, env={**os.environ, **place}))
    Path(os.environ["STAND_IN_FOLDER"], "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    statuses = [task.wait() for task in tasks]
    return max(status if status >= 0 else 128 - status for status in statuses)


def scontrol(arguments: list[str]) -> int:
    """Answer the requests that the batch script makes."""
    match arguments:
        case ["show", "hostnames", names]:
            print("\n".join(names.split(",")))
        case ["--oneliner", "show", "job", job]:
            print(f"JobId={job} JobState=RUNNING PreemptTime=None")
        case ["requeue", job]:
            with open(Path(os.environ["STAND_IN_FOLDER"], "requeued"), "a", encoding="utf-8") as file:
                file.write(f"{job}\n")
        case _:
            print(f"the stand-in for scontrol does not know {arguments}", file=sys.stderr)
            return 1
    return 0


def step_processes(folder: Path) -> list[int]:
    """Return the processes of the step that srun has started, whatever has become of their parents."""
    expected = {b"SLURM_STEP_ID=0", f"STAND_IN_FOLDER={folder}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and expected <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def scancel(arguments: list[str]) -> int:
    """Answer the one request that the batch script makes."""
    if len(arguments) != 2 or arguments != ["--signal=TERM", os.environ["SLURM_JOB_ID"]]:
        print(f"the stand-in for scancel does not know {arguments}", file=sys.stderr)
        return 1
    for pid in step_processes(Path(os.environ["STAND_IN_FOLDER"])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return 0


def install(folder: Path) -> None:
    """Put executables of these names into `folder`."""
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        path.chmod(0o755)


COMMANDS = {"srun": srun, "scontrol": scontrol, "scancel": scancel}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may want the first line only
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
