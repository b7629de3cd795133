"""How a job ends, or does not begin: nodes that end differently, ranks killed on their way out, insistent operators."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import STEPS, arguments
from tests.chaos.launching import TORCHRUN, Launch
from tests.ports import free_port
from ttp.chaos.observed.training_job import read_jsonl
from ttp.launch.attempts.signals import SAME_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

UNEVEN = """
note("begun", os.getpid())
if rank == 1 and start == "0":
    await_file("begun-0-0")
    first = int((out / "begun-0-0").read_text())
    while running(first):
        time.sleep(0.01)
    await_file("fail")
    sys.exit(3)
"""


def two_nodes(backend: str, port: int, node: int) -> tuple[str, ...]:
    if backend == "static":
        return ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port))
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j")
    return ("--nnodes", "2", *place, "--local-addr", "127.0.0.1")


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.long)])
@pytest.mark.parametrize("restarts", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_node_that_has_succeeded_does_not_wait_in_vain_for_one_that_failed(
    tmp_path: Path, backend: str, restarts: str
) -> None:
    """Its workers had all ended well when another node's failed: it starts again with that node, or, where no restart is
    left, ends and says why. torch's barrier knows of successes only and lets it wait for 300 s."""
    port, both = free_port(), []
    with contextlib.ExitStack() as stack:
        for node in range(2):
            options = (*two_nodes(backend, port, node), "--max-restarts", restarts)
            both.append(stack.enter_context(Launch(tmp_path, UNEVEN, *options, name=f"node{node}")))
        both[0].await_notes("begun-0-0", "begun-1-0")
        for job in both:
            job.says(" of 2 on this node")
        done = next(job for job in both if ": rank 0 of 2 on this node" in job.text)
        other = next(job for job in both if job is not done)
        done.until(lambda: not alive(int(done.read("begun-0-0"))), "end of rank 0")
        assert done.process.poll() is None
        (tmp_path / "fail").touch()
        statuses = [done.wait(), other.wait()]
        if restarts == "1":
            assert statuses == [0, 0], done.text + other.text
            assert sorted(done.notes("begun")) == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"]
            assert "all workers on this node succeeded, but" in done.text and "restarting with that node" in done.text
        else:
            assert statuses == [0, 1], done.text + other.text
            assert "not waiting for other nodes" in done.text
        for job in both:
            job.assert_nothing_left()


LEAVES = """
note("begun", os.getpid())
if start == "0":
    for peer in range(4):
        await_file(f"begun-{peer}-0")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    victim = int((out / "begun-2-0").read_text())
    while running(victim):
        time.sleep(0.01)
    sys.exit(75)
"""


@pytest.mark.long
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_restart_for_a_death_on_another_node_is_a_fault_without_a_session_too(tmp_path: Path, backend: str) -> None:
    """The summary of rank 0's node does not say that nothing happened: the other node's launcher has said what did."""
    port, both = free_port(), []
    with contextlib.ExitStack() as stack:
        for node in range(2):
            options = ("--nproc-per-node", "2", "--ttp-story", str(tmp_path / f"events-{node}.jsonl"))
            launch = Launch(tmp_path, LEAVES, *two_nodes(backend, port, node), *options, name=f"node{node}")
            both.append(stack.enter_context(launch))
        assert [job.wait() for job in both] == [0, 0], "".join(job.text for job in both)
    (path,) = [path for path in tmp_path.glob("events-*.jsonl") if '"end"' in path.read_text()]
    *_, fault, end = [line for line in read_jsonl(path) if line["event"] in ("fault", "end")]
    assert fault["kind"] == "elsewhere" and "signal SIGKILL" in fault["elsewhere"] and "rank 2" in fault["elsewhere"]
    assert (end["faults"], end["unknown_losses"]) == (1, 1)
    job = both[int(path.stem.removeprefix("events-"))]
    assert "--- fault in attempt 0: another node failed ---" in job.text and "lost    nothing" not in job.text


