"""Who takes part, where this node stands, and how the nodes meet: the command line's answer, or the rank table's.

Owns the settling of torchrun's arguments before its own code reads them. Reads no environment but torchrun's own
variables (`PET_...`), which count as given on the command line.
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

from ttp.errors import ConfigError
from ttp.exchange.discovery import why_unknown
from ttp.launch.rendezvous.rank_table import RankTable, is_own_address, read_rank_table

log = logging.getLogger("ttp.launch")

RESOLVE_S = 30.0
"""How long this node's own name may take to be known: a name server may learn of it after the node has begun."""

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
"""Which devices of its node a process sees, in Ascend's runtime."""
_GOVERNED = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "standalone")
"""Arguments that a rank table has a say in."""


def choose_rendezvous(args: Namespace) -> None:
    """Settle the rendezvous as `torch.distributed.run.run` does: one node needs no address."""
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def check_host_name(host: str, nodes: int) -> None:
    """See that the name under which other nodes reach this one's controller leads anywhere. Raises ConfigError.

    A name that was not chosen (the machine's own) costs a warning only: it may be known elsewhere.
    """
    if nodes == 1:
        return  # everything is at 127.0.0.1
    if not (error := why_unknown(host, 0.0)):
        return
    if host == socket.gethostname():
        log.warning(
            "this node's name %r does not resolve here (%s): if the others do not know it either, they cannot reach a"
            " controller on this node; set TTP_HOST to a name or address that they know", host, error,
        )  # fmt: skip
        return
    log.warning("TTP_HOST is %r, which does not resolve yet (%s); trying for %.0f s", host, error, RESOLVE_S)
    if error := why_unknown(host, RESOLVE_S):
        raise ConfigError(
            f"TTP_HOST is {host!r} on this node ({socket.gethostname()}), and that name does not resolve ({error}): wanted a"
            f" name or address by which all {nodes} nodes reach this one; correct it, or leave it out for the machine's own name"
        )


def explicit_arguments(make_parser: Callable[[], ArgumentParser], argv: Sequence[str] | None) -> dict[str, Any]:
    """Return those of the arguments a rank table has a say in that were given, on the command line or by torchrun's variables."""
    parser = make_parser()
    nothing = object()
    parser.set_defaults(**{name: nothing for name in _GOVERNED if f"PET_{name.upper()}" not in os.environ})
    given = vars(parser.parse_args(argv))
    return {name: given[name] for name in _GOVERNED if given[name] is not nothing}


def apply_rank_table(
    args: Namespace, given: dict[str, Any], is_own: Callable[[str], bool] = is_own_address
) -> RankTable:
    """Fill the arguments from the rank table that they name, and return it. `given`: what the user has said himself.

    --node-rank and --master-addr override the table; what contradicts it is refused. Raises ConfigError.
    """
    if not args.rank_table_file.strip():
        raise ConfigError(
            "--rank_table_file is empty: wanted the path of a rank table (is a script's variable unset?); leave the option out for"
            " a job without one"
        )
    table = read_rank_table(args.rank_table_file)
    node = _node(table, given, is_own)
    own = table.servers[node]
    wanted = {"nnodes": str(len(table.servers)), "nproc_per_node": str(len(own.ranks)), "rdzv_backend": "static"}
    for name, value in wanted.items():
        if name in given and str(given[name]) != value:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {given[name]!r}, but by {table.path} it is {value}: leave it out"
            )
        setattr(args, name, value)
    for name in ("standalone", "rdzv_endpoint"):
        if given.get(name):
            raise ConfigError(f"--{name.replace('_', '-')} and --rank_table_file exclude each other: leave one out")
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
        raise ConfigError(f"--node-rank is {node}: wanted 0 to {len(table.servers) - 1}, the servers of {table.path}")
    return node


def _show_devices(table: RankTable, node: int) -> None:
    """Make local rank i see the device that the table gives its rank, where that is not device i."""
    ids = table.servers[node].device_ids
    if ids == tuple(range(len(ids))):
        return
    text = ",".join(map(str, ids))
    if os.environ.setdefault(VISIBLE_DEVICES, text) != text:
        log.warning(
            "%s is %s, but the rank table gives this node's ranks the devices %s: the variable counts",
            VISIBLE_DEVICES, os.environ[VISIBLE_DEVICES], text,
        )  # fmt: skip
