"""Why a fault began or a checkpoint was written, as messages and manifests name it (PURE: standard library data modules only)."""

from __future__ import annotations

import enum
from typing import Annotated

from ttp.proto.frozen import dataclass

Text = Annotated[str, "for people"]
"""What is not Unicode in it is escaped on the wire, and what is too long is cut. Any other string crosses as it is, or not at all."""

_BRIEF = 100


def in_brief(text: str) -> str:
    """Return an exception's text in a short line, for where the whole one is elsewhere: in its traceback, in the incident report."""
    line = " ".join(text.split())
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF].rstrip()}..."


class CauseKind(enum.Enum):
    """Why a checkpoint was written or a freeze began."""

    PERIODIC = "periodic"  # a `save_interval` was over
    REQUESTED = "requested"  # the trainer asked for a checkpoint
    EXITED = "exited"  # the agent saw the process end
    SILENT = "silent"  # stream broken or heartbeats missing beyond the lease
    EXCEPTION = "exception"  # the rank's own training code raised
    PEER_ERROR = "peer_error"  # the rank's collective failed: somebody else is the cause
    PREEMPTED = "preempted"  # SIGTERM
    AGENT_LOST = "agent_lost"  # the launcher of the rank is gone
    HUNG = "hung"  # no rank progresses, while heartbeats go on
    CONTROLLER_LOST = "controller_lost"  # a standby took over
    DIVERGED = "diverged"  # replicas of a shard hold different bits


@dataclass(frozen=True, slots=True)
class Cause:
    """What happened to which ranks. `text` is for people: a signal's name, an exception's last line."""

    kind: CauseKind
    ranks: tuple[int, ...]
    text: Text

    @property
    def brief(self) -> str:
        """The text, an exception's in brief."""
        return in_brief(self.text) if self.kind in (CauseKind.EXCEPTION, CauseKind.DIVERGED) else self.text
