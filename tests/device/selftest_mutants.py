"""Mistakes planted in every process of a self-test's jobs: torch's own autoload calls one of these in the place of `backend.register`."""

from __future__ import annotations

from typing import Any

from tests.device import backend


def _put(module: object, name: str, value: object) -> None:
    """Replace what a module has under a name: one that it has no more would be a mistake of nothing."""
    assert name in vars(module), name
    vars(module)[name] = value


def dump_on_the_compute_stream() -> None:
    """The copies of a dump are queued behind what the training thread has launched."""
    backend.register()
    import torch

    from ttp.checkpoint.host_copy import HostCopier

    made = HostCopier.__init__

    def on_the_current(self: HostCopier, device: torch.device) -> None:
        made(self, device)
        if device.type != "cpu":
            self._stream = torch.get_device_module(device).current_stream(device)

    HostCopier.__init__ = on_the_current  # type: ignore[method-assign]


def ready_without_the_device() -> None:
    """READY is reported when the reductions are launched."""
    backend.register()
    from ttp.optim.device_stream import Lane

    Lane.await_ready = lambda self: None  # type: ignore[method-assign]


def weight_changed_after_resume() -> None:
    """One bit of what was loaded is another."""
    backend.register()
    import torch

    from ttp.trainer.train import Trainer

    resume = Trainer._resume

    def and_change(self: Trainer) -> tuple[int, int]:
        found = resume(self)
        if found[0]:
            with torch.no_grad():
                weight: Any = next(self.chunks[0].parameters()).view(-1)
                weight[0] += 1e-4
        return found

    Trainer._resume = and_change  # type: ignore[method-assign]


def abort_blocks_the_driver() -> None:
    """No mistake of TTP's: an abort that does not come back, and with which nothing else comes back that asks the device for copies. Of rank 0 alone."""
    backend.register()
    import os
    import threading

    import torch

    import ttp.groups.process_groups as groups
    from ttp.checkpoint.host_copy import HostCopier

    driver, copy = threading.Lock(), HostCopier._copy

    def blocks() -> None:
        if os.environ.get("RANK") == "0":
            driver.acquire()
            threading.Event().wait()

    def through_the_driver(self: HostCopier, values: torch.Tensor) -> torch.Tensor:
        with driver:
            return copy(self, values)

    _put(groups, "abort_all", blocks)
    HostCopier._copy = through_the_driver  # type: ignore[method-assign]


def comparison_sees_nothing() -> None:
    """Replicas are never found to differ."""
    backend.register()
    import ttp.optim.replica_check as module

    _put(module, "compare_parts", lambda *_: ((), ()))
