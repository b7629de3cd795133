"""What the machine does in each stage: one table a stage (PURE).

Owns the tables' shape, and `TABLES`, where every room finds them. `core/transitions.py` fills it, which may import all functions in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttp.proto.frozen import dataclass
from ttp.proto.messages import Downward, Heartbeat

from .events import Effect
from .state import AnyStage, ControllerState

Handler = Callable[[Any, Any, float, list[Effect]], ControllerState]
Step = Callable[[Any, float, list[Effect]], ControllerState]


def stay(state: ControllerState, *_: Any) -> ControllerState:
    """Nothing is to be done in this stage."""
    return state


def send_nothing(state: ControllerState, _: Any) -> tuple[Downward, ...]:
    """Nothing is sent in this stage."""
    return ()


@dataclass(frozen=True)
class StageTable:
    """What the machine does in one stage. Every function takes a state in that stage."""

    on: dict[type, Handler]
    """What each event means; one that is missing is a protocol error."""
    deadline: Callable[[Any], float]
    """When a Tick is due if nothing happens before; inf: never."""
    expire: Step = stay
    """What is done then."""
    advance: Step = stay
    """Goes on to another stage if the facts allow it; called after every event."""
    rank_lost: Callable[[Any, int, float, list[Effect]], ControllerState] = stay
    """A rank died: others do what it was ordered to."""
    on_timeout: Step = stay
    """No answer to an order came for too long."""
    slow: Step = stay
    """Half of the time is over: what is not done goes to ranks that have nothing left to do."""
    catch_up: Callable[[Any, int], tuple[Downward, ...]] = send_nothing
    """What a rank is sent that attaches again."""
    repeat: Callable[[Any, Heartbeat], tuple[Downward, ...]] = send_nothing
    """What a rank is sent that has lost it, by its heartbeat."""


TABLES: dict[type[AnyStage], StageTable] = {}


def table_of(state: ControllerState) -> StageTable:
    """Return the table of the stage that the machine is in."""
    return TABLES[type(state.at)]
