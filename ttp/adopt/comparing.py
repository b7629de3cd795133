"""Comparing what ranks hold alike under `ttp.protect`, and what is done about a difference.

Owns the exchange of digests of whole shard groups. The choice, and what counts as wrong, are `ttp.optim.on_divergence`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttp.adopt.adopted_state import AdoptedState
from ttp.exchange.json_collectives import world
from ttp.optim.on_divergence import Disputes, OnDivergence, majority
from ttp.optim.step_state import StepState
from ttp.proto.messages import Digest

Held = Mapping[str, int]
"""What a rank has read, by shard group."""


class AdoptedCheck:
    """The comparisons of one protected optimizer. All methods: the training thread."""

    def __init__(
        self, state: AdoptedState, steps: StepState, exchange: Callable[[Any], list[Any]], on_divergence: OnDivergence
    ) -> None:
        """`exchange`: returns every rank's JSON value (a collective over WORLD)."""
        self._state, self._steps, self._exchange = state, steps, exchange
        self.on_divergence = on_divergence

    def differing(self) -> list[str]:
        """Compare the bits that replicas hold and say what differs (a collective over WORLD)."""
        return list(self._compared()[1].values())

    def check(self) -> list[str]:
        """Compare, and do what `on_divergence` says about a difference (a collective over WORLD); return what differs where that is to report it.
        Raises ReplicasDiffer, WrongReplica, WrongPeer."""
        holders, first = self._compared()
        if first and not self.on_divergence.acts:
            return list(first.values())
        if first:
            disputes = Disputes(self._steps.step, self._steps.tracker)
            again = {group: value for group, value in self._state.bits().items() if group in first}
            disputes.add([Digest(group, value, len(holders[group])) for group, value in again.items()])
            read = _by_group(self._exchange(again))
            shards = [shard for group in first if (shard := majority(read[group], self.on_divergence.filled)).wrong]
            if shards:
                text = f"after step {self._steps.step}, {'; '.join(first.values())}"
                self.on_divergence.settle(self._steps.step, text, shards, world()[0])
            disputes.withdraw(world()[0])
        self.on_divergence.equal_after = self._steps.step
        return []

    def _compared(self) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
        """Return what each holder has read of each group, and a text for each that differs."""
        labels = {group.group_id: group.label for group in self._state.shard_groups()}
        reported = self._exchange([self._state.bits(), labels])
        read = _by_group([bits for bits, _ in reported])
        names = {group: label for _, known in reported for group, label in known.items()}
        texts = {group: _text(names[group], values) for group, values in read.items() if len(set(values.values())) > 1}
        return read, texts


def _by_group(reported: Sequence[Held]) -> dict[str, dict[int, int]]:
    read: dict[str, dict[int, int]] = {}
    for rank, held in enumerate(reported):
        for group, value in held.items():
            read.setdefault(group, {})[rank] = value
    return {group: read[group] for group in sorted(read)}


def _text(label: str, values: Mapping[int, int]) -> str:
    sides: dict[int, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    first, *others = sides.values()
    return f"{label} has other bits on ranks {first} than on ranks {sorted(rank for side in others for rank in side)}"
