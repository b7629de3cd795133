"""I21: what a rank was ordered to do on disk is over before it trains on, whoever lets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttp.proto.messages import WriteOrder

if TYPE_CHECKING:
    from tests.simulation.rank import Rank


def nothing_on_disk(process: Rank, does: str) -> None:
    """A processor lets its training thread go on (opens its gate, regroups, begins an update): its work thread neither writes nor publishes, nor will.
    Judged by that thread's queue, not by what the machine remembers."""
    for order in process.work.on_disk():
        what = "writes" if isinstance(order, WriteOrder) else "publishes"
        process.job.broken(f"I21: rank {process.rank} {does} while it {what} {order.tmp_name}")
