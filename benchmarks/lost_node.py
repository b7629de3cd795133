"""From the loss of a node to the next new step, stage by stage: a spare takes its place, its agent is started again, or the others go on without it.

Nodes are network namespaces (as root): the lost one's cable is pulled first, then all its processes are killed, so that nothing says that it is gone. The
times of the rendezvous are torch's. A stage is the time from the loss; the *last* node or rank counts. Reads consoles, journals and stamps.

`--against TREE`: another checkout of TTP takes turns with this one in the same run, and the table has both, and their ratio. Exit status 1 when the median of a
case takes more than its limit.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.chaos.nodes.namespaces import Node, Nodes, why_not
from ttp.chaos.observed.nodes_job import NodesJob
from ttp.chaos.observed.training_job import JobError, read_jsonl
from ttp.inputs.options import whole

HERE = Path(__file__).parent
AWAY_S = 120.0
"""A job that is away for longer counts as away for so long."""
STEPS = (15, 30)
"""So many steps pass before the loss, at least and at most."""
LINE = re.compile(r"\[ttprun (\d+):(\d+):(\d+\.\d+)\] (.*)")
STAGES = {
    "death_seen": "the loss is found",
    "take_places_sent": "the spare is ordered to take it",
    "replacement_came": "the spare's processes have registered",
    "regrouped": "groups made again, states filled",
    "published": "the step is saved",
    "restarting": "its agents begin to restart",
    "taken": "a spare takes the place",
    "anew": "the others know that they meet anew",
    "attempt": "all have met, workers are forked",
    "imported": "workers have imported",
    "process group": "process groups",
    "protected": "all registered",
    "loaded": "checkpoint loaded",
    "first step": "first new step",
}
LINES = {
    "restarting (": "restarting",
    "takes the place of": "taken",
    "has begun anew": "anew",
    "attempt 1:": "attempt",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Which node is lost, and what follows."""

    text: str
    limit_s: float
    spare: bool = False
    with_store: bool = False
    again: bool = False
    nnodes: str = "2"
    in_place: bool = False


CASES = {
    "in-place": Case("a spare waits, and the survivors' processes keep running", 10.0, spare=True, in_place=True),
    "spare": Case("a spare waits", 15.0, spare=True),
    "spare-store": Case("a spare waits; rank 0, controller and store are lost", 18.0, spare=True, with_store=True),
    "again": Case("no spare, the lost node's agent is started again at once", 25.0, again=True),
    "fewer": Case("no spare, `--nnodes 1:2`: the survivor goes on alone", 18.0, nnodes="1:2"),
    "fewer-store": Case("the same; rank 0, controller and store are lost", 60.0, nnodes="1:2", with_store=True),
}


def start(case: Case, nodes: tuple[Node, ...], folder: Path, tree: Path) -> NodesJob:
    return NodesJob(
        folder,
        nodes,
        stores=nodes[:2],
        spares=nodes[2:],
        nnodes=case.nnodes,
        overrides=["--training_config.training_iters", "1000000"],
        environ={
            "RESTART_STAMPS": str(folder),
            "PYTHONPATH": str(tree),
            "PYTHONSAFEPATH": "1",  # not of this folder
            "TTP_IN_PLACE": str(case.in_place),
        },
        launcher=["--rdzv-conf", "join_timeout=300", "--preload", "ttp.trainer.train"],
        program=[str(HERE / "_restart_worker.py")],
    )


def new_steps(job: NodesJob, since_unix_s: float) -> list[float]:
    """Return when steps were finished after the loss: of a later attempt than the first, or once its ranks had regrouped."""
    regrouped = [float(line["unix_s"]) for line in job.journal(0) if line["event"] == "regrouped"]
    journals = job.journals()
    if not regrouped and (len(journals) < 2 or not journals[1]):
        return []
    begun_s = max(since_unix_s, min(regrouped or [float(journals[1][0]["unix_s"])]))
    return [float(line["unix_s"]) for line in job.metrics() if "loss" in line and line["unix_s"] > begun_s]


def seconds_after(moment: re.Match[str], unix_s: float) -> float:
    """Return how long after a time a line of a console was written, which has the time of day only."""
    day = datetime.datetime.fromtimestamp(unix_s)
    then = datetime.timedelta(hours=int(moment[1]), minutes=int(moment[2]), seconds=float(moment[3]))
    midnight = day.replace(hour=0, minute=0, second=0, microsecond=0)
    after_s = (midnight + then - day).total_seconds()
    return after_s if after_s > -43200 else after_s + 86400


