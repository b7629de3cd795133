"""`python -m ttp.trainer --config NAME_OR_PATH [--section.key value ...]`: the command line.

Owns arguments, `--help` and exit statuses: 0 trained, 1 an error while training, 2 a wrong command line, configuration,
data set or checkpoint (a restart would change nothing, and ttprun makes none), 75 no controller (nothing is lost by a restart,
which may help), 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence

from ttp.errors import STAY_WRONG, CheckpointError, ConfigError, ControllerError, TTPError

from .config.loader import DEFAULT_CONFIG, MODEL_TYPE, describe, load_config, parse_overrides, presets

PLAN_OPTIONS = ("--world-size", "--devices-per-node", "--disk-gb-per-s", "--memory", "--global-batch", "--top", "--device-tflops",
                "--node-gb-per-s", "--network-gb-per-s")  # fmt: skip
"""Options of `--plan` that take a value (`command.py` reads them)."""
FOR_THE_RESTART = 75
"""As of a rank that has persisted: nothing was trained yet, and peers are not waited for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says and return the exit status. Raises what is a fault: ControllerError, or a bug."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        print(help_text())
        return 0
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("ttp.trainer.config").setLevel(logging.ERROR)  # rank 0 logs the notes on a file for all
    try:
        name, rest = _take_option(args, "--config", f"a preset ({', '.join(presets())}) or a path")
        model_type, rest = _take_option(rest, "--model_type", "the name of a section of the configuration file")
        planned, rest = _take_plan(rest)
        rest = [
            "--dataset_config.tokenizer" + arg.removeprefix("--tokenizer")
            if arg.partition("=")[0] == "--tokenizer"
            else arg
            for arg in rest
        ]
        config = load_config(name or DEFAULT_CONFIG, parse_overrides(rest), model_type or MODEL_TYPE)
        if planned is not None:
            from .plan.command import run_plan

            run_plan(config, planned)
            return 0
    except ConfigError as exc:
        print(f"ttp.trainer: {exc}", file=sys.stderr)
        return 2

    def work() -> None:
        from .train import run  # torch is loaded only when there is something to train
        from .world import world_from_env

        run(config, world_from_env())

    return status_of(work, "ttp.trainer")


def status_of(work: Callable[[], None], program: str) -> int:
    """Do the work of a rank and return the exit status, after a line that begins with the program's name for what must be corrected.
    Raises what is a fault: ControllerError, or a bug."""
    from ttp import Settings
    from ttp.exchange.error_file import install, record

    try:
        install()
        Settings.from_env()  # before torch takes an address or a port of it
        work()
    except ControllerError:
        raise
    except TTPError as exc:
        print(f"{program}: {type(exc).__name__}: {exc}", file=sys.stderr)
        record(exc)
        return 2 if isinstance(exc, (*STAY_WRONG, CheckpointError)) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def help_text() -> str:
    """Return the usage and every key with its type, default and meaning."""
    lines = [
        "usage: ttprun [torchrun's arguments] -m ttp.trainer [--config NAME_OR_PATH] [--section.key value ...]",
        "       python -m ttp.trainer ...    alone, as one rank",
        "       python -m ttp.trainer ... --plan --world-size N [--devices-per-node 8] [--disk-gb-per-s 1] [--memory 31GB]    what it would need",
        "       python -m ttp.trainer ... --plan --search --world-size N [--memory 31GB] [--global-batch N] [--top 10] [--devices-per-node 8]",
        "              [--device-tflops 100] [--node-gb-per-s 100] [--network-gb-per-s 10]    layouts for it, the fastest first",
        "",
        f"--config takes a preset ({', '.join(presets())}; default: {DEFAULT_CONFIG}) or the path of a YAML file with these sections.",
        f"--model_type NAME takes the file's section NAME for model_config (default: {MODEL_TYPE}, where there is one).",
        "--tokenizer PATH is short for --dataset_config.tokenizer PATH.",
        "Any key can be given on the command line too; values are YAML:",
        "    --training_config.training_iters 200 --optimizer_config.betas='[0.9, 0.99]'",
    ]
    section = ""
    for key, kind, default, doc in describe():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"{section}:"]
        lines.append(f"  --{key} ({kind}; {'required' if default == 'required' else f'default {default}'})")
        lines += textwrap.wrap(doc, 110, initial_indent="        ", subsequent_indent="        ")
    return "\n".join(lines)


def _take_option(args: Sequence[str], option: str, expected: str) -> tuple[str | None, list[str]]:
    """Split off `option VALUE` or `option=VALUE`; None without it. Raises ConfigError when it has no value or comes twice."""
    values, rest = [], []
    pending = list(args)
    while pending:
        arg = pending.pop(0)
        if arg == option:
            if not pending or pending[0].startswith("--"):
                raise ConfigError(f"argument {option}: got nothing after it, expected {expected}")
            values.append(pending.pop(0))
        elif arg.startswith(f"{option}="):
            values.append(arg.removeprefix(f"{option}="))
        else:
            rest.append(arg)
    if len(values) > 1:
        raise ConfigError(f"argument {option}: got it {len(values)} times, expected once. Leave the others out")
    return (values[0] if values else None), rest


def _take_plan(args: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Split off `--plan` and its own options; None without it."""
    if "--plan" not in args:
        return None, list(args)
    own, rest, pending = [], [], [arg for arg in args if arg != "--plan"]
    while pending:
        arg = pending.pop(0)
        if arg == "--search":
            own.append(arg)
        elif arg.partition("=")[0] in PLAN_OPTIONS:
            own += [arg] if "=" in arg else [arg, *pending[:1]]
            pending = pending if "=" in arg else pending[1:]
        else:
            rest.append(arg)
    return own, rest


def run_as_program(argv: Sequence[str] | None = None, program: Callable[[Sequence[str] | None], int] = main) -> None:
    """Run `program` with these arguments (None: the command line's) and end the process with its status. After an error it ends at once: taking torch's process groups down while a collective
    is in flight can hang or abort."""
    status = 1
    if set(sys.argv if argv is None else argv) & {
        "--plan",
        "--help",
        "-h",
    }:  # nothing is trained: `| head` ends it as any filter
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        status = program(argv)
    except BaseException as exc:  # the interpreter's own way out would come after the teardown
        sys.excepthook(type(exc), exc, exc.__traceback__)  # the launcher gets the reason too
        status = FOR_THE_RESTART if isinstance(exc, ControllerError) else 1
    if status == 0:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_as_program()
