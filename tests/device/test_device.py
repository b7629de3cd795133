"""The device of threads, by itself: it must be as asynchronous and as hostile as what it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import claims_device, ranks


@pytest.mark.parametrize("claim", ranks.claims_of(claims_device))
def test_device(claim: str, tmp_path: Path) -> None:
    """Each in a process of its own."""
    ranks.run(getattr(claims_device, claim), 1, tmp_path)
