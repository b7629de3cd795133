"""`ttp ckpt COMMAND ...`, also `python -m ttp.checkpoint`: looking at checkpoints, comparing, exporting, pruning and signing them.

Owns the command line. Each command is a function of the parsed arguments that returns an `Answer`; its module, and torch with it,
is imported when it is asked for. The older order `PATH {list,inspect,verify}` is taken as well.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ttp.checkpoint.cli.output import Answer, Status, UsageError, print_answer, system_error_text
from ttp.errors import TTPError
from ttp.inputs.options import whole
from ttp.mirror.url import is_url
from ttp.text.console import open_console

COMMANDS = {
    "list": ("listing", "what a folder holds: each checkpoint's step, cause, size and state"),
    "inspect": ("inspect", "step, cause, layout, sizes, host state, and who wrote what"),
    "verify": ("verify", "check that all files are there, whole, and as they were written"),
    "diff": ("diff", "compare two checkpoints bit by bit: weights, optimizer state, plain values"),
    "export": ("export", "write the newest valid checkpoint, or the one named, as one file or folder"),
    "prune": ("prune", "show which checkpoints are older than the newest valid ones; with --yes: remove them"),
    "sign": ("sign", "verify a checkpoint by its checksums, then sign it, or all of a folder"),
    "keygen": ("keygen", "make a pair of Ed25519 keys, with which checkpoints are signed and verified"),
}
"""The module of this room whose `run` it is, and what `--help` and docs/commands.md say."""
_INTERRUPTED = 130
_SIGNALLED = 128
"""Added to a signal's number, as a shell says it."""

FORMATS = ("safetensors", "torch", "hf")
DTYPES = ("float32", "bfloat16", "float16")

