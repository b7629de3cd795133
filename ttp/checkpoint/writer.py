"""What a rank calls to write a checkpoint, in the order of the calls.

probe_writable(directory)      every rank, at start: a directory that cannot be written is found now
clean_stale(directory)         one rank, at start: what interrupted attempts left
write_share(...)               every chosen writer: its parts, durable
publish(...)                   one rank: all shares become one visible checkpoint
publish_piece(...)             one rank of each node, where nodes have directories of their own
discard_attempt(...)           one rank: an attempt that failed gives its room back
check_complete(...)            what `publish` asks first; the coordinator may ask it earlier
"""

from __future__ import annotations

from ttp.checkpoint.pieces import next_start, publish_piece
from ttp.checkpoint.publish import check_complete, clean_stale, probe_writable, publish
from ttp.checkpoint.share import write_share
from ttp.checkpoint.staging import discard_attempt

__all__ = [
    "check_complete",
    "clean_stale",
    "discard_attempt",
    "next_start",
    "probe_writable",
    "publish",
    "publish_piece",
    "write_share",
]
