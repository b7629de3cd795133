"""ttprun's command line: torchrun's own parser, and TTP's and msrun's options in groups of their own."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import get_args_parser

from ttp.config import MOST_S, enabled
from ttp.fork_server.preload import has_accelerator
from ttp.inputs.options import above_zero, whole
from ttp.launch import msrun
from ttp.launch.attempts.crash_loop import FUTILE_STARTS
from ttp.launch.watch.death_watch import ACCELERATOR_POLL_S, LONGEST_POLL_S, POLL_S

LEAST_POLL_S = 1e-4
MAX_RESTARTS = 3
"""Default of --max-restarts (torchrun's is 0)."""


class _Parser(ArgumentParser):
    """Accepts torchrun's abbreviations: TTP's own options make none of them ambiguous."""

    own: frozenset[str] = frozenset()
    """The destinations of the options that are not torchrun's."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the options that an abbreviation may mean (a private method of argparse)."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[0].dest not in self.own] or found


def _modules(names: str) -> list[str]:
    """Return the modules of a list with commas. Raises ArgumentTypeError."""
    found = names.split(",")
    for name in found:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ArgumentTypeError(f"invalid module name: got {name!r}, expected names with dots, separated by commas")
    return found


def make_parser() -> ArgumentParser:
    """Make the parser; with `ENABLE_TTP=False` every default is torchrun's."""
    parser = _Parser(
        prog="ttprun",
        description="torchrun that gives the survivors of a fault time to save, and restarts from their checkpoint. "
        f"Accepts all of torchrun's options; the default of --max-restarts is {MAX_RESTARTS}. ENABLE_TTP=False: plain torchrun.",
        parents=[get_args_parser()],
        add_help=False,  # torchrun's parser has it
    )
    parser.epilog = (
        "--rdzv-endpoint accepts several endpoints, in order (node-a:29400,node-b:29400): when one is lost, the nodes use the next. Exit"
        " codes: 0 the job succeeded; 1 it failed, or a signal was received; 2 an invalid command line or setting. SIGTERM and Ctrl-C save"
        " the step in flight before the job ends; a second Ctrl-C kills the workers."
    )
    group = parser.add_argument_group("ttp", "TTP's own options (--ttp-... are ignored with ENABLE_TTP=False)")
    group.add_argument(
        "--ttp-ot",
        "--ttp_ot",
        type=above_zero("seconds", MOST_S),
        default=None,
        metavar="SECONDS",
        help="deadline of a fault, after which survivors are killed (default: the variable TTP_OT, or 120)",
    )
    group.add_argument(
        "--ttp-death-poll",
        "--ttp_death_poll",
        type=above_zero("seconds (10 ms are 0.01)", LONGEST_POLL_S, LEAST_POLL_S),
        default=None,
        metavar="SECONDS",
        help=f"interval at which workers are checked for their death, at most {LONGEST_POLL_S:g} (default: {POLL_S}, and {ACCELERATOR_POLL_S} on a node with accelerators)",
    )
    group.add_argument(
        "--ttp-futile-starts",
        "--ttp_futile_starts",
        type=whole(),
        default=FUTILE_STARTS,
        metavar="COUNT",
        help=f"crash-loop limit: stop after so many attempts in a row that failed before completing a step; 0: no limit (default: {FUTILE_STARTS})",
    )
    group.add_argument(
        "--ttp-story",
        "--ttp_story",
        type=Path,
        default=None,
        metavar="FILE",
        help="file for the job's attempts, faults and summary as JSON lines (default: story.jsonl beside the journals)",
    )
    group.add_argument(
        "--on-event",
        "--on_event",
        default="",
        metavar="COMMAND",
        help="command that is run for each event of the job, with the event as a line of JSON on its stdin (default: none)",
    )
    group.add_argument(
        "--health-check",
        "--health_check",
        default="",
        metavar="COMMAND",
        help="command that looks whether this node is fit for ranks, before it joins and after each fault on it: an exit status other than 0"
        " excludes the node; `builtin` names TTP's own checks (default: none)",
    )
    group.add_argument(
        "--status-port",
        "--status_port",
        type=whole(most=65535),
        default=None,
        metavar="PORT",
        help="serve the status page and Prometheus' metrics at this port, where the controller that leads runs; 0: any free one (default: the variable TTP_STATUS_PORT, or nowhere)",
    )
    group.add_argument(
        "--status-token-file",
        "--status_token_file",
        type=Path,
        default=None,
        metavar="FILE",
        help="the token that the page asks for (default: the variable TTP_STATUS_TOKEN_FILE, or status_token beside the journals)",
    )
    group.add_argument(
        "--preload",
        type=_modules,
        default=[],
        metavar="MODULE[,MODULE]",
        help="modules that the workers' fork server imports, beside torch's and TTP's own (default: what this job's workers had imported at their first step)",
    )
    group.add_argument(
        "--secret-file",
        "--secret_file",
        default="",
        metavar="FILE",
        help="the job's secret, the same on every node: certificates for all connections are made of it (default: the variable TTP_SECRET_FILE or TTP_SECRET; on one node a new one for each job)",
    )
    group.add_argument(
        "--spare-node",
        "--spare_node",
        action="store_true",
        help="wait as a spare node, without workers, and take the place of a node that the job loses (c10d with --rdzv-endpoint)",
    )
    group.add_argument(
        "--sign-key",
        "--sign_key",
        type=Path,
        default=None,
        metavar="FILE",
        help="private Ed25519 key (PEM) with which the ranks sign checkpoints; read with ENABLE_TTP=False too (default: the variable TTP_SIGN_KEY)",
    )
    group.add_argument(
        "--verify-key",
        "--verify_key",
        type=Path,
        default=None,
        metavar="FILE",
        help="public key: checkpoints that are not signed for it are not resumed; read with ENABLE_TTP=False too (default: the variable TTP_VERIFY_KEY)",
    )
    group.add_argument(
        "--rank_table_file",
        "--rank-table-file",
        default=None,
        metavar="FILE",
        help="a JSON file (hccl.json) that lists servers, devices and ranks; gives --nnodes, --nproc-per-node, --node-rank"
        " (by this host's own addresses) and --master-addr; read with ENABLE_TTP=False too",
    )
    of_msrun = msrun.add_options(parser)
    parser.own = frozenset(action.dest for each in (group, of_msrun) for action in each._group_actions)
    if enabled() and "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=MAX_RESTARTS)
    return parser


def death_poll_s(args: Namespace) -> float:
    """Return the interval of the death watch, in seconds: what the option says, else that of a node with or without accelerators."""
    if args.ttp_death_poll is not None:
        return float(args.ttp_death_poll)
    return ACCELERATOR_POLL_S if has_accelerator() else POLL_S


def hides_stderr(args: Namespace) -> bool:
    """Return whether some worker's stderr goes to a file instead of the console."""
    redirects = Std.from_str(args.redirects)
    each = redirects.values() if isinstance(redirects, dict) else (redirects,)
    return bool(args.local_ranks_filter) or any(Std.ERR & one == Std.ERR for one in each)


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line (None: this process's). Exits with status 2 and a message on a bad one."""
    return make_parser().parse_args(argv)
