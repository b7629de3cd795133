"""The words of a fault's report: frozen, since people search for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.launch.journals import journal, reported
from ttp.launch.report.incident import Report
from ttp.launch.report.render import fault_lines
from ttp.proto.incident import Culprit, Incident, RankPlace, Saved

DEAD = Culprit(rank=2, host="a", pid=71, cause="signal SIGKILL", phase="READY", step=42)
INCIDENT = Incident(
    kind="exited",
    culprits=(DEAD,),
    survivors=(RankPlace(phase="READY", step=42, ranks=(0, 1)), RankPlace(phase="DONE", step=42, ranks=(3,))),
    saved=Saved(step=42, path="/ckpt/iter_0000042", bytes=3 << 20, ranks=(0, 1, 3)),
    goes_on_from="/ckpt/iter_0000042",
    steps_lost=0,
    took_ms={"seen": 3.2, "frozen": 4.0, "decided": 0.1, "written": 1650.0, "published": 27.0, "total": 1684.3},
)
KILL = Report(start=4, began_unix_s=100.0, incident=INCIDENT, next="restart 1 of 3")


def killed(**changed: Any) -> list[str]:
    """Return the lines of the kill with some of the incident's fields changed."""
    return fault_lines(replace(KILL, incident=replace(INCIDENT, **changed)))


def test_a_kill_has_seven_lines() -> None:
    """Who, cause, where, saved, took, next."""
    assert fault_lines(KILL) == [
        "--- fault in attempt 4: a process exited ---",
        "who     rank 2 on node a (pid 71)",
        "cause   signal SIGKILL",
        "where   last heartbeat: READY of step 42; the others: ranks 0-1 in READY of step 42; rank 3 in DONE of step 42",
        "saved   step 42 in /ckpt/iter_0000042 (3.0 MiB, written by ranks 0-1, 3); no step lost",
        "took    seen 3 ms, frozen 4 ms, decided 0 ms, written 1,650 ms, published 27 ms; 1,684 ms in all",
        "next    restart 1 of 3, from /ckpt/iter_0000042",
    ]


def test_a_small_checkpoint_has_a_size() -> None:
    """In the unit that fits: `0.0 MiB` says nothing."""
    assert INCIDENT.saved is not None
    (saved,) = (line for line in killed(saved=replace(INCIDENT.saved, bytes=1536)) if "saved" in line)
    assert "(1.5 KiB, written by" in saved


def test_where_a_rank_was_has_what_is_certain_and_its_last_heartbeats_age() -> None:
    """A heartbeat comes once a second, and a second may be a hundred steps. The ages of several ranks' are left out."""
    old = replace(DEAD, phase="COMPUTE", step=10, heard_s=0.87, reached=42)

    def where(*culprits: Culprit) -> str:
        lines = killed(culprits=culprits, survivors=())
        return next(line for line in lines if line.startswith("where")).removeprefix("where   ")

    assert where(old) == "in READY of step 42 or later (last heartbeat, 0.9 s before: COMPUTE of step 10)"
    assert where(replace(old, reached=0)) == "last heartbeat, 0.9 s before: COMPUTE of step 10"
    assert where(replace(old, reported=True)) == "in COMPUTE of step 10"
    both = where(old, replace(old, rank=3, heard_s=0.2))
    assert both == "in READY of step 42 or later (last heartbeat: COMPUTE of step 10)"


def test_a_hang_has_its_suspects_frames() -> None:
    """The innermost frame first; where all stacks are."""
    hung = reported(journal("hung"))
    stood = {1: ("in recv, wire.py:9", "in step, train.py:80")}
    lines = fault_lines(replace(hung, stood=stood, stacks="/log/stacks_0.txt"))
    at = lines.index("stood   rank 1 in recv, wire.py:9")
    assert lines[at + 1] == "            called in step, train.py:80"
    assert lines[at + 2] == "        all stacks, suspects first: /log/stacks_0.txt"
    assert "stood   rank 1: no stacks were found on this node" in fault_lines(hung)


def test_an_exceptions_traceback_ends_under_its_cause() -> None:
    lines = fault_lines(reported(journal("raised")))
    cause = lines.index("cause   InjectedFault: rank 1, step 5: fault injected at backward")
    assert lines[cause + 1] == '        File "/srv/ttp/chaos/inject.py", line 166, in commit'
    assert lines[cause + 2].startswith("        raise InjectedFault(")
    assert lines[cause + 3].startswith("where   in COMPUTE of step 5; the others: rank 0")


def test_a_refusal_says_why_nothing_was_saved_and_where_the_job_goes_on() -> None:
    """Different causes are listed rank by rank, and several nodes one after the other."""
    culprits = (
        Culprit(rank=0, host="a", pid=1, cause="signal SIGKILL"),
        Culprit(rank=2, host="b", pid=3, cause="exit code 1"),
    )
    refused = replace(reported(journal("refused")).incident, culprits=culprits)
    lines = fault_lines(replace(KILL, incident=refused, next="restart 2 of 3"))
    assert "who     rank 0 on node a (pid 1); rank 2 on node b (pid 3)" in lines
    assert "cause   rank 0: signal SIGKILL; rank 2: exit code 1" in lines
    saved = next(line for line in lines if line.startswith("saved"))
    assert saved.startswith("saved   nothing: no live rank can write at step 8") and saved.endswith("; 2 steps lost")
    assert lines[-1] == "next    restart 2 of 3, from /run/checkpoints/iter_0000006"


@pytest.mark.parametrize(
    ("following", "end"),
    [("restart 2 of 3", "; 2 steps lost, unless copies in memory have them"), ("no restarts left", "; 2 steps lost")],
)
def test_a_loss_that_copies_may_make_good_is_not_said_to_be_one(following: str, end: str) -> None:
    """They are looked at before the next attempt, if there is one."""
    report = replace(KILL, incident=reported(journal("refused")).incident, next=following, copied=True)
    assert next(line for line in fault_lines(report) if line.startswith("saved")).endswith(end)


def test_a_thousand_culprits_fill_no_screen() -> None:
    """Ranks in runs, the first few processes, one cause."""
    many = tuple(Culprit(rank=rank, host="a", pid=rank + 1, cause="signal SIGKILL") for rank in range(1000))
    lines = killed(culprits=many)
    assert lines[1] == "who     ranks 0-999 on node a (pids 1, 2, 3, 4, 5, 6, 7, 8, ...)"
    assert lines[2] == "cause   signal SIGKILL" and max(map(len, lines)) < 200


def test_the_last_line_is_what_follows_instead_of_a_restart() -> None:
    assert fault_lines(replace(KILL, next="no restart left (of 3)"))[-1] == "next    no restart left (of 3)"
    assert fault_lines(replace(KILL, next="restart 1 of 3; if its disk works"))[-1].endswith(
        "restart 1 of 3, from /ckpt/iter_0000042; if its disk works"
    )
    assert killed(goes_on_from="")[-1].endswith("from the newest valid checkpoint that is found")


def test_a_fault_of_another_node_has_that_nodes_text() -> None:
    """No rank here is at fault, and what was lost is not known."""
    report = reported([], 3, elsewhere="b failed (rank 2: signal SIGKILL) and restarts")
    assert fault_lines(report) == [
        "--- fault in attempt 3: another node failed ---",
        "who     another node",
        "cause   b failed (rank 2: signal SIGKILL) and restarts",
        "saved   nothing: no controller on this node led the ranks",
    ]
