"""An environment of its own for each peer under build/peers, with exact versions: made once, made again when its packages change.

pip takes the versions of constraints.txt where it has them. Where pip's index gives a CUDA build of torch, each environment takes some GB.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.systems import OWN, SYSTEMS, TORCH, System, own_python
from ttp.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "build" / "peers"


class NotInstalled(Exception):
    """pip's last line."""


def python_of(system: System) -> Path:
    """Return the interpreter that has the system, installing it first where needed. Raises NotInstalled."""
    if not system.package:
        return own_python()
    folder = ENVIRONMENTS / system.package.partition("=")[0].partition("[")[0].replace("-", "_")
    packages = [f"torch=={TORCH}", "numpy", system.package, *system.also]
    stamp = folder / "installed.txt"
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8").split() != packages:
        print(f"installing {system.package} in {folder.relative_to(ROOT)}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(folder)])
        quiet = ["--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt")]
        run([str(python), "-m", "pip", "install", *quiet, *packages])
        stamp.write_text("\n".join(packages), encoding="utf-8")
    return python


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(last_line(done.stderr or done.stdout))


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def version_of(system: System) -> str:
    """Return the system's version; torch's where the system is torch."""
    return system.package.partition("==")[2] or (
        VERSION if system in [SYSTEMS[name] for name in OWN] else f"torch {TORCH}"
    )
