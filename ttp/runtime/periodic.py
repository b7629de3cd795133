"""Periodic and requested checkpoints: written by all ranks together between two steps, each shard's bytes shared among its holders.

Owns the agreement of the ranks on one write attempt after the other; what is written and published is the holder's work, as it
is at a fault. Never called at a fault.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from ttp.checkpoint.staging import discard_staging
from ttp.errors import CheckpointError
from ttp.exchange.json_collectives import exchange_json
from ttp.proto.messages import Cause, CauseKind, FileEntry, Part, PublishOrder, ShareResult
from ttp.runtime.directory_agreement import JobDirectories
from ttp.runtime.standby import last_term_of, term_of
from ttp.runtime.state_provider import OptimizerStateProvider

log = logging.getLogger("ttp")


class PeriodicSaves:
    """The periodic and requested checkpoints of one attempt of the job, as one rank takes part in them."""

    def __init__(
        self, holder: OptimizerStateProvider, directories: JobDirectories, rank: int, round_number: int
    ) -> None:
        """All ranks make one together: they tell each other who holds what."""
        self._holder = holder
        self._optimizer = holder.optimizer
        self._directories = directories
        self._rank = rank
        self._round_number = round_number
        self._device = holder.optimizer.device
        self._count = 0
        holders = exchange_json([group.group_id for group in self._optimizer.shard_groups()], self._device)
        self.writers = {
            group_id: [rank for rank, groups in enumerate(holders) if group_id in groups]
            for groups in holders
            for group_id in groups
        }
        """The ranks that hold each shard group."""

    def save(self, step: int, cause: Cause) -> str:
        """Write `step`, the current one, into the first directory that takes it (all ranks call); return its path.

        `cause`: PERIODIC, REQUESTED, or PREEMPTED where no controller leads the ranks. Raises CheckpointError on every rank when no
        directory took it.
        """
        self._count += 1
        errors = []
        for directory in self._directories.used:
            path, error = self._save_in(directory, step, cause)
            if path:
                self._holder.trust(path)
                return path
            errors.append(f"{directory}: {error}")
            if self._rank == 0:
                log.error("%s checkpoint of step %d: %s", cause.kind.value, step, errors[-1])
        raise CheckpointError(f"step {step}: no directory took the {cause.kind.value} checkpoint: {'; '.join(errors)}")

    def _save_in(self, directory: str, step: int, cause: Cause) -> tuple[str, str]:
        """Return the path and nothing, or nothing and why not."""
        tmp_name = f"iter_{step:07d}_tmp_{cause.kind.value}_{self._round_number}_{self._count}"
        parts = tuple(
            Part(group_id, ranks.index(self._rank), len(ranks))
            for group_id, ranks in sorted(self.writers.items())
            if self._rank in ranks
        )
        mine: dict[str, Any] = {}
        self._optimizer.lane.drain()  # on an accelerator the update may still be under way
        try:
            mine["result"] = dataclasses.asdict(self._holder.write_parts(directory, tmp_name, step, parts))
        except (CheckpointError, OSError) as error:
            mine["error"] = f"rank {self._rank}: {error}"
        everyone = exchange_json(mine, self._device)
        refusal = next((answer["error"] for answer in everyone if "error" in answer), "")
        if refusal:
            self._discard(directory, tmp_name)
            return "", refusal
        outcome = ["", ""]
        if self._directories.keeps:
            try:
                results = tuple(decode_share(answer["result"]) for answer in everyone)
                outcome = [self._holder.publish(self._order(directory, tmp_name, step, cause, results)), ""]
            except (CheckpointError, OSError) as problem:
                outcome = ["", f"{self._directories.node}{problem}"]
        outcomes = exchange_json(outcome, self._device)
        refusal = next((problem for _, problem in outcomes if problem), "")
        path = "" if refusal else next(path for path, _ in outcomes if path)
        if refusal:
            self._discard(directory, tmp_name)
        return path, refusal

    def _discard(self, directory: str, tmp_name: str) -> None:
        """Give a failed write attempt's room back: the dying gasp may need it."""
        if self._directories.keeps:
            discard_staging(directory, tmp_name)

    def _order(
        self, directory: str, tmp_name: str, step: int, cause: Cause, results: tuple[ShareResult, ...]
    ) -> PublishOrder:
        record = self._optimizer.last_record
        return PublishOrder(
            freeze_id=0,
            step=step,
            directory=directory,
            tmp_name=tmp_name,
            results=results,
            cause=cause,
            record=record if record is not None and record.step == step else None,
            # No controller orders it, and any controller's dump may replace it. But where all ranks save without one they execute no
            # order any more: of nodes' own directories one may have a piece of a dump that will never be whole, which gives way.
            term=(last_term_of if cause.kind is CauseKind.PREEMPTED else term_of)(self._round_number),
        )


def decode_share(fields: Mapping[str, Any]) -> ShareResult:
    """Make a ShareResult of what `dataclasses.asdict` made of one, and JSON of that."""
    return ShareResult(tuple(FileEntry(**entry) for entry in fields["files"]))
