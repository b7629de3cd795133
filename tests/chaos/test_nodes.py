"""Several nodes, each a network namespace with a cable of its own: ranks, nodes and cables are lost; the job loses nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import RunJob, arguments
from ttp.chaos.nodes import namespaces as nodes_module
from ttp.chaos.nodes.namespaces import Node, Nodes, NodesError, why_not
from ttp.chaos.observed.nodes_job import RENDEZVOUS, NodesJob
from ttp.chaos.observed.training_job import Observed, TrainingJob, read_jsonl
from ttp.chaos.verdict.timeline import by_step, compare
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.verify import verify

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]

STEPS = ("--training_config.training_iters=300", "--training_config.log_interval=100")
LAST = 300
MORE_STEPS = ("--training_config.training_iters=900", "--training_config.log_interval=100")

Line = dict[str, Any]
MakeNodes = Callable[[int], tuple[Node, ...]]


@pytest.fixture
def nodes() -> Iterator[MakeNodes]:
    """Return a function that makes so many nodes; they are gone after the test, however it ends."""
    made: list[Nodes] = []

    def make(count: int) -> tuple[Node, ...]:
        made.append(Nodes(count))
        return made[-1].__enter__()

    yield make
    for group in reversed(made):
        group.remove()


def lines_of(job: Observed, start: int, *events: str) -> list[Line]:
    journals = job.journals()
    return [line for line in journals[start] if line.get("event") in events] if len(journals) > start else []


def train_a_little(job: NodesJob, start: int, steps: int = 5) -> None:
    """Wait until this attempt of the job has made so many new steps."""
    job.wait_for(lambda: bool(lines_of(job, start, "assembled")), f"attempt {start}", 120)
    job.wait_for_step(job.last_step() + steps)


def wait_for_verdict(job: NodesJob, start: int) -> list[Line]:
    """Wait until a controller of this attempt has said what becomes of its fault."""
    job.wait_for(lambda: bool(lines_of(job, start, "published", "refused")), f"a verdict in attempt {start}", 120)
    return lines_of(job, start, "published", "refused")


@contextlib.contextmanager
def slowly(job: NodesJob, left_out: Node) -> Iterator[None]:
    """Throttle the cable of another node, so that the job cannot be over before what is to happen."""
    node = next(node for node in job.nodes if node is not left_out)
    node.throttle(4)
    yield
    node.clear()


def published(job: Observed, start: int) -> list[int]:
    return [int(line["step"]) for line in lines_of(job, start, "published")]


def assert_whole(job: NodesJob, reference: Observed) -> None:
    """Every step and the final weights are the baseline job's bits; nothing remains."""
    verdict = compare(job.metrics(), reference.metrics(), job.final(), reference.final())
    assert verdict.equal, "\n".join(verdict.differences[:10])
    assert job.leftovers() == []


