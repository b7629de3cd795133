"""A spare node (`--spare-node`): three agents on this machine, of which the third waits until the job has lost another."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.chaos.test_partings import listens
from tests.chaos.test_static import TRAINS
from tests.ports import free_port
from ttp.chaos.observed.training_job import read_jsonl

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

ENDS = """
note("begun", os.getpid())
await_file("end")
sys.exit(int((out / "end").read_text()))
"""

SPARE = "waiting as a spare node for job 'j' at 127.0.0.1:"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(stack: contextlib.ExitStack, folder: Path, worker: str, *options: str) -> tuple[Launch, Launch, Launch]:
    """Launch nodes 127.0.0.1 and 127.0.0.2, and 127.0.0.3 as a spare, which is there first; the first one has the store."""
    port, nodes = free_port(), []
    for number in (3, 1, 2):
        words = [
            *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "j"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", f"127.0.0.{number}", *options),
        ]
        words += (
            ["--spare-node", "--rdzv-conf", "is_host=0"] if number == 3 else ["--rdzv-conf", f"is_host={2 - number}"]
        )
        node = stack.enter_context(Launch(folder, worker, *words, name=f"node{number}"))
        nodes.append(node)
        node.until(lambda: listens(port) or SPARE in node.text, "store or spare")  # noqa: B023
    spare, first, second = nodes
    return first, second, spare


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path, three: contextlib.ExitStack) -> None:
    """An agent and its worker are killed, and never come back: the survivor and the spare go on with the step that was saved."""
    first, second, spare = start(three, tmp_path, TRAINS)
    first.until(lambda: "step 100:" in first.text, "step")
    assert SPARE in spare.text and spare.notes("begun") == ["begun-0-0", "begun-1-0"]
    rank = 1 if " 0: rank 1 of 2 on this node" in second.text else 0
    for pid in (second.process.pid, int(second.read(f"begun-{rank}-0"))):
        os.kill(pid, signal.SIGKILL)
    assert [first.wait(), spare.wait()] == [0, 0], first.text + spare.text
    taken = "127.0.0.3, a spare, takes the place of 127.0.0.2"
    assert taken in spare.text and (first.text + spare.text).count(taken) == 2
    assert " 1: rank " in first.text and " 1: rank " in spare.text and " 0: rank " not in spare.text
    assert "no step lost" in first.text + spare.text
    (story,) = [
        line for line in read_jsonl(tmp_path / "checkpoints" / "ttp_log" / "story.jsonl") if line["event"] == "spare"
    ]
    assert (story["start"], story["node"], story["in_place_of"]) == (1, "127.0.0.3", "127.0.0.2")
    assert sorted(first.notes("begun")) == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"]
    for job in (first, second, spare):
        job.until(lambda job=job: job.marked() == [], "end of its processes")  # type: ignore[misc]


@pytest.mark.parametrize("code", [0, 1])
def test_a_spare_that_was_not_needed_ends_with_the_job(tmp_path: Path, three: contextlib.ExitStack, code: int) -> None:
    """With its success, or with the reason why it failed; a worker that fails meanwhile, on a node that is there, does not bring it in."""
    first, second, spare = start(three, tmp_path, ENDS, "--max-restarts", "0")
    first.await_notes("begun-0-0", "begun-1-0")
    (tmp_path / "end").write_text(str(code))
    assert [first.wait(), second.wait(), spare.wait()] == [code, code, code], spare.text
    if code:
        assert "the job 'j' is over: " in spare.text and "exit code 1" in spare.text
    else:
        assert "the job 'j' has succeeded without this spare node" in spare.text
    assert "takes the place" not in spare.text and "Traceback" not in spare.text
    for job in (first, second, spare):
        job.assert_nothing_left()


def test_a_spare_that_is_signalled_to_end_leaves_the_job_alone(tmp_path: Path, three: contextlib.ExitStack) -> None:
    """SIGTERM: it ends at once. The job goes on, and another spare can come."""
    first, second, spare = start(three, tmp_path, ENDS)
    first.await_notes("begun-0-0", "begun-1-0")
    spare.says(SPARE)
    spare.process.send_signal(signal.SIGTERM)
    assert spare.wait() in (1, -signal.SIGTERM), spare.text
    assert "Traceback" not in spare.text
    spare.assert_nothing_left()
    (tmp_path / "end").write_text("0")
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    assert first.notes("begun") == ["begun-0-0", "begun-1-0"]
