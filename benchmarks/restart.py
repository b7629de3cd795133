"""From the kill of a rank to the first step after it, and from the command to the first step, stage by stage.

Contenders take turns with the same trainer, model, text and ranks: TTP, TTP without warm starts or without TLS, and torchrun with
the trainer's own DCP checkpoints every ten steps. One rank at a random moment of a random step is killed by SIGKILL, several times in each job. A stage
is reported as the time since the one before it; the *slowest* rank counts. Reads journals, logs and stamps; needs no cooperation of the product.

Exit status 1 when the way back with warm starts takes more than LIMIT_BACK of torchrun's, or the first start more than LIMIT_FIRST (medians).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ttp.chaos.observed.training_job import JobError, TrainingJob, marked, read_jsonl

LIMIT_BACK = 0.2
LIMIT_FIRST = 0.6
AWAY_S = 90.0
"""A job that is away for longer counts as away for so long."""
WARM, COLD, PLAIN, TORCHRUN = "TTP", "TTP, cold", "TTP, no TLS", "torchrun + DCP"
HERE = Path(__file__).parent
CONTENDERS: dict[str, dict[str, Any]] = {
    WARM: {},
    COLD: {"environ": {"TTP_WARM_START": "False"}},
    PLAIN: {"environ": {"TTP_TLS": "False"}},
    TORCHRUN: {
        "launch_module": "torch.distributed.run",
        "launcher": ["--standalone"],
        "environ": {"ENABLE_TTP": "False", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    },
}
"""torchrun 2.13 gives the workers of a restart the store of the last attempt, where gloo finds the old addresses: they never meet. Its variable that
makes a new store for each attempt is set, in its favour."""
SAVE_EVERY = ["--training_config.save_interval", "10"]
FAULT_STAGES = {"death_seen": "seen", "frozen": "frozen", "written": "written", "published": "published"}
RANK_STAGES = ("script", "imported", "text opened", "process group", "model and optimizer", "protected", "loaded")


def start(name: str, folder: Path, options: argparse.Namespace) -> TrainingJob:
    folder.mkdir(parents=True)
    facts = CONTENDERS[name]
    return TrainingJob(
        folder,
        ranks=options.ranks,
        overrides=["--training_config.training_iters", "100000", *(SAVE_EVERY if name == TORCHRUN else [])],
        environ={"RESTART_STAMPS": str(folder), "PYTHONPATH": str(HERE.parent), **facts.get("environ", {})},
        launcher=["--max-restarts", "1000", *facts.get("launcher", [])],
        launch_module=facts.get("launch_module", "ttp.launch"),
        program=[str(HERE / "_restart_worker.py")],
    )


def steps_since(job: TrainingJob, unix_s: float) -> list[dict[str, Any]]:
    return [line for line in job.metrics() if "loss" in line and not line.get("recovered") and line["unix_s"] > unix_s]


def wait_for_step(job: TrainingJob, unix_s: float, count: int, timeout_s: float = 300.0) -> float:
    """Wait for so many steps after a time; return the time of the first."""
    job.wait_for(lambda: len(steps_since(job, unix_s)) >= count, f"{count} steps", timeout_s)
    return float(steps_since(job, unix_s)[0]["unix_s"])


def stages_of(job: TrainingJob, killed_s: float, first_s: float) -> dict[str, float]:
    """Return the moment of each stage between a kill and the first step after it, in seconds since the kill."""
    reached: dict[str, float] = {}
    for journal in job.journals():
        for line in journal:
            if line.get("event") in FAULT_STAGES and killed_s <= line["unix_s"] <= first_s:
                stage = FAULT_STAGES[line["event"]]
                first_counts = stage in reached and stage != "written"
                reached[stage] = reached[stage] if first_counts else line["unix_s"]
    for line in read_jsonl(job.output_dir / "stamps.jsonl"):
        if killed_s <= line["unix_s"] <= first_s:
            reached[line["stage"]] = max(reached.get(line["stage"], 0.0), line["unix_s"])
    order = [*FAULT_STAGES.values(), *RANK_STAGES]
    moments = {stage: reached[stage] - killed_s for stage in order if stage in reached}
    return {**moments, "first step": first_s - killed_s}


def turn(
    name: str, folder: Path, options: argparse.Namespace, draw: random.Random
) -> tuple[float, list[dict[str, float]]]:
    """Run one job; return the time of its first start, and of each kill the stages."""
    begun_s = time.time()
    kills: list[dict[str, float]] = []
    with start(name, folder, options) as job:
        first_s = wait_for_step(job, begun_s, 1) - begun_s
        since_s = begun_s
        for _ in range(options.kills_a_job):
            wait_for_step(job, since_s, draw.randrange(12, 24))
            stamps = [line for line in read_jsonl(folder / "stamps.jsonl") if line["stage"] == "script"]
            pids = {line["rank"]: line["pid"] for line in stamps}
            time.sleep(draw.random() * 0.1)
            killed_s = time.time()
            os.kill(pids[draw.randrange(options.ranks)], signal.SIGKILL)
            try:
                since_s = wait_for_step(job, killed_s, 1, AWAY_S)
            except JobError:
                print(f"{name}: no step within {AWAY_S:.0f} s of a kill; the job is given up", flush=True)
                kills.append({"first step": AWAY_S})
                job.process.kill()
                break
            kills.append(stages_of(job, killed_s, since_s))
            since_s -= 1e-6
    for pid, _ in marked(job.mark):
        os.kill(pid, signal.SIGKILL)
    return first_s, kills


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def report(firsts: dict[str, list[float]], kills: dict[str, list[dict[str, float]]]) -> list[str]:
    """Print the tables; return the limits that were missed."""
    print(f"\n{'':16} {'kill to first step':>26}  {'command to first step':>26}  (median s, quartiles)")
    for name in kills:
        cells = []
        for values in ([each["first step"] for each in kills[name]], firsts[name]):
            low, middle, high = quartiles(values) if len(values) > 1 else (values[0],) * 3
            cells.append(f"{middle:6.2f} ({low:5.2f} to {high:5.2f}, {len(values)})")
        print(f"{name:16} {cells[0]:>26}  {cells[1]:>26}")
    for name, each in kills.items():
        print(f"\n{name}: medians of {len(each)} kills, ms")
        before = 0.0
        for stage in max(each, key=len):
            values = [one[stage] for one in each if stage in one]
            middle = statistics.median(values)
            print(f"  {stage:20} {1e3 * middle:8.0f}  {1e3 * (middle - before):+8.0f}")
            before = middle
    missed = []
    if {WARM, TORCHRUN} <= kills.keys():
        back = statistics.median(k["first step"] for k in kills[WARM]) / statistics.median(
            k["first step"] for k in kills[TORCHRUN]
        )
        first = statistics.median(firsts[WARM]) / statistics.median(firsts[TORCHRUN])
        print(
            f"\nTTP against torchrun: kill to first step {back:.3f} (limit {LIMIT_BACK}), first start {first:.3f} (limit {LIMIT_FIRST})"
        )
        missed += ["the way back"] if back > LIMIT_BACK else []
        missed += ["the first start"] if first > LIMIT_FIRST else []
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=4, help="jobs of each contender")
    parser.add_argument("--kills-a-job", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print(
        f"seed {options.seed}, {options.ranks} ranks, {options.jobs} jobs of {options.kills_a_job} kills for each contender"
    )
    firsts: dict[str, list[float]] = {name: [] for name in options.only}
    kills: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    root = Path(tempfile.mkdtemp(prefix="ttp_restart_"))
    try:
        for job in range(options.jobs):
            for name in draw.sample(options.only, len(options.only)):
                first_s, stages = turn(name, root / f"{job}_{name.replace(' ', '_')}", options, draw)
                firsts[name].append(first_s)
                kills[name] += stages
                middle = statistics.median(each["first step"] for each in stages)
                print(
                    f"job {job + 1}, {name}: first step after {first_s:.2f} s; after a kill {middle:.2f} s", flush=True
                )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    missed = report(firsts, kills)
    print("limits kept" if not missed else f"limits missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
