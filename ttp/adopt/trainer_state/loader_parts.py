"""What a loader is made of: wrapped loaders, samplers, data sets.

Owns the names of the attributes that are looked into, torch's and those of the libraries that wrap a loader. Never changes a loader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

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


def samples_in_batch(loader: Any) -> int:
    """Return how many samples all ranks together take, from the beginning of an epoch's order, for one batch of each; 0 where that is not certain."""
    batches: Any = getattr(inner(loader), "batch_sampler", None)
    ranks = 0
    if type(batches).__name__ == "BatchSamplerShard":  # accelerate's
        ranks, batches = 1 if batches.split_batches else batches.num_processes, batches.batch_sampler
    if counts_itself(loader) or not (isinstance(batches, BatchSampler) and _is_of_torch(batches)):
        return 0
    if isinstance(batches.sampler, DistributedSampler):
        ranks = batches.sampler.num_replicas if _is_of_torch(batches.sampler) and not ranks else 0
    return int(batches.batch_size * ranks)


def _is_of_torch(part: object) -> bool:
    """Return whether a sampler's class is torch's or torchdata's: another one may divide an epoch in its own way."""
    return type(part).__module__.partition(".")[0] in ("torch", "torchdata")


def length(loader: Any, limit: int | None = None) -> int:
    """Return how many batches an epoch has on this rank, at most `limit`; 0 where that is not known."""
    try:
        batches = len(inner(loader).batch_sampler)
    except (AttributeError, TypeError, NotImplementedError):
        return limit or 0
    return batches if limit is None else min(batches, limit)


def counts_itself(loader: object) -> bool:
    """Return whether the loop that takes the batches counts them as well, and has its own count after a restart."""
    return getattr(loader, "counts_itself", False)


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
