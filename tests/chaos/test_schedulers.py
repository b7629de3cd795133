"""The examples for schedulers really run, on CPU, and what schedulers send before they take a job away saves it.

Slurm is played by a stand-in (`slurm_stand_in.py`): the batch script is the real one, `srun`, `scontrol` and `scancel` are not.
`test_slurm.py` runs it under Slurm, where that is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import slurm_stand_in
from tests.chaos.conftest import SMALL, RunJob
from tests.chaos.test_faults import ITERS, finish, start
from tests.chaos.test_kills import assert_equal, published_steps
from tests.ports import free_port
from ttp.chaos.observed.training_job import marked, read_jsonl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: Slurm's KillWait and Kubernetes' grace period are 30 s by default."""


class Script:
    """One of the example scripts in a session of its own; leaving it kills all that carries its mark."""

    def __init__(self, folder: Path, *command: str, **environ: str) -> None:
        self.mark = f"script:{folder}"
        self.console = folder / "console.log"
        path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TTP_", "TORCHELASTIC_", "PET_"))}
        own = {
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "TTP_TEST_MARK": self.mark,
            "TTP_HEARTBEAT_S": "0.2",
        }
        with open(self.console, "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**clean, **own, **environ},
            )  # fmt: skip

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in [self.process.pid, *(pid for pid, _ in marked(self.mark))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def text(self) -> str:
        return self.console.read_text(errors="replace")

    def wait(self, timeout_s: float = 280.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            still_here = self.leftovers()
            self._say_where_they_stand()
            raise AssertionError(f"the script did not end; still here: {still_here}\n{self.text}") from None

    def _say_where_they_stand(self) -> None:
        """Have the launchers write the stacks of all threads into the log, which ends them (PYTHONFAULTHANDLER)."""
        for pid, command in marked(self.mark):
            if "ttprun" in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)

    def wait_for_step(self, metrics: Path, step: int) -> None:
        deadline = time.monotonic() + 200
        while not any(int(line.get("step", 0)) >= step for line in read_jsonl(metrics)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def leftovers(self) -> list[str]:
        return [command for _, command in marked(self.mark)]


def slurm(folder: Path, output: Path, iters: int) -> Script:
    """Start the batch script as Slurm would, on two nodes of one rank each."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2"}
    own = {
        "STAND_IN_FOLDER": str(folder),
        "SLURM_SUBMIT_DIR": str(folder),
        "GPUS_PER_NODE": "1",
        "MASTER_PORT": str(free_port()),
    }
    arguments = ["--config", "gpt_tiny", *SMALL, "--training_config.device=cpu"]
    arguments += [f"--training_config.output_dir={output}", f"--training_config.training_iters={iters}"]
    return Script(folder, "bash", str(EXAMPLES / "slurm" / "train.sbatch"), *arguments, **job, **own)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Path]:
    slurm_stand_in.install(tmp_path)
    yield tmp_path


def test_the_batch_script_asks_slurm_for_what_it_relies_on() -> None:
    """The time limit's signal goes to the shell, which requeues; a lost node ends neither the job nor the step."""
    text = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert {"--signal=B:TERM@180", "--requeue", "--no-kill"} <= asked
    assert re.search(r"^srun --no-kill --kill-on-bad-exit=0 ", text, re.MULTILINE)


def test_the_batch_script_names_two_meeting_points(stand_in: Path) -> None:
    """The first two nodes, each with the job's port; one node alone is named once."""
    text = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ENDPOINTS=")]
    for nodes, expected in (("a,b,c", "a:5,b:5"), ("a", "a:5")):
        environ = os.environ | {"SLURM_JOB_NODELIST": nodes, "MASTER_PORT": "5"}
        environ |= {"PATH": f"{stand_in}:{os.environ['PATH']}"}
        shell = subprocess.run(
            ["bash", "-c", f"{line}\necho $ENDPOINTS"], env=environ, capture_output=True, text=True, check=True
        )
        assert shell.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("statuses", "restarts", "requeued"),
    [
        ("75 75", "", True),
        ("0 75", "3", False),
        ("75 75", "10", False),
        ("1 0", "", False),
        ("0 0", "", False),
        ("1 75", "", True),
    ],
)
def test_the_batch_script_requeues_a_job_that_asks_for_other_nodes(
    stand_in: Path, statuses: str, restarts: str, requeued: bool
) -> None:
    """A stand-in for ttprun ends with these codes, node by node, and shows its command line; not for ever, as the nodes may be the same again."""
    first, second = statuses.split()
    program = stand_in / "ttprun"
    program.write_text(
        f'#!/bin/sh\necho "$SLURM_NODEID" "$@"\n[ "$SLURM_NODEID" = 0 ] && exit {first}\nexit {second}\n'
    )
    program.chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2"}
    job |= {
        "STAND_IN_FOLDER": str(stand_in),
        "SLURM_SUBMIT_DIR": str(stand_in),
        "HEALTH_CHECK": "builtin --memory 4",
        "ON_EVENT": "sh drain.sh",
    }
    job |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    with Script(stand_in, "bash", str(EXAMPLES / "slurm" / "train.sbatch"), "--config", "x", **job) as run:
        assert run.wait() == (
            0 if "0" in (first, second) and "1" not in (first, second) else max(int(first), int(second))
        )
        assert "--health-check builtin --memory 4 --on-event sh drain.sh -m ttp.trainer --config x" in run.text
    assert (stand_in / "requeued").exists() is requeued
    assert not list(stand_in.glob(".ttp-succeeded-*"))


def test_the_note_of_an_earlier_success_does_not_count(stand_in: Path) -> None:
    """Where the batch script was killed before it had removed the note."""
    (stand_in / ".ttp-succeeded-4711").touch()
    program = stand_in / "ttprun"
    program.write_text("#!/bin/sh\nexit 75\n")
    program.chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    job |= {"STAND_IN_FOLDER": str(stand_in), "SLURM_SUBMIT_DIR": str(stand_in)}
    with Script(stand_in, "bash", str(EXAMPLES / "slurm" / "train.sbatch"), **job) as run:
        assert run.wait() == 75
    assert (stand_in / "requeued").exists()


def test_a_node_name_that_is_none_drains_nothing(stand_in: Path) -> None:
    noted = stand_in / "noted"
    (stand_in / "scontrol").write_text(f"#!/bin/sh\ntouch {noted}\n")
    environ = os.environ | {"PATH": f"{stand_in}:{os.environ['PATH']}"}
    script = ["sh", str(EXAMPLES / "slurm" / "drain_sick_node.sh")]
    for node in ("", "ALL", "node[1-9]", "a,b", "a b", "a\nb"):
        event = {"event": "sick_node", "node": node, "reason": "x"}
        subprocess.run(script, input=json.dumps(event), env=environ, text=True, check=True)
        assert not noted.exists(), node


def test_a_sick_node_is_drained_by_the_command_on_events(stand_in: Path) -> None:
    """And by that event alone; its reason is an argument, whatever it contains."""
    noted = stand_in / "noted"
    (stand_in / "scontrol").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {noted}\n')
    environ = os.environ | {"PATH": f"{stand_in}:{os.environ['PATH']}"}
    for event, expected in (
        ({"event": "fault", "why": "sick_node"}, None),
        (
            {"event": "sick_node", "node": "node-b", "reason": "disk 'a\nb' $(reboot)"},
            ["update", "nodename=node-b", "state=drain", "reason=ttp: disk 'a b' $(reboot)"],
        ),
    ):
        script = ["sh", str(EXAMPLES / "slurm" / "drain_sick_node.sh")]
        subprocess.run(script, input=json.dumps(event), env=environ, text=True, check=True)
        assert (noted.read_text().splitlines() if noted.exists() else None) == expected


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("receiver", ["batch shell", "every process of the step"])
def test_a_slurm_job_that_is_taken_away_is_saved_and_requeued(stand_in: Path, receiver: str) -> None:
    """`scancel --batch` and --signal=B: tell the script alone, which hands it on; preemption and the time limit tell every
    process of the step, ranks and controllers included, at once. The requeued job goes on behind the saved step."""
    output, metrics = stand_in / "out", stand_in / "out" / "metrics.jsonl"
    with slurm(stand_in, output, iters=100_000) as run:
        run.wait_for_step(metrics, 5)
        if receiver == "batch shell":
            os.kill(run.process.pid, signal.SIGTERM)
        else:
            for pid in slurm_stand_in.step_processes(stand_in):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        status = run.wait(GRACE_S)
        assert status != 0 and time.monotonic() - began < GRACE_S
        assert run.leftovers() == []
    last = max(int(line.get("step", 0)) for line in read_jsonl(metrics))
    (saved,) = [int(path.name.removeprefix("iter_")) for path in (output / "checkpoints").glob("iter_*")]
    assert saved >= last, run.text
    assert re.search(r"leaving with exit status 7[56]: step \d+ is saved", run.text) and "restarting (" not in run.text
    if receiver == "batch shell":
        assert (stand_in / "requeued").read_text() == "4711\n"
    with slurm(stand_in, output, iters=saved + 3) as run:
        assert run.wait() == 0, run.text
        assert run.leftovers() == []
    resumed = [int(line["from_step"]) for line in read_jsonl(metrics) if line.get("event") == "resume"]
    assert resumed == [saved]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sigterm_then_sigkill_after_a_grace_period_saves_the_step_in_flight(tmp_path: Path, whole_job: RunJob) -> None:
    """What Kubernetes sends to the launcher, and Slurm to every process: SIGTERM, and SIGKILL to all that remains when the grace
    is over. Nothing remains by then, and the next launcher ends up where a baseline job does."""
    output = tmp_path / "faulted"
    for everybody in (False, True):
        with start(output, 2) as job:
            job.wait_for_step(60 if not everybody else 120)
            receivers = [job.process.pid, *(job.pids().values() if everybody else ())]
            for pid in receivers:
                os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(GRACE_S)
            for pid in receivers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert job.wait() == 1
        assert job.leftovers() == []
        assert published_steps(job)[-1] >= job.last_step(), job.console_tail(60)
        assert "restarting (" not in job.console_tail(10_000)
    with start(output, 2) as job:
        finish(job)
    assert_equal(job, whole_job(2, ITERS))
