"""Switches off that what a rank has lost is sent again, for wrong variants that the repetition would heal."""

from __future__ import annotations

import pytest

from ttp.controller.core import transitions


def repeats_nothing(patch: pytest.MonkeyPatch) -> None:
    """The controller sends nothing again, whatever heartbeats report."""
    patch.setattr(transitions, "repeat_lost", lambda state, beats, now, out: state)
