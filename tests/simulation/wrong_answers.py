"""Machines that send nothing again, or believe and do what they should refuse; each function is undone with its patch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ttp.controller.core import machine
from ttp.controller.core import transitions as controller_tables
from ttp.controller.core.facts.events import Effect, Send
from ttp.controller.core.facts.state import ControllerState
from ttp.controller.core.ranks.repeats import repeat_lost
from ttp.processor.core import orders as rank_orders
from ttp.processor.core import transitions as rank_tables
from ttp.processor.core.refusals import why_no_order
from ttp.processor.core.state import ProcessorState
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


# --- answers and orders outside the protocol ---


def unasked_answers_are_believed(patch: Patch) -> None:
    patch.setattr(machine, "check_answer", lambda state, message: None)


def any_exit_is_obeyed(patch: Patch) -> None:
    patch.setattr(rank_tables, "why_no_exit", lambda message: "")


def any_record_is_applied(patch: Patch) -> None:
    patch.setattr(rank_orders, "why_no_roll_forward", lambda state, record: "")


def any_directory_is_written_into(patch: Patch) -> None:
    patch.setattr(rank_orders, "why_no_order", lambda state, order: _checked(state, order, PublishOrder))


def any_record_is_published(patch: Patch) -> None:
    patch.setattr(rank_orders, "why_no_order", lambda state, order: _checked(state, order, WriteOrder))


def _checked(state: ProcessorState, order: WriteOrder | PublishOrder, kind: type) -> str:
    return why_no_order(state, order) if isinstance(order, kind) else ""
