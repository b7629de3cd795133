"""A program without the job's secret that writes into the store of a live job's workers: nothing of it is believed, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.launching import Launch
from tests.chaos.test_who_gets_in import WAITS
from tests.ports import free_port
from ttp.chaos.observed.training_job import read_jsonl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

ATTACKER = """
import itertools, random, sys, time
from datetime import timedelta
from pathlib import Path
from pickle import dumps
from torch.distributed import TCPStore
from tests.unit.launch.test_job_secret import Creates
from ttp.exchange.discovery import controller_key, failure_key, log_dir_key, process_key
from ttp.exchange.first_step import progress_key
from ttp.identity.sealed import seal
from ttp.runtime.standby import standbys_key

port, folder, seed = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
rng, job = random.Random(seed), "job7/0"
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
says = {
    controller_key(0): b"127.0.0.1:9/9 1",
    failure_key(0): b"ConfigError forged",
    log_dir_key(0): b"/forged",
    progress_key(0): b"9999",
    standbys_key(0): b"1 127.0.0.1:9/10\\n",
    **{process_key(0, rank): b"1 1" for rank in range(2)},
    **{f"ttp/nodes/{name}": b"forged" for name in ("failed", "lost", "restarts")},
    "ttp/nodes/fault": b"1 1.0",
    "ttp/nodes/succeeded/0": b"1",
    "ttp/nodes/succeeded/1": b"1",
}
ours = process_key(0, 0), process_key(0, 1), controller_key(0)
store.wait(list(ours))
replayed = [store.get(key) for key in ours]
assert all(entry.startswith(b"ttp1 ") for entry in replayed), replayed
evil = dumps(Creates(folder / "created"))

def forged(key):
    text = says[key]
    return rng.choice((
        b"", text, evil, b"\\xff" * 8, b"x" * (4 << 20), b"ttp1 " + b"0" * 64 + b" " + text,
        seal(bytes(32), (job, key), text), seal(bytes(32), (job, key), evil), seal(b"", (job, key), text),
        *(entry for entry, key_of in zip(replayed, ours) if key_of != key),
    ))

print("attacking", flush=True)
for count in itertools.count(1):
    try:
        for key in rng.sample(list(says), len(says)):
            kind = rng.random()
            if kind < 0.1:
                store.delete_key(key)
            elif kind < 0.2:
                store.append(key, forged(key))
            else:
                store.set(key, forged(key))
            if kind < 0.3:
                store.set(f"default_pg/0//cpu//0/{rng.randrange(2)}", evil)
        store.add("ttp/nodes/changes", 1)  # else agents do not look
        time.sleep(0.01)
    except RuntimeError:
        print(count, "rounds", flush=True)
        break
"""
"""Writes under TTP's keys until the store is gone, and under some of torch's, which the ranks read at their start alone."""


@contextlib.contextmanager
def attacker(port: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run it until the block ends; it attacks already when this returns."""
    seed = secrets.randbelow(2**31)
    print(f"attacker's seed: {seed}")
    command = [sys.executable, "-c", ATTACKER, str(port), str(folder), str(seed)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "attacking\n"
            yield process
        finally:
            process.kill()


def store_of(jobs: Sequence[Launch]) -> int:
    """Return the port of the workers' store, as any process of the node may read it."""
    ports = set()
    for job in jobs:
        for pid in job.marked():
            with contextlib.suppress(OSError):
                environ = dict(
                    part.partition(b"=")[::2] for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                )
                if b"RANK" in environ:
                    ports.add(int(environ[b"MASTER_PORT"]))
    (port,) = ports
    return port


def still_runs_until(job: Launch, condition: Callable[[str], bool]) -> None:
    """Wait for what its launcher's text has; it must not have ended before."""
    job.until(lambda: condition(job.text) or job.process.poll() is not None, "refusal, or second attempt")
    assert job.process.poll() is None, job.text


@pytest.mark.long
def test_who_writes_into_the_workers_store_harms_neither_a_job_nor_what_it_saves(
    tmp_path: Path, whole_job: RunJob
) -> None:
    """All through the first attempt, which ends with the death of a rank: its state is saved, and the job ends as one that was left alone."""
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job7"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "--max-restarts", "1"]
    environ = {
        "TTP_FAULTS": "kill:rank=1,step=9,point=backward,round=0",
        "TTP_HOST": "127.0.0.1",
        "TTP_SECRET": secrets.token_hex(32),
    }
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                Launch(tmp_path, WAITS, *options, environ=environ, arguments=trainer, name=f"node{node}")
            )
            for node in range(2)
        ]
        both[0].await_notes("protected-0-0", "protected-1-0")
        stranger = stack.enter_context(attacker(store_of(both), tmp_path))
        for job in both:
            still_runs_until(job, lambda text: "'ttp/nodes/failed' is refused, and counts as absent" in text)
        (tmp_path / "go-0").touch()
        still_runs_until(both[0], lambda _: len(both[0].notes("protected")) == 4)
        assert stranger.stdout is not None and stranger.stdout.readline().endswith(" rounds\n")
        (tmp_path / "go-1").touch()
        assert [job.wait() for job in both] == [0, 0], "".join(job.text for job in both)
        for job in both:
            job.assert_nothing_left()
            assert "forged" not in job.text and "Traceback" not in job.text
    assert not (tmp_path / "created").exists()
    begun = [
        line["from_step"] for line in read_jsonl(output / "metrics.jsonl") if line.get("event") in ("start", "resume")
    ]
    assert begun == [0, 8], "the rank died in step 9"
    final, baseline = (json.loads((folder / "final.json").read_text()) for folder in (output, whole_job(2).output_dir))
    assert final == baseline
