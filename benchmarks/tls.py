"""What TLS costs the control plane: a controller with and without it takes turns, with many ranks on simulated agents' streams.

For each size: until all streams are attached (every one is a handshake on both sides, on this machine's cores), calm heartbeats, and a fault:
from the report of a death to the last rank's Freeze, from the last state reply to the last order, from the first write answer to the order to publish.
`benchmarks.restart` has the rest: first start, kill to verdict, kill to first step, with and without.

`--clients 50 --ranks 1000 --ranks-per-node 1` has 1,000 streams come from 50 processes, each stream with a certificate of its own.

Exit status 1 when heartbeats take more than LIMIT times the controller's processor time without TLS (medians), or a stream broke.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks._scale_world import World
from benchmarks.scale import Usage, assemble, errors, job, one_fault, settle, shares_of_a_core
from ttp.identity.authority import Authority
from ttp.identity.issuer import Issuer
from ttp.identity.role import Identity, Role
from ttp.identity.secret import make_secret
from ttp.inputs.options import whole

LIMIT = 1.2
BROKEN = "streams that broke"
Way = Callable[[World], contextlib.AbstractContextManager[dict[str, str]]]


@contextlib.contextmanager
def certificates(world: World) -> Iterator[dict[str, str]]:
    """Let controllers that are started meanwhile have certificates; yield the variables of the agents that come to them, each with its own."""
    authority = Authority(make_secret(), world.job_id)
    issuer = Issuer("bench")
    issuer.begin(authority, range(1, 100))
    os.environ["TTP_IDENTITY"] = issuer.address
    agents = {}
    for first in range(0, world.size, world.ranks_per_node):
        ranks = tuple(range(first, min(first + world.ranks_per_node, world.size)))
        agents[first] = authority.issue(Identity(world.job_id, Role.AGENT, ranks, node=f"node{first}")).encode()
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(agents, file)
            file.flush()
            yield {"SCALE_CREDENTIALS": file.name}
    finally:
        del os.environ["TTP_IDENTITY"]
        issuer.close()


@contextlib.contextmanager
def plain(world: World) -> Iterator[dict[str, str]]:
    yield {}


def turn(world: World, clients: int, seconds: float, way: Way) -> dict[str, list[float]]:
    with way(world) as environ:
        begun = time.monotonic()
        with job(world, clients, environ) as (controller, players, _):
            attached, attached_cpu_s = time.monotonic() - begun, Usage(controller.pid).cpu_s()
            assemble(players)
            settle(players)
            shares = shares_of_a_core(controller.pid, seconds)
            memory = Usage(controller.pid).mib()
            broken = errors(players)
    with way(world) as environ:  # anew: a term's certificate is for one process
        fault = one_fault(world, clients, 3, environ)
    return {
        "started and all attached, s": [attached],
        "controller's time for that, s": [attached_cpu_s],
        "heartbeats, % of a core": [100 * share for share in shares],
        "controller's memory, MiB": [memory],
        "death report to the last Freeze, ms": [fault["freeze_all"]],
        "controller's time for that, ms": [fault["freeze_cpu_ms"]],
        "last state reply to the last order, ms": [fault["plan_all"]],
        "controller's time for the orders, ms": [fault["plan_cpu_ms"]],
        "first write answer to PublishOrder, ms": [fault["answers_to_publish"]],
        "controller's time for the answers, ms": [fault["answers_cpu_ms"]],
        "controller's time for the fault, ms": [fault["cpu_ms"]],
        BROKEN: [broken, fault["errors"]],
    }


def spread(values: list[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1000, 10000])
    parser.add_argument("--ranks-per-node", type=whole(1), default=8)
    parser.add_argument("--clients", type=whole(1), default=2, help="client processes")
    parser.add_argument("--turns", type=int, default=3, help="of each, by turns")
    parser.add_argument("--heartbeat-s", type=whole(1), default=1, help="seconds between two heartbeats of a stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats in each turn")
    options = parser.parse_args(arguments)
    missed = []
    for size in options.ranks:
        world = World(size, options.ranks_per_node, heartbeat_s=options.heartbeat_s)
        found: dict[str, dict[str, list[float]]] = {"plain": {}, "TLS": {}}
        ways: tuple[tuple[str, Way], ...] = (("plain", plain), ("TLS", certificates))
        for number in range(2 * options.turns):
            kind, way = ways[(number + number // 2) % 2]
            for name, values in turn(world, options.clients, options.seconds, way).items():
                found[kind].setdefault(name, []).extend(values)
        streams = -(-size // options.ranks_per_node)
        print(f"{size:,} ranks on {streams:,} streams, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for name, before in found["plain"].items():
            after = found["TLS"][name]
            if name == BROKEN:
                missed += [f"{size:,} ranks: {sum(before) + sum(after):.0f} streams broke"] * (sum(before + after) > 0)
                continue
            ratio = statistics.median(after) / statistics.median(before)
            print(f"  {name:38} plain {spread(before)}   TLS {spread(after)}   ratio {ratio:.2f}", flush=True)
            if name.startswith("heartbeats") and ratio > LIMIT:
                missed.append(f"{size:,} ranks: heartbeats take {ratio:.2f} of the time without TLS, limit {LIMIT}")
    for text in missed:
        print(text, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
