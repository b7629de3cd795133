"""Machines that send nothing again, or believe and do what they should refuse; each function is undone with its patch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ttp.controller import transitions as controller_tables
from ttp.controller.events import Effect, Send
from ttp.controller.repeats import repeat_lost
from ttp.controller.state import ControllerState
from ttp.proto.messages import (
    Exit,
    Freeze,
    Heartbeat,
    PublishOrder,
    RollForward,
    Thaw,
    WriteOrder,
)

Patch = pytest.MonkeyPatch


# --- what is lost stays lost ---


def thaws_are_not_sent_again(patch: Patch) -> None:
    _sent_once(patch, Thaw)


def freezes_are_not_sent_again(patch: Patch) -> None:
    _sent_once(patch, Freeze)


def orders_are_not_sent_again(patch: Patch) -> None:
    _sent_once(patch, RollForward, WriteOrder, PublishOrder)


def exit_is_not_sent_again(patch: Patch) -> None:
    _sent_once(patch, Exit)


def _sent_once(patch: Patch, *kinds: type) -> None:
    """Heartbeats that disagree are taken notice of, and these kinds are not sent again."""

    def wrong(state: ControllerState, beats: Iterable[Heartbeat], now: float, out: list[Effect]) -> ControllerState:
        again: list[Effect] = []
        state = repeat_lost(state, beats, now, again)
        out += [effect for effect in again if not (isinstance(effect, Send) and isinstance(effect.message, kinds))]
        return state

    patch.setattr(controller_tables, "repeat_lost", wrong)


def heartbeats_finish_no_rank(patch: Patch) -> None:
    def wrong(state: ControllerState, beats: Iterable[Heartbeat], now: float, out: list[Effect]) -> ControllerState:
        return repeat_lost(state, [replace(beat, finished=False) for beat in beats], now, out)

    patch.setattr(controller_tables, "repeat_lost", wrong)
