"""Programs that ask for recoveries in place: a rehearsal is what allows them, of this script and layout, from the next attempt on; the start's lines say which."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

LOOP = """
import torch
import torch.distributed as dist
import ttp

deaths = dict(pair.split(":") for pair in sys.argv[3].split(",") if pair)
torch.set_num_threads(1)
ttp.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
guard = ttp.protect(model, optimizer, in_place=True, on_data_mismatch="warn", save_dirs=[str(out / "checkpoints")])
batches = iter([torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(guard.step + 1, 40)])

DECORATOR
def train():
    for step in range(guard.step + 1, 13):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) if sys.argv[2] == "of the step" else next(batches)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if rank == 1 and deaths.get(start) == str(step) and not (out / f"died-{start}").exists():
            (out / f"died-{start}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    guard.save()

train()
note("weights", sum(p.double().sum() for p in model.parameters()).item().hex())
guard.close()
dist.destroy_process_group()
"""
SCRIPT = LOOP.replace("DECORATOR", "@ttp.ttp_to_persist")
NEVER = LOOP.replace("DECORATOR", "@ttp.ttp_to_persist(in_place=False)")
RESTART = "a rank that dies costs a checkpoint and a restart"
IN_PLACE = "a rank that dies is replaced by a new process"


def run(
    out: Path,
    script: str = SCRIPT,
    data: str = "of the step",
    deaths: str = "",
    ranks: int = 2,
    every: str = "",
    status: int = 0,
) -> str:
    """Run a job to its end; return what it printed, and remove its checkpoints: the next one begins anew, with what was rehearsed."""
    out.mkdir(exist_ok=True)
    for name in out.glob("died-*"):
        name.unlink()
    environ = {"TTP_REHEARSE": every, "TTP_IN_PLACE_S": "30"}  # a loaded machine
    with Launch(out, script, "--nproc-per-node", str(ranks), environ=environ, arguments=(data, deaths)) as job:
        assert job.wait() == status, job.text
        job.assert_nothing_left()
        text = job.text
    for path in (out / "checkpoints").glob("iter_*"):
        path.rename(out / f"{path.name}-{len(list(out.iterdir()))}")
    return text


@pytest.mark.long
def test_a_rehearsal_allows_recoveries_from_the_next_attempt_on(tmp_path: Path) -> None:
    """In one job: its first attempt is the one that rehearses, and a death in it costs a restart; one in the second does not."""
    text = run(tmp_path / "job", deaths="0:5,1:8", every="every:2")
    first, _, second = text.partition("attempt 1:")
    assert (
        f"{RESTART}: train() was not rehearsed yet: run the job's first steps once with TTP_REHEARSE=every:3" in first
    )
    assert "rehearsal: step 2 was computed twice with equal results" in first and IN_PLACE not in first
    assert text.count("training continues after step 7 with rank 1 in a new process") == 1, text[-3000:]
    assert "training continues" not in first and RESTART not in second
    [row] = json.loads((tmp_path / "job" / "checkpoints" / "rehearsal.json").read_text())["results"]
    assert (row["step"], row["unequal"]) == (6, ""), "the newest attempt's"


@pytest.mark.long
def test_another_script_or_layout_is_to_be_rehearsed_again(tmp_path: Path) -> None:
    out = tmp_path / "job"
    run(out, every="every:5")
    whole = (out / "weights-0-0").read_text()
    text = run(out, deaths="0:5")
    assert (out / "weights-0-0").read_text() == whole
    assert IN_PLACE in text and "training continues after step 4 with rank 1 in a new process" in text
    assert f"{RESTART}: train() was not rehearsed with another layout of ranks: run" in run(out, ranks=3)
    text = run(out, SCRIPT + "# changed\n", deaths="0:5")
    assert f"{RESTART}: train() was not rehearsed with another script: run" in text
    assert "training continues" not in text and "no step lost" in text
    assert IN_PLACE in run(out), "the first is as it was"


@pytest.mark.long
def test_a_function_that_cannot_be_entered_again_is_named_and_never_is(tmp_path: Path) -> None:
    """Its batches come from an iterator that was made before it."""
    out = tmp_path / "job"
    text = run(out, data="from outside", every="every:3", status=1)
    assert "step 3 gave another result when train() (worker.py:" in text and ") was called again: " in text
    text = run(out, data="from outside", deaths="0:5")
    assert f"{RESTART}: train() cannot be entered again, as the rehearsal of step 3 has shown: " in text
    assert "training continues" not in text and "no step lost" in text


@pytest.mark.long
def test_a_function_that_says_so_is_never_entered_again(tmp_path: Path) -> None:
    out = tmp_path / "job"
    text = run(out, NEVER, every="every:3")
    assert "no step was computed twice" in text and "without in_place=False" in text
    job = run(out, NEVER.replace("in_place=True", "in_place='unrehearsed'"), deaths="0:5")
    assert f"{RESTART} from now on: train() (worker.py:" in job and "ttp_to_persist(in_place=False)" in job
    assert "training continues" not in job and "no step lost" in job


@pytest.mark.long
def test_a_file_that_is_none_costs_a_line_and_no_job(tmp_path: Path) -> None:
    out = tmp_path / "job"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "rehearsal.json").write_text("[" * 100_000)
    text = run(out)
    assert text.count("ignoring ") == 1 and "nested too deep to be read. Remove it, and rehearse again" in text
    assert f"{RESTART}: train() was not rehearsed yet" in text and "Traceback" not in text


@pytest.mark.long
def test_ranks_that_do_not_ask_alike_choose_alike(tmp_path: Path) -> None:
    """As where one node has TTP_WARM_START=False: the others would make their process groups again as training begins, and wait there."""
    text = run(
        tmp_path, SCRIPT.replace("in_place=True", "in_place='unrehearsed' if rank == 0 else False"), deaths="0:5"
    )
    assert (
        f"{RESTART}: rank 1: the program has not asked for more (in_place=True, docs/" in text
        and "no step lost" in text
    )
