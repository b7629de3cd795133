"""A gate that is closed and opened in one call each, as a processor does it in two: `Gate.shut` with `settle`, and `reopen`."""

from __future__ import annotations

from ttp.processor.gate import Gate
from ttp.proto.messages import StateReport


def freeze(gate: Gate, freeze_id: int, timeout_s: float) -> StateReport:
    """Close the gate and return what this rank holds."""
    return gate.settle(gate.shut(freeze_id), freeze_id, timeout_s)


def thaw(gate: Gate, freeze_id: int) -> bool:
    """Open the gate if this freeze is the one in force, and say whether it is open now."""
    return gate.reopen(gate._freezes.ticket if freeze_id == gate.freeze_id else -1)
