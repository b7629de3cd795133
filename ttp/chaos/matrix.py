"""The matrix: every kind of fault in every phase to every role of rank that can occur, on the bundled trainer's gpt_tiny.

    ttp chaos matrix [--output DIR] [--repeat 2] [--per-job 8] [--shard I/N] [--limit CELLS] [--minutes M] [--kinds A,B]
    ttp chaos matrix --nodes ...         the faults of nodes instead, on two nodes of network namespaces
    ttp chaos matrix --in-place ...      lost ranks are replaced, and the others run on; second faults on the way back
    ttp chaos matrix --table             only print what has been run so far, as the table of docs/chaos.md

A job takes several cells, one after the other. What was run is kept, a line a cell, in DIR/cells.jsonl: a run that was ended
goes on where it was, and shards (of several machines, or hours) add up when their files are laid together. The order is
shuffled by the seed, one cell of each kind first: so whatever was run is a fair sample.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp import files
from ttp.chaos.cell import MatrixCase, labelled
from ttp.chaos.faults.inject import POINTS, START_POINTS
from ttp.chaos.faults.scenario import FaultSpec, Moment, Scenario
from ttp.chaos.node_cells import NODES, RANKS_PER_NODE, node_cells
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.observed.nodes_job import RENDEZVOUS
from ttp.chaos.observed.training_job import read_jsonl
from ttp.chaos.report.result_json import write_result
from ttp.chaos.run.campaign import Campaign, run_campaign
from ttp.chaos.run.harness import OnProgress
from ttp.chaos.verdict.in_place import finding
from ttp.chaos.verdict.invariants import VIOLATED
from ttp.errors import ConfigError

RANKS = 4
STEPS = 220
ROLES = {"first": 0, "standby": 1, "last": 3}
"""Rank 0, which starts the controller and publishes; the rank that has the standby; one that has neither."""
PARTED = {"first": 3, "standby": 0, "last": 0}
"""Whom a fault before hits, for each role: no partner of that role's rank, so that its shards have a holder left; and such
that the role's rank is the lowest one left, which publishes (`last` never is)."""
IN_STEP = ("kill", "segv", "abort", "exit", "raise", "async", "stop", "gil", "hang", "term")
DUMP_CALLS = (0, 1, 2)
NEWCOMER_POINTS = ("start", "protected")
"""A process that takes a lost one's place loads nothing."""
IN_PLACE_EVENTS = ("freeze_sent", "frozen", "decided", "regroup_sent", "replacement_came", "regrouped")
DUMP_EVENTS = ("freeze_sent", "frozen", "decided", "write_sent", "publish_sent", "published")
ENVIRON = {"TTP_HANG_FLOOR_S": "3", "TTP_HANG_START_S": "20", "TTP_VOUCHED_LEASE_S": "3", "TORCH_FR_BUFFER_SIZE": "0"}
"""A hang, and an interpreter that is held, are found soon although eight steps are not over when some faults come. Without torch's
flight recorder: its entries keep the heap from being used again while they fill their ring, which looks like a leak in so short a job."""


def cells(which: str = "matrix") -> tuple[MatrixCase, ...]:
    """Return every cell that can occur on one node (`matrix`), those of `node_cells.py` (`nodes`), or those of one node where ranks are replaced
    (`in-place`): without what needs a dump, and with second faults while the ranks regroup."""
    match which:
        case "nodes":
            return node_cells()
        case "in-place":
            return labelled((*_in_step(), *_regrouping(), *_mild(), *_elsewhere(IN_PLACE_EVENTS)))
        case _:
            return labelled((*_in_step(), *_in_dump(), *_in_start(), *_mild(), *_elsewhere(DUMP_EVENTS), *_disk()))


def _soon() -> Moment:
    return Moment(after_steps=(3, 7))


def _fault(kind: str, rank: int | None = None, **fields: Any) -> FaultSpec:
    ranks = () if rank is None else (rank,)
    return FaultSpec(kind=kind, ranks=ranks, moment=fields.pop("moment", _soon()), **fields)


