"""Asks a process of its own what a device is and does: one that is broken may crash or hang it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ttp.errors import ConfigError

PROBE_S = 120.0
"""Loading a plug-in and its kernels may take a minute on a cold disk."""
_NO_DEVICE = 2


class ProbeFailed(Exception):
    """The device's probe crashed or hung: that is a result, and the report has it."""


def probe(device: str) -> dict[str, Any]:
    """Return what the probe found. Raises ConfigError: there is no such device; ProbeFailed: it is there, and does not work."""
    command = [sys.executable, "-m", "ttp.selftest.device_probe", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProbeFailed(
            f"its probe did not end within {PROBE_S:g} s, expected a few. Try: {' '.join(command)}"
        ) from None
    if done.returncode == _NO_DEVICE:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise ProbeFailed(f"its probe ended with {done.returncode}, expected 0: {last}. Try: {' '.join(command)}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
