"""What is done about replicas that differ: said, the job ended, or a replica replaced that most holders of its shard prove wrong.

Owns the choice, since when replicas may differ, and the errors that take a training thread out of its step. Never compares: `replica_check` does, and
`ttp.adopt.comparing`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ttp.errors import ConfigError, ReplicasDiffer, TTPError, WrongPeer, WrongReplica
from ttp.interfaces.update_tracker import UpdateTracker
from ttp.proto.messages import Digest
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp")

CHOICES = ("report", "stop", "repair")


@dataclass(frozen=True, slots=True)
class Majority:
    """What the holders' digests of one shard prove: which ranks are `wrong`. `proven` False: there is no majority, so that any of them may be."""

    wrong: frozenset[int]
    proven: bool


def majority(digests: Mapping[int, object], filled: Collection[int] = ()) -> Majority:
    """Judge what each holder of one shard, by rank, has read of it. More than half of all decide; the controller counts in the same way. What those
    have that were `filled` from the others proves nothing."""
    value, count = Counter(value for rank, value in digests.items() if rank not in filled).most_common(1)[0]
    proven = 2 * count > len(digests)
    return Majority(frozenset(rank for rank, read in digests.items() if not proven or read != value), proven)


class OnDivergence:
    """One optimizer's choice, and what its comparisons have found. All methods: the training thread."""

    def __init__(self, choice: str) -> None:
        """Raises ConfigError."""
        if choice not in CHOICES:
            raise ConfigError(f"invalid on_divergence: got {choice!r}, expected {', '.join(map(repr, CHOICES))}")
        self.choice = choice
        self.equal_after = 0
        """The newest step after which all holders had the same bits: compared, or loaded from one checkpoint."""
        self.filled: Collection[int] = ()
        """Ranks whose replicas were just copied from those of others."""
        self.checkpoint_before: Callable[[int], str] = lambda step: ""
        """Returns the newest checkpoint of this step or an older one; empty: none was found."""
        self.searched: tuple[str, ...] = ()
        """The directories in which it looks."""

    @property
    def acts(self) -> bool:
        return self.choice != "report"

    def reported(self, text: str) -> str:
        """Return what is logged where a difference is only reported. `text`: what differs."""
        path = self.checkpoint_before(self.equal_after)
        back = path or f"a checkpoint from before it (none was found in {', '.join(self.searched) or 'any directory'})"
        since = (
            f"They were equal after step {self.equal_after}"
            if self.equal_after
            else "No comparison before found them equal"
        )
        return f"{text}; memory, a device or the wire has altered one of them. {since}: check these hosts, and go back to {back}"

    def settle(self, step: int, text: str, found: Collection[Majority], rank: int) -> None:
        """All holders have read twice that they differ after `step`: take this thread out of its step. `text`: what differs. Raises ReplicasDiffer,
        WrongReplica on a rank whose replica is wrong, WrongPeer on the others."""
        since = f"they were equal after step {self.equal_after}"
        if self.choice == "repair" and all(shard.proven for shard in found):
            raise self._repairs(text, since, found, rank)
        path = self.checkpoint_before(self.equal_after)
        none = f"No checkpoint from before it was found in {', '.join(self.searched) or 'any directory'}"
        resume = f"Resume from {path}" if path else f"{none}: begin anew where there is none"
        raise ReplicasDiffer(
            f"{text}; {since}, expected equal bits. No checkpoint of this state is written. {resume}, and test memory and devices of these hosts first"
        )

    @staticmethod
    def _repairs(text: str, since: str, found: Collection[Majority], rank: int) -> TTPError:
        wrong = frozenset().union(*(shard.wrong for shard in found))
        what = f"{text}; {since}, expected equal bits"
        if rank in wrong:
            return WrongReplica(
                f"{what}. Most holders agree that rank {rank} is wrong: its process is replaced, or the job restarts"
            )
        return WrongPeer(
            f"{what}. Most holders agree that {ranks_text(sorted(wrong))} {'is' if len(wrong) == 1 else 'are'} wrong"
        )


class Disputes:
    """The digests that this rank reports in one comparison, before it enters a collective in which any rank learns who is wrong."""

    def __init__(self, step: int, tracker: UpdateTracker) -> None:
        self._step, self._tracker = step, tracker
        self._digests: dict[str, Digest] = {}

    def add(self, digests: Sequence[Digest]) -> None:
        """Report these as well; waits while frozen."""
        self._digests.update({digest.group_id: digest for digest in digests})
        self._tracker.dispute(self._step, tuple(self._digests.values()))

    def withdraw(self, rank: int) -> None:
        """All holders have read equal bits the second time."""
        if not self._digests:
            return
        log.warning(
            "rank %d: step %d: replicas seemed to differ, and did not when their holders read them again: a fault in reading, not in what is held",
            rank,
            self._step,
        )
        self._tracker.dispute(self._step, ())
