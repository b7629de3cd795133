"""`ttp doctor`: looks before a long run at what the run relies on, and says of each thing whether it is as it must be.

Owns the command line, the order of the checks and the exit statuses.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from ttp.addresses import listen
from ttp.config import Settings
from ttp.doctor import finding, job_layout, save_directories, this_machine, two_nodes
from ttp.doctor.finding import Finding
from ttp.doctor.save_directories import CheckpointSize
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.options import whole
from ttp.text.console import open_console
from ttp.trainer.config.memory_size import memory_bytes

GOOD, BAD, USAGE, INTERRUPTED = 0, 1, 2, 130
MOST_RANKS, MOST_NODES = 100_000, 1_000_000
_ADDRESS = re.compile(r"(?:(\[[^\[\]]+\]|[^\s:/\[\]]*):)?(\d{1,5})")
_STATUSES = """exit status:
  0  every check is ok, or a warning
  1  a check failed: the run would fail, or lose what it need not
  2  a wrong command line

docs/doctor.md says more."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is for the trainer is in `overrides`. Exits with 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="ttp doctor",
        description="Look at what a long run relies on, before it: directories, network, limits, clocks, the layout.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save-dirs", nargs="+", type=Path, default=[], metavar="DIR",
                        help="the job's checkpoint directories (default: those of --config)")  # fmt: skip
    parser.add_argument(
        "--nproc-per-node", type=whole(1, MOST_RANKS), default=1, metavar="N", help="ranks of each node (default: 1)"
    )
    parser.add_argument(
        "--nnodes", type=whole(1, MOST_NODES), default=1, metavar="N", help="nodes of the job (default: 1)"
    )
    parser.add_argument(
        "--nodes", nargs="+", default=[], metavar="HOST", help="names of the other nodes: each must resolve here"
    )
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="a preset or file of the bundled trainer; overrides follow as `--section.key value`",
    )
    parser.add_argument(
        "--state", metavar="SIZE", help="of a trainer of your own: the bytes of a checkpoint, as in 120GB"
    )
    parser.add_argument(
        "--device", default="", help="cpu, cuda, npu, musa, xpu, or auto (default: that of --config, or auto)"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a node on which `ttp doctor --listen` runs; repeatable",
    )
    parser.add_argument(
        "--listen", metavar="[HOST:]PORT", help="do nothing but answer `--peer` of other nodes, until Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given, overrides = parser.parse_known_args(arguments)
    given.overrides = overrides
    if given.overrides and given.config is None:
        parser.error(f"unrecognized arguments: {' '.join(given.overrides)} (a trainer's key needs --config)")
    return given


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command line; return the exit status."""
    given = parse(argv)
    console = console or open_console()
    try:
        if given.listen is not None:
            return _listen(given.listen, console)
        found, notes = [], _not_checked(given)
        for each in check(given):
            found.append(each)
            if not given.json:
                console.print(finding.line(each))
    except ConfigError as error:
        if given.json:
            print(json.dumps({"status": USAGE, "error": str(error)}))
        else:
            print(f"ttp doctor: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return GOOD if given.listen is not None else INTERRUPTED
    if given.json:
        print(json.dumps(finding.fields(found, notes), indent=1))
    else:
        for note in notes:
            console.print(f"not checked: {note}", markup=False)
    return BAD if finding.has_failed(found) else GOOD


def check(given: argparse.Namespace) -> Iterator[Finding]:
    """Yield what each check finds. Raises ConfigError: the command line names what there cannot be."""
    ranks, nodes = given.nproc_per_node, given.nnodes
    dump_bytes = memory_bytes(given.state, "--state") if given.state is not None else 0
    for address in given.peer:
        _place(address, "--peer")
    layout = job_layout.read(given.config, given.overrides, ranks, nodes) if given.config is not None else None
    device = given.device or (layout.device if layout is not None else "") or "auto"
    yield from this_machine.check(device, ranks, nodes, given.nodes)
    if layout is not None:
        yield layout.finding
        dump_bytes = dump_bytes or layout.dump_bytes
    directories = given.save_dirs or (map(Path, layout.save_dirs) if layout is not None else ())
    for directory in directories:
        yield from save_directories.check(directory, _dump(dump_bytes, nodes))
    for address in given.peer:
        yield from two_nodes.ask(address)


def _dump(nbytes: int, nodes: int) -> CheckpointSize | None:
    if not nbytes:
        return None
    try:
        settings = Settings.from_env()
    except ConfigError:
        settings = Settings()  # the check of settings says what is wrong
    return CheckpointSize(nbytes, -(-nbytes // nodes), not settings.shared_dirs, settings.total_timeout_s)


def _not_checked(given: argparse.Namespace) -> list[str]:
    """Return what the command line gives no answer to, and how it would."""
    notes = []
    if not given.save_dirs and given.config is None:
        notes.append("directories: name them with --save-dirs, or a configuration with --config")
    if given.config is None:
        notes.append(
            "which deaths are survived: name a configuration with --config; of another trainer, the job's first lines say it"
        )
        if given.state is None:
            notes.append("room and time of a checkpoint: give its size with --state, or a configuration with --config")
    if given.nnodes > 1 and not given.peer:
        notes.append(
            "clocks and versions of other nodes: `ttp doctor --listen PORT` on one, `ttp doctor --peer HOST:PORT` on the others"
        )
    return notes


def _place(text: str, option: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65536 or (option == "--peer" and not found[1]):
        expected = "host:port" if option == "--peer" else "a port, or host:port"
        raise ConfigError(f"invalid {option}: got {checked.shown(text)}, expected {expected}")
    return (found[1] or "").strip("[]"), int(found[2])


def _listen(text: str, console: Console) -> int:
    host, port = _place(text, "--listen")
    try:
        server = listen(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {text}: {getattr(error, 'strerror', None) or error}. Name a free port, and a host of this node"
        ) from None
    with server:
        console.print(
            f"listening on port {port}: ask with `ttp doctor --peer HOST:{port}` on the other nodes; Ctrl-C ends it",
            markup=False,
        )
        two_nodes.serve(server, lambda line: console.print(line, markup=False))
    return GOOD
