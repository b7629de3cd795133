"""Random numbers as a function of the place in the run: what a dead rank drew last need not be known to anybody.

Every rank's generators (torch's on the host and on each device that the rank sees, Python's, numpy's) are seeded before and after each forward pass from
(rank, step, pass), and before each batch is fetched from (rank, epoch, batch). So a resumed run draws what an uninterrupted one draws: also a
batch that a trainer draws by itself, behind the last forward pass of a step, for the next step.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ttp.exchange.agreed import agree
from ttp.exchange.json_collectives import broadcast_json


class Seeds:
    """One rank's seeds."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        """Take rank 0's seed for all (a collective): the trainer's own, if it called torch.manual_seed."""
        self.base: int = agree("the seed", lambda: broadcast_json(torch.initial_seed(), device))
        """Belongs to the run: it is saved, and given back on resume."""
        self._enabled = enabled
        self._device = device
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def seed_pass(self, step: int, index: int) -> None:
        """A forward pass begins: dropout and the like."""
        self._seed("pass", step, index)

    def seed_after(self, step: int, index: int) -> None:
        """A forward pass has ended: what is drawn from here on is for later. `index`: -1 without a pass."""
        self._seed("after", step, index)

    def seed_fetch(self, epoch: int, index: int) -> None:
        """A batch is fetched: shuffling, augmentation, masking."""
        self._seed("fetch", epoch, index)

    def seed_collate(self, number: int) -> None:
        """The samples of a run's batch are put together."""
        self._seed("collate", number)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Give the generators back as they were: what is drawn meanwhile (an evaluation) has no part in training."""
        if not self._enabled:
            yield
            return
        module = self._devices()
        here, python, numpy = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
        there = None if module is None else module.get_rng_state_all()
        try:
            yield
        finally:
            torch.default_generator.set_state(here)
            if module is not None:
                module.set_rng_state_all(there)
            random.setstate(python)
            np.random.set_state(numpy)

    def number(self, *place: str | int) -> int:
        """Return the seed for a place in the run, the same on every rank, in any attempt."""
        digest = hashlib.sha256(repr((self.base, *place)).encode()).digest()
        return int.from_bytes(digest[:7], "little")  # below 2**63 and the same for every generator

    @property
    def enabled(self) -> bool:
        return self._enabled

    def _devices(self) -> Any:
        """Return torch's module of the accelerators of the rank's kind, whose generators are all seeded; None on the host alone."""
        return None if self._device.type == "cpu" else torch.get_device_module(self._device)

    def _seed(self, *place: str | int) -> None:
        if not self._enabled:
            return
        number = self.number(self._rank, *place)
        # Not torch.manual_seed, which takes 20 times as long: it prepares devices that this process does not use.
        torch.default_generator.manual_seed(number)
        if (module := self._devices()) is not None:
            module.manual_seed_all(number)  # manual_seed is for the current device, which need not be the rank's
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
