"""Which nodes take part, this node's number, and the rendezvous: from the command line or the rank table.

Owns torchrun's arguments before torch's code reads them. Never reads the environment, except torchrun's own variables (`PET_...`), which count
as given on the command line, and the list of visible devices.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import run as torchrun

from ttp.addresses import is_own_address
from ttp.errors import ConfigError
from ttp.exchange.discovery import why_unknown
from ttp.launch.hosts.rank_table import RankTable, read_rank_table

log = logging.getLogger("ttp.launch")

RESOLVE_S = 30.0
"""How long to wait for this node's own name to resolve: DNS may learn it after the node has begun."""

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
"""Which devices of its node a process sees, in Ascend's runtime."""
_GOVERNED = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "standalone")
"""Arguments that a rank table sets."""


def choose_rendezvous(args: Namespace) -> None:
    """Set the rendezvous arguments as `torch.distributed.run.run` does: one node needs no address."""
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def check_host_name(host: str, nodes: int) -> None:
    """Check that the name under which other nodes reach this one's controller resolves. Raises ConfigError.

    The default, the host's own name, causes a warning only: it may resolve elsewhere.
    """
    if nodes == 1:
        return  # all addresses are 127.0.0.1
    if not (error := why_unknown(host, 0.0)):
        return
    if host == socket.gethostname():
        log.warning(
            "this node's host name %r does not resolve here (%s); other nodes where it does not resolve either cannot reach a controller on"
            " this node. Set TTP_HOST to a name or address that resolves on all nodes", host, error,
        )  # fmt: skip
        return
    log.warning("TTP_HOST=%r does not resolve yet (%s); retrying for %.0f s", host, error, RESOLVE_S)
    if error := why_unknown(host, RESOLVE_S):
        raise ConfigError(
            f"invalid TTP_HOST: got {host!r} on node {socket.gethostname()}, which does not resolve ({error}), expected a name or address"
            f" by which all {nodes} nodes reach this one. Correct it, or unset it to use the host's own name"
        )


def explicit_arguments(make_parser: Callable[[], ArgumentParser], argv: Sequence[str] | None) -> dict[str, Any]:
    """Return those arguments that a rank table sets and that were given, on the command line or by torchrun's variables."""
    parser = make_parser()
    nothing = object()
    parser.set_defaults(**{name: nothing for name in _GOVERNED if f"PET_{name.upper()}" not in os.environ})
    given = vars(parser.parse_args(argv))
    return {name: given[name] for name in _GOVERNED if given[name] is not nothing}


def apply_rank_table(
    args: Namespace, given: dict[str, Any], is_own: Callable[[str], bool] = is_own_address
) -> RankTable:
    """Set the arguments from the rank table that they name, and return it. `given`: the user's own arguments.

    --node-rank and --master-addr override the table; other contradictions are errors. Raises ConfigError.
    """
    if not args.rank_table_file.strip():
        raise ConfigError(
            "invalid --rank_table_file: got an empty path, expected the path of a rank table. Check that the script's variable is set, or"
            " omit the option"
        )
    table = read_rank_table(args.rank_table_file)
    node = _node(table, given, is_own)
    own = table.servers[node]
    expected = {"nnodes": str(len(table.servers)), "nproc_per_node": str(len(own.ranks)), "rdzv_backend": "static"}
    for name, value in expected.items():
        if name in given and str(given[name]) != value:
            raise ConfigError(
                f"invalid --{name.replace('_', '-')}: got {given[name]!r}, expected {value} as in {table.path}. Omit the option"
            )
        setattr(args, name, value)
    for name in ("standalone", "rdzv_endpoint"):
        if given.get(name):
            raise ConfigError(
                f"invalid --{name.replace('_', '-')}: got it with --rank_table_file, expected one of the two. Omit one"
            )
    args.node_rank = node
    args.master_addr = given.get("master_addr", table.servers[0].address)
    _show_devices(table, node)
    log.info(
        "rank table %s: node %d of %d (%s), ranks %d-%d of %d; node 0 at %s",
        table.path, node, len(table.servers), own.server_id, own.ranks[0], own.ranks[-1],
        table.servers[-1].ranks[-1] + 1, args.master_addr,
    )  # fmt: skip
    return table


def _node(table: RankTable, given: dict[str, Any], is_own: Callable[[str], bool]) -> int:
    if "node_rank" not in given:
        return 0 if len(table.servers) == 1 else table.own_node(is_own)
    node = int(given["node_rank"])
    if not 0 <= node < len(table.servers):
        raise ConfigError(
            f"invalid --node-rank: got {node}, expected 0 to {len(table.servers) - 1}, the servers of {table.path}"
        )
    return node


def _show_devices(table: RankTable, node: int) -> None:
    """Make local rank i see the device that the table assigns to its rank, where that is not device i."""
    ids = table.servers[node].device_ids
    if ids == tuple(range(len(ids))):
        return
    text = ",".join(map(str, ids))
    if os.environ.setdefault(VISIBLE_DEVICES, text) != text:
        log.warning(
            "%s=%s overrides the rank table, which assigns the devices %s to this node's ranks",
            VISIBLE_DEVICES, os.environ[VISIBLE_DEVICES], text,
        )  # fmt: skip
