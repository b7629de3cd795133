"""Why an agent ends though the job may continue, and the exit code that asks a scheduler to start it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttp.text.wording import ranks_text

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: this node is excluded or drained, or too few nodes remain. The job continues from its newest checkpoint when it is started
again, on other nodes. A worker that leaves for a restart has the same code."""

LOST_STARTS = 5
"""After so many attempts in a row that lost a node before the ranks had a controller, a node that never reached the workers' store leaves.
One that did reach it leaves after twice as many: unreachable nodes have left by then."""


class Drained(RuntimeError):
    """This node was asked to leave (`ttp drain`). Its ranks have left by themselves, as at a preemption notice, or its text says why not."""


class NotStarted(RuntimeError):
    """The workers' program cannot be executed on this node."""


class NeverMet(RuntimeError):
    """The rendezvous completes, but the workers' store is not reachable from every node."""


class NotEnded(RuntimeError):
    """A worker of the last attempt has not ended after SIGKILL: this node cannot take part in another one."""


def raise_if_never_met(lost_starts: Sequence[tuple[str, str]]) -> None:
    """Raise NeverMet when too many attempts in a row have lost a node. `lost_starts`: of each such attempt, which node, and why its store was never
    reached from here (empty: it was)."""
    unreached = [why for _, why in lost_starts if why]
    if len(unreached) >= LOST_STARTS:
        what = unreached[-1]
    elif len(lost_starts) >= 2 * LOST_STARTS:
        what = lost_starts[-1][0]
    else:
        return
    raise NeverMet(
        f"{len(lost_starts)} attempts in a row ended before the ranks had a controller: {what}. Expected every node to resolve the name of node 0"
        " and to reach a port there that is new in each attempt. Open the ports between the nodes, or set --local-addr to an address"
        " that all nodes reach"
    )


def not_ended(living: Mapping[int, int]) -> str:
    """Return why a node cannot take part in another attempt: these workers of the last one (rank -> pid) still hold their memory and devices, as in
    uninterruptible sleep. torch gives them up, and would start others beside them. Empty: there are none."""
    if not living:
        return ""
    return (
        f"{ranks_text(living)} of the last attempt did not end after SIGKILL (pids {', '.join(map(str, living.values()))}), expected no"
        " process of an earlier attempt before this node joins again. Restart this host: such a process waits for a device or a file system"
    )
