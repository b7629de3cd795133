"""A stand-in for Slurm's commands, for tests of a batch script on one machine: no Slurm runs here.

Installed under the names `srun` and `scontrol`. As srun it starts one process for each node of SLURM_JOB_NODELIST (names
with commas between, all addresses of this host), with the variables that slurmd sets for a task, hands SIGTERM on to all of
them as srun does, and ends with the highest exit status. As scontrol it knows `show hostnames LIST` and `requeue JOB`.
"""

from __future__ import annotations

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

    def hand_on(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    for node, name in enumerate(nodes):
        place = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "SLURMD_NODENAME": name}
        tasks.append(subprocess.Popen(arguments, env={**os.environ, **place}))
    Path(os.environ["STAND_IN_FOLDER"], "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    statuses = [task.wait() for task in tasks]
    return max(status if status >= 0 else 128 - status for status in statuses)


def scontrol(arguments: list[str]) -> int:
    """Answer the two requests that the batch script makes."""
    match arguments:
        case ["show", "hostnames", names]:
            print("\n".join(names.split(",")))
        case ["requeue", job]:
            with open(Path(os.environ["STAND_IN_FOLDER"], "requeued"), "a", encoding="utf-8") as file:
                file.write(f"{job}\n")
        case _:
            print(f"the stand-in for scontrol does not know {arguments}", file=sys.stderr)
            return 1
    return 0


def install(folder: Path) -> None:
    """Put executables of these names into `folder`."""
    for name in ("srun", "scontrol"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        path.chmod(0o755)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may want the first line only
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