@pytest.mark.long
def test_a_job_without_a_session_is_reported_to_machines_too(tmp_path: Path) -> None:
    """Its attempts, its faults and why it has failed; and a program that is not there, for which there was no attempt."""
    story = ("--ttp-story", str(tmp_path / "story.jsonl"))
    with Launch(tmp_path, "note('begun'); sys.exit(3)", "--max-restarts", "1", *story) as job:
        assert job.wait() == 1
    lines = read_jsonl(tmp_path / "story.jsonl")
    assert [line["event"] for line in lines] == ["start", "fault", "start", "fault", "end"], job.text
    assert lines[-1]["result"] == "failed" and lines[-1]["why"].startswith("rank 0: exit code 3")
    assert lines[0]["world_size"] == 1 and list(lines[0]["pids"]) == ["0"]
    assert "why     rank 0: exit code 3" in job.text
    with Launch(tmp_path, "", *story, "--no-python", "./nosuch") as job:
        assert job.wait() == 1
    left = read_jsonl(tmp_path / "story.jsonl")[-1]
    assert left["event"] == "left" and "'./nosuch' (no such file or directory)" in left["why"]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.parametrize(
    "program", ["./nosuch", *(pytest.param(name, marks=pytest.mark.long) for name in ("nosuch-on-path", "nosuch.py"))]
)
def test_a_program_that_is_not_there_is_reported_in_a_line(tmp_path: Path, program: str) -> None:
    """With torchrun's exit code, and without its traceback; a script too, for which torchrun starts workers first."""
    script = program.endswith(".py")
    options = ("--nproc-per-node", "2", *(() if script else ("--no-python",)), program)
    with (
        Launch(tmp_path, "", *options) as job,
        Launch(tmp_path, "", *options, program=TORCHRUN, name="torchrun") as plain,
    ):
        assert job.wait() == plain.wait() == 1
        kind = "script" if script else "program"
        line = f"ttprun: error: cannot start the workers: got {kind} '{program}' (no such file or directory)"
        assert line in job.text
        assert "Traceback" not in job.text and "Traceback" in plain.text
        assert "attempt 0:" not in job.text and "the job has ended" not in job.text
        job.assert_nothing_left()


def test_an_agent_that_waits_for_other_nodes_logs_it(tmp_path: Path) -> None:
    """After a few seconds: for how many nodes, and at which endpoint."""
    place = f"127.0.0.1:{free_port()}"
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "j", "--local-addr", "127.0.0.1")
    with Launch(tmp_path, "note('begun')", "--nnodes", "2:3", *options) as job:
        words = f"waiting for 2 to 3 nodes, this one included, to join at {place}"
        job.until(lambda: words in job.text, "word of what is waited for")
        assert job.notes("begun") == []


TRAINER = """
from ttp.trainer import train
from ttp.trainer.__main__ import run_as_program
sys.argv = ["ttp.trainer", *sys.argv[2:]]
"""

