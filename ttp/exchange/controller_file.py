"""The controllers of an attempt, from the ranks of a node to its agent: a small file in a directory that the agent has made for this attempt.

Owns the file `controllers.json`. The first rank of each node writes it before it registers with the controller: no controller ever leads ranks
whose agent cannot find it, however slow the attempt's store is. Never decides who leads: the controllers do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

NAME = "controllers.json"
MOST_BYTES = 1 << 20
"""A thousand controllers with long names of hosts have a tenth of it."""
MOST_ADDRESS = 300
MOST_PATH = 4096


@dataclass(frozen=True, slots=True)
class Controllers:
    """What the ranks of one node know of their controllers."""

    addresses: tuple[str, ...]
    """`host:port/term`: the controller that the attempt began with, then the standbys in the order in which they take over. Empty: the only rank of
    the job has it to itself."""
    pid: int
    """Of the first, where it is a process of this node; 0: it is not."""
    log_dir: str
    """Where its journals are, as seen from this node."""


def write(directory: Path, known: Controllers) -> None:
    """Replace the file of an attempt (the first rank of each node). Raises OSError."""
    files.replace(directory / NAME, json.dumps(asdict(known)))


def read(directory: Path) -> Controllers | None:
    """Return what the first rank of this node has written; None: nothing so far. Raises ValueError, OSError, each with one line."""
    try:
        content = read_json(directory / NAME, MOST_BYTES)
    except FileNotFoundError:
        return None
    fields = checked.mapping(content, "controllers")
    addresses = tuple(_address(*item) for item in checked.items(*checked.field(fields, "addresses", "")))
    pid = checked.integer(*checked.field(fields, "pid", ""), most=2**31 - 1)
    log_dir, path = checked.field(fields, "log_dir", "")
    if not checked.string(log_dir, path).startswith("/") or len(log_dir.encode()) > MOST_PATH:
        raise checked.Invalid(path, log_dir, f"an absolute path of at most {MOST_PATH} bytes")
    return Controllers(addresses, pid, log_dir)


def _address(value: object, path: str) -> str:
    address = checked.string(value, path)
    place, _, term = address.partition("/")
    host, _, port = place.rpartition(":")
    if (
        not host
        or not address.isprintable()
        or " " in address
        or len(address) > MOST_ADDRESS
        or not _is_port(port)
        or (term and not term.isdecimal())
    ):
        raise checked.Invalid(path, value, f"host:port/term of at most {MOST_ADDRESS} characters")
    return address


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536
