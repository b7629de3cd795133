"""A kernel that keeps a device's stream busy for a known time, in place of one that hangs.

Owns how that is made on each device. A hung kernel is seen by what cannot pass it: whatever ends while the kernel runs did not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_LEAST_S = 0.05
"""A measured piece of work takes at least this: less is mostly the launch."""
_MEASUREMENTS = 3
_FIRST_CYCLES = 1_000_000
_FIRST_SIZE, _LARGEST_SIZE = 512, 8192
"""Rows and columns of the matrices where the device's module has no kernel that sleeps."""


class LongKernel:
    """One device's. `start` may be called from any thread, and again."""

    def __init__(self, device: torch.device) -> None:
        """Measure how fast the device is, and load what is launched later. Waits for the device."""
        self._module: Any = torch.get_device_module(device)
        self._device = device
        # torch has a kernel that counts cycles, for its own tests; a plug-in need not have one.
        asleep: Callable[[int], None] | None = getattr(self._module, "_sleep", None)
        self._launch = self._products() if asleep is None else self._cycles(asleep)

    def start(self, seconds: float) -> Any:
        """Queue the kernel on the current stream; return an event that is done when it has ended. Does not wait."""
        self._launch(seconds)
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def _cycles(self, asleep: Callable[[int], None]) -> Callable[[float], None]:
        cycles = _FIRST_CYCLES
        while (took := self._timed(asleep, cycles)) < _LEAST_S:
            cycles *= 4
        return lambda seconds: asleep(int(cycles * seconds / took))

    def _products(self) -> Callable[[float], None]:
        size = _FIRST_SIZE
        while True:
            factor, product = (torch.zeros(size, size, device=self._device) for _ in range(2))
            took = self._timed(_multiply, factor, product, 1)
            if took >= _LEAST_S or size == _LARGEST_SIZE:
                return lambda seconds: _multiply(factor, product, max(1, round(seconds / took)))
            size *= 2

    def _timed(self, launch: Callable[..., None], *arguments: Any) -> float:
        """Return the shortest of some measurements: on a busy host one may be mostly the wait for a processor."""
        took = []
        for _ in range(_MEASUREMENTS):
            self._module.synchronize()
            began = time.perf_counter()
            launch(*arguments)
            self._module.synchronize()
            took.append(time.perf_counter() - began)
        return min(took)


def _multiply(factor: torch.Tensor, product: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(factor, factor, out=product)
