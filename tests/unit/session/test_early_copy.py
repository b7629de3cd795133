"""State that was copied to the host early is what is written, for its step alone."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from ttp.checkpoint.format.types import HeldTensor
from ttp.proto.messages import Part
from ttp.runtime import state_provider
from ttp.runtime.state_provider import OptimizerStateProvider


class Optimizer:
    """One shard, on a device that may stop giving copies."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.values = torch.ones(4)

    def holdings(self, step: int | None = None) -> dict[str, list[HeldTensor]]:
        return {"group": [HeldTensor("w", (4,), 0, self.values)]}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> OptimizerStateProvider:
    monkeypatch.setattr(state_provider, "HostCopier", lambda device: lambda values: values.clone())
    written = OptimizerStateProvider.__new__(OptimizerStateProvider)
    optimizer: Any = Optimizer()
    written.optimizer = optimizer
    written._early, written._on_host, written._reading = None, None, contextlib.nullcontext()
    written._rank, written._digests, written._copier = 0, False, None  # type: ignore[assignment]
    written.around = state_provider._nothing_around
    written._io_done = 0
    return written


def content(provider: OptimizerStateProvider, monkeypatch: pytest.MonkeyPatch, step: int) -> list[float]:
    """Return what would be written of a step."""
    found: list[HeldTensor] = []
    monkeypatch.setattr(state_provider, "write_share", lambda *given, **_: found.extend(given[3]))
    provider.write_parts("dir", "iter_0000004_tmp_1", step, [Part("group", 0, 1)])
    return [value for tensor in found for value in tensor.values.tolist()]


def test_the_copy_is_written_of_its_step_until_it_is_dropped(
    provider: OptimizerStateProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.prepare_copy()
    provider.copy_to_host(4)
    provider.optimizer.values.fill_(9.0)  # type: ignore[attr-defined]
    assert content(provider, monkeypatch, 4) == [1.0] * 4
    assert content(provider, monkeypatch, 5) == [9.0] * 4
    provider.drop_copy()
    assert content(provider, monkeypatch, 4) == [9.0] * 4


def test_a_write_waits_for_the_copy_and_writes_that(
    provider: OptimizerStateProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind the copy may block the device. A copy of the same step is not made twice."""
    begun, goes_on, copies = threading.Event(), threading.Event(), list[int]()

    def slow(values: torch.Tensor) -> torch.Tensor:
        copies.append(1)
        begun.set()
        assert goes_on.wait(60)
        return values.clone()

    provider.prepare_copy()
    provider._early = slow  # type: ignore[assignment]
    copying = threading.Thread(target=provider.copy_to_host, args=(4,))
    copying.start()
    assert begun.wait(60)
    found: list[float] = []
    writing = threading.Thread(target=lambda: found.extend(content(provider, monkeypatch, 4)))
    writing.start()
    assert not provider._reading.acquire(blocking=False)  # type: ignore[attr-defined]
    goes_on.set()
    copying.join(60)
    writing.join(60)
    provider.optimizer.values.fill_(9.0)  # type: ignore[attr-defined]
    assert found == [1.0] * 4 and provider._io_done == 16
    provider.copy_to_host(4)
    assert len(copies) == 1 and content(provider, monkeypatch, 4) == [1.0] * 4
    provider.copy_to_host(5)
    assert len(copies) == 2 and content(provider, monkeypatch, 4) == [9.0] * 4


def test_where_nothing_was_prepared_nothing_is_copied(
    provider: OptimizerStateProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU: state is there already."""
    provider.optimizer.device = torch.device("cpu")
    provider.prepare_copy()
    provider.copy_to_host(4)
    assert provider._on_host is None
