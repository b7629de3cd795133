"""What goes into the controller's machine and what comes out (PURE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ttp.hang_limits import HangLimits
from ttp.proto.frozen import dataclass
from ttp.proto.messages import Downward, Heartbeat, Upward

JSONValue = str | int | float | bool | None | tuple["JSONValue", ...] | Mapping[str, "JSONValue"]
Fields = dict[str, JSONValue]
"""A journal line's fields while they are gathered."""
_HANG = "hang_"


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Fixed for the controller's life; times in seconds."""

    job_id: str
    term: int
    world_size: int
    heartbeat_s: float = 1.0
    lease_s: float = 3.0
    """A rank whose stream broke or whose heartbeats stopped is dead after this long."""
    vouched_lease_s: float = 10.0
    """The same where its agent reports its process alive and running; three times as long before the eighth step."""
    freeze_timeout_s: float = 10.0
    """How long a rank may take to close its gate before the decision goes on without it."""
    progress_timeout_s: float = 30.0
    """Longest silence of all outstanding roll-forwards, writes or the publish before they count as failed."""
    total_timeout_s: float = 120.0
    """TTP_OT: bounds a fault from the first freeze to the exit."""
    register_timeout_s: float = 600.0
    """Registered ranks are released (Exit) when the world has not assembled by then."""
    orphan_timeout_s: float = 15.0
    """The controller exits when no rank is attached for this long."""
    hang: HangLimits = HangLimits()
    standby: int = 0
    """0: the controller that the job starts with; i: the i-th standby, which waits until ranks come to it."""
    address: str = ""
    """How the others reach this controller, as it stands in their list of controllers."""
    standbys: int = 0
    """How many standbys there are behind the active controller; a lost one is replaced. 0: the job does without."""
    standby_start_s: float = 20.0
    """A rank that was asked for a standby has so long to answer; after that, or after its failure, another one is asked."""
    local_dirs: bool = False
    """Every node has checkpoint directories of its own: each publishes what its ranks have written."""
    in_place_s: float = 0.0
    """How long all ranks may take to regroup with replacements of those that a fault has cost, before a checkpoint is written instead; 0: a
    checkpoint is always written."""
    most_in_place: int = 100
    """After so many faults that ended in place the next one ends in a restart."""
    publish_first: bool = False
    """The step is written and published before the ranks regroup, so that it is never in memory alone."""

    def flat(self) -> dict[str, Any]:
        """Return the fields by the names that arguments and journals have for them: those of `hang` beside the others."""
        fields = asdict(self)
        hang = fields.pop("hang")
        return fields | {f"{_HANG}{name}": value for name, value in hang.items()}

    @classmethod
    def from_flat(cls, fields: Mapping[str, Any]) -> ControllerSettings:
        hang = {name.removeprefix(_HANG): value for name, value in fields.items() if name.startswith(_HANG)}
        return cls(
            **{name: value for name, value in fields.items() if not name.startswith(_HANG)}, hang=HangLimits(**hang)
        )


# --- in ---


@dataclass(frozen=True, slots=True)
class Received:
    message: Upward


@dataclass(frozen=True, slots=True)
class HeartbeatBatch:
    """Heartbeats that came together, in order: as each of them Received, but deadlines are checked once, after the last.

    A node's ranks send them together, relays bring those of several nodes within milliseconds, and at 10,000 ranks a controller receives hardly
    anything but heartbeats: together they cost little more than one.
    """

    messages: tuple[Heartbeat, ...]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream that carried these ranks ended (an agent's stream: `ranks` empty, `host` set)."""

    ranks: tuple[int, ...]
    host: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; the machine compares `now` with its deadlines."""


@dataclass(frozen=True, slots=True)
class EarlierLives:
    """The controller at this address, whose term is lower, has answered that it is alive. `generation`: the newest that is whole, as far as it knows.
    `look`: which question that is the answer to."""

    address: str
    generation: int = 0
    look: int = 0


Event = Received | HeartbeatBatch | StreamClosed | EarlierLives | Tick

# --- out ---


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver to each of these ranks' streams; a rank without a stream is skipped."""

    ranks: tuple[int, ...]
    message: Downward


@dataclass(frozen=True, slots=True)
class Tell:
    """Deliver to the agents of these hosts; one that is not attached is skipped."""

    hosts: tuple[str, ...]
    message: Downward


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Order these processes, each a rank and its pid, to exit; what else comes of them means nothing, and it concerns no agent."""

    processes: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LookFor:
    """Ask whether the controllers of lower terms at these addresses are alive: `EarlierLives` for each that answers. They may be long gone, or answer
    once they are not stopped or cut off any more."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Supersede:
    """Order the controller at this address, which has just answered, to end: this one takes over. It does not obey later than `SUPERSEDE_PART` of a lease
    after its answer. Whether it does is asked: it is looked for again."""

    address: str
    generation: int = 0
    """Of the rank that has come here: a controller that leads a later one leads on."""
    look: int = 0
    """The question whose answer it follows."""


@dataclass(frozen=True, slots=True)
class Journal:
    """One line of the job's event log. Event names: registered, assembled, takeover_began, took_over, suspect, cleared, stalled,
    moving_again, hung, not_hung, death_seen, freeze_sent, awaiting_updates, frozen, decided, rolled_forward, not_in_place, take_places_sent, regroup_sent,
    replacement_came, regrouped, regroup_failed, write_sent, written, publish_sent, published, refused, thawed, exit_sent, incident,
    finished, earlier_process, stands_by_again, lost_node_back, standby_asked, standby_started, standby_failed, standby_lost."""

    event: str
    fields: Mapping[str, JSONValue]


@dataclass(frozen=True, slots=True)
class Finish:
    """The controller's work is over; the driver ends the process once what was sent is delivered."""

    reason: str


Effect = Send | Tell | TurnAway | LookFor | Supersede | Journal | Finish
