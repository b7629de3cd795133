"""The options of `--health-check builtin`: read by ttprun, which refuses a wrong one before anything is started, and by the checks (`ttp.doctor.health_check`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

MEMORY_BYTES = 1 << 30


def parse_builtin(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Exits with 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="ttprun --health-check builtin", description="Is this node fit for ranks, now?"
    )
    parser.add_argument("--save-dirs", nargs="+", type=Path, default=[], metavar="DIR",
                        help="the job's checkpoint directories")  # fmt: skip
    parser.add_argument(
        "--memory",
        type=_gigabytes,
        default=MEMORY_BYTES,
        metavar="GB",
        help="memory that must be available (default: 1)",
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", help="compare the clocks with a node on which `ttp doctor --listen` runs"
    )
    return parser.parse_args(arguments)


def _gigabytes(text: str) -> int:
    try:
        found = float(text.upper().removesuffix("GB"))
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1e6:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected gigabytes, 0 to 1000000, as in 4 or 4GB")
    return int(found * 2**30)
