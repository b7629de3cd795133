"""What process groups have on an accelerator, with stand-ins for their backends; `tests/device` has real jobs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttp.errors import AbortedCollective
from ttp.groups import device_backends, process_groups
from ttp.groups.process_groups import ProcessGroups
from ttp.optim.step_agreement import communicators

DEVICE = torch.device("cuda")


class StandIn:
    """The backend of one process group on one kind of device."""

    def __init__(self, name: str = "nccl", meets: threading.Barrier | None = None) -> None:
        self._name, self._meets, self.aborts = name, meets, 0

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        if self._meets is not None:
            self._meets.wait(10)
        self.aborts += 1


def world(monkeypatch: pytest.MonkeyPatch, *backends: StandIn) -> None:
    """Let torch have a process group with each of these."""
    groups = [
        SimpleNamespace(
            _device_types=[torch.device("cpu"), DEVICE], _get_backend=lambda kind, backend=backend: backend, pg=number
        )
        for number, backend in enumerate(backends)
    ]
    table = SimpleNamespace(_world=SimpleNamespace(pg_map=dict.fromkeys(map(Group, groups))))
    monkeypatch.setattr(
        device_backends, "dist", SimpleNamespace(is_initialized=lambda: bool(backends), distributed_c10d=table)
    )


class Group:
    """A process group, as a key of torch's table."""

    def __init__(self, like: Any) -> None:
        self.__dict__.update(like.__dict__)


def test_all_are_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One abort waits until the kernels of the others have ended: each of these ends only when the others have begun."""
    meets = threading.Barrier(3)
    backends = [StandIn(meets=meets) for _ in range(3)]
    world(monkeypatch, *backends)
    device_backends.abort_all()
    assert [backend.aborts for backend in backends] == [1, 1, 1]


def test_what_connections_close_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo, on a device as well; and the groups of a process in a lost one's place, which have no peers."""
    backends = [StandIn("gloo"), StandIn("fake"), StandIn("simccl")]
    world(monkeypatch, *backends)
    device_backends.abort_all()
    assert [backend.aborts for backend in backends] == [0, 0, 1]
    world(monkeypatch)
    device_backends.abort_all()


def test_a_backend_without_an_abort_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, StandIn(), SimpleNamespace(name=lambda: "hccl"))  # type: ignore[arg-type]
    assert device_backends.without_abort() == ("hccl",)


def test_kernels_are_awaited_on_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(synchronize=lambda: waited.append(kind))
    )
    world(monkeypatch, StandIn(), StandIn())
    device_backends.await_kernels()
    assert waited == ["cuda"]


def test_groups_are_aborted_once_and_their_kernels_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving is repeated until the training thread has come out; an abort of what was aborted would say nothing new."""
    done: list[str] = []
    monkeypatch.setattr(process_groups, "abort_all", lambda: done.append("abort"))
    monkeypatch.setattr(process_groups, "await_kernels", lambda: done.append("kernels"))
    groups = ProcessGroups()
    groups.leave()
    groups.leave()
    assert groups.left
    groups.close()
    assert done == ["abort", "kernels"]


def test_what_was_computed_while_groups_are_left_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort of one's own need not show in `get_error`."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr(communicators, "all_groups", lambda: [])
    communicators.check_communicators(DEVICE, 3)
    monkeypatch.setattr(communicators, "GROUPS", SimpleNamespace(left=True))
    with pytest.raises(AbortedCollective, match="step 3: process groups are being made again"):
        communicators.check_communicators(DEVICE, 3)
