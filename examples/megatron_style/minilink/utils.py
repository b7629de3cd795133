"""What the patch adds to the trainer's utilities."""

from __future__ import annotations

import os


def get_ttp_switch() -> bool:  # TTP
    enable_ttp = os.getenv("ENABLE_TTP", "True")
    enable_ttp = enable_ttp.lower() in ("true", "1")  # type: ignore[assignment]
    return enable_ttp  # type: ignore[return-value]