_STATUSES = """exit status:
  0  yes: valid, complete, equal; exported, pruned, signed
  1  no: broken, or none is there (list, inspect, verify, sign); different (diff)
  2  wrong usage: the command line, no such folder, an output that is there already
  3  no answer, or not done: no right to read, no room, a broken checkpoint to compare, export or keep

docs/checkpoints.md says more."""


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command line; return the exit status. argparse itself exits with 2."""
    given = parser().parse_args(command_first(sys.argv[1:] if argv is None else argv))
    console = console or open_console(soft_wrap=False)
    module, _ = COMMANDS[given.command]
    run: Callable[[argparse.Namespace, Console], Answer] = importlib.import_module(f"{__package__}.{module}").run
    progress = open_console(sys.stderr)  # the answer alone is on stdout
    try:
        with _ended_as_by_ctrl_c():
            if any(map(is_url, _named(given))):
                from ttp.checkpoint.cli.urls import run_on_urls  # fsspec takes a while

                answer = run_on_urls(run, given, progress)
            else:
                _check_folders(given)
                answer = run(given, progress)
    except UsageError as error:
        answer = _refusal(given.command, Status.USAGE, str(error))
    except TTPError as error:
        answer = _refusal(given.command, Status.FAILED, str(error))
    except OSError as error:
        answer = _refusal(given.command, Status.FAILED, system_error_text(error))
    except _Ended as ended:
        return _SIGNALLED + ended.number
    except KeyboardInterrupt:
        return _INTERRUPTED  # what a shell says of Ctrl-C; no command leaves anything half done that looks whole
    print_answer(answer, console, as_json=given.json)
    return int(answer.status)


class _Ended(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP end a command as Ctrl-C does: it removes what it has not finished. One that is ignored (nohup) stays so."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the removal takes a while
        raise _Ended(number)

    in_main = threading.current_thread() is threading.main_thread()
    signals = [one for one in (signal.SIGTERM, signal.SIGHUP) if in_main and signal.getsignal(one) is signal.SIG_DFL]
    for one in signals:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in signals:
            signal.signal(one, signal.SIG_DFL)


def _check_folders(given: argparse.Namespace) -> None:
    """Raise UsageError unless every path of the command line is a folder."""
    for path in map(Path, _named(given)):
        if not path.is_dir():
            what = "is a file" if path.exists() else "is not there"
            raise UsageError(f"{path} {what}: expected a checkpoint (iter_0000042) or a folder of checkpoints")


def _named(given: argparse.Namespace) -> list[str]:
    """Return every path and URL of checkpoints on the command line."""
    named = [getattr(given, argument, []) for argument in ("path", "a", "b")]
    return [str(path) for each in named for path in (each if isinstance(each, list) else [each])]


def _place(text: str) -> Path | str:
    """Return a path, or a URL as it is."""
    return text if is_url(text) else Path(text)


def command_first(arguments: Sequence[str]) -> list[str]:
    """Return the command line with its command in front, where a folder was named before it."""
    places = [place for place, word in enumerate(arguments) if not word.startswith("-")]
    if len(places) < 2 or arguments[places[0]] in COMMANDS:
        return list(arguments)
    command = places[1]
    return [arguments[command], *arguments[:command], *arguments[command + 1 :]]


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    root = argparse.ArgumentParser(
        prog="ttp ckpt",
        description="Look at checkpoints, compare, export, prune and sign them.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {name: _command(parsers, name, summary) for name, (_, summary) in COMMANDS.items()}
    one = "a checkpoint (iter_0000042), or a folder of checkpoints: the newest one of it; or the URL of either"
    many = "a folder of checkpoints, or an output folder that has one"
    _look(commands, one, many)

    diff = commands["diff"]
    diff.add_argument("a", type=_place, metavar="A", help=one)
    diff.add_argument("b", type=_place, metavar="B", help=one)
    diff.add_argument("--limit", type=whole(1), default=20, metavar="N", help="differing tensors shown (default: 20)")
    diff.add_argument("--shallow", action="store_true", help="do not compare checksums first")

    export = commands["export"]
    export.add_argument("path", type=_place, metavar="PATH", help=one + " that is valid")
    export.add_argument("output", type=Path, metavar="OUTPUT", help="a new file (hf: a new folder)")
    export.add_argument(
        "--to", required=True, choices=FORMATS, help="hf: a model of the bundled trainer, for transformers"
    )
    export.add_argument("--all", action="store_true", help="optimizer state, too (safetensors, torch)")
    export.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as stored; hf: float32)")
    export.add_argument("--tokenizer", help="hf: a tokenizer to put beside; default: the one that the checkpoint names")

    prune = commands["prune"]
    prune.add_argument(
        "path", type=_place, nargs="+", metavar="PATH", help=many + "; where each node has its own: those of all nodes"
    )
    prune.add_argument(
        "--keep", type=whole(1), required=True, metavar="N", help="valid checkpoints that stay, 1 or more"
    )
    prune.add_argument(
        "--partial", action="store_true", help="parts of older steps that are not whole in these folders go as well"
    )
    prune.add_argument("--yes", action="store_true", help="remove; without it nothing is changed")
    _sign(commands)
    for command in (commands[name] for name in ("verify", "diff", "export", "prune")):
        command.add_argument(
            "--key", metavar="FILE", help="public key that must have signed it, besides (default: TTP_VERIFY_KEY)"
        )
    return root


def _sign(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    sign = commands["sign"]
    sign.add_argument("path", type=_place, metavar="PATH", help="a checkpoint (iter_0000042), or a folder of them: all")
    sign.add_argument("--sign-key", required=True, metavar="FILE", help="private key, as `keygen` makes it")
    keygen = commands["keygen"]
    keygen.add_argument(
        "prefix", type=Path, metavar="PREFIX", help="PREFIX.pem and PREFIX.pub.pem are new; of a folder: ttp.pem in it"
    )


def _look(commands: Mapping[str, argparse.ArgumentParser], one: str, many: str) -> None:
    listing = commands["list"]
    listing.add_argument("path", type=_place, metavar="PATH", help=many + ", or a URL")
    listing.add_argument("--shallow", action="store_true", help=argparse.SUPPRESS)  # it always is
    inspect = commands["inspect"]
    inspect.add_argument("path", type=_place, metavar="PATH", help=one)
    inspect.add_argument("--shallow", action="store_true", help=argparse.SUPPRESS)
    verify = commands["verify"]
    verify.add_argument(
        "path",
        type=_place,
        metavar="PATH",
        help="a checkpoint (iter_0000042), a folder of them (all), or the URL of either",
    )
    verify.add_argument("--shallow", action="store_true", help="names, sizes and completeness only, no checksums")


def _command(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    command = parsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return command


def _refusal(command: str, status: Status, text: str) -> Answer:
    return Answer(status, {"error": text}, [f"[red]ttp ckpt {command}:[/] {escape(text)}"])
