"""From the kill of a rank to the next new step, in place against a restart, for sizes of the state and numbers of ranks.

For each size and number of ranks three jobs of the same trainer, in drawn order: in one the killed rank's place is taken by another process and the others run on, in the
second the step is written first (TTP_GASP=always), in the third it is written and all restart (warm). One rank at a random moment of a random step gets SIGKILL, several times in each job. A stage is reported as the
time from the kill; the *slowest* rank counts. Then the times are fitted: seconds = a + b x bytes that a rank holds + c x ranks.

Exit status 1 when the median of either of the first two takes more than LIMIT of a restart's anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ttp.chaos.kills_in_place import back
from ttp.chaos.observed.training_job import TrainingJob, read_jsonl
from ttp.chaos.verdict.recoveries import BY_CHECKPOINT, IN_PLACE

LIMIT = 1.0
HERE = Path(__file__).parent
WRITTEN_FIRST = "written first"
WAYS = {
    IN_PLACE: {"TTP_IN_PLACE": "True", "TTP_GASP": "if_needed"},
    WRITTEN_FIRST: {"TTP_IN_PLACE": "True", "TTP_GASP": "always"},
    BY_CHECKPOINT: {"TTP_IN_PLACE": "False"},
}
SAFE = {IN_PLACE: "regrouped", WRITTEN_FIRST: "published", BY_CHECKPOINT: "published"}
"""Until then the newest step is in the memory of the survivors alone."""
BYTES = 12
"""Of the state for each parameter: master weight and two moments."""
REPLICAS = 2
LAYERS, VOCABULARY = 2, 256
STEPS = (4, 12)
"""So many steps pass before a kill, at least and at most."""
BEGIN = ("script", "model and optimizer")
STAGES = {
    IN_PLACE: ("seen", "frozen", *BEGIN, "came", "groups", "filled", "regrouped", "new step"),
    WRITTEN_FIRST: (
        "seen",
        "frozen",
        "written",
        "published",
        *BEGIN,
        "came",
        "groups",
        "filled",
        "regrouped",
        "new step",
    ),
    BY_CHECKPOINT: ("seen", "frozen", "written", "published", *BEGIN, "protected", "loaded", "new step"),
}
WORDS = {
    "came": "new process registered",
    "groups": "groups made again",
    "filled": "shards filled",
    "regrouped": "replicas compared, gates opened",
    "script": "a new process begins",
    "model and optimizer": "its model and optimizer are made",
    "protected": "all registered",
    "loaded": "checkpoint loaded",
    "new step": "first new step",
}


@dataclass(frozen=True, slots=True)
class OneKill:
    ranks: int
    nbytes: float
    """What each rank holds of the state."""
    asked: str
    """The way back that was tried, and the one that was taken."""
    taken: str
    why: str
    stages_s: dict[str, float]

    @property
    def took_s(self) -> float:
        return self.stages_s["new step"]


def hidden_size(nbytes: float, ranks: int) -> int:
    """Return the width of a model of whose state each rank holds about so much."""
    parameters = nbytes * ranks / REPLICAS / BYTES
    # 16 matrices of width x width in each layer, two of vocabulary x width
    square, linear = 16 * LAYERS, 2 * VOCABULARY
    width = (-linear + math.sqrt(linear**2 + 4 * square * parameters)) / (2 * square)
    return max(16, 8 * round(width / 8))


def overrides(nbytes: float, ranks: int) -> list[str]:
    width = hidden_size(nbytes, ranks)
    sizes = {
        "num_layers": LAYERS,
        "hidden_size": width,
        "ffn_hidden_size": 4 * width,
        "num_attention_heads": 2,
        "num_query_groups": 2,
    }
    return [
        *(f"--model_config.{name}={value}" for name, value in (sizes | {"seq_length": 16}).items()),
        "--dataset_config.batch_size=1",
        "--training_config.training_iters=1000000",
    ]


def run_job(way: str, nbytes: float, ranks: int, kills: int, draw: random.Random, folder: Path) -> list[OneKill]:
    """Kill ranks of one job; return what became of each kill."""
    environ = {**WAYS[way], "RESTART_STAMPS": str(folder), "PYTHONPATH": str(HERE.parent)}
    done: list[OneKill] = []
    folder.mkdir(parents=True)
    with TrainingJob(
        folder,
        ranks=ranks,
        overrides=overrides(nbytes, ranks),
        environ=environ,
        launcher=["--max-restarts", "1000"],
        program=[str(HERE / "_restart_worker.py")],
    ) as job:
        job.wait_for_step(1)
        held = parameters(folder) * BYTES * REPLICAS / ranks
        for _ in range(kills):
            job.wait_for_step(job.last_step() + draw.randint(*STEPS))
            recent = statistics.median(float(line["time_ms"]) for line in job.metrics()[-8:] if line.get("time_ms"))
            time.sleep(draw.random() * recent / 1e3)  # anywhere within a step
            attempt = job.starts()[-1]
            kill = job.kill(draw.randrange(ranks))
            ending = back(job, attempt, [kill.unix_s])
            stages = {stage: ms / 1e3 for stage, ms in ending.stages_ms.items()}
            stages |= stamped(folder, kill.unix_s, stages["new step"])
            taken = way if ending.how == IN_PLACE else ending.how
            done.append(OneKill(ranks, held, way, taken, ending.why, stages))
            job.wait_for(lambda: len(job.pids()) == ranks, "all ranks", 60)
    return done


def parameters(folder: Path) -> int:
    """Return how many parameters the model has, as the job logged it."""
    found = re.search(r"model: ([\d,]+) parameters", (folder / "console.log").read_text(errors="replace"))
    assert found is not None
    return int(found[1].replace(",", ""))


def stamped(folder: Path, killed_s: float, lasted_s: float) -> dict[str, float]:
    """Return when the slowest rank reached each stage that ranks stamp, in seconds since the kill."""
    reached: dict[str, float] = {}
    for line in read_jsonl(folder / "stamps.jsonl"):
        since_s = line["unix_s"] - killed_s
        if 0 <= since_s <= lasted_s:
            reached[line["stage"]] = max(reached.get(line["stage"], 0.0), since_s)
    return reached


# --- report ---


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f}, {len(values)})"


def fit(kills: Sequence[OneKill]) -> tuple[float, float, float, float]:
    """Return a, b, c of seconds = a + b x bytes + c x ranks by least squares, and the median distance from it. What did not vary has no share."""
    sizes, ranks = (np.array([getattr(one, name) for one in kills], dtype=float) for name in ("nbytes", "ranks"))
    columns = [np.ones(len(kills)), sizes * (np.ptp(sizes) > 0.2 * sizes.max()), ranks * (np.ptp(ranks) > 0)]
    matrix, took = np.stack(columns, axis=1), np.array([one.took_s for one in kills])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1.0)
    solved = np.linalg.lstsq(matrix / scale, took, rcond=None)[0] / scale
    a, b, c = map(float, solved)
    return a, b, c, float(np.median(np.abs(matrix @ solved - took)))


def report(kills: Sequence[OneKill]) -> list[str]:
    """Print the tables; return where the limit was missed."""
    cells = sorted({(one.ranks, one.nbytes) for one in kills})
    missed = []
    print(
        f"\n{'ranks':>5} {'MB a rank':>10} {'in place':>30} {'written first':>30} {'restart':>30} {'ratios':>12}   (kill to new step: median s, quartiles, kills)"
    )
    for ranks, nbytes in cells:
        found = {
            way: [one.took_s for one in kills if (one.ranks, one.nbytes, one.taken) == (ranks, nbytes, way)]
            for way in WAYS
        }
        shown = [spread(found[way]) if found[way] else "-" for way in WAYS]
        ratios = []
        for way in (IN_PLACE, WRITTEN_FIRST) if found[BY_CHECKPOINT] else ():
            if found[way]:
                share = statistics.median(found[way]) / statistics.median(found[BY_CHECKPOINT])
                ratios.append(f"{share:.2f}")
                missed += [f"{way}, {ranks} ranks, {nbytes / 1e6:.1f} MB: {share:.2f}"] if share > LIMIT else []
        print(
            f"{ranks:5} {nbytes / 1e6:10.1f}" + "".join(f" {text:>30}" for text in shown) + f" {', '.join(ratios):>12}"
        )
    for way, stages in STAGES.items():
        mine = [one for one in kills if one.taken == way]
        if not mine:
            continue
        print(f"\n{way}: ms from the kill, medians")
        print(f"{'':34}" + "".join(f"{f'{ranks} x {nbytes / 1e6:.0f} MB':>13}" for ranks, nbytes in cells))
        for stage in stages:
            row = [
                [one.stages_s[stage] for one in mine if (one.ranks, one.nbytes) == cell and stage in one.stages_s]
                for cell in cells
            ]
            figures = "".join(f"{1e3 * statistics.median(each):13,.0f}" if each else f"{'-':>13}" for each in row)
            print(f"{WORDS.get(stage, stage):34}{figures}")
        if alone := [one.stages_s[SAFE[way]] for one in mine if SAFE[way] in one.stages_s]:
            print(f"the newest step is in memory alone until: {WORDS.get(SAFE[way], SAFE[way])}, {spread(alone)} s")
        a, b, c, off = fit(mine)
        print(
            f"fit of {len(mine)}: {a:.3f} s + {b * 1e6 * 1e3:.2f} ms a MB + {1e3 * c:.0f} ms a rank; median distance {1e3 * off:.0f} ms"
        )
    for one in kills:
        if one.asked != BY_CHECKPOINT and one.taken != one.asked:
            print(f"not in place: {one.ranks} ranks, {one.nbytes / 1e6:.1f} MB: {one.why}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument(
        "--megabytes", type=float, nargs="*", default=[5.0, 50.0, 200.0], help="state that each rank holds"
    )
    parser.add_argument("--kills", type=int, default=10, help="in each job")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, help="write every kill there")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print(f"seed {options.seed}, {options.kills} kills for each way, size and number of ranks", flush=True)
    kills: list[OneKill] = []
    root = Path(tempfile.mkdtemp(prefix="ttp_recovery_"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the job in progress as well
    try:
        for ranks in options.ranks:
            for megabytes in options.megabytes:
                for way in draw.sample(list(WAYS), len(WAYS)):
                    folder = root / f"{ranks}_{megabytes:g}_{way.replace(' ', '_')}"
                    kills += run_job(way, megabytes * 1e6, ranks, options.kills, draw, folder)
                    shutil.rmtree(folder)
                    print(
                        f"{ranks} ranks, {megabytes:g} MB, {way}: {spread([one.took_s for one in kills[-options.kills :]])} s",
                        flush=True,
                    )
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in kills], indent=1))
    missed = report(kills)
    print("\nlimits kept" if not missed else f"\nlimits missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
