"""`ttp chaos`: run any job under a schedule of faults, and judge it.

ttp chaos run SCENARIO.yaml [options] -- ttprun ... train.py ...
ttp chaos faults                    the kinds of faults, their points and what is expected of each
ttp chaos check SCENARIO.yaml       read a scenario, and say what it would do
ttp chaos report RESULT.json        draw the report anew

0  everything held, every fault happened
1  an invariant was violated, a bit differs, the job did not come back
2  wrong usage: a scenario, a command or an option that cannot be carried out
3  everything held, but some faults, or some of their injections, did not happen: the job was over before, or never came to their place
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttp.chaos import matrix
from ttp.chaos.faults.scenario import EVENTS, KINDS, Scenario, load_scenario
from ttp.chaos.folder import taken
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.nodes.namespaces import NodesError
from ttp.chaos.observed.training_job import JobError
from ttp.chaos.report.html_page import page, write_report
from ttp.chaos.report.result_json import result_of, write_result
from ttp.chaos.report.terminal import Screen, show_summary
from ttp.chaos.run.campaign import Soak, read_baseline, run_campaign
from ttp.config import MOST_S
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.input_file import read_json
from ttp.inputs.options import above_zero, whole
from ttp.text.console import open_console

GOOD, BAD, USAGE, PARTLY = 0, 1, 2, 3
MOST_RESULT_BYTES = 1 << 30
IN_PLACE = (
    "lost ranks are replaced and the others run on, wherever that is possible (default: every fault costs a restart)"
)
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. argparse itself exits with 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, command = _split(arguments)
    args = parser().parse_args(own)
    console = open_console()
    try:
        with InterruptGuard(lambda text: console.print(escape(text))) as patience:
            return _do(console, args, command, patience)
    except ConfigError as error:
        console.print(f"[red]ttp chaos:[/] {escape(str(error))}")
        return USAGE
    except (JobError, NodesError) as error:
        console.print(f"[red]ttp chaos:[/] {escape(str(error))}")
        return BAD
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been ended")
        return 130


def _do(console: Console, args: argparse.Namespace, command: Sequence[str], patience: InterruptGuard) -> int:
    match args.what:
        case "run":
            return _run(console, args, command, patience)
        case "faults":
            return _list_kinds(console)
        case "check":
            return _check(console, args.scenario)
        case "matrix":
            return _matrix(console, args, patience)
        case _:
            return _draw(console, args)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the harness's own words from the job's, at the first `--`."""
    if "--" not in arguments:
        return list(arguments), []
    place = list(arguments).index("--")
    return list(arguments[:place]), list(arguments[place + 1 :])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ttp chaos", description=(__doc__ or "").split("\n\n")[0].partition(": ")[2])
    what = parser.add_subparsers(dest="what", required=True, metavar="{run,faults,check,report,matrix}")
    run = what.add_parser("run", help="run a job under a scenario: ttp chaos run SCENARIO [options] -- COMMAND")
    run.add_argument("scenario", type=Path)
    run.add_argument("--output", type=Path, default=Path("output/chaos"), help="folder of runs, result and report")
    run.add_argument("--seed", type=whole(most=checked.INT64_MAX), help="instead of the scenario's")
    run.add_argument(
        "--baseline", "--unbroken", type=Path, help="baseline.json of an earlier campaign of the same command"
    )
    run.add_argument("--no-compare", action="store_true", help="make no baseline run: nothing is compared")
    run.add_argument("--in-place", action="store_true", help=IN_PLACE)
    run.add_argument("--duration", help="soak: draw from the scenario's faults for so long (90, 30m, 2h)")
    run.add_argument("--faults-per-hour", type=above_zero("a number", 1e6), help="soak: how many (default: 60)")
    run.add_argument("--keep", action="store_true", help="keep what is in the output folder (default: it is emptied)")
    what.add_parser("faults", help="list the kinds of faults")
    check = what.add_parser("check", help="read a scenario, and say what it would do")
    check.add_argument("scenario", type=Path)
    report = what.add_parser("report", help="draw the report anew from a result.json")
    report.add_argument("result", type=Path)
    report.add_argument("--output", type=Path, help="default: report.html beside it")
    _add_matrix(
        what.add_parser("matrix", help="every kind x phase x role on the bundled trainer; goes on where it was")
    )
    return parser


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="default: output/chaos-matrix, with --nodes output/chaos-nodes")
    parser.add_argument("--nodes", action="store_true", help="the faults of nodes, on two nodes of network namespaces")
    parser.add_argument("--in-place", action="store_true", help=IN_PLACE)
    parser.add_argument("--repeat", type=whole(1), default=2, help="how often every cell is run")
    parser.add_argument("--per-job", type=whole(1), default=8, help="cells that one job takes, one after the other")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th cell from the I-th (0 to N-1)")
    parser.add_argument("--limit", type=whole(), help="at most so many cells now")
    parser.add_argument("--minutes", type=above_zero("minutes", 1e6), help="begin no job after so long")
    parser.add_argument("--kinds", help="only these kinds of cells, separated by commas")
    parser.add_argument(
        "--seed", type=whole(most=checked.INT64_MAX), default=0, help="of the order, and of all random choices"
    )
    parser.add_argument("--table", action="store_true", help="print what has been run so far, and run nothing")


