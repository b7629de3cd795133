"""Random numbers as a function of the place in the run: what a dead rank drew last need not be known to anybody.

Every rank's generators (torch's on the host and on the rank's device, Python's, numpy's) are seeded before each forward pass from (rank, step, pass),
and before each batch is fetched from (rank, epoch, batch). So a resumed run draws what an unbroken one draws.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch
import torch.distributed as dist

from ttp.exchange import broadcast_json


class Seeds:
    """One rank's seeds."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        """Take rank 0's seed for all (a collective): the trainer's own, if it called torch.manual_seed."""
        self.base: int = broadcast_json(torch.initial_seed(), device)
        """Belongs to the run: it is saved, and given back on resume."""
        self._enabled = enabled
        self._device = device
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def seed_pass(self, step: int, index: int) -> None:
        """A forward pass begins: dropout and the like."""
        self._seed("pass", step, index)

    def seed_fetch(self, epoch: int, index: int) -> None:
        """A batch is fetched: shuffling, augmentation, masking."""
        self._seed("fetch", epoch, index)

    def _seed(self, *place: str | int) -> None:
        if not self._enabled:
            return
        digest = hashlib.sha256(repr((self.base, self._rank, *place)).encode()).digest()
        number = int.from_bytes(digest[:7], "little")  # below 2**63 and the same for every generator
        # Not torch.manual_seed, which takes 20 times as long: it prepares devices that this process does not use.
        torch.default_generator.manual_seed(number)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(number)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
