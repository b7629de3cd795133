"""Real ranks for tests: a fork server that has imported torch once, and gloo between its children."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.forkserver import fork_server, run_ranks_to_end
from tests.unit.optim import rank_main

DEADLINE_S = 240.0

RunRanks = Callable[..., None]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Return run(world, name, ...): run those claims (claims_*.py), in this order, on `world` gloo ranks."""
    context = fork_server()

    def run(world: int, *names: str) -> None:
        ranks = [
            context.Process(target=rank_main.main, args=(rank, world, names, str(tmp_path))) for rank in range(world)
        ]
        run_ranks_to_end(ranks, tmp_path, DEADLINE_S, str(names))
        assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
        # A scenario that did not run cannot pass.
        assert len(list(tmp_path.glob("done_*"))) == world

    return run
