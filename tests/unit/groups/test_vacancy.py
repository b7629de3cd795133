"""How a program joins its process group, in a process of its own and in a lost one's place."""

from __future__ import annotations

from typing import Any

import pytest

from ttp.groups import vacancy
from ttp.groups.process_groups import ProcessGroups


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What torch was called with."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **given: calls.append((backend, given)))
    monkeypatch.setattr("ttp.groups.vacancy.GROUPS", ProcessGroups())
    for name in ("TTP_VACANT", "TTP_IN_PLACE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_groups_are_bound_to_a_device_only_where_they_stay(
    joined: list[tuple[Any, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TTP_IN_PLACE=cuda they may have to be made again."""
    vacancy.init_process_group("nccl", device_id="cuda:1")
    monkeypatch.setenv("TTP_IN_PLACE", "cuda")
    vacancy.init_process_group("nccl", device_id="cuda:1")
    assert joined == [("nccl", {"device_id": "cuda:1"}), ("nccl", {})]


@pytest.mark.parametrize(
    ("backend", "fake"), [(None, "fake"), ("nccl", "fake"), ("cpu:gloo,npu:hccl", "cpu:fake,npu:fake")]
)
def test_a_process_in_a_lost_ones_place_has_no_peers_on_any_device(
    backend: str | None, fake: str, joined: list[tuple[Any, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch knows its fake backend on its own devices; that of a plug-in is named."""
    for name, value in (("TTP_VACANT", "3"), ("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    vacancy.init_process_group(backend)
    ((given, arguments),) = joined
    assert given == fake and (arguments["rank"], arguments["world_size"]) == (1, 2)
    assert vars(vacancy)["GROUPS"].backend == (backend or "gloo")
