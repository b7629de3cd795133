"""The command `ttp`: one word, then a tool's own command line.

    ttp chaos ...      faults for any job, and the verdict (`ttp.chaos.cli`)
    ttp ckpt ...       checkpoints (`ttp.checkpoint.cli.main`)
    ttp status ...     what a job does now (`ttp.status.main`)
    ttp drain ...      take a node out of a job that runs (`ttp.launch.drain`)
    ttp doctor ...     what a run relies on, before it (`ttp.doctor.main`)
    ttp selftest ...   what TTP relies on, tried on a device (`ttp.selftest.main`)

Owns the list of tools and nothing of what they do; a tool is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ttp.text.streams import replace_lost


class Tool(NamedTuple):
    module: str
    """Has `main(argv) -> exit status`."""
    summary: str


TOOLS = {
    "chaos": Tool("ttp.chaos.cli", "run a job under a schedule of faults, and judge it"),
    "ckpt": Tool("ttp.checkpoint.cli.main", "look at checkpoints, compare, export and prune them"),
    "status": Tool("ttp.status.main", "show what a job does now: step, pace, coverage, faults, checkpoints"),
    "drain": Tool("ttp.launch.drain", "take a node out of a job that runs, at its next step boundary"),
    "doctor": Tool("ttp.doctor.main", "look before a long run at what it relies on, and say what to do"),
    "selftest": Tool("ttp.selftest.main", "try what TTP relies on, on this machine's device"),
}
USAGE = 2
UNREAD = 1
"""As rich ends a program whose reader has gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the rest of the command line to the tool named first; return its exit status: 1 where the reader of its output is gone
    (`| head`)."""
    try:
        try:
            return _do(argv)
        finally:  # argparse leaves by SystemExit after its help
            sys.stdout.flush()
    except BrokenPipeError:
        if not replace_lost():  # it was another pipe
            raise
        return UNREAD


def _do(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in TOOLS:
        run = importlib.import_module(TOOLS[arguments[0]].module).main
        return int(run(arguments[1:]))
    if arguments == ["--version"]:
        print(f"ttp {importlib.import_module('ttp').__version__}")
        return 0
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    out = sys.stdout if asked else sys.stderr
    if arguments and not asked:
        print(f"ttp: got {arguments[0]!r}, expected one of {', '.join(TOOLS)}", file=out)
    print("usage: ttp TOOL ...\n", file=out)
    for name, tool in TOOLS.items():
        print(f"  ttp {name:<8} {tool.summary}", file=out)
    print("\n`ttp TOOL --help` says more; `ttp --version` which one this is.", file=out)
    return 0 if asked else USAGE


if __name__ == "__main__":
    sys.exit(main())
