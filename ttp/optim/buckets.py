"""Gradient buckets: contiguous memory that backward writes into, reduced bucket by bucket while backward runs on.

Owns the hooks on the parameters, the gradients' memory, and the order of launches: bucket k only after bucket k - 1,
whatever the order of the hooks, so that every rank issues the same collectives in the same order. Never looks at
optimizer state, never decides what a step does.

A step has one pass that launches every bucket: the last backward. Buckets that accumulate in shards are launched by every pass: each
adds this rank's slot to `reduced` and gives the bucket's memory back. The last pass, or `finish`, then exchanges with the other holders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ttp.errors import ConfigError
from ttp.groups.polled_wait import wait_for
from ttp.optim.collectives import BucketMemory, Wires, Works
from ttp.optim.device_stream import Lane
from ttp.optim.shard_layout.split import gradient_of, local_of

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
    given: torch.Tensor | None = None
    """What the parameter's grad was from then on: the view, or None."""
    version: int = 0
    """That of the view then: every change in place counts it up."""


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
        self,
        buckets: Sequence[Bucket],
        lane: Lane,
        touched: Callable[[], object],
        launched: Callable[[], None],
        waits: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """buckets: in the order in which they are launched, on every rank the same. `touched` is called before reduced
        gradients may change, `launched` when a step's first bucket is launched. `with waits():` encloses the wait for other ranks behind
        a pass that is not the step's last."""
        self._buckets, self._lane = buckets, lane
        self._touched, self._launched, self._waits = touched, launched, waits
        self._places = [
            _Place(name, param, _view(bucket.memory.grads, param, offset), index, local_of(param).data_ptr())
            for index, bucket in enumerate(buckets)
            for (name, param), offset in zip(bucket.params, bucket.offsets, strict=True)
        ]
        # Gradients can be views of the bucket only where they have its dtype and are not DTensors; else they are added to it
        # and dropped.
        self._direct = all(
            place.view.dtype == place.param.dtype and not isinstance(place.param, DTensor) for place in self._places
        )
        self._sharded = [number for number, bucket in enumerate(buckets) if bucket.memory.sharded]
        self._missing = [0] * len(buckets)
        self._next = 0
        self._added: set[int] = set()
        """Buckets whose `reduced` has something of this step."""
        self._apart: set[int] = set()
        """Buckets that no other passes of this step reach than those of `micro_batch`."""
        self._scattering: deque[tuple[int, Works]] = deque()
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
        """Let backward add to the gradients without reducing them; what accumulates in shards is reduced by the end (a collective)."""
        with self._pass_over(self._sharded):
            yield

    @contextmanager
    def micro_batch(self, params: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """The same for a pass that reaches these parameters alone, where all of a step's passes that reach them are made so."""
        reached = {id(param) for param in params}
        mine = {place.bucket for place in self._places if id(place.param) in reached}
        order = [number for number in self._sharded if number in mine]
        self._apart.update(order)
        with self._pass_over(order):
            yield

    @contextmanager
    def _pass_over(self, order: Sequence[int]) -> Iterator[None]:
        """A pass that is not the step's last and reduces these buckets."""
        if not self._synchronised or not self._sharded:
            before, self._synchronised = self._synchronised, False
            try:
                yield
            finally:
                self._synchronised = before
            return
        if any(place.arrived for place in self._places):
            raise RuntimeError(
                "no_sync() came after a backward pass outside it: only the last pass of a step is outside"
            )
        self._synchronised = False
        self._begin_pass(order)
        try:
            yield
        finally:
            self._synchronised = True
        self._end_pass()
        self._begin_last_pass()

    def zero(self) -> None:
        """Forget all gradients: backward's first one of each parameter is copied to its place in a bucket, further ones are added.

        Without hooks it would not be copied: then every parameter's grad is its place already, and zero.
        """
        if self._next:
            self._reduce_rest()  # other ranks may have launched more of a step that is thrown away: stay in order
        else:
            self._begin()
        if self._hooks or not self._direct:
            return
        for bucket in self._buckets:
            bucket.memory.hold()
            bucket.memory.grads.zero_()
        for place in self._places:
            place.stale = False
            place.param.grad = place.view

    def gradient(self, name: str) -> torch.Tensor:
        """Return the view of a gradient in its bucket; zeros where backward has not come to it."""
        place = next((place for place in self._places if place.name == name), None)
        if place is None:
            raise ConfigError(f"no parameter is called {name!r}")
        if self._is_sharded(place):
            raise ConfigError(
                f"the gradient of {name!r} accumulates in shards: no rank has its whole sum; name the parameter in `copies`, or build"
                f" the optimizer without gradient_accumulation_shard"
            )
        self._touched()
        if place.stale:
            place.view.zero_()
            place.stale = False
            if self._direct:
                place.param.grad = place.view
        return place.view

    def finish(self) -> None:
        """Reduce the rest, and wait; then `reduced` of every bucket is final and the gradients are used up.

        A parameter that backward did not reach counts as a zero gradient. On an accelerator the current stream waits,
        not the thread. Raises ConfigError for a parameter that has got other memory, and for a gradient that was changed behind the last
        backward pass.
        """
        for place in self._places:
            if place.arrived and (place.param.grad is not place.given or place.view._version != place.version):
                raise ConfigError(
                    f"the gradient of parameter {place.name!r} was changed between backward and step, expected as backward left it: it is reduced"
                    " meanwhile, and replicas would differ. In place of clip_grad_norm_ or clip_grad_value_ build the optimizer with"
                    " clip=ClipNorm(...) or ClipValue(...)"
                )
            if not isinstance(place.param, DTensor) and place.param.data_ptr() != place.memory:
                raise ConfigError(
                    f"parameter {place.name!r} has got other memory since the optimizer was built (by `param.data = ...` or"
                    f" model.to()): updates would not reach it; move the model before, and write values in place"
                )
        self._reduce_rest()

    def _reduce_rest(self) -> None:
        if self._synchronised and not self._last:  # a pass that an exception broke off
            self._end_pass()
            self._begin_last_pass()
        self._end_pass()
        for number in sorted(self._apart):
            self._exchange(self._buckets[number])
        while self._exchanging:
            bucket, works = self._exchanging.popleft()
            wait_for(works)
            bucket.wires.settle(bucket.memory)
        self._lane.join()
        self._begin()

    def give_up(self) -> None:
        """Forget all gradients, and what is on the wire: it belongs to groups that were left."""
        self._scattering.clear()
        self._exchanging.clear()
        self._synchronised = True
        for bucket in self._buckets:
            bucket.wires.give_up()
            bucket.memory.clear()
        self._begin()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self) -> None:
        for place in self._places:
            place.stale = True
            place.param.grad = None
        for bucket in self._buckets:
            bucket.memory.release()
        self._added.clear()
        self._apart.clear()
        self._begin_last_pass()

    def _begin_last_pass(self) -> None:
        """What comes now is the last pass, unless it comes within `no_sync` or `micro_batch`."""
        self._begin_pass([number for number in range(len(self._buckets)) if number not in self._apart], last=True)

    def _begin_pass(self, order: Sequence[int], last: bool = False) -> None:
        """Wait for the gradients of these buckets, which are launched in this order."""
        self._order, self._last, self._next = order, last, 0
        self._missing = [0] * len(self._buckets)
        for place in self._places:
            place.arrived = False
            place.stale |= self._is_sharded(place)
        for number in order:
            self._missing[number] = len(self._buckets[number].params)

    def _end_pass(self) -> None:
        """Launch the rest of the pass, and wait until each bucket's row is summed."""
        left = set(self._order[self._next :])
        for number in left:
            self._buckets[number].memory.hold()
        for place in self._places:
            if place.bucket in left and (place.stale or (self._is_view(place) and place.param.grad is None)):
                place.view.zero_()
        with self._waits():
            while self._next < len(self._order):
                if len(self._scattering) > SCATTERING:
                    self._add_up()
                self._launch()
            while self._scattering:
                self._add_up()

    def _arrive(self, place: _Place) -> None:
        """Take in one parameter's gradient, right after backward has accumulated it."""
        self._touched()
        if place.arrived:
            raise RuntimeError(
                f"parameter {place.name!r} got a second gradient after its bucket was released for reduction; run all "
                f"backward passes of a step but the last inside optimizer.no_sync(), with gradient_accumulation_shard each in one of "
                f"its own (and use_reentrant=False in activation checkpointing of shared parameters)"
            )
        sharded = self._is_sharded(place)
        if sharded and not self._missing[place.bucket]:
            raise RuntimeError(
                f"parameter {place.name!r} got a gradient outside its own passes: make all passes of a step that reach it within"
                f" optimizer.micro_batch() of its parameters, or none"
            )
        self._collect(place)
        if not self._synchronised and not sharded:
            return
        place.arrived, place.given, place.version = True, place.param.grad, place.view._version
        self._missing[place.bucket] -= 1
        while self._scattering and all(work.is_completed() for work in self._scattering[0][1]):
            self._add_up()
        while (
            self._next < len(self._order)
            and not self._missing[self._order[self._next]]
            and len(self._scattering) <= SCATTERING
        ):
            self._launch()

    def _is_view(self, place: _Place) -> bool:
        """True where the parameter's grad is the place in the bucket, so that later passes add to it."""
        return self._direct and not self._is_sharded(place)

    def _is_sharded(self, place: _Place) -> bool:
        return self._buckets[place.bucket].memory.sharded

    def _collect(self, place: _Place) -> None:
        if self._is_view(place):
            if place.param.grad is not place.view:
                place.view.copy_(gradient_of(place.param))
                place.param.grad = place.view
        else:
            self._buckets[place.bucket].memory.hold()
            if place.stale:
                place.view.copy_(gradient_of(place.param))
            else:
                place.view.add_(gradient_of(place.param))
            place.param.grad = None
        place.stale = False

    def _launch(self) -> None:
        """Start reducing the next bucket."""
        if self._next == 0 and not self._added:
            self._launched()
        number = self._order[self._next]
        bucket = self._buckets[number]
        if self._lane.ordered:
            with self._lane.side():
                wait_for(bucket.wires.scatter(bucket.memory))
                self._summed(number)
        else:
            self._scattering.append((number, bucket.wires.scatter(bucket.memory)))
        self._next += 1

    def _add_up(self) -> None:
        """Wait for the oldest reduce-scatter, and go on with its bucket."""
        number, works = self._scattering.popleft()
        wait_for(works)
        self._summed(number)

    def _summed(self, number: int) -> None:
        """A bucket's reduce-scatter is done: add the row's sum up, and exchange it where no pass follows."""
        bucket = self._buckets[number]
        bucket.wires.add_up(bucket.memory, first=number not in self._added)
        self._added.add(number)
        if bucket.memory.sharded:
            self._lane.keep_for_side(bucket.memory.grads)
            bucket.memory.release()
        if self._last:
            self._exchange(bucket)

    def _exchange(self, bucket: Bucket) -> None:
        """Start the exchange with the other holders of the shards."""
        with self._lane.side():
            works = bucket.wires.exchange(bucket.memory)
            if self._lane.ordered:
                wait_for(works)
                bucket.wires.settle(bucket.memory)
            else:
                self._exchanging.append((bucket, works))


def _view(flat: torch.Tensor, param: torch.Tensor, offset: int) -> torch.Tensor:
    """`.data`: it counts its changes by itself, and not those of the bucket, which is reduced in place."""
    local = local_of(param)
    return flat[offset : offset + local.numel()].view(local.shape).data
