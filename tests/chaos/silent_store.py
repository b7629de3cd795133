"""`ttprun` with an agent that the workers' store never answers: `python -m tests.chaos.silent_store` with ttprun's arguments.

The workers and their rendezvous have the store; the agent's search for the controller waits for it until the agent ends.
"""

from __future__ import annotations

import threading

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.launch import __main__ as ttprun
from ttp.launch.links.controller_client import ControllerClient


def _waits_for_ever(self: ControllerClient) -> Store:
    threading.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    ControllerClient._connect = _waits_for_ever  # type: ignore[method-assign]
    ttprun.main()
