"""The private names of torch that ttprun uses, all in one place: what to look at when torch changes.

`SimpleElasticAgent` declares its methods for subclasses with a leading underscore, so an agent cannot be built without
them. Everything else that ttprun takes from torch is public, but for one variable. A test compares this list with the code and with torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RUN_WITH = ("2.13.0", "2.14.1")
"""Versions of torch that ttprun was run with: the first with all its tests, 2.14.1 with the unit tests and test_launch.py only."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """An attribute of torch's agent, and what it is used for."""

    name: str
    kind: str
    """`method`: overridden, and the inherited one called (or left out); `attribute`: of the instance; `variable`: of the
    environment, which torch's documentation does not name."""
    use: str


PRIVATE_NAMES = (
    PrivateName("_rendezvous", "method", "meet again when a node dies before all ranks are known"),
    PrivateName("_start_workers", "method", "begin a start: the death watch and the courier follow the workers"),
    PrivateName("_monitor_workers", "method", "hold the survivors before torch ends them, and explain the end"),
    PrivateName("_stop_workers", "method", "hold the survivors when another node causes the restart"),
    PrivateName("_shutdown", "method", "end all that a start has left, with a notice under a controller"),
    PrivateName("_exit_barrier", "method", "left out: it waits 300 s for a node whose workers have failed"),
    PrivateName("_remaining_restarts", "attribute", "set to 0 when a restart could change nothing"),
    PrivateName(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "variable",
        "set while torch's rendezvous runs, so that it makes no store for the workers: every start has a new one",
    ),
)
"""All but the variable of `torch.distributed.elastic.agent.server.api.SimpleElasticAgent`, through `LocalElasticAgent`."""
