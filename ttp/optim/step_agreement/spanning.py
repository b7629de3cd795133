"""The spanning collective: the small all-reduce that every rank of the model enters when it is READY.

Owns what goes over it, how it is waited for, and that a result counts only if every rank contributed. Whoever has its result
knows that every rank was READY; what follows from the result, the optimizer decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttp.exchange.json_collectives import check_joined, world
from ttp.groups.polled_wait import wait_for
from ttp.groups.process_groups import GROUPS
from ttp.optim.step_agreement.communicators import check_communicators
from ttp.optim.step_agreement.participation import NUMBERS, Contribution, Ending, ending_of

_SLICE = timedelta(milliseconds=20)
"""On the CPU: how long a collective is waited for before `abandons` is asked again. A wait that is shorter costs what a plain
one does (0.18 ms of CPU time at one of 5 ms), a longer one 0.9 % of a core (0.8 ms at 100 ms); asking every 0.3 ms cost
7 % (0.5 and 7.4 ms)."""
_POLL_S = 0.0003
"""On an accelerator, between two looks: there torch takes a wait that has timed out for a failure of the collective. Each look
costs 26 us, so a core that has little else to do is busy by 7 % while it waits for slower ranks."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks read after the collective."""

    squares: float
    """Sum of squares of the gradient as it was reduced; not used after an overflow."""
    overflow: int
    """So many ranks' squares are not finite (where ranks of several groups share the model: the groups are counted together)."""
    ending: Ending
    """What all ranks do when they have finished the step."""
    sums: tuple[float, ...]


class Spanning:
    """The collective over `span`, and over `barrier` where `span` does not hold all ranks that share the model."""

    def __init__(self, span: Any, barrier: Any, device: torch.device) -> None:
        """Raises ConfigError where a launcher has started other ranks and this one has not joined them."""
        check_joined("the replica optimizer")
        self._span, self._barrier, self._device = span, barrier, device
        self.abandons: Callable[[int], None] | None = None
        """Called with the step again and again during the wait: whatever it raises ends it."""
        self.attempt = 0
        """Number of this attempt of the job (`participation.attempt_number`): the same on every rank."""
        self._left: list[tuple[Any, torch.Tensor]] = []
        """Collectives that were not waited for to the end, with their memory: one may still complete."""

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the process groups that have taken the place of these."""
        self._span, self._barrier = successor(self._span), successor(self._barrier)

    def check_communicators(self, step: int) -> None:
        """Before READY and before the update: raise AbortedCollective if a communicator reports an error. At once on the CPU."""
        check_communicators(self._device, step)

    def agree(
        self,
        step: int,
        squares: torch.Tensor,
        notice: bool,
        unled: bool,
        sums: Sequence[float] | torch.Tensor | None,
    ) -> Agreed:
        """Sum this rank's squares (FP64, 0-d), its notice, whether no controller leads it, and the caller's sums over all ranks (a
        collective).

        Raises AbortedCollective when the result is not the sum over all ranks, ProtocolError when ranks are at different steps.
        """
        contribution = Contribution(self.attempt, step)
        finite = squares.isfinite()
        overflow, norm = (~finite).double(), torch.where(finite, squares, torch.zeros_like(squares))
        own = [*contribution.numbers, float(notice), float(unled)]
        if torch.is_tensor(sums) and sums.device.type != "cpu":
            given = self._on_device(own)
            extra = sums.to(torch.float64).reshape(-1)
        else:
            given = self._on_device(
                own + torch.as_tensor([] if sums is None else sums, dtype=torch.float64).flatten().tolist()
            )
            extra = given[len(own) :]
        proof, noticed, alone = given[:NUMBERS], given[NUMBERS], given[NUMBERS + 1]
        vector = torch.cat([proof, torch.stack([overflow, noticed, alone, norm]), extra])
        if self._span is not None:
            self._sum(step, vector, self._span)
        in_span = vector[:NUMBERS].clone()
        if self._barrier is not None:
            # Contributing the group's verdict here, and not before, is what makes this the spanning collective. A rank whose
            # own group's result is incomplete takes no part: then no rank's is complete.
            whole = (in_span == proof * self._size(self._span)).all().double()
            vector[:NUMBERS] = proof * whole
            vector[NUMBERS + 2] = alone  # each rank's own, not its group's sum
            self._sum(step, vector[: NUMBERS + 3], self._barrier)
        numbers = torch.cat([in_span, vector]).tolist()  # waits for the device
        self.check_communicators(step)  # not before: until then the collective may be aborted
        contribution.check(numbers[:NUMBERS], self._size(self._span))
        if self._barrier is not None:
            contribution.check(numbers[NUMBERS : 2 * NUMBERS], self._size(self._barrier))
        overflows, notices, unleds, total, *summed = numbers[2 * NUMBERS :]
        ending = ending_of(notices, unleds, self._whole_size, world()[1])
        return Agreed(total, round(overflows), ending, tuple(summed))

    def _on_device(self, numbers: Sequence[float]) -> torch.Tensor:
        """Bring numbers to the device without waiting for it: from memory that it reads by itself."""
        pinned = self._device.type != "cpu"
        return torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned).to(self._device, non_blocking=True)

    @property
    def spans_job(self) -> bool:
        """Every rank of the job enters it."""
        return self._whole_size == world()[1]

    @property
    def _whole_size(self) -> int:
        return self._size(self._span if self._barrier is None else self._barrier)

    @staticmethod
    def _size(group: Any) -> int:
        return 1 if group is None else dist.get_world_size(group)

    def _sum(self, step: int, vector: torch.Tensor, group: Any) -> None:
        if self.abandons is None and not GROUPS.pollable:
            dist.all_reduce(vector, group=group)
            return
        work = dist.all_reduce(vector, group=group, async_op=True)
        if self.abandons is None:
            wait_for([work])
            return
        try:
            while not work.is_completed():
                self.abandons(step)
                self._wait_a_while(work)
        except BaseException:
            self._left.append((work, vector))
            raise
        work.wait()

    def _wait_a_while(self, work: Any) -> None:
        if self._device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # not completed yet, or failed: then the wait to the end says so
                work.wait(_SLICE)
        else:
            time.sleep(_POLL_S)
