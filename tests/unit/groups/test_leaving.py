"""Ranks are killed in the middle of collectives; the others come out and make their groups again with a process in each one's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.forkserver import fork_server
from tests.unit.groups import ranks
from tests.waiting import until

WORLD = 3


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.long)])
def test_survivors_come_out_and_go_on_with_replacements(rounds: int, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = fork_server()
    processes = [
        context.Process(target=ranks.in_place, args=(index, WORLD, rounds, store.port, str(tmp_path)))
        for index in range(WORLD + rounds)
    ]
    for process in processes:
        process.start()
    try:
        until(
            lambda: len(list(tmp_path.glob("done_*"))) == WORLD or list(tmp_path.glob("error_*")),
            "the end of all rounds",
            60 + 5 * rounds,
        )
        errors = [path.read_text() for path in tmp_path.glob("error_*")]
        assert not errors, errors[0]
    finally:
        for process in processes:
            process.kill()
            process.join()
