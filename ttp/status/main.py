"""`ttp status [JOB]`: what a job does now, once or again and again, for people or as JSON.

Owns the command line, the exit statuses and the redrawing.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live

from ttp.errors import ConfigError
from ttp.inputs.options import above_zero
from ttp.status import page_access
from ttp.status.answer import JobView
from ttp.status.find_job import Job, find
from ttp.status.look import ENDED, look
from ttp.status.page_access import PagePlace
from ttp.status.tables import shown
from ttp.text.console import open_console

GOOD, IN_PART, USAGE = 0, 1, 2
WATCH_S = 2.0
_STATUSES = """exit status:
  0  the job's controller has answered, or the job has ended
  1  shown in part: no controller has answered, or a file is broken; a note says which
  2  no such job, or a wrong command line

docs/status.md says more."""
Pause = Callable[[float], object]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="ttp status",
        description="Show what a job does now: by its controller, or by its files.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job", nargs="?", default=".", metavar="JOB",
        help="the job's output_dir, log_dir or checkpoint directory, or its controller's host:port (default: this folder)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--watch", nargs="?", type=above_zero("seconds", 1e6), const=WATCH_S, metavar="SECONDS",
        help=f"look again after so long, until Ctrl-C or the job's end (default: {WATCH_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--login",
        action="store_true",
        help="a link instead, which lets one browser into the status page, within five minutes",
    )
    parser.add_argument("--ranks", action="store_true", help="every rank and every fault, not the first to look at")
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None, console: Console | None = None, pause: Pause | None = None) -> int:
    """Run the command line; return the exit status."""
    given = parse(argv)
    console = console or open_console(soft_wrap=False)
    try:
        job = find(given.job)
        if given.login:
            place = _page_of(job)
            print(page_access.login_link(place, time.time()))
            if place.fingerprint:
                print(
                    f"ttp status: the page's certificate has the SHA-256 fingerprint {place.fingerprint}",
                    file=sys.stderr,
                )
            return GOOD
        if given.watch is None:
            status = look(job, all_ranks=given.ranks)
            _print(status, console, as_json=given.json, indent=1)
            return exit_status(status)
        return _watch(job, given, console, pause or threading.Event().wait)
    except ConfigError as error:
        if given.json:
            print(json.dumps({"status": USAGE, "error": str(error)}))
        else:
            print(f"ttp status: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return GOOD  # --watch is ended so


def _page_of(job: Job) -> PagePlace:
    """Raises ConfigError."""
    place = page_access.read(job.log_dir) if job.log_dir is not None else None
    if place is None:
        raise ConfigError(
            f"no status page found: got {job.log_dir or job.address}, expected the folder of a job that serves one, on a node that has its files."
            " Start the job with --status-port"
        )
    return place


def exit_status(status: JobView) -> int:
    """Return 0 for an answer in which nothing is missing, 1 for one in part."""
    return IN_PART if status.notes or (status.source == "files" and status.state != ENDED) else GOOD


def fields(status: JobView) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {"status": exit_status(status), **asdict(status)}


def _print(status: JobView, console: Console, *, as_json: bool, indent: int | None) -> None:
    if as_json:
        print(json.dumps(fields(status), indent=indent, allow_nan=False), flush=True)
    else:
        console.print(shown(status))


def _watch(job: Job, given: argparse.Namespace, console: Console, pause: Pause) -> int:
    """Look again and again; on a terminal in place, else one status after the other."""
    if given.json or not console.is_terminal or console.is_dumb_terminal:
        while True:
            status = look(job, all_ranks=given.ranks)
            _print(status, console, as_json=given.json, indent=None)
            if status.state == ENDED:
                return exit_status(status)
            pause(given.watch)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = look(job, all_ranks=given.ranks)
            live.update(shown(status), refresh=True)
            if status.state == ENDED:
                return exit_status(status)
            pause(given.watch)
