"""`python -m ttp.trainer --config NAME --plan --world-size N`: explains a layout; with `--search`, proposes layouts, best first.

Owns the options of `--plan` and the printing. Starts nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from ttp.errors import ConfigError
from ttp.inputs import checked

from ..config.memory_size import memory_bytes
from ..config.schema import Config
from .estimate import lines, make_plan
from .search import Hardware, search, table

MOST_RANKS = 1_000_000
"""Of a plan: every rank's place is looked at."""
MOST_SEARCHED = 100_000
"""Ranks of a search, which makes thousands of plans."""


def run_plan(config: Config, arguments: Sequence[str]) -> None:
    """Print the plan, or the proposals of `--search`. Raises ConfigError."""
    given = _parse(arguments)
    limit = given.memory if given.memory is not None else config.training_config.max_device_memory
    if not given.search:
        plan = make_plan(config, given.world_size, given.devices_per_node)
        print("\n".join(lines(plan, given.disk_gb_per_s * 1e9, given.world_size, limit)))
        return
    if given.world_size > MOST_SEARCHED:
        raise ConfigError(f"--world-size: got {given.world_size}, expected at most {MOST_SEARCHED} with --search")
    machine = Hardware(
        given.devices_per_node, given.device_tflops * 1e12, given.node_gb_per_s * 1e9, given.network_gb_per_s * 1e9
    )
    nbytes = memory_bytes(limit, "--memory") if limit is not None else None
    found = search(config, given.world_size, machine, nbytes, given.global_batch)
    print("\n".join(table(found, given.world_size, machine, limit, given.top)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ttp.trainer --plan", exit_on_error=False, add_help=False)
    parser.add_argument("--world-size", type=_whole(1))
    parser.add_argument("--devices-per-node", type=_whole(1), default=8)
    parser.add_argument("--disk-gb-per-s", type=_number, default=1.0)
    parser.add_argument("--memory", type=_memory)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--global-batch", type=_whole(1))
    parser.add_argument("--top", type=_whole(1), default=10)
    parser.add_argument("--device-tflops", type=_number, default=100.0)
    parser.add_argument("--node-gb-per-s", type=_number, default=100.0)
    parser.add_argument("--network-gb-per-s", type=_number, default=10.0)
    try:
        given = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"--plan: {error}. python -m ttp.trainer --help lists the options") from None
    if given.world_size is None:
        raise ConfigError("--world-size: missing, expected the number of ranks, as in --plan --world-size 8")
    return given


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= MOST_RANKS):
            raise argparse.ArgumentTypeError(
                f"got {checked.shown(text)}, expected an integer from {least} to {MOST_RANKS}"
            )
        return int(text)

    return read


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-6 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"got {checked.shown(text)}, expected a number from 1e-6 to 1e9")
    return value


def _memory(text: str) -> str:
    try:
        memory_bytes(text, "size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
