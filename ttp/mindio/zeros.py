"""How many elements of the reduced gradient are zero: Megatron's `--log-num-zeros-in-grad`.

Owns the count, which goes with the norm over the ranks. Off unless it is asked for: it reads every gradient once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ttp.optim.partition import ParameterPart
from ttp.optim.replica_optimizer import TTPOddReplicaOptimizer, TTPReplicaOptimizer
from ttp.optim.step_agreement.participation import Ending
from ttp.proto.messages import CommitRecord


def count_zeros(parts: Sequence[ParameterPart]) -> torch.Tensor:
    """Return how many zeros this rank counts: each element of the model is counted on one rank, padding on none."""
    total = torch.zeros((), dtype=torch.float64, device=parts[0].memory[0].params.device)
    for part in parts:
        for place, shard in enumerate(part.layout.held(part.rank)):
            for segment in part.layout.shard_segments(shard):
                bucket = part.layout.buckets[segment.bucket]
                if bucket.counted:
                    start, stop = part.layout.counted_run(bucket, shard, part.rank)
                    first, last = max(start, segment.offset), min(stop, segment.offset + segment.numel)
                    if first < last:
                        total += (part.memory[segment.bucket].reduced[place][first:last] == 0).sum()
    return total


class _CountsZeros(TTPReplicaOptimizer):
    def _agree(
        self, step: int, squares: torch.Tensor, sums: Sequence[float] | torch.Tensor | None
    ) -> tuple[CommitRecord, Ending]:
        return super()._agree(step, squares, count_zeros(self._parts) if sums is None else sums)


class CountingReplicaOptimizer(_CountsZeros):
    """The commit record's first sum is the number of zeros."""


class CountingOddReplicaOptimizer(_CountsZeros, TTPOddReplicaOptimizer):
    """The same with the ring layout."""
