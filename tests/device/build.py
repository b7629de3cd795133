"""Compiles the device's extension, once for each state of its sources.

Owns the folder build/sim_device. A compiler that is missing, or that fails, raises: nothing is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[2] / "build" / "sim_device"
NAME = "sim_device"
FLAGS = ["-O1", "-g0", "-std=c++20", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]


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
        with warnings.catch_warnings():  # of distutils, which setuptools replaces
            warnings.simplefilter("ignore")
            from torch.utils import cpp_extension

        jobs, path = os.environ.setdefault("MAX_JOBS", "2"), os.environ["PATH"]
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{path}"  # where ninja is
        try:
            cpp_extension.load(
                NAME, [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
                extra_cflags=FLAGS, build_directory=str(folder), is_python_module=False, verbose=False,
            )  # fmt: skip
        finally:
            os.environ["PATH"] = path
            if jobs == "2":
                os.environ.pop("MAX_JOBS", None)