def _run(console: Console, args: argparse.Namespace, command: Sequence[str], patience: InterruptGuard) -> int:
    scenario = load_scenario(args.scenario)
    if args.seed is not None:
        scenario = dataclasses.replace(scenario, seed=args.seed)
    scenario = dataclasses.replace(scenario, in_place=args.in_place)
    soak = _soak(args)
    output: Path = args.output.resolve()
    baseline = args.baseline.resolve() if args.baseline else None
    if baseline is not None and not args.keep:
        _check_outside(baseline, output)
    with taken(output, keep=args.keep):
        return _run_in(console, args, command, patience, scenario, soak, output, baseline)


def _check_outside(baseline: Path, output: Path) -> None:
    """Raises ConfigError: a baseline that emptying the output folder would remove, or that is none."""
    _, final = read_baseline(baseline)
    for path in (baseline, *([final.resolve()] if final else ())):
        if path.is_relative_to(output):
            raise ConfigError(
                f"--baseline: got {baseline}, of which {path} is in --output {output}, expected another folder, as that one is emptied;"
                " name another --output, or add --keep"
            )


def _run_in(
    console: Console,
    args: argparse.Namespace,
    command: Sequence[str],
    patience: InterruptGuard,
    scenario: Scenario,
    soak: Soak | None,
    output: Path,
    baseline: Path | None,
) -> int:
    """Run the campaign in a folder that is held; return the exit status."""
    console.print(
        f"scenario {escape(scenario.name)}: {len(scenario.faults)} faults; seed {scenario.seed}; output {output}"
    )
    campaign = None
    with Screen(console) as screen:
        for campaign in run_campaign(
            scenario,
            command,
            output,
            soak=soak,
            baseline=baseline,
            compare=not args.no_compare,
            on_progress=screen.on_progress,
            patience=patience,
        ):
            content = write_result(campaign) if campaign.runs else {}
    assert campaign is not None
    show_summary(console, campaign)
    report = write_report(content, output / "report.html")
    console.print(f"result: {output / 'result.json'}\nreport: {report}")
    content = result_of(campaign)
    if not content["good"]:
        console.print(f"[bold red]VIOLATED[/] (seed {scenario.seed})")
        return BAD
    missed = content["not_reached"] + content["incomplete"]
    if missed:
        console.print(
            f"[yellow]{missed} of {content['faults']} faults did not happen, or not with all injections[/]: the job was over before"
            " (give it more steps), or did not come to their place"
        )
        return PARTLY
    console.print(f"[bold green]HELD[/]: {content['faults']} faults, {content['fired']} injections")
    return GOOD


def _soak(args: argparse.Namespace) -> Soak | None:
    if args.duration is None:
        if args.faults_per_hour is not None:
            raise ConfigError(
                f"--faults-per-hour is {args.faults_per_hour} without --duration: say for how long, as in --duration 2h"
            )
        return None
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([smhd]?)", args.duration)
    rate = 60.0 if args.faults_per_hour is None else args.faults_per_hour
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--duration: got {checked.shown(args.duration)}, expected seconds, or a number with s, m, h or d (30m)"
        )
    lasts_s = float(match[1]) * _UNITS[match[2]]
    if lasts_s > MOST_S:
        raise ConfigError(f"--duration: got {checked.shown(args.duration)}, expected at most {MOST_S:g} s")
    return Soak(lasts_s, rate)


