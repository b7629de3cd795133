"""torch's device `sim`: registers the extension as `torch.sim`, and its process group as `simccl`.

Owns the names and what torch asks a device's module for. `register` is also what torch's own autoload calls (the entry point
`torch.backends` that `autoload.py` writes), so that a job of ttprun finds the device with nothing of ttp knowing it.
Traits come from SIM_TRAITS (`poison=1,delay_us=300`).
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.device.build import extension

NAME = "sim"
BACKEND = "simccl"
TRAITS = "SIM_TRAITS"


def register() -> None:
    """Make torch know the device, once a process."""
    if hasattr(torch, NAME):
        return
    native = extension()
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    native.register_hooks()
    module = _module(native)
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if dist.is_available():
        _register_group()
    for entry in filter(None, os.environ.get(TRAITS, "").split(",")):
        name, _, value = entry.partition("=")
        native.set_trait(name, int(value))


def _register_group() -> None:
    dist.Backend.register_backend(BACKEND, _group, devices=[NAME])


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the group that torch asks for: gloo's own timeout is longer, as it only carries the bytes."""
    inner = dist.ProcessGroupGloo(
        dist.distributed_c10d.PrefixStore("simccl", store), rank, size, timeout=timedelta(hours=1)
    )
    return extension().Group(inner, rank, size, int(timeout.total_seconds() * 1000))


def _module(native: ModuleType) -> Any:
    """Return what `torch.sim` is."""
    module: Any = ModuleType(f"torch.{NAME}")

    def here(device: Any = None) -> torch.device:
        if device is None:
            return torch.device(NAME, native.current_device())
        if isinstance(device, int):
            return torch.device(NAME, device)
        named = torch.device(device)
        return named if named.index is not None else torch.device(NAME, native.current_device())

    class Event(torch.Event):
        """An event of this device."""

        def __new__(cls, **options: Any) -> Event:
            return super().__new__(cls, torch.device(NAME), **options)

    @contextlib.contextmanager
    def stream(entered: torch.Stream) -> Iterator[None]:
        before, device_before = native.current_stream(entered.device_index), native.current_device()
        native.set_device(entered.device_index)  # as torch.cuda.stream does
        native.set_stream(entered.device_index, entered.stream_id)
        try:
            yield
        finally:
            native.set_stream(entered.device_index, before)
            native.set_device(device_before)

    @contextlib.contextmanager
    def device(entered: Any) -> Iterator[None]:
        before = native.current_device()
        native.set_device(here(entered).index)
        try:
            yield
        finally:
            native.set_device(before)

    def current_stream(device: Any = None) -> torch.Stream:
        at = here(device)
        return torch.Stream(stream_id=native.current_stream(at.index), device_index=at.index, device_type=_TYPE)

    def make_stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(here(device), priority=priority)

    module.__dict__.update(
        Event=Event,
        Stream=make_stream,
        stream=stream,
        device=device,
        current_stream=current_stream,
        default_stream=lambda of=None: torch.Stream(stream_id=0, device_index=here(of).index, device_type=_TYPE),
        set_stream=lambda entered: native.set_stream(entered.device_index, entered.stream_id),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: native.DEVICES,
        current_device=native.current_device,
        set_device=lambda chosen: native.set_device(here(chosen).index),
        synchronize=lambda of=None: native.synchronize_device(here(of).index),
        get_device_name=lambda of=None: "threads of the host",
        _sleep=lambda cycles: sleep(cycles / 1e9),  # as torch.cuda has it, with a clock of 1 GHz
        manual_seed=lambda seed: None,  # its random numbers are the host's
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda of=None: torch.get_rng_state(),
        set_rng_state=lambda state, of=None: None,
        get_rng_state_all=list,
        set_rng_state_all=lambda states: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        memory_allocated=lambda of=None: native.bytes_allocated(here(of).index),
        max_memory_allocated=lambda of=None: native.bytes_allocated(here(of).index),
        reset_peak_memory_stats=lambda of=None: None,
        empty_cache=lambda: None,
    )
    return module


_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]


# --- what a test asks of the device, and no real one has ---


def set_traits(**traits: int) -> None:
    """Set traits by name (`runtime.h`)."""
    for name, value in traits.items():
        extension().set_trait(name, value)


@contextlib.contextmanager
def traits(**chosen: int) -> Iterator[None]:
    """Set traits for a while."""
    before = extension().traits()
    set_traits(**chosen)
    try:
        yield
    finally:
        set_traits(**before)


def counts() -> dict[str, int]:
    """Return what the device has done so far: syncs, launches, segments and so on (`runtime.h`)."""
    return dict(extension().counts())


def hang(stream: torch.Stream | None = None) -> None:
    """Queue a kernel that does not end before `release`."""
    chosen = _current(stream)
    extension().hang(chosen.device_index, chosen.stream_id)


def sleep(seconds: float, stream: torch.Stream | None = None) -> None:
    """Queue a kernel that takes so long."""
    chosen = _current(stream)
    extension().sleep(chosen.device_index, chosen.stream_id, seconds)


def release(device: int = 0) -> None:
    """End all kernels that hang."""
    extension().release_hung(device)


def fail(error: str, device: int = 0) -> None:
    """Give the device a sticky error: every call fails from now on."""
    extension().fail(device, error)


def _current(stream: torch.Stream | None) -> torch.Stream:
    return stream if stream is not None else getattr(torch, NAME).current_stream()


def drawn_traits(seed: int) -> dict[str, int]:
    """Draw how hostile the device is."""
    rng = random.Random(f"traits {seed}")
    return {
        "seed": seed,
        "delay_us": rng.choice((0, 0, 50, 300)),
        "alloc_syncs": rng.randint(0, 1),
        "poison": rng.randint(0, 1),
        "late_release": rng.randint(0, 1),
        "lazy_load": rng.randint(0, 1),
        "garbage": rng.randint(0, 4),
        "blind_watchdog": rng.randint(0, 1),
        "remote_hangs": rng.randint(0, 1),
        "error_lag_ms": 0,
        "one_queue": int(rng.random() < 0.1),
    }
