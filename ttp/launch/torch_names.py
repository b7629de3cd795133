"""The private names of torch and of Python that ttprun uses, all in one place: what to check when one of them changes.

`SimpleElasticAgent` declares its methods for subclasses with a leading underscore, so an agent cannot be built without
them. Everything else that ttprun takes from torch is public, but for one variable; of Python's `argparse` it takes two private names.
Tests compare these lists with the code, with torch and with Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttp.torch_range import TESTED

RUN_WITH = TESTED
"""Versions of torch that ttprun was run with."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """An attribute of torch's agent, and what it is used for."""

    name: str
    kind: str
    """`method`: overridden, and the inherited one called or not; `attribute`: of the instance; `variable`: an environment variable that
    torch does not document."""
    use: str


PRIVATE_NAMES = (
    PrivateName("_rendezvous", "method", "join again when a node dies before all ranks are known"),
    PrivateName("_start_workers", "method", "begin an attempt: start its death watch and its controller client"),
    PrivateName("_monitor_workers", "method", "let the survivors save before torch ends them, and report the end"),
    PrivateName("_stop_workers", "method", "let the survivors save when another node causes the restart"),
    PrivateName("_shutdown", "method", "end all processes of an attempt; with a controller, drain first"),
    PrivateName("_exit_barrier", "method", "not called: it waits 300 s for a node whose workers have failed"),
    PrivateName(
        "_remaining_restarts", "attribute", "read: only torch counts; set to 0 when a restart would fail the same way"
    ),
    PrivateName(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "variable",
        "set while torch's rendezvous runs, so that it makes no store for the workers: every attempt has a new one",
    ),
)
"""All but the variable of `torch.distributed.elastic.agent.server.api.SimpleElasticAgent`, through `LocalElasticAgent`."""

HANDLER_NAMES = (
    PrivateName(
        "_popen",
        "method",
        "overridden: the process is forked (`warm_start.py`), and the inherited one called when it cannot be",
    ),
    PrivateName("_stdout", "attribute", "read: the log file that the forked worker gets; None: the agent's own"),
    PrivateName("_stderr", "attribute", "the same"),
)
"""Of torch's `SubprocessHandler`. The class takes the place of `get_subprocess_handler` in `torch.distributed.elastic.multiprocessing.api`
while workers are started."""

PYTHON_RUN_WITH = ("3.11", "3.12", "3.13")
"""Versions of Python that the command line was run with: 3.11 with all its tests; 3.12.1 and 3.13.0 with abbreviations of TTP's options
and of a few that stood in for torchrun's only."""

ARGPARSE_NAMES = (
    PrivateName(
        "_get_option_tuples", "method", "overridden: TTP's options make no abbreviation of torchrun's ambiguous"
    ),
    PrivateName("_group_actions", "attribute", "read: which options are TTP's own"),
)
"""Of `argparse.ArgumentParser`, and of the group that its `add_argument_group` returns."""
