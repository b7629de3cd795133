"""Compiles the device's extension, once for each state of its sources.

Owns the folder build/sim_device. A compiler that is missing, or that fails, raises: nothing is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[2] / "build" / "sim_device"
NAME = "sim_device"
FLAGS = ["-O1", "-g0", "-std=c++20", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]

_LOAD = """
import sys
from torch.utils import cpp_extension
name, folder, flags, source = sys.argv[1:]
cpp_extension.load(name, [source], extra_cflags=flags.split(), build_directory=folder, is_python_module=False)
"""
"""Run in an interpreter of its own: torch's compiling imports setuptools, which asks that distutils was not imported before."""


def extension() -> ModuleType:
    """Return the extension, compiled first where no process has. Raises what the compiler reports."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    folder = BUILT / _state()
    library = folder / f"{NAME}.so"
    if not library.exists():
        _compile(folder)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def _state() -> str:
    """Name the sources, the flags, torch and Python."""
    digest = hashlib.sha256(repr((torch.__version__, sys.version, FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "compiling", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes begin together
        if (folder / f"{NAME}.so").exists():
            return
        whole = folder / "all.cpp"  # torch's headers, which take most of the time, are read once
        whole.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, NAME, str(folder), " ".join(FLAGS), str(whole)],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the device of tests/device does not compile:\n{done.stdout}{done.stderr}")
