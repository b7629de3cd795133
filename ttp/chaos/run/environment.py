"""What a run stands on: its nodes, the socket for its ranks, its launchers. Made in this order and taken down in the reverse
one, whatever happens; Ctrl-C does not disturb the taking down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttp.chaos.faults.control_socket import Control
from ttp.chaos.faults.scenario import Scenario
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.nodes.namespaces import Nodes
from ttp.chaos.observed.target import Target


@contextlib.contextmanager
def staged(
    command: Sequence[str], folder: Path, scenario: Scenario, patience: InterruptGuard
) -> Iterator[tuple[Target, Control]]:
    """Make all that a run of the command needs; nothing of it remains afterwards. Raises ConfigError, NodesError."""
    with contextlib.ExitStack() as stack:
        stack.callback(patience.ended)
        nodes = stack.enter_context(Nodes(scenario.nodes)) if scenario.nodes else ()
        control = stack.enter_context(Control())
        target = Target(
            command,
            folder,
            socket_path=control.path,
            environ=scenario.variables,
            nodes=nodes,
            small_disk_mib=scenario.small_disk_mib,
            patience=patience,
        )
        stack.enter_context(target)
        stack.callback(patience.ending)
        yield target, control
