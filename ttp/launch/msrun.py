"""Maps the options of msrun, MindSpore's launcher, to torchrun's: in a script of msrun only the command's name changes.

Owns the options that torchrun does not have; --master_addr, --master_port, --node_rank and --log_dir are torchrun's own. Never starts anything.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from ttp.errors import ConfigError
from ttp.inputs.options import whole
from ttp.launch.checks import MOST_WORKERS

PORT = 8118
"""msrun's default of --master_port."""
MOST_TIMEOUT_S = 7 * 24 * 3600
_CONTRADICTING = ("nnodes", "nproc_per_node", "standalone", "rank_table_file")


def add_options(parser: ArgumentParser) -> Any:
    """Add the options in a group of their own, and return it."""
    group = parser.add_argument_group("msrun", "options of msrun, for its scripts")
    group.add_argument(
        "--worker_num",
        "--worker-num",
        type=whole(1, MOST_WORKERS),
        default=None,
        metavar="COUNT",
        help="ranks of the job, over all nodes; with --local_worker_num",
    )
    group.add_argument(
        "--local_worker_num",
        "--local-worker-num",
        type=whole(1, MOST_WORKERS),
        default=None,
        metavar="COUNT",
        help="ranks of this node; with --worker_num",
    )
    group.add_argument(
        "--cluster_time_out",
        "--cluster-time-out",
        type=whole(1, MOST_TIMEOUT_S),
        default=None,
        metavar="SECONDS",
        help="time for all nodes to meet",
    )
    group.add_argument(
        "--join",
        type=_true_or_false,
        default=None,
        metavar="True",
        help="stay until the job has ended; False is refused",
    )
    return group


def _true_or_false(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected True or False")
    return text == "True"


def apply_msrun(args: Namespace, given: Mapping[str, Any]) -> None:
    """Set torchrun's arguments from msrun's. `given`: torchrun's arguments that the command line names. Raises ConfigError."""
    if args.join is False:
        raise ConfigError(
            "invalid --join: got False, expected True: ttprun stays until the job has ended, to save and restart after a fault. To run it in"
            " the background use nohup and &"
        )
    if args.cluster_time_out is not None:
        # Of the static and of the c10d rendezvous; --rdzv-conf comes after them and overrides them.
        own = f"timeout={args.cluster_time_out},join_timeout={args.cluster_time_out}"
        args.rdzv_conf = f"{own},{args.rdzv_conf}" if args.rdzv_conf else own
    if args.worker_num is None and args.local_worker_num is None:
        return
    _place_workers(args, given)
    if args.log_dir and (args.tee, args.redirects) == ("0", "0"):
        args.tee = "3"  # msrun's --log_dir has the workers' output


def _place_workers(args: Namespace, given: Mapping[str, Any]) -> None:
    total, local = args.worker_num, args.local_worker_num
    if total is None or local is None:
        name, count = ("local_worker_num", total) if local is None else ("worker_num", local)
        raise ConfigError(
            f"invalid --{name}: got nothing, expected a count beside the other's {count}. Give both; they are equal on one node"
        )
    for name in _CONTRADICTING:
        if name in given or (name == "rank_table_file" and args.rank_table_file is not None):
            raise ConfigError(
                f"invalid --{name.replace('_', '-')}: got it with --worker_num, expected one of the two. Omit one: both set the number of ranks"
            )
    nodes, rest = divmod(total, local)
    if rest or not nodes:
        raise ConfigError(
            f"invalid --worker_num: got {total} with --local_worker_num {local}, expected a multiple of it: all nodes have the same number"
            " of ranks. Change either, or use torchrun's --nnodes and --nproc-per-node"
        )
    args.nnodes, args.nproc_per_node = str(nodes), str(local)
    if int(given.get("node_rank", -1)) >= 0:
        return
    args.node_rank = 0
    if nodes > 1 and "rdzv_backend" not in given:  # the rendezvous numbers the nodes, as msrun does
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or PORT}"
