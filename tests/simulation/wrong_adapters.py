"""Adapters that are wrong on purpose: the gate, the handlers and the work thread as they are shipped, each with one rule broken; undone
with the patch."""

from __future__ import annotations

from typing import Any

import pytest

from ttp.controller.handler import Handler as ControllerHandler
from ttp.processor.events import Event, WriteDone, WriteShare
from ttp.processor.gate import Gate
from ttp.processor.handler import Handler
from ttp.processor.worker import Held, Task, Tasks
from ttp.proto.messages import ShareResult

Patch = pytest.MonkeyPatch


def an_update_that_was_left_is_whole(patch: Patch) -> None:
    """An exception out of an update gives the lock back, and tears nothing."""

    def wrong(self: Gate) -> None:
        if self._in_update:
            self._in_update = False
            self._release()

    patch.setattr(Gate, "abandon", wrong)


def the_gate_opens_with_an_older_ticket(patch: Patch) -> None:
    """That of the first freeze: the gate stays closed."""
    reopen = Gate.reopen
    patch.setattr(Gate, "reopen", lambda self, ticket: reopen(self, 1))


def an_answer_comes_before_the_work(patch: Patch) -> None:
    begin = Tasks.begin

    def wrong(self: Tasks, task: Task) -> Event | None:
        answer = begin(self, task)
        return WriteDone(task.order, ShareResult(())) if answer is None and isinstance(task, WriteShare) else answer

    patch.setattr(Tasks, "begin", wrong)


def a_failed_task_is_not_answered(patch: Patch) -> None:
    failed = Tasks.failed

    def wrong(self: Tasks, task: Held, error: BaseException) -> Any:
        failed(self, task, error)

    patch.setattr(Tasks, "failed", wrong)


def a_late_end_of_an_update_is_not_reported(patch: Patch) -> None:
    patch.setattr(Handler, "_settle_late", lambda self, ticket, freeze_id: None)


def a_finished_controller_goes_on(patch: Patch) -> None:
    patch.setattr(ControllerHandler, "_finish", lambda self, reason: None)


def controllers_do_not_beat(patch: Patch) -> None:
    patch.setattr(ControllerHandler, "_beat", lambda self: None)
