"""Fingerprints of batches: a hash over the shapes, the types and a bounded sample of the elements.

Owns the sampling. Never keeps a batch, and never waits for a device unless `Fingerprint.value` is asked: elements on an accelerator are
gathered and copied to the host in its own order, and hashed when the copy is known to be done.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

SAMPLED_ELEMENTS = 256
"""Of one tensor, at equal distances."""
SAMPLED_LEAVES = 16
"""Tensors, numbers and strings of one batch."""
_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Fingerprint:
    """The fingerprint of one batch."""

    def __init__(self, batch: object) -> None:
        """Sample now: the batch may be changed in place later."""
        self._parts: list[bytes | torch.Tensor] = []
        self._copied: list[Any] = []
        self._value: str | None = None
        with torch.no_grad():
            for count, leaf in enumerate(_leaves(batch)):
                if count == SAMPLED_LEAVES:
                    break
                self._add(leaf)

    def known(self) -> str:
        """Return the fingerprint; empty while a device still copies, and for a batch without anything to hash. Any thread."""
        try:
            copied = self._value is not None or all(event.query() for event in self._copied)
        except RuntimeError:  # a device that has failed
            return ""
        return self.value() if copied else ""

    def value(self) -> str:
        """Return the fingerprint, empty for a batch without anything to hash. Waits for the device."""
        parts = self._parts  # taken first: another thread may set the value and drop them meanwhile
        if self._value is None:
            for event in self._copied:
                event.synchronize()
            body = b"".join(part if isinstance(part, bytes) else _bytes_of(part) for part in parts)
            self._value = hashlib.blake2b(body, digest_size=8).hexdigest() if body else ""
            self._parts = []
        return self._value

    def _add(self, leaf: object) -> None:
        if isinstance(leaf, torch.Tensor):
            self._add_tensor(getattr(leaf, "to_local", lambda: leaf)())
        elif isinstance(leaf, np.ndarray):
            sample = b"" if leaf.dtype.hasobject else leaf.flat[_places(leaf.size)].tobytes()
            self._parts += [f"{leaf.dtype}{leaf.shape}".encode(), sample]
        else:
            text = leaf if isinstance(leaf, str | bytes) else repr(leaf)
            start = text[:SAMPLED_ELEMENTS]
            self._parts += [
                str(len(text)).encode(),
                start if isinstance(start, bytes) else start.encode("utf-8", "replace"),
            ]

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)  # most nested ones have none
        self._parts.append(f"{tensor.dtype}{shape}".encode())
        if (
            tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.device.type == "meta"
            or not tensor.numel()
        ):
            return
        places = _places_on(tensor.numel(), tensor.device)
        sample = torch.take(_takeable(tensor.detach()), places)
        if tensor.device.type == "cpu":
            self._parts.append(_bytes_of(sample))
            return
        host = torch.empty(sample.shape, dtype=sample.dtype, pin_memory=True)
        host.copy_(sample, non_blocking=True)
        module = torch.get_device_module(tensor.device)
        event = module.Event()
        event.record(module.current_stream(tensor.device))
        self._parts.append(host)
        self._copied.append(event)


def _leaves(value: object) -> Iterator[object]:
    """Yield what can be hashed, in the order of the batch; other objects have no part in it."""
    if isinstance(value, torch.Tensor | np.ndarray | str | bytes | bool | int | float):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))


def _places(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if count <= SAMPLED_ELEMENTS:
        return np.arange(count)
    return np.arange(SAMPLED_ELEMENTS) * (count - 1) // (SAMPLED_ELEMENTS - 1)


@functools.lru_cache(maxsize=64)
def _places_on(count: int, device: torch.device) -> torch.Tensor:
    """The places of the sampled elements, sent to a device once for each size."""
    return torch.from_numpy(_places(count)).to(device)


def _takeable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bits in a type that torch can take elements of: it cannot of most unsigned and of 8-bit floating-point numbers."""
    bits = _BITS.get(tensor.dtype, torch.uint8 if tensor.is_floating_point() and tensor.element_size() == 1 else None)
    return tensor if bits is None else tensor.view(bits)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
