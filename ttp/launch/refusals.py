"""Workers whose start cannot go otherwise next time: their command line, configuration or checkpoint stays wrong until somebody
corrects it.

Pure: how workers ended and what they recorded in, words out. Whether the start had got on already is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Mapping

import ttp.errors
from ttp.errors import STAY_WRONG, STAY_WRONG_AT_FIRST
from ttp.launch.processes import Lost
from ttp.launch.story import Recorded, blames_a_peer
from ttp.proto.messages import SAVED_EXIT_CODES

USAGE_ERROR = 2
"""The exit status of a program that refuses its command line or configuration (argparse's, and the bundled trainer's)."""


def refusal(
    statuses: Mapping[int, int | Lost | None], raised: Mapping[int, Recorded], *, first_start: bool = False
) -> str:
    """Say why a restart would end the same way; empty: it may go better.

    So it is when workers have refused (exit code 2, or an exception of STAY_WRONG), and none has failed for a reason of its own.
    `statuses`: of all that failed. `raised`: what they recorded. `first_start`: of the job; errors of STAY_WRONG_AT_FIRST count too.
    """
    reasons = []
    for rank, status in statuses.items():
        told = raised.get(rank)
        if status == USAGE_ERROR:
            reasons.append(f"exit code {USAGE_ERROR} says that the configuration is wrong")
        elif told is not None and stays_wrong(told, first_start):
            reasons.append(f"{told.name} says what must be corrected first")
        elif status not in SAVED_EXIT_CODES and not (told is not None and blames_a_peer(told)):
            return ""
    return reasons[0] if reasons else ""


def stays_wrong(told: Recorded, first_start: bool = False) -> bool:
    """Say whether an exception is one of STAY_WRONG; another library's of the same name is not."""
    kind = getattr(ttp.errors, told.name, None)
    final = (*STAY_WRONG, *STAY_WRONG_AT_FIRST) if first_start else STAY_WRONG
    return isinstance(kind, type) and issubclass(kind, final) and f"{kind.__module__}.{told.text}" in told.trace
