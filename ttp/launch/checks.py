"""The command line's values that torchrun's parser lets through: each bad one is refused in a line, before anything starts.

torch finds some of them by an assertion, some when the workers run already, and some never. Owns looks only; the folders of
`--log-dir` and `--ttp-story` are made if they are not there, as they would be a moment later.
"""

from __future__ import annotations

import os
import signal
import tempfile
from argparse import Namespace
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.events.handlers import get_logging_handler

from ttp.errors import ConfigError
from ttp.exchange.discovery import why_unknown
from ttp.inputs import checked
from ttp.launch.rendezvous.topology import RESOLVE_S

MOST_RESTARTS = 2**31 - 1
LEAST_MONITOR_S = 1e-3
MOST_MONITOR_S = 3600.0
"""Of `--monitor-interval`: a launcher that looks at its workers less than once an hour looks at nothing."""


def check_arguments(args: Namespace) -> None:
    """Check what needs no configuration of torch's. Raises ConfigError."""
    _check_nodes(args.nnodes)
    if args.standalone and torchrun.parse_min_max_nnodes(args.nnodes) != (1, 1):
        raise ConfigError(f"--standalone is for one node: got --nnodes {args.nnodes}; leave one of the two out")
    if not 0 <= args.max_restarts <= MOST_RESTARTS:
        raise ConfigError(
            f"--max-restarts is {checked.shown(args.max_restarts)}: wanted a number from 0 to {MOST_RESTARTS}"
        )
    if not LEAST_MONITOR_S <= args.monitor_interval <= MOST_MONITOR_S:
        raise ConfigError(
            f"--monitor-interval is {args.monitor_interval}: wanted seconds from {LEAST_MONITOR_S:g}, at most {MOST_MONITOR_S:.0f}"
        )
    try:
        get_logging_handler(getattr(args, "event_log_handler", "null"))
    except KeyError:
        raise ConfigError(
            f"--event-log-handler is {args.event_log_handler!r}: wanted one that is registered: null, console"
        ) from None
    for name in getattr(args, "signals_to_handle", "SIGTERM").split(","):
        if name.strip() not in signal.Signals.__members__:
            raise ConfigError(f"--signals-to-handle has {name!r}: wanted names of signals as SIGTERM,SIGINT")
    if args.log_dir and args.log_dir != os.devnull:
        _check_folder("--log-dir", Path(args.log_dir))
    if args.ttp_story is not None:
        if args.ttp_story.is_dir():
            raise ConfigError(f"--ttp-story is {str(args.ttp_story)!r}, a folder: wanted a file")
        _check_folder("--ttp-story", args.ttp_story.resolve().parent)


def check_node_rank(args: Namespace) -> None:
    """Check the node's number, which counts with the static rendezvous only. Raises ConfigError."""
    nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < nodes:
        raise ConfigError(
            f"--node-rank is {args.node_rank}, with --nnodes {args.nnodes}: wanted 0 to {nodes - 1}, another one on each node"
        )


MOST_NODES = 1_000_000
MOST_WORKERS = 100_000


def check_workers(count: int, given: str) -> None:
    """Check how many workers this node has. Raises ConfigError."""
    if not 1 <= count <= MOST_WORKERS:
        raise ConfigError(
            f"--nproc-per-node is {checked.shown(given)}, that is {checked.shown(count)}: wanted a number from 1 to {MOST_WORKERS}, gpu,"
            " cpu or auto"
        )


def check_local_addr(address: str | None, nodes: int) -> None:
    """See that the address that was given for this node leads anywhere: the others are told it. Raises ConfigError."""
    within_s = RESOLVE_S if nodes > 1 else 0.0  # a name server may learn of the node later
    if address and (error := why_unknown(address, within_s)):
        raise ConfigError(
            f"--local-addr is {address!r}, which does not resolve here ({error}): wanted a name or address of this node"
        )


def _check_nodes(given: str) -> None:
    try:
        least, most = torchrun.parse_min_max_nnodes(given)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 0 < least <= most <= MOST_NODES:
        raise ConfigError(
            f"--nnodes is {checked.shown(given)}: wanted a number of nodes from 1, or MIN:MAX with MIN not above MAX"
        )


def _check_folder(option: str, folder: Path) -> None:
    """See that files can be made in a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ttprun_", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option}: nothing can be written in {str(folder)!r} ({error.strerror or error}); name another place, or make that"
            " one writable"
        ) from None
