"""Real jobs with a mirror in a real S3 server: disks are lost, objects are altered, processes die, the server is away."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, RunJob, arguments, run_to_end
from tests.s3 import BUCKET, S3, serving
from tests.waiting import until
from ttp.chaos.observed.training_job import TrainingJob
from ttp.chaos.verdict.tensors import compare_checkpoints
from ttp.mirror import fetch
from ttp.mirror.remote import Remote

SAVES = "--training_config.save_interval=8"
KILL = "kill:rank=1,step=13,point=updating"
STOP = "stop:rank=1,step=18,point=backward,round=1"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as found:
        yield found


def environ(s3: S3, name: str, **more: str) -> dict[str, str]:
    return {**s3.environ, "TTP_MIRROR": f"s3://{BUCKET}/{name}", **more}


def set_for(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reads the mirror, too."""
    for key, value in s3.environ.items():
        monkeypatch.setenv(key, value)


def whole(s3: S3, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps whose manifest is in the mirror, all files with their checksums, newest first."""
    set_for(s3, monkeypatch)
    remote = Remote(f"s3://{BUCKET}/{name}")
    found = {step: fetch.find(remote, step) for step in fetch.steps_of(remote)}
    for each in filter(None, found.values()):
        fetch.check_sums(remote, each)
    return [step for step, each in found.items() if each is not None]


def console(job: TrainingJob) -> str:
    return (job.output_dir / "console.log").read_text(errors="replace")


@pytest.mark.long
def test_a_job_that_loses_its_directory_resumes_from_the_mirror_with_the_same_bits(
    tmp_path: Path, s3: S3, whole_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed meanwhile; an object of the newest checkpoint is altered, so that the one before it is taken."""

    def go_on_once_step_16_is_copied(job: TrainingJob) -> None:
        """The newest checkpoint is copied, and a job as short as this one would have its last by then."""
        remote = Remote(f"s3://{BUCKET}/lost")
        job.wait_for(lambda: fetch.find(remote, 16) is not None, "step 16 in the mirror", JOB_S)
        os.kill(job.pids()[1], signal.SIGCONT)

    given = environ(s3, "lost", TTP_LEASE_S="120")
    set_for(s3, monkeypatch)
    job = run_to_end(
        tmp_path / "job", 2, SAVES, faults=f"{KILL};{STOP}", environ=given, meanwhile=go_on_once_step_16_is_copied
    )
    steps = whole(s3, "lost", monkeypatch)
    assert steps[0] == 24 and len(steps) > 1 and s3.uploads() == []
    text = console(job)
    assert "mirror  step 24, nothing behind" in text and "test/secret/key" not in text
    story = [json.loads(line) for line in (job.output_dir / "log" / "story.jsonl").read_text().splitlines()]
    copied = {Path(line["path"]).name for line in story if line["event"] == "mirror" and line["what"] == "mirrored"}
    assert copied == {f"iter_{step:07d}" for step in steps}
    assert story[-1]["mirror"] == "step 24, nothing behind"
    shutil.rmtree(job.output_dir / "checkpoints")
    victim = next(key for key in s3.keys("lost/iter_0000024/") if key.endswith(".distcp"))
    content = bytearray(s3.get(victim))
    content[len(content) // 2] ^= 1
    s3.put(victim, bytes(content))
    again = run_to_end(tmp_path / "job", 2, SAVES, environ=environ(s3, "lost"))
    text = console(again)
    assert f"{victim} was altered since rank" in text and "resumed from" in text and f"at step {steps[1]}" in text
    assert "iter_0000024 is another write of that step: nothing is overwritten" in text
    new, baseline = again.output_dir / "checkpoints" / "iter_0000024", whole_job(2, SAVES).output_dir
    assert compare_checkpoints(new, baseline / "checkpoints" / "iter_0000024") == []


@pytest.mark.long
def test_an_agent_that_is_killed_in_an_upload_takes_the_mirror_along_and_the_next_one_finishes(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = ("--model_config.hidden_size=512", "--model_config.ffn_hidden_size=2048")
    s3.proxy.carried, s3.proxy.hold_after = 0, 12 << 20
    with TrainingJob(
        tmp_path / "job", ranks=1, overrides=arguments(SAVES, *wide), environ=environ(s3, "killed"), launcher=()
    ) as job:
        job.wait_for(lambda: s3.proxy.carried > 12 << 20, "the middle of an upload", JOB_S)
        job.process.kill()
        job.process.wait()
        until(lambda: job.leftovers() == [], "the end of its processes", JOB_S)
    s3.proxy.release()
    assert whole(s3, "killed", monkeypatch) == []
    run_to_end(tmp_path / "job", 1, SAVES, *wide, environ=environ(s3, "killed"))
    assert whole(s3, "killed", monkeypatch)[0] == 24 and s3.uploads() == []


@pytest.mark.long
def test_without_an_answer_a_job_goes_on_from_its_directories_and_does_not_begin_by_mistake(
    tmp_path: Path, s3: S3
) -> None:
    """Nothing found and no answer: refused, unless that is set to be accepted."""
    s3.proxy.down = True
    away = environ(s3, "away", TTP_MIRROR_END_S="0.5")
    short = ("--training_config.training_iters=2", SAVES)
    try:
        refused = run_to_end(tmp_path / "job", 1, *short, status=1, restarts=0, environ=away)
        assert "and none from the mirror" in console(refused) and "TTP_MIRROR_OPTIONAL=True" in console(refused)
        assert not list((tmp_path / "job" / "checkpoints").glob("iter_*"))
        began = run_to_end(tmp_path / "job", 1, *short, environ={**away, "TTP_MIRROR_OPTIONAL": "True"})
        assert "goes on from step 1" in console(began)
        assert "TTP_MIRROR_END_S (0.5 s) expired" in console(began) and "mirror  no checkpoint, 2 steps" in console(
            began
        )
        went_on = run_to_end(tmp_path / "job", 1, *short, environ=away)
        assert "the mirror is passed over, and the job goes on from step 2" in console(went_on)
    finally:
        s3.proxy.down = False


def test_a_bad_url_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = run_to_end(tmp_path / "job", 1, status=2, environ={"TTP_MIRROR": "s3://key:sec/ret@bucket/prefix"})
    assert "ttprun: error: invalid TTP_MIRROR: got a URL with a password" in console(job) and "ret@" not in console(job)
