"""Which controller a stream is opened to: the one of this job, and none of a lower term than was seen (PURE).

Owns the stream's term. Never closes anything: whoever reads the stream does, on a refusal.
"""

from __future__ import annotations


class Fence:
    """Checks what comes on one stream, the greeting first."""

    def __init__(self, job_id: str, lowest: int) -> None:
        """`lowest`: the highest term seen so far; a controller of a lower one is refused."""
        self._job_id = job_id
        self._lowest = lowest
        self.term = 0
        """The controller's; 0: it has not greeted yet."""
        self.refused = False
        """A controller of a lower term is there."""

    def refusal(self, address: str, job_id: str, term: int) -> str:
        """Return why a parcel, and its stream, is refused; empty: it is taken, and its term is the stream's."""
        if job_id != self._job_id:
            return f"{address} is the controller of job {job_id!r}, expected {self._job_id!r}; check its address"
        if self.term == 0:
            if term < self._lowest:
                self.refused = True
                return f"the controller at {address} has term {term}, but term {self._lowest} was seen: it is fenced"
            self.term = term
        if term != self.term:
            return f"the controller at {address} changed its term from {self.term} to {term} within a stream"
        return ""
