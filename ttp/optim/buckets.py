"""Gradient buckets: contiguous memory that backward writes into, reduced bucket by bucket while backward runs on.

Owns the hooks on the parameters, the gradients' memory, and the order of launches: bucket k only after bucket k - 1,
whatever the order of the hooks, so that every rank issues the same collectives in the same order. Never looks at
optimizer state, never decides what a step does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ttp.errors import ConfigError
from ttp.optim.lane import Lane
from ttp.optim.split import gradient_of, local_of
from ttp.optim.wires import BucketMemory, Wires, Works

SCATTERING = 2
"""Reduce-scatters under way when another bucket is launched, at most: gloo's point-to-point works are not known to be done before
somebody waits for them, and what is received has memory of its own until then. Hooks wait for none, they leave the other
buckets to `finish`: a peer that does not reach a parameter launches its bucket only there, and may meet this rank in a
collective of the backward pass before."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where one parameter's gradient goes."""

    name: str
    param: torch.nn.Parameter
    view: torch.Tensor
    """This rank's part of the gradient."""
    bucket: int
    memory: int
    """Where the parameter's values lie."""
    stale: bool = True
    """The view holds nothing of the step at hand: it was reduced, or never written."""
    arrived: bool = False
    """The gradient is final: backward outside no_sync has reached this parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together."""

    params: tuple[tuple[str, torch.nn.Parameter], ...]
    offsets: tuple[int, ...]
    """Where each parameter begins."""
    memory: BucketMemory
    wires: Wires


class GradBuckets:
    """Hooks, gradients and launches. All methods are for the training thread (and backward's hooks within it)."""

    def __init__(
        self, buckets: Sequence[Bucket], lane: Lane, touched: Callable[[], None], launched: Callable[[], None]
    ) -> None:
        """buckets: in the order in which they are launched, on every rank the same. `touched` is called before reduced
        gradients may change, `launched` when a step's first bucket is launched."""
        self._buckets, self._lane = buckets, lane
        self._touched, self._launched = touched, launched
        self._places = [
            _Place(name, param, _view(bucket.memory.grads, param, offset), index, local_of(param).data_ptr())
            for index, bucket in enumerate(buckets)
            for (name, param), offset in zip(bucket.params, bucket.offsets, strict=True)
        ]
        # Gradients can be views of the bucket only where they have its dtype and are no DTensors; else they are added to it
        # and dropped.
        self._direct = all(
            place.view.dtype == place.param.dtype and not isinstance(place.param, DTensor) for place in self._places
        )
        self._missing = [0] * len(buckets)
        self._next = 0
        self._scattering: deque[tuple[Bucket, Works]] = deque()
        self._exchanging: deque[tuple[Bucket, Works]] = deque()
        self._synchronised = True
        self._begin()
        self._hooks = [
            place.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, place=place: self._arrive(place)
            )
            for place in self._places
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add to the gradients without reducing them."""
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def zero(self) -> None:
        """Forget all gradients: backward's first one of each parameter is copied to its place in a bucket, further ones are added.

        Without hooks nobody would copy it: then every parameter's grad is its place already, and zero.
        """
        if self._next:
            self.finish()  # other ranks may have launched more of a step that is thrown away: stay in order
        else:
            self._begin()
        if self._hooks or not self._direct:
            return
        for bucket in self._buckets:
            bucket.memory.grads.zero_()
        for place in self._places:
            place.stale = False
            place.param.grad = place.view

    def gradient(self, name: str) -> torch.Tensor:
        """Return the view of a gradient in its bucket; zeros where backward has not come to it."""
        place = next((place for place in self._places if place.name == name), None)
        if place is None:
            raise ConfigError(f"no parameter is called {name!r}")
        self._touched()
        if place.stale:
            place.view.zero_()
            place.stale = False
            if self._direct:
                place.param.grad = place.view
        return place.view

    def finish(self) -> None:
        """Reduce what is left, and wait; then `reduced` of every bucket is final and the gradients are used up.

        A parameter that backward did not reach counts as a zero gradient. On an accelerator the current stream waits,
        not the thread. Raises ConfigError for a parameter that has got other memory.
        """
        for place in self._places:
            if not isinstance(place.param, DTensor) and place.param.data_ptr() != place.memory:
                raise ConfigError(
                    f"parameter {place.name!r} has got other memory since the optimizer was built (by `param.data = ...` or"
                    f" model.to()): updates would not reach it; move the model before, and write values in place"
                )
        for place in self._places:
            if place.bucket >= self._next and (place.stale or (self._direct and place.param.grad is None)):
                place.view.zero_()
        while self._next < len(self._buckets):
            if len(self._scattering) > SCATTERING:
                self._exchange()
            self._launch()
        while self._scattering:
            self._exchange()
        while self._exchanging:
            bucket, works = self._exchanging.popleft()
            _wait(works)
            bucket.wires.settle(bucket.memory)
        self._lane.join()
        self._begin()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self) -> None:
        self._next = 0
        self._missing = [0] * len(self._buckets)
        for place in self._places:
            place.stale, place.arrived = True, False
            place.param.grad = None
            self._missing[place.bucket] += 1

    def _arrive(self, place: _Place) -> None:
        """Take in one parameter's gradient, right after backward has accumulated it."""
        self._touched()
        if place.arrived:
            raise RuntimeError(
                f"parameter {place.name!r} got a second gradient after its bucket was released for reduction; run all "
                f"backward passes of a step but the last inside optimizer.no_sync() (and use_reentrant=False in "
                f"activation checkpointing of shared parameters)"
            )
        self._collect(place)
        if not self._synchronised:
            return
        place.arrived = True
        self._missing[place.bucket] -= 1
        while self._scattering and all(work.is_completed() for work in self._scattering[0][1]):
            self._exchange()
        while self._next < len(self._buckets) and not self._missing[self._next] and len(self._scattering) <= SCATTERING:
            self._launch()

    def _collect(self, place: _Place) -> None:
        if self._direct:
            if place.param.grad is not place.view:
                place.view.copy_(gradient_of(place.param))
                place.param.grad = place.view
        else:
            if place.stale:
                place.view.copy_(gradient_of(place.param))
            else:
                place.view.add_(gradient_of(place.param))
            place.param.grad = None
        place.stale = False

    def _launch(self) -> None:
        """Start reducing the next bucket."""
        if self._next == 0:
            self._launched()
        bucket = self._buckets[self._next]
        memory, wires = bucket.memory, bucket.wires
        if self._lane.ordered:
            with self._lane.side():
                _wait(wires.scatter(memory))
                _wait(wires.exchange(memory))
                wires.settle(memory)
        else:
            self._scattering.append((bucket, wires.scatter(memory)))
        self._next += 1

    def _exchange(self) -> None:
        """Wait for the oldest reduce-scatter and start its exchange."""
        bucket, works = self._scattering.popleft()
        _wait(works)
        self._exchanging.append((bucket, bucket.wires.exchange(bucket.memory)))


def _wait(works: Works) -> None:
    for work in works:
        work.wait()


def _view(flat: torch.Tensor, param: torch.Tensor, offset: int) -> torch.Tensor:
    local = local_of(param)
    return flat[offset : offset + local.numel()].view(local.shape)
