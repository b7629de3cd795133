"""Checks of values that torchrun's parser accepts: each invalid one is an error in one line, before anything starts.

torch detects some of them by an assertion, some when the workers run already, and some never. Owns the checks only. The directories of
`--log-dir` and `--ttp-story` are created if they do not exist.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.elastic.events.handlers import get_logging_handler

from ttp import files
from ttp.errors import ConfigError
from ttp.exchange.discovery import why_unknown
from ttp.inputs import checked
from ttp.launch.hosts.topology import RESOLVE_S

log = logging.getLogger("ttp.launch")

MOST_RESTARTS = 2**31 - 1
LEAST_MONITOR_S = 1e-3
MOST_MONITOR_S = 3600.0
"""Of `--monitor-interval`."""
MOST_SHUTDOWN = 2**31 - 1
"""Seconds of `--shutdown-timeout`."""

UNHANDLED = ("SIGKILL", "SIGSTOP")
"""No process can handle them."""
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torch's own name."""

GLOO_TLS_FILES = tuple(f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}" for name in ("PKEY", "CERT", "CA_FILE"))
"""torch's own names."""


def check_arguments(args: Namespace) -> None:
    """Check what does not need torch's configuration. Raises ConfigError."""
    _check_nodes(args.nnodes)
    if args.standalone and torchrun.parse_min_max_nnodes(args.nnodes) != (1, 1):
        raise ConfigError(f"invalid --nnodes: got {args.nnodes} with --standalone, expected 1. Omit one of the two")
    if not 0 <= args.max_restarts <= MOST_RESTARTS:
        raise ConfigError(
            f"invalid --max-restarts: got {checked.shown(args.max_restarts)}, expected an integer from 0 to {MOST_RESTARTS}"
        )
    if not LEAST_MONITOR_S <= args.monitor_interval <= MOST_MONITOR_S:
        raise ConfigError(
            f"invalid --monitor-interval: got {args.monitor_interval}, expected {LEAST_MONITOR_S:g} to {MOST_MONITOR_S:.0f} seconds"
        )
    try:
        get_logging_handler(getattr(args, "event_log_handler", "null"))
    except KeyError:
        raise ConfigError(
            f"invalid --event-log-handler: got {args.event_log_handler!r}, expected a registered one: null, console"
        ) from None
    for name in getattr(args, "signals_to_handle", "SIGTERM").split(","):
        if name.strip() not in signal.Signals.__members__:
            raise ConfigError(
                f"invalid --signals-to-handle: got {name!r}, expected names of signals as in SIGTERM,SIGINT"
            )
        if name.strip() in UNHANDLED:
            raise ConfigError(
                f"invalid --signals-to-handle: got {name!r}, which no process can handle, expected names of signals as in SIGTERM,SIGINT. Omit it"
            )
    _check_shutdown_timeout(getattr(args, "shutdown_timeout", 30))  # older versions of torch have none
    if args.log_dir and args.log_dir != os.devnull:
        _check_directory("--log-dir", Path(args.log_dir), files.make_folder)
    _check_gloo_transport()
    if args.ttp_story is not None:
        if args.ttp_story.is_dir():
            raise ConfigError(f"invalid --ttp-story: got the directory {str(args.ttp_story)!r}, expected a file")
        _check_directory("--ttp-story", args.ttp_story.resolve().parent, partial(os.makedirs, exist_ok=True))


def _check_shutdown_timeout(given: int | None) -> None:
    """Check the seconds from SIGTERM to SIGKILL, which torch uses as it ends the workers, and not before. None: those of torch's variable."""
    name, value = "--shutdown-timeout", str(given)
    if given is None:
        name, value = SHUTDOWN_VARIABLE, os.environ.get(SHUTDOWN_VARIABLE, "30")
    try:
        seconds = int(value)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= MOST_SHUTDOWN:
        raise ConfigError(
            f"invalid {name}: got {checked.shown(value)}, expected an integer from 0 to {MOST_SHUTDOWN} (seconds). Correct or omit it"
        )


def _check_gloo_transport() -> None:
    """Check that this build of torch has the transport that gloo is asked for, and TLS its files: torch would refuse it in each worker."""
    if (transport := os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP")) == "TCP":
        return
    if transport == "TCP_TLS":
        for name in GLOO_TLS_FILES:
            if not os.access(path := os.environ.get(name, ""), os.R_OK):
                raise ConfigError(
                    f"invalid {name}: got {path!r}, expected a file that can be read. TLS of gloo needs it"
                )
    try:
        ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as error:
        raise ConfigError(
            f"invalid GLOO_DEVICE_TRANSPORT: got {transport!r}, which torch {torch.__version__} refuses ({str(error).splitlines()[0]}). Install a build of"
            " torch that has it, or unset the variable: gloo's traffic is plain then"
        ) from None


def warn_of_taken_port(port: int) -> None:
    """Warn where another process of this node listens at the status page's port: the page waits until it is free."""
    if port <= 0:
        return
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as error:
            log.warning(
                "--status-port %d cannot be had on this node now (%s): the status page is served here once it is free, or choose another port",
                port, error.strerror or error,
            )  # fmt: skip


def check_node_rank(args: Namespace) -> None:
    """Check the node's number, which only the static rendezvous uses. Raises ConfigError."""
    nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < nodes:
        raise ConfigError(
            f"invalid --node-rank: got {args.node_rank} with --nnodes {args.nnodes}, expected 0 to {nodes - 1}, different on each node"
        )


MOST_NODES = 1_000_000
MOST_WORKERS = 100_000


def check_workers(count: int, given: str) -> None:
    """Check how many workers this node has. Raises ConfigError."""
    if not 1 <= count <= MOST_WORKERS:
        raise ConfigError(
            f"invalid --nproc-per-node: got {checked.shown(given)} ({checked.shown(count)} workers), expected an integer from 1 to"
            f" {MOST_WORKERS}, gpu, cpu or auto"
        )


def check_local_addr(address: str | None, nodes: int) -> None:
    """Check that the address given for this node resolves: the other nodes will use it. Raises ConfigError."""
    within_s = RESOLVE_S if nodes > 1 else 0.0  # DNS may learn the name later
    if address and (error := why_unknown(address, within_s)):
        raise ConfigError(
            f"invalid --local-addr: got {address!r}, which does not resolve here ({error}), expected a name or address of this node"
        )


def _check_nodes(given: str) -> None:
    try:
        least, most = torchrun.parse_min_max_nnodes(given)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 0 < least <= most <= MOST_NODES:
        raise ConfigError(
            f"invalid --nnodes: got {checked.shown(given)}, expected a number of nodes >= 1, or MIN:MAX with MIN <= MAX"
        )


def _check_directory(option: str, folder: Path, make: Callable[[Path], None]) -> None:
    """Check that files can be created in a directory, which is made if it is not there."""
    try:
        make(folder)
        with tempfile.TemporaryDirectory(prefix=".ttprun_", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"invalid {option}: got {str(folder)!r} ({error.strerror or error}), expected a writable directory. Name another one, or make"
            " it writable"
        ) from None
