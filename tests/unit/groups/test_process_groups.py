"""Process groups made again on real gloo ranks: see ranks.py, whose functions are run here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.forkserver import fork_server, run_ranks_to_end
from tests.unit.groups import ranks
from ttp.errors import ConfigError
from ttp.groups.process_groups import ProcessGroups, Recipe

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
        run_ranks_to_end(processes, tmp_path, DEADLINE_S, name)
        ended = {path.name for path in tmp_path.glob("done_*")}
        assert ended == {f"done_{rank}" for rank in range(1 if name in ranks.WITHOUT_RANK_1 else world)}

    return on_ranks


@pytest.mark.parametrize(
    "name", ["everything_has_its_name_and_members_again", "ddp_and_fsdp2_give_the_bits_that_they_gave"]
)
def test_groups_are_the_same_again_for_whatever_uses_them(name: str, run: Run) -> None:
    run(name, 4)


@pytest.mark.parametrize(
    "name", ["a_group_of_an_earlier_generation_is_refused", "a_program_that_joins_anew_keeps_its_keys"]
)
def test_generations_are_kept_apart(name: str, run: Run) -> None:
    run(name, 2)


@pytest.mark.parametrize("name", sorted(ranks.WITHOUT_RANK_1))
def test_groups_that_were_left_hold_nothing_up(name: str, run: Run) -> None:
    run(name, 2)


def test_keys_of_all_earlier_generations_go_and_those_of_later_ones_stay() -> None:
    """A process in rank 0's place has made none of the earlier ones; another rank may make its groups for the next fault already."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    outer = dist.PrefixStore("job", store)  # type: ignore[attr-defined]
    later = ("ttp_generation_3.0/a", "ttp_generation_3.1/a", "ttp_generation_10.0/a", "ttp_agreed/2.0/a", "a")
    for key in (
        *later,
        "ttp_generation_0.0/a",
        "ttp_generation_0.1/a",
        "ttp_generation_2.11/a",
        "ttp_generation_2.11/b",
    ):
        outer.set(key, "")
    groups = ProcessGroups()
    groups._store, groups.recovery = outer, 3
    groups._forget_keys()
    assert {key.removeprefix("/").removeprefix("job/") for key in store.list_keys() if "init" not in key} == set(later)


@pytest.mark.parametrize("switches", [40, pytest.param(500, marks=pytest.mark.long)])
def test_nothing_grows_however_often_they_are_made_again(switches: int, run: Run) -> None:
    run("nothing_grows", 2, switches)


def test_what_ranks_agree_on_as_they_start_is_there_for_a_process_in_a_lost_ones_place(run: Run) -> None:
    run("a_new_process_reads_what_the_others_have_agreed_on", 2)


def test_a_new_process_trains_on_with_what_the_others_hold(run: Run) -> None:
    run("a_new_process_is_given_what_the_others_hold", 3)


def test_a_process_without_groups_has_none_to_make() -> None:
    successor = ProcessGroups().make_again()
    assert successor(None) is None and successor(run) is run


def test_groups_that_are_split_from_one_of_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's, after init_process_group(device_id=...): ranks outside a subgroup take part in making it."""
    bound = Recipe(None, "0", (0, 1), "nccl", timedelta(seconds=9), "", "", "cuda:0")
    monkeypatch.setattr("ttp.groups.process_groups.recipes", lambda: [bound])
    with pytest.raises(ConfigError, match=r"invalid TTP_REHEARSE: got process groups that are bound to a device \(0\)"):
        ProcessGroups().check()
