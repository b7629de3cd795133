"""Why an agent ends though the job may continue, and the exit code that asks a scheduler to start it again."""

from __future__ import annotations

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: this node is excluded or drained, or too few nodes remain. The job continues from its newest checkpoint when it is started
again, on other nodes. A worker that leaves for a restart has the same code."""


class Drained(RuntimeError):
    """This node was asked to leave (`ttp drain`). Its ranks have left by themselves, as at a preemption notice, or its text says why not."""


class NotStarted(RuntimeError):
    """The workers' program cannot be executed on this node."""


class NeverMet(RuntimeError):
    """The rendezvous completes, but the workers' store is not reachable from every node."""


class NotEnded(RuntimeError):
    """A worker of the last attempt has not ended after SIGKILL: this node cannot take part in another one."""
