"""What all attempts of one job share: the agent's settings, its connections to controllers, and its reporter.

Made once, from the command line and the environment (`main.make_launching`). Owns the variables that each attempt's workers have. Never decides
anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ttp.fork_server.servers import ForkServers
from ttp.launch.attempts.copies import Copies
from ttp.launch.attempts.crash_loop import FUTILE_STARTS
from ttp.launch.attempts.identities import Identities
from ttp.launch.attempts.mirror import Mirror
from ttp.launch.attempts.relays import Relays
from ttp.launch.health.node_health import NodeHealth
from ttp.launch.links.controller_client import ControllerLink
from ttp.launch.links.controller_shutdown import START_VARIABLE, RequestShutdown
from ttp.launch.rendezvous.job_secret import Read
from ttp.launch.report.reporter import Reporter
from ttp.proto.messages import Replace, TakePlaces, Thaw


class Workers(Protocol):
    """This node's workers, for the connection to a controller. No call blocks or raises."""

    @property
    def places(self) -> int:
        """For how many ranks of a lost node there is room here: a spare node has no workers yet. 0: there is none."""

    def running(self) -> Mapping[int, int]:
        """Return those of their processes that run now, by rank."""

    def take(self, order: Replace | TakePlaces | Thaw) -> None:
        """A process is to be replaced, a lost node's ranks are to be started here, or the ranks train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """What all attempts of one job share. Times in seconds."""

    total_timeout_s: float
    """TTP_OT: a fault's deadline."""
    poll_s: float
    """Between two looks of the death watch."""
    open_link: Callable[[str, str, Mapping[int, int], Workers], ControllerLink]
    """`open_link(address, job_id, pids, workers)`: connect to a controller as the agent of these ranks (rank -> pid)."""
    request_shutdown: RequestShutdown
    futile_starts: int = FUTILE_STARTS
    """The crash loop's limit: after so many attempts in a row that failed before completing a step the job stops; 0: no limit."""
    script: str = ""
    """The file that Python executes; empty: a module, a program, or stdin."""
    secret: Read | None = None
    """`secret()`: the job's, as this node was given it; None: the job does without (TTP_TLS=False)."""
    require_secret: bool = False
    """Several nodes must be given one."""
    quotes_traces: bool = False
    """The log quotes the root cause's traceback: the workers' own stderr is not on the console."""
    reporter: Reporter | None = None
    """Reports the job's attempts and faults; None: nothing is reported."""
    mirror: Mirror = field(default_factory=Mirror)
    """Copies checkpoints into an object store, if one is named."""
    fork_servers: ForkServers | None = None
    """Fork this node's workers and controllers; None: they are executed."""
    identities: Identities | None = None
    """This node's certificates; None: connections are plain, or the site has its own."""
    copies: Copies | None = None
    """The memory for ranks' copies; None: there is none."""
    relays: Relays | None = None
    """Carries the ranks' streams to controllers; None: each connects itself."""
    health: NodeHealth | None = None
    """This node's health check; None: there is none."""
    spare_node: bool = False
    """This node has no workers until the job has lost another one."""


def set_variables(
    number: int, start_id: str, directory: Path | None, servers: ForkServers | None, sockets: Mapping[str, str]
) -> None:
    """Set what an attempt's workers inherit from this process. `sockets`: the agent's, by variable."""
    os.environ.update(
        {
            "TTP_LAUNCHED": "1",
            "TTP_ATTEMPT": str(number),
            "TTP_ROUND_ID": str(number),
            "TTP_ATTEMPT_DIR": str(directory or ""),
            "TTP_FORK_SERVER": servers.address if servers is not None else "",
            **sockets,
            START_VARIABLE: start_id,
        }
    )
