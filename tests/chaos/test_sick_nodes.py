"""Several nodes, each a network namespace, with `--health-check`: a sick node takes no part, its place goes to a spare, and the reason is reported."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.test_nodes import WHY_NOT, MakeNodes, assert_whole, nodes, published, train_a_little
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.nodes_job import RENDEZVOUS, NodesJob
from ttp.chaos.observed.training_job import read_jsonl
from ttp.launch.endings import REQUEUE_EXIT_CODE
from ttp.launch.health.check_command import CHECK_S
from ttp.status import history

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes on this machine: {WHY_NOT}"),
]

STEPS = ("--training_config.training_iters=150",)
CHECK = """
import os, pathlib, sys, time
own = pathlib.Path(sys.argv[1], os.uname().nodename)
with open(own.with_suffix(".log"), "a") as log:
    print(time.time(), file=log)
if own.exists():
    print("looked at the disk")
    if (text := own.read_bytes()) == b"hang":
        time.sleep(1000)
    sys.stdout.buffer.write(text)
    sys.exit(3)
"""
"""Fails with what the file of this node's name says, if there is one."""
EVENT = """
import os, pathlib, sys
with open(pathlib.Path(sys.argv[1]), "a") as events:
    events.write(os.uname().nodename + " " + sys.stdin.read())
"""


class Checked(NodesJob):
    """A job whose nodes are checked; `sicken` makes one sick."""

    def __init__(
        self,
        output: Path,
        nodes: Sequence[Node],
        *,
        environ: Mapping[str, str] | None = None,
        sick: Mapping[str, bytes] | None = None,
        join_timeout_s: int = 240,
        **more: Any,
    ) -> None:
        self._state = output / "health"
        self._state.mkdir(parents=True)
        for name, text in (sick or {}).items():
            (self._state / name).write_bytes(text)
        check, event = output / "check.py", output / "event.py"
        check.write_text(CHECK)
        event.write_text(EVENT)
        self._events = output / "events"
        super().__init__(
            output,
            nodes,
            launcher=(
                *("--health-check", shlex.join([sys.executable, str(check), str(self._state)])),
                *("--on-event", shlex.join([sys.executable, str(event), str(self._events)])),
                *("--rdzv-conf", RENDEZVOUS.replace("join_timeout=240", f"join_timeout={join_timeout_s}")),
            ),
            overrides=arguments(*STEPS),
            environ=environ,
            **more,
        )

    def __enter__(self) -> Checked:
        super().__enter__()
        return self

    def sicken(self, node: Node, text: bytes) -> None:
        (self._state / node.name).write_bytes(text)

    def heal(self, node: Node) -> None:
        (self._state / node.name).unlink()

    def checks(self, node: Node) -> list[float]:
        """Return when this node was checked."""
        path = self._state / f"{node.name}.log"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    def drained(self) -> set[str]:
        """Return where the command on events got an event of a sick node."""
        lines = self._events.read_text().splitlines()
        return {line.split()[0] for line in lines if '"event": "sick_node"' in line}

    def story(self) -> list[dict[str, Any]]:
        return read_jsonl(self.output_dir / "log" / "story.jsonl")


