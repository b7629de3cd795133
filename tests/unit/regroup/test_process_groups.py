"""Process groups made again on real gloo ranks: see ranks.py, whose functions are run here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.forkserver import fork_server
from tests.unit.regroup import ranks
from ttp.errors import ConfigError
from ttp.regroup.process_groups import ProcessGroups

DEADLINE_S = 200.0

Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return run(name, world, ...): run that function of ranks.py, with what else is given, on so many ranks."""

    def on_ranks(name: str, world: int, *given: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = fork_server()
        processes = [
            context.Process(target=ranks.main, args=(name, given, rank, world, store.port, str(tmp_path)))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + DEADLINE_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        errors = "\n".join(path.read_text() for path in sorted(tmp_path.glob("error_*")))
        assert not errors, errors
        assert not late, f"ranks {late} still ran after {DEADLINE_S} s"
        assert len(list(tmp_path.glob("done_*"))) == world

    return on_ranks


@pytest.mark.parametrize(
    "name", ["everything_has_its_name_and_members_again", "ddp_and_fsdp2_give_the_bits_that_they_gave"]
)
def test_groups_are_the_same_again_for_whatever_uses_them(name: str, run: Run) -> None:
    run(name, 4)


def test_a_group_of_an_earlier_generation_is_refused(run: Run) -> None:
    run("a_group_of_an_earlier_generation_is_refused", 2)


@pytest.mark.parametrize("switches", [40, pytest.param(500, marks=pytest.mark.long)])
def test_nothing_grows_however_often_they_are_made_again(switches: int, run: Run) -> None:
    run("nothing_grows", 2, switches)


def test_without_groups_nothing_is_made() -> None:
    with pytest.raises(ConfigError, match="not initialized in this process"):
        ProcessGroups().make_again()