RELEASED = (
    TRAINER
    + """
if rank == 1 and start == "0":
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
    train.Trainer.close = die
run_as_program()
"""
)
"""The bundled trainer; in the first attempt rank 1 is killed when its training has been released."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_trained_again_after_a_kill_on_the_way_out(tmp_path: Path) -> None:
    """The last step is durable before any rank may leave, without a setting: the next attempt finds nothing to do."""
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    with Launch(tmp_path, RELEASED, "--nproc-per-node", "2", arguments=trainer) as job:
        job.until(lambda: job.process.poll() is not None, "end", within_s=300)
        assert job.wait() == 0, job.text
        assert "restarting (1 of 3 restarts): rank 1: signal SIGKILL" in job.text
        assert f"nothing to do: {STEPS} of {STEPS} steps are done" in job.text
        job.assert_nothing_left()
    lines = read_jsonl(output / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["from_step"] for line in lines if line.get("event") == "resume"] == [STEPS]


@pytest.mark.timeout(600)
def test_a_second_ctrl_c_under_a_live_controller_ends_all_at_once(tmp_path: Path) -> None:
    """The first one drains the job, and the step in flight has its time; the second one does not wait for it."""
    trainer = (*arguments(), "--training_config.output_dir", str(tmp_path / "output"))
    environ = {"TTP_FAULTS": "hang:rank=1,step=5,point=backward", "TTP_BOUNDARY_S": "600", "TTP_OT": "900"}
    script = TRAINER + "run_as_program()"
    with Launch(tmp_path, script, "--nproc-per-node", "2", arguments=trainer, environ=environ) as job:
        metrics = tmp_path / "output" / "metrics.jsonl"
        job.until(lambda: metrics.exists() and '"step": 4' in metrics.read_text(), "step 4", within_s=200)
        job.process.send_signal(signal.SIGINT)
        job.until(lambda: "sending SIGTERM to ranks 0-1" in job.text, "notice")
        time.sleep(3 * SAME_S)  # one that comes sooner is the same notice
        assert job.process.poll() is None
        began = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 1
        assert time.monotonic() - began < 60, "it waited for the ranks"
        assert "second signal received: killing the workers" in job.text
        assert "cause   ttprun received SIGINT, and killed the ranks (SIGKILL) at a second signal" in job.text
        assert re.search(r"faults +0 faults, 1 preemption notice\nlost +unknown after 1 notice;", job.text), job.text
        job.assert_nothing_left()


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_notice_leaves_the_ranks_their_time(tmp_path: Path, second: signal.Signals) -> None:
    """As systemd sends them, and schedulers that send SIGTERM again: at once and in the middle of a slow step, which is saved all the
    same."""
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    environ = {"TTP_FAULTS": "slow:rank=1,step=5,point=backward,for=8"}
    script = TRAINER + "run_as_program()"
    with Launch(tmp_path, script, "--nproc-per-node", "2", arguments=trainer, environ=environ) as job:
        metrics = output / "metrics.jsonl"
        job.until(lambda: metrics.exists() and '"step": 4' in metrics.read_text(), "step 4", within_s=200)
        job.process.send_signal(signal.SIGTERM)
        job.process.send_signal(second)
        job.until(lambda: "sending SIGTERM to ranks 0-1" in job.text, "notice")
        time.sleep(3 * SAME_S)  # those that come sooner are the same notice
        for number in (second, signal.SIGTERM, second):
            job.process.send_signal(number)
        assert job.wait() == 1
        assert job.text.count("received: the workers are shutting down already") == 1, job.text
        assert "second signal" not in job.text and "killed" not in job.text
        job.assert_nothing_left()
    *_, fault, end = read_jsonl(output / "log" / "story.jsonl")
    assert fault["kind"] == "preempted" and fault["saved"]["step"] >= 4 and fault["steps_lost"] == 0
    assert fault["next"].startswith("no restart on this node: the agent received SIG")
    assert end["result"].startswith("ended by SIG") and (end["faults"], end["notices"]) == (1, 1)
    assert {c["cause"].partition(" received SIG")[0] for c in fault["culprits"]} == {"ttprun"}


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_notice_while_survivors_are_held_changes_neither_the_fault_nor_what_is_saved(tmp_path: Path) -> None:
    """Rank 1 is killed, and rank 0 writes to a slow disk when the launcher gets SIGTERM: nothing follows, and one rank is at fault."""
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    faults = "kill:rank=1,step=5,point=updating;slowdisk:rank=0,step=5,point=write,for=3"
    script = TRAINER + "run_as_program()"
    with Launch(tmp_path, script, "--nproc-per-node", "2", arguments=trainer, environ={"TTP_FAULTS": faults}) as job:
        job.until(lambda: "; holding rank 0 for up to" in job.text, "hold", within_s=200)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 1
        assert "next    no restart on this node: the agent received SIGTERM" in job.text, job.text
        job.assert_nothing_left()
    *_, fault, end = read_jsonl(output / "log" / "story.jsonl")
    assert [culprit["rank"] for culprit in fault["culprits"]] == [1] and fault["kind"] == "exited"
    assert fault["saved"]["step"] == 5 and fault["next"] == "no restart on this node: the agent received SIGTERM"
    assert end["result"] == "ended by SIGTERM"


NOHUP = """
import runpy, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.argv[0] = "ttprun"
runpy.run_module("ttp.launch", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
def test_a_hangup_that_is_ignored_ends_nothing(tmp_path: Path) -> None:
    """`nohup ttprun ...` goes on when the terminal goes, though torch would take the signal."""
    driver = tmp_path / "driver.py"
    driver.write_text(NOHUP)
    with Launch(tmp_path, "note('begun')\nawait_file('go')", program=[str(driver)]) as job:
        job.await_notes("begun-0-0")
        job.says("attempt 0: ")
        job.process.send_signal(signal.SIGHUP)
        ignored = int(re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{job.process.pid}/status").read_text(), re.M)[1], 16)  # type: ignore[index]
        assert ignored >> (signal.SIGHUP - 1) & 1
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.text


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_rank_whose_interpreter_is_held_says_where_it_stood(tmp_path: Path) -> None:
    """C code that holds Python's lock silences all of a process's threads: its stacks are written by a signal's handler, before
    the launcher ends it, and the report quotes them."""
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    environ = {"TTP_FAULTS": "gil:rank=1,step=5,point=backward", "TTP_IN_PLACE": "False"}
    script = TRAINER + "run_as_program()"
    with Launch(tmp_path, script, "--nproc-per-node", "2", arguments=trainer, environ=environ) as job:
        job.until(lambda: job.process.poll() is not None, "end", within_s=300)
        assert job.wait() == 0, job.text
        stood = re.search(r"^stood   rank 1 in (\w+), \S+inject\.py:\d+$", job.text, re.M)
        assert stood is not None and stood[1] == "_hold_the_gil", job.text
        assert re.search(r"^            called in commit, \S+inject\.py:\d+$", job.text, re.M)
        job.assert_nothing_left()
    (fault,) = [line for line in read_jsonl(output / "log" / "story.jsonl") if line["event"] == "fault"]
    (culprit,) = fault["culprits"]
    assert culprit["rank"] == 1 and culprit["stood"][0].startswith("in _hold_the_gil, ")
    assert fault["stacks"] == str(output / "log" / "stacks_0.txt")
    assert (output / "log" / "stacks_0.txt").read_text().startswith("=== rank 1 (suspect) ===")
