"""Sizes of a device's memory as people write them: 31GB (PURE)."""

from __future__ import annotations

import re

from ttp.errors import ConfigError
from ttp.inputs import checked

_MEMORY = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?GB")


def memory_bytes(text: str, key: str) -> int:
    """Return the bytes of a device's memory, as in 31GB, of 2**30 bytes each. Raises ConfigError naming `key`."""
    found = _MEMORY.fullmatch(text)
    nbytes = int(float(found[1]) * 2**30) if found else 0
    if nbytes == 0:
        raise ConfigError(f"{key}: got {checked.shown(text)}, expected a size above 0 in GB, as in 31GB")
    return nbytes
