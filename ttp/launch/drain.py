"""`ttp drain NODE`: take a node out of a job that runs. Its ranks finish their step and save it; a spare takes its place, or the job does without.

Owns the command line. It writes one entry into the job's rendezvous store, sealed with the job's secret, and waits until the node's agent has left.
What follows is the agents' (`agent.py`).
"""

from __future__ import annotations

import argparse
import functools
import getpass
import math
import os
import socket
import sys
import time
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.identity.secret import SecretSource
from ttp.inputs.options import above_zero
from ttp.launch.rendezvous import departures
from ttp.launch.rendezvous.bounded_call import end_despite_calls
from ttp.launch.rendezvous.job_secret import JobSecret
from ttp.launch.rendezvous.multi_endpoint import ROUND_S, Endpoint, Stores, parse_endpoints
from ttp.launch.rendezvous.spare_nodes import JOINING, RUNNING, SPARE, Agent, Silence, read_agents

LEFT, NOT_LEFT, USAGE = 0, 1, 2
WAIT_S = 300.0
"""So long the command waits for the node to leave: a fault's time (TTP_OT), and the end of its processes."""
SILENT_S = 10.0
"""An agent that has not renewed its entry for so long is not there."""
_STATUSES = """exit status:
  0  the node has left
  1  the node was asked, and has not left within --wait
  2  no such job, no such node, or a wrong command line

docs/sick_nodes.md says more."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="ttp drain",
        description="Take a node out of a job that runs, at its next step boundary.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "node", metavar="NODE", help="the node: its --local-addr, else its host name, as the job's log has it"
    )
    parser.add_argument("--rdzv-endpoint", required=True, metavar="HOST[:PORT][,...]", help="as the job has it")
    parser.add_argument("--rdzv-id", required=True, metavar="ID", help="as the job has it")
    parser.add_argument(
        "--secret-file", default="", metavar="FILE",
        help="the job's secret, if it was given one (default: the variable TTP_SECRET_FILE or TTP_SECRET)",
    )  # fmt: skip
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the job's log (default: who asks, and where)")
    parser.add_argument(
        "--wait", type=above_zero("seconds", 1e6), default=WAIT_S, metavar="SECONDS",
        help=f"how long to wait for the node to leave (default: {WAIT_S:g})",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = parse(argv)
    try:
        status = _drain(given)
    except ConfigError as error:
        print(f"ttp drain: {error}", file=sys.stderr)
        status = USAGE
    except KeyboardInterrupt:
        print(f"ttp drain: not waiting any longer; {given.node} leaves all the same if it was asked", file=sys.stderr)
        status = NOT_LEFT
    end_despite_calls(status)
    return status


def _drain(given: argparse.Namespace) -> int:
    """Raises ConfigError."""
    source = SecretSource.take(os.environ)
    if given.secret_file:
        source = SecretSource(file=given.secret_file)
    secret = JobSecret(given.rdzv_id, source.read if Settings.from_env().tls else None)
    stores = Stores(parse_endpoints(given.rdzv_endpoint), hosting=False, secret=secret)
    place = stores.find_in_use()
    if place is None:
        raise ConfigError(
            f"no job found: got --rdzv-id {given.rdzv_id!r} at {given.rdzv_endpoint}, expected those of a job that runs"
            f" ({stores.trouble() or 'no job of that name meets there'}). Give the job's own options"
        )
    silence = Silence(SILENT_S)
    numbers = _find(stores, place, given, silence)
    why = given.reason or f"asked by {_user()} on {socket.gethostname()}"
    if stores.ask(place, lambda store: _ask(store, given.rdzv_id, numbers, why)) is None:
        raise ConfigError(f"the rendezvous store at {place} is lost: {stores.trouble()}. Try again")
    print(f"{given.node} was asked to leave at the next step boundary", flush=True)
    return _wait(stores, place, given, numbers, why, silence)


def _ask(store: Store, run_id: str, numbers: Sequence[int], why: str) -> bool:
    for number in numbers:
        departures.ask_to_leave(store, run_id, number, why)
    return True


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _find(stores: Stores, place: Endpoint, given: argparse.Namespace, silence: Silence) -> list[int]:
    """Return the numbers of the node's agents that are there, as far as they are known by now. Raises ConfigError."""
    until_s = time.monotonic() + SILENT_S + ROUND_S
    first: dict[int, int] = {}
    while True:
        agents = _read(stores, place, given)
        lost = silence.of(agents, time.monotonic())
        here = [agent for agent in agents if agent.state in (JOINING, RUNNING) and agent.number not in lost]
        found = [agent for agent in here if agent.node == given.node]
        for agent in found:
            first.setdefault(agent.number, agent.beat)
        if numbers := [agent.number for agent in found if agent.beat != first[agent.number]]:
            return numbers  # it renews its entry
        if not found or time.monotonic() >= until_s:
            break
        time.sleep(ROUND_S / 4)
    if any(agent.node == given.node and agent.state == SPARE and agent.number not in lost for agent in agents):
        raise ConfigError(f"{given.node} waits as a spare and has no ranks. End its ttprun by SIGTERM")
    names = ", ".join(sorted({agent.node for agent in here if agent.node != given.node})) or "none"
    raise ConfigError(f"no such node: got {given.node!r}, expected one of the job's nodes: {names}")


def _read(stores: Stores, place: Endpoint, given: argparse.Namespace) -> list[Agent]:
    agents = stores.ask(place, lambda store: read_agents(store, given.rdzv_id))
    if agents is None:
        raise ConfigError(f"the rendezvous store at {place} is lost: {stores.trouble()}. Try again")
    return agents


def _wait(
    stores: Stores, place: Endpoint, given: argparse.Namespace, asked: Sequence[int], why: str, silence: Silence
) -> int:
    """Wait until no agent of this node is there. `asked`: by their numbers in the store at `place`, where `silence` has seen them. One with another
    number is asked, too: the rendezvous has moved, its store was started again empty, or several agents run on the node."""
    until_s, moved_s = time.monotonic() + given.wait, -math.inf
    while time.monotonic() < until_s:
        found = stores.find_in_use() or place
        if found != place:
            place, asked, silence, moved_s = found, (), Silence(SILENT_S), time.monotonic()
        agents = stores.ask(place, lambda store: read_agents(store, given.rdzv_id))
        if agents is not None:
            of_node = {agent.number for agent in agents if agent.node == given.node}
            if not of_node.issuperset(asked):  # entries stay: this is another store
                asked, silence, moved_s = (), Silence(SILENT_S), time.monotonic()
            gone = silence.of(agents, time.monotonic())
            there = [
                agent.number
                for agent in agents
                if agent.node == given.node and agent.state in (JOINING, RUNNING) and agent.number not in gone
            ]
            # The agents come to a new store one by one.
            if not there and time.monotonic() - moved_s >= SILENT_S:
                print(f"{given.node} has left the job")
                return LEFT
            new = [number for number in there if number not in asked]
            request = functools.partial(_ask, run_id=given.rdzv_id, numbers=new, why=why)
            if new and stores.ask(place, request) is not None:
                asked = (*asked, *new)
        time.sleep(ROUND_S)
    print(
        f"ttp drain: {given.node} has not left within {given.wait:g} s: see its ttprun's log. A job that is still starting, or not"
        " protected, cannot be drained",
        file=sys.stderr,
    )
    return NOT_LEFT