def stages_of(job: NodesJob, lost_s: float, first_s: float) -> dict[str, float]:
    """Return the moment of each stage between a loss and the first step after it, in seconds since the loss."""
    found: dict[str, float] = {"first step": first_s - lost_s}

    def reach(stage: str, after_s: float) -> None:
        if 0 <= after_s <= first_s - lost_s:
            found[stage] = max(found.get(stage, 0.0), after_s)

    first: list[dict[str, Any]] = job.journal(0)
    published_s = min((line["unix_s"] for line in first if line["event"] == "published"), default=first_s)
    for line in first:
        if line["event"] in STAGES and line["unix_s"] <= published_s:
            reach(line["event"], line["unix_s"] - lost_s)
    for node in job.nodes:
        for moment in filter(None, map(LINE.match, job.console(node).splitlines())):
            for words, stage in LINES.items():
                if words in moment[4]:
                    reach(stage, seconds_after(moment, lost_s))
    for line in read_jsonl(job.output_dir / "stamps.jsonl"):
        if line["stage"] in STAGES:
            reach(line["stage"], line["unix_s"] - lost_s)
    if "taken" in found:  # the spare itself logs it first, rank 0's node when all have met
        spare = job.nodes[-1]
        lines = [moment for moment in map(LINE.match, job.console(spare).splitlines()) if moment]
        found["taken"] = next(seconds_after(line, lost_s) for line in lines if "takes the place of" in line[4])
    return found


def turn(case: Case, folder: Path, tree: Path, draw: random.Random) -> dict[str, float]:
    """Run one job, lose a node of it, and return the stages. Raises JobError."""
    with Nodes(3 if case.spare else 2) as nodes, start(case, nodes, folder, tree) as job:
        job.wait_for_step(draw.randint(*STEPS))
        if case.spare:
            job.wait_for(lambda: "waiting as a spare node" in job.console(nodes[2]), "spare", 60.0)
        job.wait_for_step(job.last_step() + 10)
        first = job.node_of_rank(0)
        lost = first if case.with_store else next(node for node in nodes[:2] if node is not first)
        time.sleep(draw.random())  # at a random moment between two heartbeats
        lost_s = time.time()
        lost.power_off()
        if case.again:
            lost.plug()
            job.start(lost)
        try:
            job.wait_for(lambda: bool(new_steps(job, lost_s)), "step after the loss", AWAY_S)
        except JobError as error:
            print(str(error).splitlines()[0], flush=True)
            return {"first step": AWAY_S}
        return stages_of(job, lost_s, min(new_steps(job, lost_s)))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}, {len(values)})"


def report(case: Case, measured: dict[str, list[dict[str, float]]]) -> bool:
    """Print one case's table; return whether the limit was kept."""
    here = measured["here"]
    print(f"\n{case.text}: seconds since the loss, medians (least to most, how many)")
    print(f"{'':40} " + " ".join(f"{name:>26}" for name in measured))
    for stage, words in STAGES.items():
        cells = [[one[stage] for one in turns if stage in one] for turns in measured.values()]
        if any(cells):
            print(f"{words:40} " + " ".join(f"{spread(cell) if cell else '-':>26}" for cell in cells))
    middle = statistics.median(one["first step"] for one in here)
    if "against" in measured:
        other = statistics.median(one["first step"] for one in measured["against"])
        print(f"{'ratio':40} {middle / other:>26.2f}")
    return middle <= case.limit_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=whole(1), default=3, help="losses of each case")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--against", type=Path, default=None, help="the root of another checkout of TTP")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if why := why_not():
        print(f"nothing was measured: {why}")
        return 0
    if options.against is not None and not (options.against / "ttp" / "launch").is_dir():
        print(f"invalid --against: got {options.against}, expected the root of a checkout of TTP, with ttp/launch")
        return 2
    trees = {"here": HERE.parent} | ({"against": options.against.resolve()} if options.against is not None else {})
    draw = random.Random(options.seed)
    print(f"seed {options.seed}, {options.times} losses of each case" + (" and tree" if len(trees) > 1 else ""))
    missed = []
    root = Path(tempfile.mkdtemp(prefix="ttp_lost_node_"))
    try:
        for name in options.cases:
            measured: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
            for number in range(options.times):
                for tree in draw.sample(list(trees), len(trees)):
                    stages = turn(CASES[name], root / f"{name}_{number}_{tree}", trees[tree], draw)
                    measured[tree].append(stages)
                    print(f"{name}, {tree}: {stages['first step']:.1f} s", flush=True)
            if not report(CASES[name], measured):
                missed.append(f"{name} ({CASES[name].limit_s:g} s)")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("limits kept" if not missed else f"limits missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
