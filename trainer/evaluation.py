"""The validation loss: the mean over held-out tokens, the same ones every time and under every layout.

Owns when it is measured, on what, and `validation.jsonl`, a line each time. Takes no part in what is committed: weights,
gradients, random numbers and the order of the text are as they were before. After a resume the step's evaluation is repeated, for
the process before may have died ahead of it: a step's last line counts, and it has the same bits.

    {"step": 100, "loss": "0x1.1c6f8a0000000p+1", "loss_value": 2.222154, "sequences": 64, "unix_s": ...}
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config.schema import Config
from .data.batches import OpenedText, Samples
from .devices.device_table import HOST
from .metrics import MetricsFile
from .parallel.mesh import Mesh
from .parallel.micro_batches import Passes

log = logging.getLogger("ttp.trainer")


class Evaluation:
    """One rank's part of it."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        passes: Passes,
        text: OpenedText[Any],
        output_dir: Path,
        rank: int,
        device: torch.device,
    ) -> None:
        training = config.training_config
        self._every, self._last = training.eval_interval, training.training_iters
        self._passes, self._held_out, self._device = passes, text.held_out, device
        self._each = config.batch_size(mesh.data.size)
        """Sequences of a batch, over all ranks."""
        self._sequences, self._file = 0, None
        """How many are measured: of the last batch those that are too many do not count."""
        if self._every is None or self._held_out is None:
            return
        self._sequences = min(training.eval_sequences, self._held_out.count)
        self._file = MetricsFile(output_dir / "validation.jsonl") if rank == 0 else None

    def is_due(self, step: int) -> bool:
        """True after the steps that are evaluated, the last one among them."""
        return bool(self._sequences and self._every) and (step % (self._every or 1) == 0 or step == self._last)

    def run(self, step: int) -> float:
        """Measure and note the loss after `step` (all ranks call, between two steps); return it."""
        assert self._held_out is not None
        began = time.perf_counter()
        loss = self.loss_of(self._held_out, self._sequences)
        if self._file is not None:
            value = loss if math.isfinite(loss) else None
            line = {"step": step, "loss": loss.hex(), "loss_value": value, "sequences": self._sequences}
            self._file.append({**line, "unix_s": time.time()})
            seconds = time.perf_counter() - began
            log.info("validation: step %d, loss %.6f on %d sequences, %.2f s", step, loss, self._sequences, seconds)
        return loss

    def loss_of(self, samples: Samples, count: int) -> float:
        """Return the mean loss of a token of the first `count` samples (all ranks call)."""
        total = sum(self._passes.evaluate(samples, first, count) for first in range(0, count, self._each))
        summed = torch.tensor([total], dtype=torch.float64 if self._device.type == HOST else torch.float32)
        summed = summed.to(self._device)
        dist.all_reduce(summed)
        return float(summed) / samples.counted(0, count)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
