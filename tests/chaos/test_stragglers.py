"""A rank that is slow in a real job is named with its node, and no more when it is not: by a slow loader, and by a limit on its processor time."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S, SMALL
from tests.chaos.launching import Launch
from ttp.chaos.observed.training_job import TrainingJob, read_jsonl
from ttp.controller.stragglers import FINISHED
from ttp.status import main

pytestmark = pytest.mark.long

EVEN, SLOW = 220, 200
"""Steps of the first job before its last rank is slower, and in which it has to be found."""
LOADS_S = 0.25

TRAINS = f"""
import torch, torch.distributed as dist, ttp
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(64, 64)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
guard = ttp.protect(wrapped, optimizer, save_dirs=[out / "checkpoints"], log_dir=out / "log")

@ttp.ttp_to_persist
def train():
    for epoch in guard.epochs(1):
        for batch in guard.batches([torch.ones(4, 64)] * {EVEN + SLOW}):
            slow = 1.2 if rank == 2 and guard.step >= {EVEN} else 1.0
            time.sleep(slow * {LOADS_S})  # the loader
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()

train()
guard.close()
"""


def slow_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a job's controllers of ranks that are slow, and that are not any more."""
    lines = [line for path in sorted(folder.rglob("journal_*.jsonl")) for line in read_jsonl(path)]
    return [line for line in lines if line["event"] in ("straggler", "straggler_over")]


def status_of(folder: Path) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main.main([str(folder), "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_a_loader_that_is_a_fifth_slower_is_found_in_200_steps_and_nothing_before(tmp_path: Path) -> None:
    """Under DistributedDataParallel and `ttp.protect`: its wait within `backward()` is not the ranks' own time."""
    environ = {"OMP_NUM_THREADS": "1", "TTP_LEASE_S": "60"}
    events = tmp_path / "events"
    options = ("--nproc-per-node=3", "--on-event", f"sh -c 'cat >> {events}'")
    with Launch(tmp_path, TRAINS, *options, environ=environ) as launch:
        launch.until(lambda: events.exists() and "straggler" in events.read_text(), "event", 2 * JOB_S)
        assert launch.process.poll() is None, "it comes while the job trains"
        assert launch.wait() == 0, launch.text
    found = slow_ranks(tmp_path)
    assert [(line["event"], line["fields"]["rank"]) for line in found] == [("straggler", 2), ("straggler_over", 2)]
    fields = found[0]["fields"]
    (named, over) = [event for event in map(json.loads, events.read_text().splitlines()) if "ratio" in event]
    assert named["event"] == "straggler" and over["event"] == "straggler_over" and over["why"] == FINISHED
    assert {name: named[name] for name in fields} == fields
    assert [line[8:14] for line in launch.text.splitlines() if line.startswith("slow ")] == ["rank 2", "rank 2"]
    assert EVEN < fields["step"] <= EVEN + SLOW and fields["host"], fields
    assert 1.1 < fields["ratio"] < 1.35 and LOADS_S < fields["others_s"] < fields["own_s"], fields


@contextlib.contextmanager
def limited(name: str, pid: int, part: float) -> Iterator[None]:
    """Let a process have so much of a core, by a group of version 1 or 2; skip where no group can be made."""
    period_us = 20_000
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    first = (old / "cpu.cfs_quota_us").exists()
    group = (old if first else new) / name
    home = old if first else new / Path(f"/proc/{pid}/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    try:
        group.mkdir()
        if first:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(round(part * period_us)))
        else:
            (group / "cpu.max").write_text(f"{round(part * period_us)} {period_us}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no group with a limit can be made here: {error}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (home / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def test_a_rank_with_little_processor_time_is_named_until_it_has_more(tmp_path: Path) -> None:
    """The bundled trainer, `ttp status` and the loss that it shows."""
    runs = (
        *SMALL,
        "--training_config.training_iters=100000",
        "--model_config.hidden_size=256",
        "--model_config.seq_length=128",
    )
    environ = {"OMP_NUM_THREADS": "1", "TTP_LEASE_S": "60", "TTP_HEARTBEAT_S": "0.5"}
    with TrainingJob(tmp_path / "output", ranks=2, overrides=runs, environ=environ) as job:
        job.wait_for_step(20)
        pid = job.pids()[1]
        with limited(f"ttp_test_{os.getpid()}", pid, 0.08):
            slowed_at = job.last_step()
            job.wait_for(lambda: 1 in named(tmp_path), "rank 1 is named", JOB_S)
            found = status_of(job.output_dir)
            (row,) = [row for row in found["stragglers"] if row["rank"] == 1]
            assert row["ratio"] > 1.1 and row["own_s"] > row["others_s"] > 0 and row["node"], row
            assert [rank["slower"] is not None for rank in found["ranks"]] == [False, True]
            assert found["ranks"][0]["waited_s"] > found["ranks"][1]["waited_s"] >= 0
            assert found["loss"] > 0 and found["loss_finite"]
        (line,) = [line["fields"] for line in slow_ranks(tmp_path) if line["fields"]["rank"] == 1]
        assert slowed_at < line["step"] <= slowed_at + 220, line
        job.wait_for(lambda: 1 not in named(tmp_path), "rank 1 is not named any more", JOB_S)


def named(folder: Path) -> set[int]:
    """Return the ranks that are slow now, by the journals."""
    newest = {line["fields"]["rank"]: line["event"] for line in slow_ranks(folder)}
    return {rank for rank, event in newest.items() if event == "straggler"}
