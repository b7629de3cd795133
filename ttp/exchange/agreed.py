"""What ranks agree on as a job starts, kept for the processes that take the places of lost ones: no rank would answer them.

Such a value is the same on every rank that takes part, and is known before the first step. Owns where it is kept: in the store that the ranks of an
attempt met in. They are no more protected there than what torch's process groups keep in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ttp.config import Settings
from ttp.errors import ControllerError
from ttp.groups.process_groups import GROUPS
from ttp.groups.vacancy import vacant

READ_AT_MOST = timedelta(seconds=20)
"""How long a process that takes a lost one's place waits for such a value: it was written before the first step."""


class Agreements:
    """Those of one process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._store: Any = None

    def agree(self, name: str, make: Callable[[], Any], group: Any = None) -> Any:
        """Return `make()`, a JSON value on which all ranks of `group` agree (None: of the job). Of several of one name each is kept, in their order. In a process that takes a lost one's place it is what the others have agreed on; `make` is not called there.

        Raises what `make` does; ControllerError: it is not known there.
        """
        self._counts[name] += 1
        settings = Settings.from_env()
        place = "job" if group is None else group.group_name
        key = f"ttp/agreed/{settings.round_number}/{place}/{name}/{self._counts[name]}"
        if vacant():
            return self._read(settings, key, name)
        value = make()
        if _is_needed(settings) and dist.get_rank(group) == 0:
            self._open(settings).set(key, json.dumps(value))
        return value

    def of_this_rank(self, name: str, value: Any) -> Any:
        """Keep a JSON value of this rank's for a process that takes its place, and return it. There return that of the rank's first process. Raises
        ControllerError: it is not known there."""
        settings = Settings.from_env()
        if not (vacant() or _is_needed(settings)):
            return value
        key = f"ttp/own/{settings.round_number}/{name}/{dist.get_rank()}"
        if not vacant():
            self._open(settings).set(key, json.dumps(value))
            return value
        return self._read(settings, key, f"that one's {name}")

    def _read(self, settings: Settings, key: str, what: str) -> Any:
        try:
            return json.loads(self._open(settings).get(key))
        except RuntimeError as error:
            raise ControllerError(
                f"this process takes a lost one's place, and {what} is not in the job's store: {error}"
            ) from error

    def _open(self, settings: Settings) -> Any:
        if self._store is None:
            address = settings.master_addr, settings.master_port
            self._store = dist.TCPStore(*address, is_master=False, timeout=READ_AT_MOST)  # type: ignore[attr-defined]
        return self._store


def _is_needed(settings: Settings) -> bool:
    """Return whether a process may take the place of one of this job."""
    replaceable = settings.launched and settings.in_place != "off" and GROUPS.replaceable
    return replaceable and bool(settings.master_port) and dist.is_initialized()


AGREEMENTS = Agreements()
agree = AGREEMENTS.agree
of_this_rank = AGREEMENTS.of_this_rank