def _in_step() -> Iterator[MatrixCase]:
    for kind in IN_STEP:
        for point in POINTS:
            for role, rank in ROLES.items():
                yield MatrixCase(kind, point, role, _fault(kind, rank, point=point))
    for kind in ("kill", "stop", "term"):  # from outside, wherever the rank is
        for role, rank in ROLES.items():
            yield MatrixCase(kind, "any", role, _fault(kind, rank, point="now"))
    for one in range(RANKS):
        for other in range(one + 1, RANKS):
            pair = FaultSpec(kind="kill", ranks=(one, other), count=2, moment=_soon(), point="now")
            yield MatrixCase("two kills", "any", f"ranks {one} and {other}", pair)


def _in_dump() -> Iterator[MatrixCase]:
    """A second fault while the first one's dump is written or published, at each system call that counts."""
    for role, rank in ROLES.items():
        for point in ("write", "publish") if role != "last" else ("write",):
            for call in DUMP_CALLS:
                for kind in ("kill", "stop", "abort"):
                    second = FaultSpec(kind=kind, ranks=(rank,), point=point, call=call)
                    first = _fault("kill", PARTED[role], point="backward", then=(second,))
                    yield MatrixCase(f"{kind} in a dump", f"{point} {call}", role, first)


def _in_start() -> Iterator[MatrixCase]:
    """A second fault while the next attempt begins."""
    for role, rank in ROLES.items():
        for point in START_POINTS:
            for kind in ("kill", "segv"):
                second = FaultSpec(kind=kind, ranks=(rank,), point=point)
                yield MatrixCase(f"{kind} in a start", point, role, _fault("kill", rank, point="now", then=(second,)))


def _regrouping() -> Iterator[MatrixCase]:
    """A second fault on the way back in place: to the process that comes for the lost one, as it starts and later, and to a rank that stays."""
    for role, rank in ROLES.items():
        for point in NEWCOMER_POINTS:
            for kind in ("kill", "segv", "stop"):
                second = FaultSpec(kind=kind, ranks=(rank,), point=point)
                yield MatrixCase(
                    f"{kind} of a new process", point, role, _fault("kill", rank, point="now", then=(second,))
                )
        for event in IN_PLACE_EVENTS[-3:]:
            for whom, other in (("a new process", rank), ("a rank that stays", PARTED[role])):
                for kind in ("kill", "stop"):
                    if whom == "a new process" and event == "regroup_sent":
                        continue  # it has not come yet
                    second = FaultSpec(kind=kind, ranks=(other,), moment=Moment(event=event), point="now")
                    first = _fault("kill", rank, point="backward", then=(second,))
                    yield MatrixCase(f"{kind} of {whom}", event, role, first)


def _mild() -> Iterator[MatrixCase]:
    """What need not be a fault at all."""
    for role, rank in ROLES.items():
        for point in POINTS:
            yield MatrixCase("slow", point, role, _fault("slow", rank, point=point, for_s=1.5))
        yield MatrixCase("stop, and go on", "any", role, _fault("stop", rank, point="now", for_s=1.0))
        yield MatrixCase("cpu hog", "any", role, _fault("cpu", rank, point="now", for_s=2.0))
        yield MatrixCase("memory hog", "any", role, _fault("memory", rank, point="now", for_s=2.0, mib=512))


def _elsewhere(events: Sequence[str]) -> Iterator[MatrixCase]:
    yield MatrixCase("kill_agent", "any", "launcher", _fault("kill_agent"))
    if events == DUMP_EVENTS:
        broken = _fault("kill", 2, point="now", then=(_then("corrupt", "published"),))
        yield MatrixCase("corrupt", "published", "checkpoint", broken)
    for kind in ("kill_controller", "stop_controller"):
        idle = _fault(kind, for_s=8.0 if kind == "stop_controller" else 0.0)
        yield MatrixCase(kind, "training", "controller", idle)
        for event in events:
            dump = _fault("kill", 2, point="now", then=(_then(kind, event),))
            yield MatrixCase(kind, event, "controller", dump)
    again = _then("kill_controller", "standby_started")
    yield MatrixCase("kill_controller", "in turn", "controller", _fault("kill_controller", then=(again,)))
    last = (again, FaultSpec(kind="kill", ranks=(2,), moment=Moment(event="standby_started"), point="now"))
    yield MatrixCase(
        "kill_controller", "in turn", "and a rank", _fault("kill_controller", then=last, expect=("saved",))
    )


