"""What a loader is made of: wrapped loaders, samplers, data sets.

Owns the names of the attributes that are looked into, torch's and those of the libraries that wrap a loader. Never changes a loader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_PARTS = ("base_dataloader", "_dataloader", "flattened", "batch_sampler", "sampler", "_sampler", "dataset", "datasets")
"""accelerate's and Fabric's wrapped loader, the loaders of Lightning's CombinedLoader, the sampler that it wraps, and what torch's have, its concatenated data sets among them."""

_LISTS = ("flattened", "datasets")


def parts(loader: object) -> Iterator[tuple[str, Any]]:
    """Yield the loader and everything within it once, each with where it was found."""
    met: set[int] = set()

    def walk(value: object, path: str) -> Iterator[tuple[str, Any]]:
        if id(value) in met:
            return
        met.add(id(value))
        yield path, value
        for name in _PARTS:
            part = getattr(value, name, None)
            if name in _LISTS:
                for index, each in enumerate(part if isinstance(part, list) else ()):
                    yield from walk(each, f"{path}.{index}")
            elif part is not None:
                yield from walk(part, f"{path}.{name}")

    yield from walk(loader, "loader")


def inner(loader: Any) -> Any:
    """Return the loader that another one wraps, or itself."""
    for name in ("base_dataloader", "_dataloader"):
        loader = getattr(loader, name, loader)
    return loader


def streams(loader: object) -> list[Any]:
    """Return the streaming data sets of the library `datasets` within a loader."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return [part for _, part in parts(loader) if isinstance(part, kind)] if kind is not None else []


def has_shuffle_buffer(stream: Any) -> bool:
    """Say whether a streaming data set of `datasets` shuffles within a buffer, which its state leaves out."""
    left, met = [getattr(stream, "_ex_iterable", None)], 0
    while left and met < 1000:
        each, met = left.pop(), met + 1
        if type(each).__name__.startswith("BufferShuffled"):
            return True
        left += [
            within for name in ("ex_iterable", "_interleaved") if (within := getattr(each, name, None)) is not None
        ]
        left += getattr(each, "ex_iterables", ())
    return False
