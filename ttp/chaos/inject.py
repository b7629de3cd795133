"""Faults at chosen places of a training step, for tests and demonstrations.

`TTP_FAULTS` holds one or more faults, separated by `;`:

    kill:rank=2,step=7,point=updating          SIGKILL to itself in the middle of rank 2's update of step 7
    raise:rank=0,step=3,point=backward         an exception in the training thread
    stop:rank=1,step=5,point=ready             SIGSTOP
    exit:rank=1,step=5,point=done              os._exit(1)
    kill:rank=1,step=9,point=ready,round=1     in the job's second start (default: round=0)

Points, in the order of a step: backward (reductions of this step have begun), ready (own reduced gradients are final),
record (commit record in hand, update not begun), updating (some shards updated, some not), done (update finished),
gathering (parameters half gathered). The faults are real: a signal, an exception, an exit. Owns nothing else.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from ttp.errors import ConfigError

POINTS = ("backward", "ready", "record", "updating", "done", "gathering")
ACTIONS = ("kill", "raise", "stop", "exit")


class InjectedFault(RuntimeError):
    """The exception that `raise` throws."""


@dataclass(frozen=True, slots=True)
class Fault:
    action: str
    rank: int
    step: int
    point: str
    round: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse TTP_FAULTS. Raises ConfigError that names the fault and what was wanted."""
    return tuple(_parse_fault(part.strip()) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    action, _, rest = text.partition(":")
    fields: dict[str, str] = {}
    for pair in rest.split(","):
        name, sep, value = pair.partition("=")
        if not sep or name.strip() in fields:
            raise ConfigError(f"TTP_FAULTS: {text!r}: wanted name=value once each, got {pair!r}")
        fields[name.strip()] = value.strip()
    unknown = set(fields) - {"rank", "step", "point", "round"}
    missing = {"rank", "step", "point"} - set(fields)
    if action not in ACTIONS or unknown or missing or fields["point"] not in POINTS:
        raise ConfigError(
            f"TTP_FAULTS: {text!r}: wanted ACTION:rank=R,step=S,point=P[,round=N] with ACTION one of {', '.join(ACTIONS)}"
            f" and P one of {', '.join(POINTS)}"
        )
    try:
        return Fault(action, int(fields["rank"]), int(fields["step"]), fields["point"], int(fields.get("round", "0")))
    except ValueError:
        raise ConfigError(f"TTP_FAULTS: {text!r}: rank, step and round must be whole numbers") from None


def injector(faults: tuple[Fault, ...], rank: int, round_number: int) -> Callable[[str, int], None] | None:
    """Return the hook for this rank's optimizer (`on_point`), or None when no fault is meant for it."""
    mine = {(f.point, f.step): f.action for f in faults if f.rank == rank and f.round == round_number}
    if not mine:
        return None

    def on_point(point: str, step: int) -> None:
        action = mine.get((point, step))
        if action is not None:
            _commit(action, rank, step, point)

    return on_point


def _commit(action: str, rank: int, step: int, point: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(1)
        case _:
            raise InjectedFault(f"rank {rank}, step {step}: fault injected at {point}")