@pytest.mark.long
def test_ranks_and_nodes_are_lost_one_after_the_other(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """2 nodes x 2 ranks: a rank is killed; then the node without rank 0; then the node with rank 0, the active controller
    and the rendezvous store. Each lost node is started again; no committed step is lost, all bits are the baseline job's."""
    a, b = nodes(2)
    with NodesJob(tmp_path / "faulted", (a, b), overrides=arguments(*STEPS)) as job:
        before = []
        train_a_little(job, 0)
        before.append(job.kill(3).after_step)
        train_a_little(job, 1)
        before.append(job.last_step())
        lost = b if job.node_of_rank(0) is a else a
        lost.power_off()
        wait_for_verdict(job, 1)
        lost.plug()
        job.start(lost)
        train_a_little(job, 2)
        before.append(job.last_step())
        lost = job.node_of_rank(0)
        lost.power_off()
        wait_for_verdict(job, 2)
        lost.plug()
        job.start(lost)
        assert job.wait(timeout_s=200) == {"node-a": 0, "node-b": 0}, job.console_tail(60)
    for start, step in enumerate(before):
        assert published(job, start)[0] >= step, (start, step)
    assert lines_of(job, 2, "took_over")
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
def test_a_rank_killed_among_three_nodes_costs_nothing_and_is_reported_rightly(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """3 nodes x 2 ranks. The report names the rank, its process and node, the cause, the step and where it lies; the launcher
    of rank 0's node reports it on its console, the others do not; what is said of every attempt is said once."""
    three = nodes(3)
    with NodesJob(tmp_path / "faulted", three, overrides=arguments(*STEPS)) as job:
        train_a_little(job, 0)
        teller, victim = job.node_of_rank(0), 3
        node = job.node_of_rank(victim)
        killed = job.kill(victim)
        train_a_little(job, 1)
        assert set(job.wait(timeout_s=200).values()) == {0}, job.console_tail(60)
    (step,) = published(job, 0)
    assert step >= killed.after_step
    story = read_jsonl(job.output_dir / "log" / "story.jsonl")
    story = [line for line in story if line["event"] not in ("hold", "held", "straggler", "straggler_over")]
    assert [line["event"] for line in story] == ["start", "fault", "start", "end"]
    for start in (story[0], story[2]):
        assert start["world_size"] == 6 and sorted(start["pids"]) == [str(rank) for rank in range(6)]
        assert {row["host"] for row in start["rows"]} == {node.name for node in three}
    fault = story[1]
    (culprit,) = fault["culprits"]
    assert (culprit["rank"], culprit["host"], culprit["pid"]) == (victim, node.name, killed.pid)
    assert culprit["cause"] == "signal SIGKILL" and not culprit["reported"]
    assert 0 < culprit["step"] <= step + 1, "of its last heartbeat, which may be a second old"
    assert {place["step"] for place in fault["survivors"]} <= {step, step + 1}
    assert sorted(rank for place in fault["survivors"] for rank in place["ranks"]) == [0, 1, 2, 4, 5]
    path = str(job.output_dir / "checkpoints" / f"iter_{step:07d}")
    assert (fault["saved"]["step"], fault["saved"]["path"], fault["goes_on_from"]) == (step, path, path)
    assert fault["steps_lost"] == 0 and victim not in fault["saved"]["ranks"]
    assert (story[3]["result"], story[3]["starts"], story[3]["faults"]) == ("succeeded", 2, 1)
    assert (story[3]["saved_steps"], story[3]["steps_lost"]) == ([step], 0)
    logged = [each for each in three if "--- fault in attempt 0" in job.console(each)]
    assert logged == [teller]
    assert f"rank {victim} on node {node.name} (pid {killed.pid})" in job.console(teller)
    assert f"step {step} in {path}" in job.console(teller)
    assert_whole(job, whole_job(6, *STEPS))


@pytest.mark.long
def test_the_job_goes_on_with_fewer_nodes_and_takes_the_lost_one_in_again(tmp_path: Path, nodes: MakeNodes) -> None:
    """3 nodes x 2 ranks, `--nnodes 2:3`: the node with rank 0, the active controller and the store is lost; four ranks go
    on from a resharded checkpoint; the node comes back, and six ranks go on. Every stretch has the bits of a job of that
    size from that checkpoint."""
    three = nodes(3)
    options = arguments(*MORE_STEPS)
    with NodesJob(tmp_path / "faulted", three, nnodes="2:3", overrides=options) as job:
        train_a_little(job, 0)
        step, lost = job.last_step(), job.node_of_rank(0)
        lost.power_off()
        wait_for_verdict(job, 0)
        train_a_little(job, 1)
        assert len(job.pids()) == 4
        with slowly(job, lost):
            lost.plug()
            job.start(lost)
            train_a_little(job, 2)
        assert len(job.pids()) == 6
        assert set(job.wait(timeout_s=200).values()) == {0}, job.console_tail(60)
    (first,), (second,) = published(job, 0), published(job, 1)
    assert first >= step
    assert job.leftovers() == []
    assert_stretch(job, tmp_path / "from_nothing", 6, options, None, 0, first)
    assert_stretch(job, tmp_path / "from_first", 4, options, first, first, second)
    assert_stretch(job, tmp_path / "from_second", 6, options, second, second, 900)


def assert_stretch(
    job: NodesJob, output: Path, ranks: int, options: tuple[str, ...], begin: int | None, after: int, last: int
) -> None:
    """Steps after+1 to last are what a job of so many ranks makes that begins with the checkpoint of step `begin`."""
    if begin is not None:
        name = f"iter_{begin:07d}"
        shutil.copytree(job.output_dir / "checkpoints" / name, output / "checkpoints" / name)
    with TrainingJob(output, ranks=ranks, overrides=options) as reference:
        reference.wait_for_step(last)
        expected = by_step(reference.metrics())
    found = [line for line in job.metrics() if "loss" in line and after < int(line["step"]) <= last]
    assert sorted({int(line["step"]) for line in found}) == list(range(after + 1, last + 1))
    for line in found:
        step = int(line["step"])
        assert (line["loss"], line["grad_norm"]) == (expected[step]["loss"], expected[step]["grad_norm"]), step


@pytest.mark.long
def test_a_pulled_cable_leaves_both_sides_right_and_one_publishes(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """The cable of the node with rank 0 is pulled: each side has a controller and a holder of everything. A step is
    published once; no rank trains alone; with the cable back in all continue, and lose nothing."""
    a, b = nodes(2)
    with NodesJob(tmp_path / "cut", (a, b), overrides=arguments(*STEPS)) as job:
        train_a_little(job, 0)
        step = job.last_step()
        a.unplug()
        job.wait_for(lambda: not (job.ranks_on(a) or job.ranks_on(b)), "leave of all ranks", 120)
        checkpoints = list_checkpoints([job.output_dir / "checkpoints"])
        steps = [verify(path).step for path in checkpoints]
        verdicts = lines_of(job, 0, "published")
        assert len(job.journals()) == 1, "a side started again by itself"
        a.plug()
        assert job.wait(timeout_s=200) == {"node-a": 0, "node-b": 0}, job.console_tail(60)
    assert steps and steps[0] >= step
    assert len(steps) == len(set(steps)) and max(steps) - min(steps) <= 1
    assert {int(line["step"]) for line in verdicts} == set(steps)
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
def test_a_node_cut_off_and_back_finds_the_others_where_they_went(tmp_path: Path, nodes: MakeNodes) -> None:
    """3 nodes, `--nnodes 2:3`: the one with the store is cut off. It does not train alone; the two others go on in another
    store; when its cable is back, its agent finds them there."""
    three = nodes(3)
    with NodesJob(tmp_path / "cut", three, nnodes="2:3", overrides=arguments(*MORE_STEPS)) as job:
        train_a_little(job, 0)
        step, cut = job.last_step(), job.node_of_rank(0)
        cut.unplug()
        job.wait_for(lambda: len(job.journals()) > 1 and len(job.pids()) == 4, "an attempt of four ranks", 120)
        train_a_little(job, 1)
        assert not job.ranks_on(cut)
        steps = [verify(path).step for path in list_checkpoints([job.output_dir / "checkpoints"])]
        with slowly(job, cut):
            cut.plug()
            train_a_little(job, 2)
        assert len(job.ranks_on(cut)) == 2
        assert set(job.wait(timeout_s=200).values()) == {0}, job.console_tail(60)
    assert max(published(job, 0)) >= step
    assert len(steps) == len(set(steps)) and max(steps) - min(steps) <= 1, (
        "each side was right, and a step is there once"
    )
    assert set(published(job, 0)) == set(steps)
    assert sorted(by_step(job.metrics())) == list(range(1, 901))
    assert job.leftovers() == []


@pytest.mark.long
def test_a_node_lost_while_its_ranks_are_starting_is_reported_and_the_others_go_on(
    tmp_path: Path, nodes: MakeNodes
) -> None:
    """3 nodes, `--nnodes 2:3`: the node with rank 0 and both stores is lost after the rendezvous, before any rank is known to
    anybody. No controller is there to notice; the launchers do, long before torch's half an hour."""
    three = nodes(3)
    options, patient = arguments(*STEPS), RENDEZVOUS.replace("last_call_timeout=4", "last_call_timeout=20")
    launcher = ("--rdzv-conf", patient)  # all three are there at the first attempt, however slow one is
    with NodesJob(tmp_path / "faulted", three, nnodes="2:3", overrides=options, launcher=launcher) as job:
        first = ": ranks 0-1 of 6 on this node"
        job.wait_for(lambda: any(first in job.console(node) for node in three), "an attempt of six ranks", 120)
        lost = next(node for node in three if first in job.console(node))
        lost.power_off()
        assert not job.journals(), "too late: rank 0 has started a controller"
        others = [node for node in three if node is not lost]
        assert job.wait(*others, timeout_s=400) == {node.name: 0 for node in others}, job.console_tail(60)
    for node in others:
        assert "a node was lost before the ranks had a controller: node 0" in job.console(node)
        assert "restarting (" not in job.console(node)
    assert sorted(by_step(job.metrics())) == list(range(1, LAST + 1))
    assert job.leftovers() == []


@pytest.mark.long
def test_a_slow_cable_is_not_a_fault(tmp_path: Path, nodes: MakeNodes, whole_job: RunJob) -> None:
    """Steps that take twenty times as long for a while, through a cable of 2 Mbit/s: no rank is suspected."""
    a, b = nodes(2)
    with NodesJob(tmp_path / "slow", (a, b), overrides=arguments(*STEPS)) as job:
        train_a_little(job, 0, 20)
        b.throttle(2)
        job.wait_for_step(job.last_step() + 10)
        b.clear()
        assert job.wait(timeout_s=200) == {"node-a": 0, "node-b": 0}, job.console_tail(60)
    assert len(job.journals()) == 1
    assert not lines_of(job, 0, "freeze_sent", "death_seen", "took_over")
    assert_whole(job, whole_job(4, *STEPS))


HARNESS = """
import signal, sys, time
from ttp.chaos.nodes.namespaces import Nodes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
with Nodes(2) as (a, b):
    a.popen(["sleep", "1000"])
    print("up", flush=True)
    time.sleep(1000)
"""


UNDER_PYTEST = """
import sys, time
from pathlib import Path
import pytest
Path(sys.argv[1], "test_up.py").write_text('''
import time
from tests.chaos.test_nodes import nodes
def test_up(nodes):
    nodes(2)[0].popen(["sleep", "1000"])
    print("up", flush=True)
    while True:  # the kernel may give a signal to another thread: Python's main thread looks for it between two sleeps
        time.sleep(0.05)
''')
sys.exit(pytest.main(["-s", "-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], sys.argv[1]]))
"""


def spaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"ttp-{pid}-")]


def test_a_test_run_that_is_signalled_to_end_removes_its_nodes(tmp_path: Path) -> None:
    """SIGTERM to pytest, in the middle of a test that has made some."""
    command = [sys.executable, "-c", UNDER_PYTEST, str(tmp_path)]
    harness = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert harness.stdout is not None
    with harness.stdout:
        while (line := harness.stdout.readline()) and line.strip() != b"up":
            pass
        assert len(spaces_of(harness.pid)) == 3
        harness.send_signal(signal.SIGTERM)
        assert b"Terminated" in harness.stdout.read()
    assert harness.wait(60) == pytest.ExitCode.INTERRUPTED
    assert spaces_of(harness.pid) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_harness_that_is_ended(signum: signal.Signals) -> None:
    """Ctrl-C and SIGTERM remove nodes and what runs on them at once; after SIGKILL the next harness does."""
    harness = subprocess.Popen([sys.executable, "-c", HARNESS], stdout=subprocess.PIPE)
    assert harness.stdout is not None and harness.stdout.readline() == b"up\n"
    mine = f"ttp-{harness.pid}-"
    assert mine in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    harness.send_signal(signum)
    assert harness.wait(60) == -signum, "it ends as what was sent"
    harness.stdout.close()
    if signum == signal.SIGKILL:
        with Nodes(1):
            pass
    assert mine not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert (
        not [name for name in os.listdir("/etc/netns") if name.startswith(mine)]
        if os.path.isdir("/etc/netns")
        else True
    )


def test_what_the_system_refuses_is_said_in_its_own_words(nodes: MakeNodes) -> None:
    """A cable of no width; the node stays as it was."""
    (node,) = nodes(1)
    with pytest.raises(NodesError, match=r"`tc .* rate 0kbit .*`: "):
        node.throttle(0)
    node.clear()
    node.clear()


ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
open("/dev/stdout", "w").write("up\\n")
connection, _ = server.accept()
while piece := connection.recv(1 << 16):
    connection.sendall(piece)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection(("node-b", 5000), 60)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for line in sys.stdin:
    question, began, answer = b"x" * int(line), time.monotonic(), 0
    connection.sendall(question)
    while answer < len(question):
        answer += len(connection.recv(1 << 16))
    print(time.monotonic() - began, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("netem", [True, False])
def test_a_delay_makes_packets_late_in_each_direction(
    nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch, netem: bool
) -> None:
    """On a connection that lives on: a small packet and many at once, while the delay is there, is changed and is gone; by netem
    where the kernel has it, and by the process that does without. Nothing of that process remains."""
    a, b = nodes(2)
    if not netem:

        def without(namespace: str, *words: str) -> str:
            if "netem" in words:
                raise NodesError("netem: unknown")
            return real(namespace, *words)

        real = nodes_module._tc
        monkeypatch.setattr(nodes_module, "_tc", without)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    enter = ["ip", "netns", "exec"]
    ask = ASK.replace("node-b", b.address)
    with subprocess.Popen([*enter, b._namespace, sys.executable, "-I", "-c", ECHO], **pipes) as echo:
        assert echo.stdout is not None and echo.stdout.readline() == b"up\n"
        with subprocess.Popen([*enter, a._namespace, sys.executable, "-I", "-c", ask], **pipes) as asker:
            assert asker.stdin is not None

            def took_s(nbytes: int = 1) -> float:
                assert asker.stdin is not None and asker.stdout is not None
                asker.stdin.write(f"{nbytes}\n".encode())
                asker.stdin.flush()
                return float(asker.stdout.readline())

            took_s()  # the addresses are known
            b.delay(200)
            assert all(0.4 <= took_s() < 5.0 for _ in range(3))
            assert took_s(1 << 20) >= 0.4
            b.delay(100)
            assert all(took_s() >= 0.2 for _ in range(3))
            b.clear()
            assert min(took_s() for _ in range(5)) < 0.2
            b.delay(100)
            asker.stdin.close()
        echo.kill()
    for node in (a, b):
        node.clear()
    listed = subprocess.run(["ip", "netns", "pids", b._switch], capture_output=True, text=True, check=True).stdout
    assert listed == ""