def _then(kind: str, event: str) -> FaultSpec:
    return FaultSpec(kind=kind, moment=Moment(event=event), for_s=8.0 if kind == "stop_controller" else 0.0)


def _disk() -> Iterator[MatrixCase]:
    allowed = ("saved", "refused", "fell_back")
    for role, rank in ROLES.items():
        for kind, point in (
            ("enospc", "write"),
            ("eio", "write"),
            ("torn", "write"),
            ("slowdisk", "write"),
            ("eio", "publish"),
            ("slowdisk", "publish"),
        ):
            if role == "last" and point == "publish":
                continue
            second = FaultSpec(kind=kind, ranks=(rank,), point=point, for_s=0.1)
            yield MatrixCase(
                kind, point, role, _fault("kill", PARTED[role], point="now", then=(second,), expect=allowed)
            )


# --- running ---


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPlan:
    """What of the matrix is to be run now."""

    output: Path
    repeat: int = 2
    per_job: int = 8
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    until_monotonic_s: float = float("inf")
    kinds: tuple[str, ...] = ()
    seed: int = 0
    which: str = "matrix"
    """Of which cells: `matrix`, `nodes`, `in-place`."""

    @property
    def nodes(self) -> bool:
        return self.which == "nodes"


def ordered(plan: MatrixPlan) -> list[MatrixCase]:
    """Return this shard's cells in their order: shuffled, one of each kind first, then the rest; again for each repeat."""
    rng = random.Random(plan.seed)
    expected = [cell for cell in cells(plan.which) if not plan.kinds or cell.kind in plan.kinds]
    rng.shuffle(expected)
    seen: set[str] = set()
    first = [cell for cell in expected if not (cell.kind in seen or seen.add(cell.kind))]  # type: ignore[func-returns-value]
    rest = [cell for cell in expected if cell not in first]
    index, count = plan.shard
    return ([*first, *rest] * plan.repeat)[index::count]


def open_cells(plan: MatrixPlan) -> list[MatrixCase]:
    """Return the cells that have not been run as often as they should."""
    done: dict[str, int] = {}
    for line in read_lines(plan.output):
        if line["happened"]:
            done[line["cell"]] = done.get(line["cell"], 0) + 1
    left = []
    for cell in ordered(plan):
        if done.get(cell.name, 0):
            done[cell.name] -= 1
        else:
            left.append(cell)
    return left[: plan.limit] if plan.limit is not None else left


def next_batch(todo: Sequence[MatrixCase], most: int) -> list[MatrixCase]:
    """Return the cells that the next job takes, in order. One that costs a controller while all train ends a job: another standby is there
    within seconds, and a later fault of the controller that comes before may cost steps (docs/limits.md)."""
    for count, cell in enumerate(todo[:most], 1):
        if cell.kind in ("kill_controller", "stop_controller") and cell.phase == "training":
            return list(todo[:count])
    return list(todo[:most])


def read_lines(output: Path) -> list[dict[str, Any]]:
    """Return what has been run so far, of all shards whose files lie there. Raises ConfigError for files that cannot be read."""
    try:
        return [line for path in sorted(output.glob("cells*.jsonl")) for line in read_jsonl(path)]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--output: got {output}, whose cells cannot be read ({' '.join(str(error).split())}), expected the folder of a matrix"
        ) from None


def command(*, nodes: bool = False) -> list[str]:
    """Return the job's command, on one node or on each of two."""
    count = RANKS_PER_NODE if nodes else RANKS
    places = ("--nnodes", "{nodes}", "--rdzv-backend", "c10d", "--rdzv-id", "matrix", "--rdzv-endpoint", "{endpoints}")
    return [
        *(sys.executable, "-m", "ttp.launch", "--nproc-per-node", str(count), "--max-restarts", "1000"),
        *((*places, "--rdzv-conf", RENDEZVOUS) if nodes else ()),
        *("--ttp-futile-starts", "0", "-m", "ttp.trainer", "--config", "gpt_tiny"),
        *("--training_config.output_dir", "{output}", "--training_config.training_iters", str(STEPS)),
        *("--training_config.log_interval", "100"),
    ]