def _list_kinds(console: Console) -> int:
    table = Table("fault", "hits", "what it is", "points", "becomes")
    for name, kind in KINDS.items():
        table.add_row(name, kind.place, kind.text, " ".join(kind.points) or "-", " or ".join(kind.outcomes))
    console.print(table)
    console.print(f"events for `then`: {' '.join(EVENTS)}")
    return GOOD


def _check(console: Console, path: Path) -> int:
    scenario = load_scenario(path)
    console.print(f"scenario {escape(scenario.name)}: {len(scenario.faults)} faults; seed {scenario.seed}")
    for number, fault in enumerate(scenario.faults, 1):
        console.print(f"{number:4}  {escape(fault.text)}: {' or '.join(fault.outcomes)}")
    return GOOD


def _matrix(console: Console, args: argparse.Namespace, patience: InterruptGuard) -> int:
    if args.nodes and args.in_place:
        raise ConfigError(
            "--in-place: got it with --nodes, expected one of them: the cells of --nodes are about nodes that are lost or cut off"
        )
    which = "nodes" if args.nodes else "in-place" if args.in_place else "matrix"
    output = (args.output or Path(f"output/chaos-{which}")).resolve()
    if args.table:
        print(matrix.table(matrix.read_lines(output), which))
        return GOOD
    plan = _plan(args, output, which)
    with taken(output, keep=True):
        return _run_cells(console, plan, patience)


def _run_cells(console: Console, plan: matrix.MatrixPlan, patience: InterruptGuard) -> int:
    """Run cells in a folder that is held; return the exit status."""
    output, which = plan.output, plan.which
    todo = len(matrix.open_cells(plan))
    console.print(f"{len(matrix.cells(which))} cells, {todo} to run now; output {output}")
    good, beginning = True, matrix.read_lines(output)
    with Screen(console) as screen:
        for campaign in matrix.run_matrix(plan, screen.on_progress, patience):
            content = result_of(campaign)
            good = good and bool(content["good"])
            console.print(f"{campaign.scenario.name}: {'held' if content['good'] else '[red]VIOLATED[/]'}")
            if not content["good"]:
                show_summary(console, campaign)
    run = matrix.read_lines(output)[len(beginning) :]
    console.print(
        f"{sum(line['happened'] for line in run)} of {todo} cells were run, {sum(line['blows'] for line in run)} injections"
    )
    print(matrix.table(matrix.read_lines(output), which))
    for line in run:
        if line["finding"]:
            console.print(f"[yellow]finding[/]: {escape(line['finding'])}")
    return GOOD if good else BAD


def _plan(args: argparse.Namespace, output: Path, which: str) -> matrix.MatrixPlan:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", args.shard)
    if match is None or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--shard: got {checked.shown(args.shard)}, expected I/N with I from 0 to N - 1")
    kinds = tuple(args.kinds.split(",")) if args.kinds else ()
    known = dict.fromkeys(cell.kind for cell in matrix.cells(which))
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(f"--kinds: got {checked.shown(unknown[0])}, expected some of {', '.join(known)}")
    return matrix.MatrixPlan(
        output=output,
        repeat=args.repeat,
        per_job=args.per_job,
        shard=(int(match[1]), int(match[2])),
        limit=args.limit,
        until_monotonic_s=time.monotonic() + args.minutes * 60 if args.minutes else float("inf"),
        kinds=kinds,
        seed=args.seed,
        which=which,
    )


def _draw(console: Console, args: argparse.Namespace) -> int:
    try:
        content = checked.mapping(read_json(args.result, MOST_RESULT_BYTES), "content")
        expected = {"incidents", "verdicts", "curves", "name"} - set(content)
        if expected:
            raise ValueError(f"no {', '.join(sorted(expected))}")
        body = page(content)
    except OSError as error:
        raise ConfigError(f"{args.result}: {error.strerror}, expected the result.json of a campaign") from None
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:  # of a shape that no campaign writes
        raise ConfigError(
            f"{args.result}: {' '.join(str(error).split()) or type(error).__name__}, expected the result.json of a campaign"
        ) from None
    output = args.output or args.result.parent / "report.html"
    try:
        output.write_text(body, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{output} cannot be written: {error}") from None
    console.print(str(output))
    return GOOD


if __name__ == "__main__":
    sys.exit(main())
