"""Names of staging directories: where the writers of one write attempt put their files before it is published (PURE).

Owns the one pattern: the controller makes such names, ranks take no other ones in an order.
"""

from __future__ import annotations

import re

from ttp.proto.frozen import dataclass

_STAGING = re.compile(r"iter_([0-9]{7,19})_tmp_([0-9]{1,19})_([0-9]{1,19})_([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class StagingName:
    """Fresh for every write attempt of every controller."""

    step: int
    term: int
    freeze_id: int
    attempt: int

    def __str__(self) -> str:
        return f"iter_{self.step:07d}_tmp_{self.term}_{self.freeze_id}_{self.attempt}"


def staging_name_of(text: str) -> StagingName | None:
    """Return what a name says; None for one that no controller makes."""
    match = _STAGING.fullmatch(text)
    if match is None:
        return None
    name = StagingName(*map(int, match.groups()))
    return name if str(name) == text else None