def run_matrix(
    plan: MatrixPlan, on_progress: OnProgress = lambda *_: None, patience: InterruptGuard | None = None
) -> Iterator[Campaign]:
    """Run jobs until no cell is open or the time is over; yield each job's campaign when its cells are on record."""
    files.make_folder(plan.output)
    todo = open_cells(plan)
    number = len(list(plan.output.glob("job_*")))
    while todo and time.monotonic() < plan.until_monotonic_s:
        batch = next_batch(todo, plan.per_job)
        todo = todo[len(batch) :]
        seed = plan.seed * 100_003 + number
        scenario = Scenario(
            name=f"matrix job {number}",
            seed=seed,
            faults=tuple(c.fault for c in batch),
            environ=ENVIRON,
            deadline_s=240.0,
            nodes=NODES if plan.nodes else 0,
            in_place=plan.which == "in-place",
        )
        baseline = plan.output / "baseline.json"
        folder = plan.output / f"job_{number}"
        given = baseline if baseline.exists() else None
        asked = command(nodes=plan.nodes)
        runs = run_campaign(scenario, asked, folder, baseline=given, on_progress=on_progress, patience=patience)
        campaign = next(runs)
        if given is None:  # at once: a run that is interrupted now need not make it again
            (folder / "baseline.json").replace(baseline)
        for _ in runs:
            pass
        write_result(campaign)
        _put_down(plan.output, number, batch, campaign)
        yield campaign
        number += 1


def _put_down(output: Path, job: int, batch: Sequence[MatrixCase], campaign: Campaign) -> None:
    """Add the job's cells to the file."""
    wrong = [f"{v.name}: {v.text}" for one in campaign.runs for v in one.verdicts if v.state == VIOLATED]
    with open(output / "cells.jsonl", "a", encoding="utf-8") as file:
        for cell, incident in zip(batch, campaign.incidents, strict=False):
            line = {
                "cell": cell.name,
                "kind": cell.kind,
                "phase": cell.phase,
                "role": cell.role,
                "job": job,
                "seed": campaign.scenario.seed,
                "happened": incident.complete,
                "blows": len(incident.firings),
                "outcome": incident.outcome,
                "finding": finding(incident),
                "as_expected": incident.as_expected,
                "lost": incident.lost,
                "stages_ms": incident.stages_ms,
                "problems": incident.problems,
                "job_violated": wrong,
            }
            file.write(json.dumps(line) + "\n")


def table(lines: Sequence[dict[str, Any]], which: str = "matrix") -> str:
    """Return the summary of what has been run, in Markdown."""
    kinds: dict[str, int] = {}
    for cell in cells(which):
        kinds[cell.kind] = kinds.get(cell.kind, 0) + 1
    rows = [
        "| fault | cells | run of them | injections | what became of it | unexpected | first new step, median s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    total = [0, 0, 0, 0]
    for kind, count in kinds.items():
        mine = [line for line in lines if line["kind"] == kind and line["blows"]]
        run = len({line["cell"] for line in mine if line["happened"]})
        injections = sum(line["blows"] for line in mine)
        wrong = sum(not line["as_expected"] for line in mine)
        outcomes: dict[str, int] = {}
        for line in mine:
            outcomes[line["outcome"]] = outcomes.get(line["outcome"], 0) + 1
        counts = ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items())) or "-"
        times = sorted(line["stages_ms"]["first_new_step"] for line in mine if "first_new_step" in line["stages_ms"])
        again = f"{times[len(times) // 2] / 1e3:.1f}" if times else "-"
        rows.append(f"| {kind} | {count} | {run} | {injections} | {counts} | {wrong} | {again} |")
        total = [total[0] + count, total[1] + run, total[2] + injections, total[3] + wrong]
    rows.append(f"| **all** | {total[0]} | {total[1]} | {total[2]} | | {total[3]} | |")
    return "\n".join(rows)
