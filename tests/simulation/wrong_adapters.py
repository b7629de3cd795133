"""Adapters that are wrong on purpose: the gate, the handlers, the work thread and the memory of written shares as they are shipped, each with
one rule broken; undone with the patch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ttp.checkpoint.write import WrittenShares, merge_results
from ttp.controller.handler import Handler as ControllerHandler
from ttp.processor.core.events import Event, GateClosed, WriteDone, WriteShare
from ttp.processor.gate import Gate
from ttp.processor.handler import Handler
from ttp.processor.worker import Held, Task, Tasks
from ttp.proto.messages import Part, ShareResult

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


def reports_name_no_checkpoint(patch: Patch) -> None:
    patch.setattr(Handler, "_gate_closed", lambda self, report, now: self._step(GateClosed(report), now))


def a_finished_controller_goes_on(patch: Patch) -> None:
    patch.setattr(ControllerHandler, "_finish", lambda self, reason: None)


def controllers_do_not_beat(patch: Patch) -> None:
    patch.setattr(ControllerHandler, "_beat", lambda self: None)


def shares_of_another_step_are_linked(patch: Patch) -> None:
    """A rank that has written a step, and is ordered to write the one before in its place, links the files that it has."""
    take = WrittenShares.take
    patch.setattr(WrittenShares, "take", lambda self, step, *order: take(self, self._step, *order))


def shares_with_other_parts_are_linked(patch: Patch) -> None:
    """One ordered part in a share is enough: the others are there twice."""

    def wrong(
        self: WrittenShares, step: int, directory: str, tmp_name: str, parts: Iterable[Part]
    ) -> tuple[ShareResult, set[Part]]:
        left, result = set(parts), ShareResult(())
        for share in self._shares if step == self._step else []:
            fits = share.directory == directory and share.tmp_name != tmp_name and bool(share.parts & left)
            if fits and self._link(directory, share, tmp_name):
                left, result = left - share.parts, merge_results(result, share.result)
        return result, left

    patch.setattr(WrittenShares, "take", wrong)


def linked_shares_are_not_reported(patch: Patch) -> None:
    """The publisher knows of no file with their parts."""
    take = WrittenShares.take

    def wrong(self: WrittenShares, *order: Any) -> tuple[ShareResult, set[Part]]:
        return ShareResult(()), take(self, *order)[1]

    patch.setattr(WrittenShares, "take", wrong)