@pytest.mark.long
def test_a_node_that_is_sick_after_a_fault_gives_its_place_to_the_spare(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """The step is saved as ever, no step is lost, and what was wrong is said on every node, in the report, and to the command on events."""
    a, b, c = nodes(3)
    with Checked(tmp_path / "job", (c, a, b), spares=(c,), stores=(c,)) as job:
        train_a_little(job, 0)
        sick = job.node_of_rank(3)
        well = a if sick is b else b
        job.sicken(sick, b"uncorrected memory errors: 2 of mc0\n")
        killed = job.kill(3)
        assert job.wait(timeout_s=200) == {c.name: 0, well.name: 0, sick.name: REQUEUE_EXIT_CODE}, job.console_tail(60)
    assert published(job, 0)[0] >= killed.after_step
    why = "its health check failed (exit status 3): uncorrected memory errors: 2 of mc0"
    assert f"this node is excluded: {why}" in job.console(sick)
    assert f"a node is excluded: {sick.name}: {why}" in job.console(well)
    assert f"{c.name}, a spare, takes the place of {sick.name}" in job.console(c)
    (line,) = [each for each in job.story() if each["event"] == "sick_node"]
    assert (line["node"], line["reason"]) == (sick.name, why)
    end = job.story()[-1]
    assert (end["result"], end["excluded"], end["steps_lost"]) == ("succeeded", [f"{sick.name}: {why}"], 0)
    assert f"sick    {sick.name}: {why}" in job.console(c) + job.console(well)
    assert history.read(job.output_dir / "log").excluded == (f"{sick.name}: {why}",)
    assert sick.name in job.drained() and job.drained() - {sick.name}, "on the node itself, and on that of rank 0"
    assert (len(job.checks(well)), len(job.checks(sick)), len(job.checks(c))) == (1, 3, 2)
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
def test_a_node_that_is_sick_before_the_first_attempt_gives_its_place_to_the_spare(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """It never joins. What it prints are bytes of all kinds, which are shown as far as they can be."""
    a, b, c = nodes(3)
    garbage = bytes(range(256)) * 40 + b"\n\xff\xfe broken \x1b[31m\x00disk\n\n"
    with Checked(tmp_path / "job", (c, a, b), spares=(c,), stores=(c,), sick={b.name: garbage}) as job:
        assert job.wait(timeout_s=200) == {c.name: 0, a.name: 0, b.name: REQUEUE_EXIT_CODE}, job.console_tail(60)
    why = "its health check failed (exit status 3): \ufffd\ufffd broken [31m disk"
    assert f"this node is excluded: {why}" in job.console(b)
    assert f"{c.name}, a spare, takes the place of {b.name}" in job.console(c)
    end = job.story()[-1]
    assert (end["result"], end["starts"], end["excluded"]) == ("succeeded", 1, [f"{b.name}: {why}"])
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
def test_a_job_with_too_few_nodes_asks_to_be_started_again_and_continues(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """No spare, and no fewer nodes allowed: all end with 75. The next allocation has other nodes, and loses no step."""
    a, b = nodes(2)
    with Checked(tmp_path / "job", (a, b), join_timeout_s=20) as job:
        train_a_little(job, 0)
        sick = job.node_of_rank(3)
        well = a if sick is b else b
        job.sicken(sick, b"no device answers\n")
        killed = job.kill(3)
        assert set(job.wait(timeout_s=200).values()) == {REQUEUE_EXIT_CODE}, job.console_tail(60)
        why = f"{sick.name}: its health check failed (exit status 3): no device answers"
        assert "too few nodes joined within 20 s" in job.console(well) and f"excluded: {why}" in job.console(well)
        assert job.story()[-1]["result"] != "succeeded" and why in job.story()[-1]["excluded"]
        consoles = job.console(a) + job.console(b)
        # torch's timer is sometimes dropped in its own thread, which it then cannot join: torch prints that, and ignores it.
        assert consoles.count("Traceback") == consoles.count("Exception ignored in: <finalize object")
        assert published(job, 0)[0] >= killed.after_step
        job.heal(sick)
        for node in (a, b):
            job.start(node)
        assert job.wait(timeout_s=200) == {a.name: 0, b.name: 0}, job.console_tail(60)
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
def test_a_check_that_hangs_delays_no_dump_and_excludes_the_node(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob
) -> None:
    """The step is published while the check hangs. Then it is killed, and the spare takes the place."""
    a, b, c = nodes(3)
    with Checked(tmp_path / "job", (c, a, b), spares=(c,), stores=(c,)) as job:
        train_a_little(job, 0)
        sick = job.node_of_rank(3)
        job.sicken(sick, b"hang")
        job.kill(3)
        statuses = job.wait(timeout_s=300)
        assert statuses[sick.name] == REQUEUE_EXIT_CODE and sorted(statuses.values()) == [0, 0, REQUEUE_EXIT_CODE]
    why = f"its health check took longer than {CHECK_S:g} s and was killed; it had printed: looked at the disk"
    assert f"this node is excluded: {why}" in job.console(sick)
    (fault,) = [line for line in job.story() if line["event"] == "fault"]
    assert fault["took_ms"]["total"] < 1e3 * CHECK_S, "the survivors had saved and left before"
    assert job.story()[-1]["excluded"] == [f"{sick.name}: {why}"]
    assert_whole(job, whole_job(4, *STEPS))


@pytest.mark.long
@pytest.mark.parametrize("sick", [False, True])
def test_in_place_no_process_is_put_on_a_sick_node(
    tmp_path: Path, nodes: MakeNodes, whole_job: RunJob, sick: bool
) -> None:
    """On a node that is well another process takes the rank's place, once the check has passed; on a sick one the step is written, and the spare
    takes the place."""
    a, b, c = nodes(3)
    with Checked(
        tmp_path / "job", (c, a, b), spares=(c,), stores=(c,), environ={"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30"}
    ) as job:
        train_a_little(job, 0)
        node = job.node_of_rank(3)
        if sick:
            job.sicken(node, b"too hot\n")
        job.kill(3)
        statuses = job.wait(timeout_s=200)
    assert statuses[node.name] == (REQUEUE_EXIT_CODE if sick else 0), job.console_tail(60)
    assert len(job.checks(node)) == (3 if sick else 2)
    assert ("this node is sick: its health check failed" in job.console(node)) is sick
    assert ("in the place of the one that ended" in job.console(node)) is not sick
    assert len(job.starts()) == (2 if sick else 1)
    assert_whole(job, whole_job(4, *STEPS))
