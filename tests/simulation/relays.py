"""The relays of a simulated job, one a node: the streams of its ranks stand still together, and break together.

What a rank and its relay have agreed on is the shipped `stream.py`: for how long a relay may be silent. A rank that leaves its relay connects to
controllers itself from then on, and what it had said on the stream before still arrives, late.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ttp.processor.handler import Closed
from ttp.proto.stream import LOOKS, SILENT_LEASES

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.network import RankStream


class Relay:
    """One node's."""

    def __init__(self, job: Job, node: int) -> None:
        self.job, self.node = job, node
        self.gone = False
        self._still_until = 0.0
        self._streams: list[RankStream] = []

    def carry(self, stream: RankStream) -> None:
        """Another stream of one of its ranks is opened."""
        if self.gone:
            stream.process.relayed = False  # its first try finds nothing there
        self._streams = [each for each in self._streams if not each.broken]
        self._streams.append(stream)
        if self._still_until > self.job.now:
            self._holds(stream)

    def stands_still(self, seconds: float) -> None:
        """It is stopped, or starved: it passes on nothing for a while, and then all of it."""
        self.job.note(f"the relay of host{self.node} stands still for {seconds:.3f} s")
        self._still_until = max(self._still_until, self.job.now + seconds)
        for stream in self._streams:
            self._holds(stream)

    def loses(self, controller: int) -> bool:
        """Its connection to this controller breaks."""
        its = [each for each in self._streams if each.up and not each.broken and each.controller.place == controller]
        for stream in its:
            self.job.note(f"the connection of host{self.node}'s relay breaks")
            self.job.struck("stream break", stream.rank)
            self.job.reject_stream(stream.rank, stream)
        return bool(its)

    def ends(self) -> None:
        """Its agent is gone."""
        self.gone = True
        for stream in self._streams:
            stream.process.relayed = False
            self.job.struck("stream break", stream.rank)
            self.job.reject_stream(stream.rank, stream)

    def _holds(self, stream: RankStream) -> None:
        stream.hold(self._still_until - self.job.now)
        self.job.struck("brief stream pause", stream.rank)
        silent_s = SILENT_LEASES * self.job.times.lease_s
        self.job.scheduler.after(silent_s * (1 + self.job.rng.random() / LOOKS), partial(self._is_missed, stream))

    def _is_missed(self, stream: RankStream) -> None:
        process = stream.process
        if self.job.now >= self._still_until or process.handler.stream is not stream or not process.alive:
            return
        if process.stopped or process.hogged:  # it looks again once it runs
            self.job.scheduler.after(SILENT_LEASES * self.job.times.lease_s, partial(self._is_missed, stream))
            return
        self.job.note(f"rank {stream.rank} leaves its relay")
        process.relayed, stream.losing, stream.up = False, True, False
        process.put(Closed(stream, "nothing received from this node's relay"))
        if not stream.broken:
            self.job.scheduler.at(self._still_until + 0.001, partial(self._is_left, stream))

    def _is_left(self, stream: RankStream) -> None:
        """What had been said on it has arrived."""
        stream.broken = True
        self.job.close_seen_later(stream.rank, stream)
