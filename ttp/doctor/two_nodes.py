"""Two nodes looked at together: `ttp doctor --listen PORT` on one, `ttp doctor --peer HOST:PORT` on the other.

A line of JSON goes each way, again and again: the round trip, the difference of the clocks, the versions. Owns this small protocol. It says
nothing but versions and the time, and believes nothing that is not such a line.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ttp.doctor.finding import FAILED, WARNING, Finding, judged
from ttp.identity.authority import SKEW_S
from ttp.inputs import checked
from ttp.version import VERSION

ROUNDS = 16
CONNECT_S = 5.0
MOST_BYTES = 4096
SLOW_ROUND_TRIP_S = 0.05
"""Within one cluster it takes below a millisecond; ranks agree on every step over such connections."""
CLOSE_CLOCKS_S = 1.0
"""Reports of several nodes are put in order by their clocks."""


def own_versions() -> dict[str, str]:
    """Return what must be the same on all nodes."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"ttp": VERSION, "torch": torch, "python": platform.python_version()}


def serve(server: socket.socket, show: Callable[[str], object], clock: Callable[[], float] = time.time) -> None:
    """Answer peers, one after the other, until this is interrupted; each is named once by `show`."""
    while True:
        channel, place = server.accept()
        with channel, suppress(OSError, ValueError, RecursionError):
            channel.settimeout(CONNECT_S)
            lines = channel.makefile("rwb")
            with lines:
                seen = False
                while text := lines.readline(MOST_BYTES):
                    versions = _versions(json.loads(text))
                    lines.write(json.dumps({"unix_s": clock(), **own_versions()}).encode() + b"\n")
                    lines.flush()
                    if not seen:
                        show(f"{str(place[0]).removeprefix('::ffff:')} asked: {_text(versions)}")
                    seen = True


def ask(address: str, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Yield what is found between this node and the one that listens there (host:port)."""
    name = f"peer {address}"
    host, _, port = address.rpartition(":")
    own, best_s, offset_s, theirs = own_versions(), float("inf"), 0.0, {}
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as channel:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = channel.makefile("rwb")
            with lines:
                for _ in range(ROUNDS):
                    sent, began = clock(), time.perf_counter()
                    lines.write(json.dumps(own).encode() + b"\n")
                    lines.flush()
                    answer = checked.mapping(json.loads(lines.readline(MOST_BYTES)), "answer")
                    took_s = time.perf_counter() - began
                    unix_s, theirs = checked.number(*checked.field(answer, "unix_s", "")), _versions(answer)
                    if took_s < best_s:
                        best_s, offset_s = took_s, unix_s - (sent + took_s / 2)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        found = f"does not answer: {getattr(error, 'strerror', None) or error}"
        do = "Run `ttp doctor --listen PORT` there, and look at the firewalls and names between the nodes"
        yield Finding(name, FAILED, found, "an answer of `ttp doctor --listen`", do)
        return
    yield judged(f"{name}, round trip", best_s < SLOW_ROUND_TRIP_S, f"{1e3 * best_s:.2f} ms", f"below {1e3 * SLOW_ROUND_TRIP_S:.0f} ms",
                 "Look at the network between the nodes: they agree on every step over it", ms=round(1e3 * best_s, 3))  # fmt: skip
    away = abs(offset_s)
    yield judged(f"{name}, clock", away < CLOSE_CLOCKS_S, f"{offset_s:+.3f} s from this node's, within {1e3 * best_s / 2:.1f} ms",
                 f"below {CLOSE_CLOCKS_S:g} s; beyond {SKEW_S:g} s certificates may be refused", "Synchronize the clocks (chrony, ntp)",
                 bad=FAILED if away >= SKEW_S else WARNING, offset_s=round(offset_s, 6))  # fmt: skip
    differ = [f"{key} {theirs[key]} there, {own[key]} here" for key in own if theirs.get(key) != own[key]]
    bad = FAILED if theirs.get("ttp") != own["ttp"] else WARNING
    yield judged(
        f"{name}, versions",
        not differ,
        "; ".join(differ) or _text(own),
        "the same on all nodes",
        "Install the same on both",
        bad=bad,
    )


def _versions(fields: Any) -> dict[str, str]:
    """Raises ValueError for what no doctor sends."""
    known: Mapping[str, Any] = checked.mapping(fields, "message")
    return {key: checked.string(known.get(key), key)[:80] for key in ("ttp", "torch", "python")}


def _text(versions: Mapping[str, str]) -> str:
    return f"TTP {versions['ttp']}, torch {versions['torch']}, Python {versions['python']}"
